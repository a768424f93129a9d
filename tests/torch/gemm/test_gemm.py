import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from fp8ref.conformance.gemm.bound import gamma
from fp8ref.crosscheck import bounds
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.recipe import RECIPES
from fp8ref.sim.gemm import gemm as sim_gemm
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.spec.gemm import MX_BLOCKS
from fp8ref.spec.granularity import GRANULARITIES
from fp8ref.torch.gemm import gemm
from fp8ref.torch.quantize import scaling


@pytest.mark.parametrize(
    "formats", [(E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FN, E5M2), (E5M2, E5M2)], ids=str
)
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("epilogue", ["scale_then_round", "unit_round_scale_round"])
@pytest.mark.parametrize("k", [96, 90])
# B-1, G-4, G-5
def test_matmul_is_within_its_bound_of_the_exact_result(formats, granularity, epilogue, k, rng):
    x, y = (rng.standard_normal((n, k)).astype(np.float32) for n in (48, 32))
    a, b = (
        scaling.quantize(torch.from_numpy(v), f, granularity=granularity)
        for v, f in zip((x, y), formats, strict=True)
    )
    sa, sb = (
        sim_scaling.quantize(v, f, granularity=granularity)
        for v, f in zip((x, y), formats, strict=True)
    )
    simulated = sim_gemm.matmul(sa, sb, epilogue=epilogue, out_dtype=BFLOAT16)
    out = (
        gemm.matmul(a, b, accumulate="slow", epilogue=epilogue, out_dtype=torch.bfloat16)
        .float()
        .numpy()
    )
    spec = (
        RECIPES["rowwise"] if epilogue.startswith("unit") else RECIPES["tensorwise"]
    ).grad_weight
    assert (np.abs(out - simulated) <= bounds.gemm(sa, sb, spec, out, simulated)).all()


@pytest.mark.parametrize(
    ("granularities", "policy"),
    [(("blockwise_1x128", "blockwise_128x128"), "torchao"), (("mx_1x32", "mx_1x32"), "mx_rceil")],
)
def test_operands_in_blocks_are_dequantized(granularities, policy, rng):  # G-16
    """Powers of two, so that every product and sum is exact: then G-13 and G-16 are one."""
    x, y = (2.0 ** rng.integers(-2, 3, (n, 256)).astype(np.float32) for n in (48, 144))
    a, b = (
        scaling.quantize(torch.from_numpy(v), E4M3FN, granularity=g, policy=policy)
        for v, g in zip((x, y), granularities, strict=True)
    )
    sa, sb = (
        sim_scaling.quantize(v, E4M3FN, granularity=g, policy=policy)
        for v, g in zip((x, y), granularities, strict=True)
    )
    out = gemm.matmul(a, b, accumulate="slow")
    assert out.dtype == torch.float32
    if policy == "mx_rceil":
        np.testing.assert_array_equal(out, sim_gemm.matmul(sa, sb, accumulate="exact"))
    dequantized = [sim_scaling.dequantize(q).astype(np.float64) for q in (sa, sb)]
    # any order of float32 sums
    bound = gamma(256) * (np.abs(dequantized[0]) @ np.abs(dequantized[1]).T)
    assert (np.abs(out.numpy() - dequantized[0] @ dequantized[1].T) <= bound).all()


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_each_operand_is_contracted_along_its_own_axis(granularity, rng):  # G-1
    # [K, M], [K, N]
    x, y = (torch.from_numpy(rng.standard_normal((32, n)).astype(np.float32)) for n in (16, 48))
    a, b = (scaling.quantize(v, E4M3FN, granularity=granularity, axis=0) for v in (x, y))
    c, d = (
        scaling.quantize(v.t().contiguous(), E4M3FN, granularity=granularity, axis=1)
        for v in (x, y)
    )
    options = {"accumulate": "slow", "out_dtype": torch.bfloat16}
    assert torch.equal(gemm.matmul(a, b, **options), gemm.matmul(c, d, **options))


