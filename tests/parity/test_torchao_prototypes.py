"""torchao's prototypes in blocks, against fp8ref's recipes: the casts of its blockwise linear, and
its MX linear (spec S-6, S-9, S-14).

Its blockwise linear runs on GPUs only. Its casts run here: those in torch, and its Triton kernels
under Triton's interpreter. Its MX linear runs on a CPU as ``KernelPreference.EMULATED``.
"""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import cast
from fp8ref.torch.linear import linear, passes
from fp8ref.torch.quantize import scaling

# ---- blockwise ----

STUB = """
import sys, types
import torch
import torch._dynamo
import torchao.float8
try:
    import triton
except ModuleNotFoundError:  # the casts' module needs no more of it than its decorators
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.jit, triton.autotune, triton.language = lambda f: f, lambda **_: lambda f: f, language
    triton.Config, language.constexpr = lambda *_, **__: None, int
    sys.modules.update({"triton": triton, "triton.language": language})
from torchao.prototype.blockwise_fp8_training import kernels as theirs
"""
IN_TORCH = """
casts = [theirs.torch_blockwise_scale_act_quant_lhs, theirs.torch_blockwise_scale_act_quant_rhs, theirs.torch_blockwise_scale_weight_quant]
"""
IN_TRITON = """
names = ["act_quant_lhs", "act_quant_rhs", "act_quant_transposed_lhs", "weight_quant_rhs", "weight_quant_transposed_rhs"]
for name in names:
    # autotuning would time kernels on a GPU
    kernel = getattr(theirs, f"triton_fp8_blockwise_{name}_kernel")
    kernel.configs = [triton.Config({"NUM_GROUPS": 32} if "act" in name else {})]
casts = [getattr(theirs, f"triton_fp8_blockwise_{name}") for name in names]
"""
RUN = """
results = [[tuple(t.contiguous() for t in f(x)) for f in casts] for x in torch.load(sys.argv[1])]
torch.save(results, sys.argv[2])
"""
# (granularity, reduced axis, whether codes and scales come transposed)
OF_TORCH = [
    ("blockwise_1x128", -1, False),
    ("blockwise_1x128", 0, False),
    ("blockwise_128x128", -1, False),
]
OF_TRITON = [
    *OF_TORCH[:2],
    ("blockwise_1x128", 0, True),
    OF_TORCH[2],
    ("blockwise_128x128", -1, True),
]
DTYPES = (torch.float32, torch.bfloat16)


def theirs(casts, tensors, folder, **environment):
    """What torchao's casts make of tensors, in a process of its own: they import Triton, or what
    stands for it.
    """
    torch.save(tensors, folder / "in.pt")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        STUB + casts + RUN,
        str(folder / "in.pt"),
        str(folder / "out.pt"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "out.pt")


def tensors(rng):
    """[256, 256], by name: amaxes of every size from the floor of 1e-12 up, an infinity, a NaN,
    zeros.
    """
    normal = rng.standard_normal((256, 256))
    spread = normal * 2.0 ** rng.integers(-30, 30, (256, 256))
    special = spread.copy()
    special[:128, :128], special[130, 5], special[3, 200] = 0, np.inf, np.nan
    return {
        "normal": normal,
        "spread": spread,
        "special": special,
        "below the floor": normal * 1e-14,
    }


def quantized(x, granularity, axis, transposed):
    """fp8ref's codes and scale_inv, by policy torchao, as torchao's functions give them."""
    q = scaling.quantize(x, E4M3FN, granularity=granularity, policy="torchao", axis=axis)
    return tuple(t.t().contiguous() if transposed else t for t in (q.codes, q.scale_inv))


def codes_of(x):
    return cast.canonical_nans(x.view(torch.uint8).numpy(), E4M3FN)


@pytest.mark.slow
def test_blockwise_casts_in_torch(tmp_path, rng):  # S-5, S-6, S-9
    """Equal bit for bit, except where the floor of an amax is met in bfloat16: of lines down the
    columns torchao rounds it to bfloat16.
    """
    made = {
        (name, dtype): torch.from_numpy(x).to(dtype)
        for name, x in tensors(rng).items()
        for dtype in DTYPES
    }
    floors = torch.stack(
        [
            torch.tensor(1e-12, dtype=torch.float64),
            torch.tensor(1e-12, dtype=torch.bfloat16).double(),
        ]
    )
    floor_inv = 1 / (448 / floors).float()
    found = theirs(IN_TORCH, list(made.values()), tmp_path)
    for ((name, dtype), x), results in zip(made.items(), found, strict=True):
        for how, (codes, scale_inv) in zip(OF_TORCH, results, strict=True):
            mine, mine_inv = quantized(x, *how)
            expected = mine_inv
            if dtype is torch.bfloat16 and how[1] == 0:
                expected = torch.where(mine_inv == floor_inv[0], floor_inv[1], mine_inv)
            np.testing.assert_array_equal(expected, scale_inv, err_msg=f"{name} {dtype} {how}")
            if name != "below the floor" or torch.equal(expected, mine_inv):
                np.testing.assert_array_equal(
                    codes_of(mine), codes_of(codes), err_msg=f"{name} {dtype} {how}"
                )


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_triton
@pytest.mark.slow
def test_blockwise_casts_of_tritons_kernels(tmp_path, rng):  # S-6, S-9
    """Scales are equal, except that of a NaN: Triton's maximum leaves it out, and torchao's scale
    is that of the other elements.

    Codes are compared of tensors that a cast does not round. Triton 3.5's interpreter drops the
    carry of a significand that rounds up to the next power of two: it casts 124.3 to 64.
    """
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = values[torch.from_numpy(rng.integers(0, 0x7F, (256, 256)))]
    exact[range(256), range(256)] = exact[range(256), [*range(128, 256), *range(128)]] = (
        448  # of each line of 128, either way
    )
    exact *= 2.0**-7
    given = {name: torch.from_numpy(x) for name, x in tensors(rng).items()} | {"exact": exact}
    made = {(name, dtype): x.to(dtype) for name, x in given.items() for dtype in DTYPES}
    found = theirs(IN_TRITON, list(made.values()), tmp_path, TRITON_INTERPRET="1")
    for ((name, dtype), x), results in zip(made.items(), found, strict=True):
        for how, (codes, scale_inv) in zip(OF_TRITON, results, strict=True):
            mine, mine_inv = quantized(x, *how)
            if (name, dtype) == ("below the floor", torch.bfloat16):
                # the floor is a number of the tensor's dtype, or of float32, by Triton's version
                continue
            has_nan = mine_inv.isnan()
            assert bool(has_nan.any()) == (name == "special")
            assert scale_inv.isfinite()[has_nan].all()
            np.testing.assert_array_equal(
                mine_inv[~has_nan], scale_inv[~has_nan], err_msg=f"{name} {dtype} {how}"
            )
            if name == "exact":
                np.testing.assert_array_equal(
                    codes_of(mine), codes_of(codes), err_msg=f"{name} {dtype} {how}"
                )


