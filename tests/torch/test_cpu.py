import subprocess
import sys

import pytest
import torch

PROGRAM = """
import torch
from fp8ref.torch import cpu
g = torch.Generator().manual_seed(0)
a, b = (torch.randn(n, 64, generator=g).to(torch.float8_e4m3fn) for n in (32, 48))
one = torch.tensor(0.37)
def mm(): return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
before = mm()
cpu.use_native_scaled_mm(); cpu.use_native_scaled_mm()
assert torch.backends.mkldnn.enabled
native = mm()
assert torch.backends.mkldnn.enabled
assert torch.equal(native, (a.float() * one) @ (b.float() * one).t())
assert torch.allclose(before, native, rtol=0, atol=1e-5), (before - native).abs().max()
print("native", torch.equal(before, native))
"""


def test_scaled_mm_runs_torchs_own_kernel_and_leaves_onednn_on():
    """In a process of its own: the registration lasts as long as the process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("native")


def test_the_scaled_product_is_of_scaled_operands():
    """What torch's CPU kernel does: (A * sa) @ (B * sb), where a GPU scales the accumulator. B-1 covers both."""
    from fp8ref.torch import cpu

    cpu.use_native_scaled_mm()
    a = torch.full((16, 32), 1.5).to(torch.float8_e4m3fn)
    scale = torch.tensor(1 / 3)
    out = torch._scaled_mm(a, a.t(), scale_a=scale, scale_b=scale, out_dtype=torch.float32)
    assert torch.equal(out, (a.float() * scale) @ (a.float() * scale).t())


def test_recipes_that_this_torch_does_not_multiply_on_a_cpu_are_refused_by_name(monkeypatch):
    """torch 2.11 and 2.12 have no scales of rows there; what is slow multiplies on unit scales (G-5)."""
    from fp8ref.torch import convert, cpu

    def without_rows(a, b, *, scale_a, scale_b, out_dtype):
        if scale_a.numel() > 1:
            raise RuntimeError("Now _scaled_mm only supports per-tensor scaling for CPU backend.")

    cpu._multiplies_rows.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", without_rows)
    try:
        for recipe in ("rowwise", "rowwise_with_gw_hp"):
            with pytest.raises(ValueError, match=f"recipe '{recipe}' scales by rows, .* Move the model there first, install torch 2.13"):
                convert.convert(torch.nn.Linear(32, 32, bias=False).bfloat16(), recipe)
        convert.convert(torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False).bfloat16()), "tensorwise")
    finally:
        cpu._multiplies_rows.cache_clear()