def test_a_tensorwise_operand_beside_a_rowwise_one_counts_as_rowwise(rng):  # L-4
    x, y = (torch.from_numpy(rng.standard_normal((n, 32)).astype(np.float32)) for n in (16, 48))
    row, whole = scaling.quantize(x, E4M3FN, granularity="rowwise"), scaling.quantize(y, E4M3FN)
    spread = whole._replace(
        scale=whole.scale.expand(48, 1),
        scale_inv=whole.scale_inv.expand(48, 1),
        granularity="rowwise",
    )
    options = {"accumulate": "slow", "out_dtype": torch.bfloat16}
    assert torch.equal(gemm.matmul(row, whole, **options), gemm.matmul(row, spread, **options))


@pytest.mark.parametrize(
    "granularities", list(itertools.product(GRANULARITIES, repeat=2)), ids=" x ".join
)
def test_operands_whose_scales_go_together_are_the_simulators(granularities, rng):  # G-13, L-4
    """Any other pair is refused by both: scales of one shape would broadcast over the other's."""
    x, y = (
        rng.standard_normal((n, 256)).astype(np.float32) * 2.0 ** np.arange(-8, 8).repeat(16)
        for n in (2, 32)
    )
    policies = ["mx_rceil" if g in MX_BLOCKS else "torchao" for g in granularities]
    options = [
        {"granularity": g, "policy": p} for g, p in zip(granularities, policies, strict=True)
    ]
    operands = [
        scaling.quantize(torch.from_numpy(v.astype(np.float32)), E4M3FN, **o)
        for v, o in zip((x, y), options, strict=True)
    ]
    simulated = [
        sim_scaling.quantize(v.astype(np.float32), E4M3FN, **o)
        for v, o in zip((x, y), options, strict=True)
    ]
    try:
        expected = sim_gemm.matmul(*simulated, out_dtype=BFLOAT16)
    except ValueError:
        with pytest.raises(
            ValueError,
            match=f"same length of K.*got {' and '.join(granularities)}. Quantize both alike",
        ):
            gemm.matmul(*operands, accumulate="slow")
        return
    out = gemm.matmul(*operands, accumulate="slow", out_dtype=torch.bfloat16)
    magnitudes = [np.abs(sim_scaling.dequantize(q).astype(np.float64)) for q in simulated]
    # both rounded once; float32 sums in any order
    bound = 2**-7 * np.abs(expected) + 2 * gamma(256) * (magnitudes[0] @ magnitudes[1].T)
    assert (np.abs(out.float().numpy() - expected) <= bound).all()


def test_blocks_have_no_epilogue_of_a_rounded_sum():  # G-5, G-13
    q = scaling.quantize(torch.ones(16, 128), E4M3FN, granularity="blockwise_1x128")
    with pytest.raises(ValueError, match=r"rounded sum over all of K.*Use 'scale_then_round'"):
        gemm.matmul(q, q, accumulate="slow", epilogue="unit_round_scale_round")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": "exact"}, "fast"),
        ({"accumulate": "fast", "epilogue": "once"}, "scale_then_round"),
    ],
)
def test_errors(options, message):
    q = scaling.quantize(torch.ones(16, 16), E4M3FN)
    with pytest.raises(ValueError, match=message):
        gemm.matmul(q, q, **options)
    with pytest.raises(ValueError, match="one length"):
        gemm.matmul(q, scaling.quantize(torch.ones(16, 32), E4M3FN), accumulate="fast")


PROGRAM = """
import torch
from fp8ref.torch.gemm import gemm
g = torch.Generator().manual_seed(0)
a, b = (torch.randn(n, 64, generator=g).to(torch.float8_e4m3fn) for n in (32, 48))
one = torch.tensor(0.37)
def mm(): return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
before = mm()
gemm.use_native_scaled_mm(); gemm.use_native_scaled_mm()
assert torch.backends.mkldnn.enabled
native = mm()
assert torch.backends.mkldnn.enabled
assert torch.equal(native, (a.float() * one) @ (b.float() * one).t())
assert torch.allclose(before, native, rtol=0, atol=1e-5), (before - native).abs().max()
print("native", torch.equal(before, native))
"""