# ---- MX ----


def mx_linear(mode, dtype):
    """torchao's MX linear, emulated, and fp8ref's of the same weight."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    how = {
        "kernel_preference": KernelPreference.EMULATED,
        "scale_calculation_mode": ScaleCalculationMode(mode),
    }
    other, own = (
        MXFP8Linear(128, 64, bias=False, dtype=dtype, **how),
        linear.Linear(128, 64, "mxfp8", bias=False, dtype=dtype),
    )
    own.weight = other.weight
    return other, own


def passed(model, x, grad_output):
    """output, grad_input and grad_weight."""
    x, model.weight.grad = x.clone().requires_grad_(), None
    output = model(x)
    output.backward(grad_output)
    return output.detach(), x.grad, model.weight.grad


def mx_operands(monkeypatch, models, x, grad_output):
    """(codes, scale codes) along the reduced axis, by GEMM and operand, as torchao casts them, and
    as fp8ref does.
    """
    mx_tensor = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    to_mx, cast_by_torchao, own = mx_tensor.to_mx, [], {}

    def spy(*args, **kwargs):
        scale, codes = to_mx(*args, **kwargs)
        cast_by_torchao.append((codes.view(torch.uint8), scale.float()))
        return scale, codes

    monkeypatch.setattr(mx_tensor, "to_mx", spy)
    monkeypatch.setattr(
        passes, "observers", [lambda which, a, b, out: own.update({(which, 0): a, (which, 1): b})]
    )
    for model in models:
        passed(model, x, grad_output)
    of_own = {}
    for key, q in own.items():
        last = q.axis in (-1, 1)
        of_own[key] = tuple(t if last else t.t() for t in (q.codes.view(torch.uint8), q.scale_inv))
    order = [
        ("output", 0),
        ("output", 1),
        ("grad_input", 0),
        ("grad_input", 1),
        ("grad_weight", 0),
        ("grad_weight", 1),
    ]
    return dict(zip(order, cast_by_torchao, strict=True)), of_own


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_of_torchaos_mx_linear(dtype, monkeypatch, rng):  # S-5, S-6, S-14
    """Codes and scales of all three GEMMs, in torchao's default mode, RCEIL, which is that of
    recipe mxfp8.
    """
    x, grad_output = (
        torch.from_numpy(rng.standard_normal((96, n)) * 2.0 ** rng.integers(-40, 40, (96, n))).to(
            dtype
        )
        for n in (128, 64)
    )
    x[0, :32], x[40], grad_output[:, 3], grad_output[64] = 0, 1e-40, 0, 0
    other, own = mx_operands(monkeypatch, mx_linear("rceil", dtype), x, grad_output)
    assert other.keys() == own.keys()
    for key, (codes, scale_inv) in other.items():
        np.testing.assert_array_equal(own[key][1], scale_inv, err_msg=str(key))
        np.testing.assert_array_equal(
            cast.canonical_nans(own[key][0].numpy(), E4M3FN), codes_of(codes), err_msg=str(key)
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_of_torchaos_mx_linear(dtype, rng):  # G-16
    """Of integers, whose sums are exact in any order: blocks have powers of two times 7 at most,
    which a cast does not round.
    """
    x, w, grad_output = (
        torch.from_numpy(rng.integers(-7, 8, shape)).to(dtype)
        for shape in ((96, 128), (64, 128), (96, 64))
    )
    other, own = mx_linear("rceil", dtype)
    own.weight = other.weight = torch.nn.Parameter(w)
    for theirs_, mine in zip(
        passed(other, x, grad_output), passed(own, x, grad_output), strict=True
    ):
        assert torch.equal(theirs_, mine)
        assert mine.count_nonzero()


@pytest.mark.filterwarnings("ignore")
def test_torchaos_mx_linear_in_floor_is_another_recipe(monkeypatch, rng):  # R-1, S-14
    """Which policy mx_floor has; mxfp8 rounds up."""
    x, grad_output = (torch.from_numpy(rng.standard_normal((96, n))).float() for n in (128, 64))
    other, own = mx_operands(monkeypatch, mx_linear("floor", torch.float32), x, grad_output)
    codes, scale_inv = other["output", 0]
    assert (own["output", 0][1] / scale_inv).unique().tolist() == [1, 2]
    floor = scaling.quantize(x, E4M3FN, granularity="mx_1x32", policy="mx_floor")
    assert torch.equal(floor.scale_inv, scale_inv)
    assert torch.equal(floor.codes.view(torch.uint8), codes)