def test_scaled_mm_runs_torchs_own_kernel_and_leaves_onednn_on():
    """In a process of its own: the registration lasts as long as the process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("native")


KERNEL = """
import torch
from fp8ref.torch.gemm import gemm
torch.backends.mkldnn.enabled = False
g = torch.Generator().manual_seed(0)
def results():
    for formats in ((torch.float8_e4m3fn,) * 2, (torch.float8_e5m2, torch.float8_e4m3fn)):
        for dtype in (torch.float32, torch.bfloat16):
            for scales in ((torch.tensor(0.3), torch.tensor(7.0)), (rows, columns)):
                yield torch._scaled_mm(a.view(formats[0]), b.view(formats[1]).t(),
                    scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)
a, b = (torch.randint(0, 256, (n, 80), generator=g, dtype=torch.uint8) for n in (32, 48))
a[3:], b[5:] = a[3:] & 0xBF, b[5:] & 0xBF  # NaN and infinities in some rows
rows, columns = torch.rand(32, 1, generator=g), torch.rand(1, 48, generator=g)
before = list(results())
gemm.use_native_scaled_mm()
for x, y in zip(before, results(), strict=True):
    bits = torch.int32 if x.dtype == torch.float32 else torch.int16
    assert torch.equal(x.view(bits), y.view(bits))
with torch.autocast("cpu", torch.bfloat16):
    assert torch.equal(next(results()).view(torch.int32), before[0].view(torch.int32))
one = torch.tensor(1.0)
for x, y, scale in ((a, b[0], one), (a[None], b.t()[None], one), (a, b.t(), one.view(1, 1, 1))):
    codes = x.view(torch.float8_e4m3fn), y.view(torch.float8_e4m3fn)
    assert gemm._scaled_product(*codes, scale, one, None, None, torch.float32) is None
try:
    torch._scaled_mm(a.view(torch.float8_e4m3fn), a.view(torch.float8_e4m3fn),
        scale_a=rows, scale_b=columns)
except (RuntimeError, ValueError) as error:
    print(error)
"""


def test_scaled_products_are_those_of_torchs_kernel_bit_for_bit():
    """Formats, dtypes and scales by rows; what is wrong is left to torch's kernel, which says so.

    In a process of its own, before and after the registration.
    """
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be multiplied" in done.stdout or "Invalid scaling" in done.stdout


def test_the_scaled_product_is_of_scaled_operands():
    """What torch's CPU kernel does: (A * sa) @ (B * sb), where a GPU scales the accumulator.

    B-1 covers both.
    """

    gemm.use_native_scaled_mm()
    a = torch.full((16, 32), 1.5).to(torch.float8_e4m3fn)
    scale = torch.tensor(1 / 3)
    out = torch._scaled_mm(a, a.t(), scale_a=scale, scale_b=scale, out_dtype=torch.float32)
    assert torch.equal(out, (a.float() * scale) @ (a.float() * scale).t())


def test_recipes_that_this_torch_does_not_multiply_on_a_cpu_are_refused_by_name(monkeypatch):
    """torch 2.11 and 2.12 have no scales of rows there; what is slow multiplies on unit scales
    (G-5).
    """
    from fp8ref.torch.model import convert

    def without_rows(a, b, *, scale_a, scale_b, out_dtype):
        if scale_a.numel() > 1:
            raise RuntimeError("Now _scaled_mm only supports per-tensor scaling for CPU backend.")

    gemm._cpu_multiplies_rows.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", without_rows)
    try:
        for recipe in ("rowwise", "rowwise_with_gw_hp"):
            with pytest.raises(
                ValueError,
                match=f"recipe '{recipe}' scales by rows, .* Move the model there first, install "
                "torch 2.13",
            ):
                convert.convert(torch.nn.Linear(32, 32, bias=False).bfloat16(), recipe)
        convert.convert(
            torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False).bfloat16()), "tensorwise"
        )
    finally:
        gemm._cpu_multiplies_rows.cache_clear()
