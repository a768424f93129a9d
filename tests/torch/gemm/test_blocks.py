"""Which kernel multiplies operands in blocks, what each is handed, and what torchao's computes
(spec G-17).
"""

import importlib.util
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from fp8ref.conformance.gemm.bound import gamma
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES
from fp8ref.sim.gemm import gemm as sim_gemm
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.spec.epilogue import Epilogue
from fp8ref.torch import proof
from fp8ref.torch.gemm import blocks as block_gemm
from fp8ref.torch.gemm import gemm
from fp8ref.torch.model import checkpointing, convert
from fp8ref.torch.model.report import report
from fp8ref.torch.quantize import scaling
from fp8ref.torch.quantize.scaling import Quantized

FORMATS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
GEMMS = tuple(RECIPES["blockwise"].gemms)
UNEVEN = {"input": (384, 384), "weight": (128, 384), "grad_output": (384, 128)}  # halves of tiles
EVEN = {"input": (256, 256), "weight": (256, 256), "grad_output": (256, 256)}  # no room to make
# one block of K, whose stride nobody asks for
ONE = {"input": (128, 128), "weight": (256, 128), "grad_output": (128, 256)}
RAGGED = {"input": (200, 256), "weight": (144, 256)}  # M and N that no block divides
CASES = [(which, shapes) for shapes in (UNEVEN, EVEN, ONE) for which in GEMMS] + [
    ("output", RAGGED)
]


def integers(rng, shape, granularity, axis):
    """Integers to 7 times a power of two of their block, 7 among them: scale_inv is a power of two,
    and every sum is exact in float32.

    On a tensor core too: products are 49 at most, sums of a block below 2^13, which G-10 keeps.
    """
    rows, length = 128 if granularity == "blockwise_128x128" else 1, 128
    other, reduced = (-(-shape[1 - axis] // rows), shape[axis] // length)
    x = rng.integers(-7, 8, (other, rows, reduced, length)).astype(np.float32)
    x[:, 0, :, 0] = 7
    x *= 2.0 ** rng.integers(-1, 2, (other, 1, reduced, 1)).astype(np.float32)
    x = x.reshape(other * rows, -1)[: shape[1 - axis]]
    return x if axis == 1 else np.ascontiguousarray(x.T)


def operands(which, shapes, make):
    """a and b of a GEMM of recipe blockwise, in torch, and in the simulator, which reduces the last
    axis.
    """
    spec = RECIPES["blockwise"].gemms[which]
    for role, cast, axis in zip(
        OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True
    ):
        x = make(shapes[role], cast.granularity, axis)
        yield scaling.quantize(
            torch.from_numpy(x), cast.fmt, granularity=cast.granularity, axis=axis - 2
        )
        yield sim_scaling.quantize(
            x if axis == 1 else x.T.copy(), cast.fmt, granularity=cast.granularity
        )


def reads(x, rows, columns):
    """That a kernel which loads this many rows and columns of a matrix stays inside its memory."""
    assert (
        x.storage_offset() + (rows - 1) * x.stride(0) + (columns - 1) * x.stride(1)
        < x.untyped_storage().nbytes() // x.element_size()
    )


def tiles(n, size=256):
    return -(-n // size) * size


def fake(squares):
    """torchao's kernel for b in blocks of 128x128, or of 1x128: the layouts that it asserts, the
    loads that it makes, its order (G-13).
    """

    def run(a, b, a_s, b_s, block_size, out_dtype):
        (m, k), n = a.shape, b.shape[1]
        assert (block_size, b.shape[0], a.dtype, b.dtype) == (
            128,
            k,
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
        )
        assert (a.stride(-1), b.stride(-2), a_s.stride(-2)) == (1, 1, 1)
        assert b_s.stride(-2 if squares else -1) == 1
        reads(a_s, tiles(m), k // 128)
        reads(b_s, k // 128, tiles(n) // 128 if squares else tiles(n))
        total = torch.zeros(m, n)
        for i in range(k // 128):
            part = slice(i * 128, (i + 1) * 128)
            scale_b = b_s[i].repeat_interleave(128)[:n] if squares else b_s[i, :n]
            # [M, 128] @ [128, N], exact
            total += (a[:, part].double() @ b[part].double()).float() * a_s[:m, i, None] * scale_b
        return total.to(out_dtype)

    return run


@pytest.fixture
def faked(monkeypatch):
    """A device with torchao's kernels, where there is none."""
    monkeypatch.setattr(block_gemm, "_has_tensor_cores", lambda device: True)
    monkeypatch.setattr(block_gemm, "_is_hopper", lambda device: False)
    monkeypatch.setattr(block_gemm, "kernels", lambda: (fake(squares=False), fake(squares=True)))


class FakeDeepGEMM:
    """What DeepGEMM 54e2261 checks on compute capability 9.0, and the order of its kernels,
    ``product`` of G-13.

    csrc/apis/gemm.hpp: fp8_fp4_gemm_nt, whose alias is fp8_gemm_nt; csrc/utils/layout.hpp:
    check_sf_layout, check_major_type_cd; csrc/jit_kernels/impls: sm90_fp8_gemm_1d2d.hpp,
    sm90_fp8_gemm_1d1d.hpp.
    """

    def __init__(self) -> None:
        self.calls = []

    def fp8_gemm_nt(
        self,
        a,
        b,
        d,
        c=None,
        recipe=None,
        recipe_a=None,
        recipe_b=None,
        compiled_dims="nk",
        disable_ue8m0_cast=False,
    ):
        (codes_a, sfa), (codes_b, sfb) = a, b
        (m, k), n = codes_a.shape, len(codes_b)
        recipe = recipe or (1, 128, 128)
        assert {codes_a.dtype, codes_b.dtype} == {torch.float8_e4m3fn}
        # K-major; a's and b's rows without gaps
        assert (codes_a.stride(), codes_b.stride()) == ((k, 1), (k, 1))
        assert (codes_b.shape[1], tuple(d.shape), d.stride(-1)) == (k, (m, n), 1)
        assert {sfa.dtype, sfb.dtype} == {torch.float32}
        assert tuple(sfa.shape) == (m, -(-k // 128))
        assert tuple(sfb.shape) == (-(-n // recipe[1]), -(-k // 128))
        if recipe == (1, 1, 128):
            assert c is d  # what it adds to; otherwise it copies c first
            assert d.dtype == torch.float32
            scales_b = sfb
        else:
            assert recipe == (1, 128, 128)
            assert c is None
            assert d.dtype == torch.bfloat16
            assert n % 8 == 0  # DG_TRAP_ONLY_DEVICE_ASSERT in sm90_fp8_gemm_1d2d.cuh
            assert sfb.is_contiguous() or sfb.t().is_contiguous()
            scales_b = sfb.repeat_interleave(128, dim=0)[:n]
        assert d.stride(0) * d.element_size() % 16 == 0  # of a copy by TMA
        total = torch.zeros(m, n) if c is None else c.clone()
        for i in range(k // 128):
            part = slice(i * 128, (i + 1) * 128)
            acc = codes_a.float()[:, part].double() @ codes_b.float()[:, part].double().t()  # exact
            scale = sfa[:, i, None] * scales_b[:, i]
            # one rounding of product and sum: float64 holds the product, and rounds the sum twice
            # too rarely for these cases
            total = (acc.float().double() * scale.double() + total.double()).float()
        d.copy_(total)
        self.calls.append((recipe, tuple(d.shape), d.dtype))


@pytest.fixture
def deepgemm(faked, monkeypatch):
    """A Hopper with DeepGEMM's kernels and torchao's, where there is none."""
    made = FakeDeepGEMM()
    monkeypatch.setattr(block_gemm, "_is_hopper", lambda device: True)
    monkeypatch.setattr(block_gemm, "deep_gemm", lambda: made)
    return made


@pytest.mark.grid(5)
@pytest.mark.parametrize(("which", "shapes"), CASES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
# G-13, G-17
def test_deepgemm_is_handed_our_codes_and_scales_in_its_layouts(
    which, shapes, out_dtype, deepgemm, rng
):
    """Bit for bit, of numbers that need every rounding."""
    a, sa, b, sb = operands(
        which, shapes, lambda shape, *_: rng.standard_normal(shape).astype(np.float32)
    )
    out = gemm.matmul(a, b, accumulate="slow", out_dtype=out_dtype)
    assert out.dtype == out_dtype
    expected = sim_gemm.matmul(
        sa, sb, out_dtype=FORMATS[out_dtype], epilogue=Epilogue(name="deepgemm", scale="product")
    )
    np.testing.assert_array_equal(out.float().numpy(), expected)
    squares = which != "grad_weight" and out_dtype == torch.bfloat16
    assert deepgemm.calls == [
        (
            (1, 128, 128) if squares else (1, 1, 128),
            out.shape,
            torch.bfloat16 if squares else torch.float32,
        )
    ]


def test_deepgemm_multiplies_where_it_can_and_torchao_the_rest(deepgemm, monkeypatch):  # G-17
    line, odd = quantized("blockwise_1x128"), quantized("blockwise_1x128", 132)
    assert block_gemm.kernel(line, line) == "deep_gemm"
    assert block_gemm.kernel(odd, line) == "deep_gemm"
    assert block_gemm.kernel(line, odd) == "torchao_triton"  # 132 columns
    assert block_gemm.kernel(line, quantized("blockwise_1x128", fmt=E5M2)) == "dequantized"
    monkeypatch.setattr(block_gemm, "kernels", lambda: None)
    assert block_gemm.kernel(line, odd) == "dequantized"
    assert block_gemm.kernel(line, line) == "deep_gemm"
    monkeypatch.setattr(block_gemm, "_is_hopper", lambda device: False)
    assert block_gemm.kernel(line, line) == "dequantized"


class FakeScaledMM:
    """What torch's scaled_mm checks of scales of 1x128 and 128x128: ATen/native/cuda/ScaledBlas.cpp
    of PyTorch 2bec3bdf, _scaled_block1x128_block1x128 and _scaled_block1x128_block128x128, and the
    dtypes that its own tests have. Sums in any order are those of G-13 where they are exact.
    """

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
        (m, k), n = a.shape, b.shape[1]
        kinds = functional.ScalingType
        assert {a.dtype, b.dtype} == {torch.float8_e4m3fn}
        assert {scale_a.dtype, scale_b.dtype} == {torch.float32}
        assert (a.stride(), b.stride()) == ((k, 1), (1, k))
        assert k % 16 == n % 16 == 0
        assert recipe_a is kinds.BlockWise1x128
        assert (tuple(scale_a.shape), scale_a.stride()) == ((m, k // 128), (1, m))
        assert m * scale_a.element_size() % 16 == 0  # where each column of scales begins
        if recipe_b is kinds.BlockWise128x128:
            rows = -(-k // 512) * 4
            assert (tuple(scale_b.shape), scale_b.stride()) == ((rows, n // 128), (1, rows))
            scales_b = scale_b[: k // 128].repeat_interleave(128, dim=1)
        else:
            assert recipe_b is kinds.BlockWise1x128
            assert (tuple(scale_b.shape), scale_b.stride()) == ((n, k // 128), (1, n))
            scales_b = scale_b.t()
        assert output_dtype in (torch.bfloat16, torch.float32)
        total = torch.zeros(m, n)
        for i in range(k // 128):
            part = slice(i * 128, (i + 1) * 128)
            acc = (a[:, part].double() @ b[part].double()).float()  # exact
            total += acc * scale_a[:, i, None] * scales_b[i]
        self.calls.append((recipe_b.name, (m, n), output_dtype))
        return total.to(output_dtype)


@pytest.fixture
def scaled_mm(deepgemm, monkeypatch):
    """A Hopper with torch's scaled_mm of blocks, beside DeepGEMM and torchao."""
    made = FakeScaledMM()
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(functional, "scaled_mm", made)
    return made


@pytest.mark.parametrize(("which", "shapes"), CASES[:-1])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
# G-13, G-17
def test_scaled_mm_is_handed_our_codes_and_scales_in_its_layouts(
    which, shapes, out_dtype, scaled_mm, rng
):
    """Where sums are exact, the simulator's bits; grad_weight without a float32 result."""
    a, sa, b, sb = operands(which, shapes, lambda shape, *how: integers(rng, shape, *how))
    out = gemm.matmul(a, b, accumulate="slow", out_dtype=out_dtype)
    expected = sim_gemm.matmul(sa, sb, out_dtype=FORMATS[out_dtype])
    np.testing.assert_array_equal(out.float().numpy(), expected)
    kind = "BlockWise1x128" if which == "grad_weight" else "BlockWise128x128"
    written = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    assert scaled_mm.calls == [(kind, out.shape, written)]


@pytest.mark.skipif(not hasattr(functional, "scaled_mm"), reason="before torch 2.10")
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("shape", [(256, 384, 640), (100, 128, 128), (128, 256, 512)])
def test_torchs_own_check_of_scaled_mm_takes_the_layouts(shape, squares):  # G-17
    m, n, k = shape
    with FakeTensorMode():
        a, b = (torch.empty(size, k, dtype=torch.float8_e4m3fn) for size in (m, n))
        scales = torch.empty(m, k // 128), torch.empty(n // 128 if squares else n, k // 128)
        out = block_gemm.multiply(a, b, *scales, torch.bfloat16, "scaled_mm")
        inner = block_gemm._by_scaled_mm(block_gemm._Operands(a, b, *scales), torch.bfloat16)
    assert out.shape == inner.shape == (m, n)
    assert out.dtype == inner.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("cuda", "hopper", "there", "expected"),
    [
        ("12.9", True, True, "scaled_mm"),
        ("13.0", True, True, "scaled_mm"),
        ("12.8", True, True, "deep_gemm"),
        ("12.9", False, True, "torchao_triton"),
        ("12.9", True, False, "deep_gemm"),
        (None, True, True, "deep_gemm"),
    ],
)
def test_scaled_mm_multiplies_where_cublaslt_takes_blocks(  # G-17
    cuda, hopper, there, expected, scaled_mm, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(block_gemm, "_is_hopper", lambda device: hopper)
    if not there:
        monkeypatch.delattr(functional, "scaled_mm")
    line = quantized("blockwise_1x128")
    assert block_gemm.kernel(line, line) == expected


def test_scaled_mm_takes_rows_of_16_bytes_of_scales_and_whole_blocks_of_columns(scaled_mm):
    line, odd, ragged = (quantized("blockwise_1x128", n) for n in (128, 130, 144))
    assert block_gemm.kernel(line, line) == block_gemm.kernel(ragged, line) == "scaled_mm"
    assert block_gemm.kernel(odd, line) == block_gemm.kernel(line, ragged) == "deep_gemm"


def test_a_step_by_scaled_mm_is_named_in_the_proof_and_the_report(scaled_mm):  # B-8, R-7
    module = model()
    with proof.trace_eager(module) as trace:
        step(module)
    assert {g.accumulate for g in trace.gemms} == {"blocks, cuBLASLt"}
    assert len(scaled_mm.calls) == 6
    assert {dtype for *_, dtype in scaled_mm.calls} == {torch.bfloat16}
    assert {row.kernel for row in report(module).rows if row.recipe} == {"torch's scaled_mm"}


@pytest.mark.parametrize("kernels", ["faked", "deepgemm", "scaled_mm"])
def test_zeros_fill_a_last_block_of_rows(kernels, request):  # L-5, G-17
    """A kernel takes whole blocks of K, here 200 rows of grad_weight's operands: those of 256 rows,
    of which the last are zeros."""
    request.getfixturevalue(kernels)
    generator = torch.Generator().manual_seed(0)
    g, x = (
        torch.randint(-7, 8, (200, columns), generator=generator).float() for columns in (128, 256)
    )

    def multiplied(*tensors):
        a, b = (
            scaling.quantize(v, E4M3FN, granularity="blockwise_1x128", axis=-2, ragged=True)
            for v in tensors
        )
        return gemm.matmul(a, b, accumulate="slow", out_dtype=torch.bfloat16)

    found = multiplied(g, x)
    assert torch.equal(found, multiplied(*(nn.functional.pad(v, (0, 0, 0, 56)) for v in (g, x))))
    assert torch.equal(found.isfinite(), torch.ones_like(found, dtype=torch.bool))
    assert found.any()


def test_a_step_by_deepgemm_is_named_in_the_proof_and_the_report(deepgemm):  # B-8, R-7
    module = model()
    with proof.trace_eager(module) as trace:
        step(module)
    assert {g.accumulate for g in trace.gemms} == {"blocks, DeepGEMM"}
    assert len(deepgemm.calls) == 6
    assert {row.kernel for row in report(module).rows if row.recipe} == {"DeepGEMM's kernels"}


@pytest.mark.parametrize(
    ("source", "logged"),
    [
        (None, None),
        ("def fp8_gemm_nt(*args, **kwargs): ...", None),
        (
            "assert False, 'no CUDA'",
            "cannot be imported (AssertionError: no CUDA): torchao's kernels multiply",
        ),
        ("__version__ = '1.0'", "deep_gemm 1.0 has no fp8_gemm_nt"),
    ],
)
# G-17
def test_a_deepgemm_that_cannot_be_used_is_spoken_of(source, logged, tmp_path, monkeypatch, caplog):
    if source is not None:
        (tmp_path / "deep_gemm.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    found = block_gemm.deep_gemm.__wrapped__()
    sys.modules.pop("deep_gemm", None)
    assert (found is not None) == (source is not None and logged is None)
    assert [logged in record.getMessage() for record in caplog.records] == (
        [True] if logged else []
    )


@pytest.mark.grid(5)
@pytest.mark.parametrize(("which", "shapes"), CASES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
# G-13, G-17
def test_the_kernels_are_handed_our_codes_and_scales_in_their_layouts(
    which, shapes, out_dtype, faked, rng
):
    """Bit for bit, of numbers that need every rounding."""
    a, sa, b, sb = operands(
        which, shapes, lambda shape, *_: rng.standard_normal(shape).astype(np.float32)
    )
    out = gemm.matmul(a, b, accumulate="slow", out_dtype=out_dtype)
    assert out.dtype == out_dtype
    expected = sim_gemm.matmul(
        sa, sb, out_dtype=FLOAT32 if out_dtype == torch.float32 else BFLOAT16
    )
    np.testing.assert_array_equal(out.float().numpy(), expected)


def quantized(granularity, m=128, k=128, fmt=E4M3FN, device="cpu", axis=-1):
    shape = (m, k) if axis == -1 else (k, m)
    scales = torch.empty(0, device=device)
    return Quantized(
        torch.empty(shape, device=device, dtype=torch.uint8), scales, scales, fmt, granularity, axis
    )


@pytest.mark.parametrize(
    ("capability", "hip", "there", "expected"),
    [
        ((9, 0), False, True, "torchao_triton"),
        ((10, 0), False, True, "torchao_triton"),
        ((12, 0), False, True, "torchao_triton"),
        ((8, 9), False, True, "dequantized"),
        ((9, 0), False, False, "dequantized"),
        ((9, 4), True, True, "dequantized"),
    ],
)
def test_the_choice_by_device(capability, hip, there, expected, monkeypatch):  # G-16, G-17
    monkeypatch.setattr(torch.version, "cuda", None if hip else "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(block_gemm, "kernels", lambda: (fake(False), fake(True)) if there else None)
    monkeypatch.setattr(block_gemm, "deep_gemm", lambda: None)
    q = quantized("blockwise_1x128")
    on_gpu = q._replace(
        codes=type("Codes", (), {"shape": q.codes.shape, "device": torch.device("cuda", 0)})()
    )
    assert block_gemm.kernel(on_gpu, on_gpu) == expected
    assert block_gemm.kernel(q, q) == "dequantized"


def test_the_choice_by_operands(faked):  # G-17
    """int32 offsets: 2^31 elements of an operand, or of the result, are too many."""
    line, square = quantized("blockwise_1x128"), quantized("blockwise_128x128")
    assert [block_gemm.kernel(a, b) for a, b in itertools.product((line, square), repeat=2)] == [
        "torchao_triton",
        "torchao_triton",
        "dequantized",
        "dequantized",
    ]
    assert block_gemm.kernel(quantized("mx_1x32"), quantized("mx_1x32")) == "dequantized"
    assert block_gemm.kernel(quantized("blockwise_1x128", fmt=E5M2), line) == "dequantized"
    for large, small in (((1 << 23, 256), (16, 256)), ((1 << 16, 256), (1 << 15, 256))):
        a, b = (quantized("blockwise_1x128", *shape, device="meta") for shape in (large, small))
        assert block_gemm.kernel(a, b) == block_gemm.kernel(b, a) == "dequantized"
    a, b = (
        quantized("blockwise_1x128", n, 256, device="meta", axis=0)
        for n in ((1 << 15) - 128, 1 << 15)
    )
    assert block_gemm.kernel(a, b) == "torchao_triton"


def test_without_triton_or_under_other_names_there_is_no_kernel(monkeypatch):
    name = "torchao.prototype.blockwise_fp8_training.kernels"
    monkeypatch.setitem(sys.modules, name, None)  # as if Triton were not there
    assert block_gemm.kernels.__wrapped__() is None
    monkeypatch.setitem(sys.modules, name, type(sys)(name))
    assert block_gemm.kernels.__wrapped__() is None


def model():
    torch.manual_seed(0)
    return convert.convert(
        nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 256)).bfloat16(),
        "blockwise",
    )


def step(module):
    module(torch.randn(256, 256).bfloat16().requires_grad_()).float().square().sum().backward()


SEEN = {
    (
        f"{name}/{which}",
        "f8e4m3fn",
        "f8e4m3fn",
        "blocks",
        f"blockwise_1x128 x blockwise_{'1x128' if which == 'grad_weight' else '128x128'}",
    )
    for name in "02"
    for which in GEMMS
}
PLAN = {"0": "blockwise", "2": "blockwise"}


def described(trace):
    return {(g.name, g.a, g.b, g.accumulate, g.granularity) for g in trace.gemms}


def test_the_proof_names_what_multiplied(faked, monkeypatch):  # B-8
    module = model()
    with proof.trace_eager(module) as trace:
        step(module)
    assert described(trace) == SEEN
    assert len(trace.gemms) == 6
    assert proof.missing(trace, PLAN) == []
    found = proof.manifest(trace, PLAN, [])
    assert found["on_dequantised_operands"] == []
    assert all(g["fp8"] for g in found["gemms"])
    with proof.trace_eager(module) as trace:  # one fallback among many steps is named
        step(module)
        monkeypatch.setattr(block_gemm, "_has_tensor_cores", lambda device: False)
        step(module)
    assert len(proof.manifest(trace, PLAN, [])["on_dequantised_operands"]) == 6


def test_selective_checkpointing_keeps_the_kernels_results(faked):
    module = model()
    checkpointed = checkpointing.checkpointed(module.forward, "selective")
    with proof.trace_eager(module) as trace:
        step(checkpointed)
    assert [g.which for g in trace.gemms].count("output") == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
@pytest.mark.slow
def test_compiled_the_kernel_is_one_operator_and_seen(faked):  # B-8, G-17
    torch._dynamo.reset()
    module = model()
    with proof.trace_compiled(module) as trace:
        step(torch.compile(module))
    assert described(trace) == SEEN
    assert proof.manifest(trace, PLAN, [])["on_dequantised_operands"] == []
    torch._dynamo.reset()


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
# Triton's interpreter runs kernels on tensors of a CPU. Autotuning would time them on a GPU: each
# size of tile has its turn instead.
INTERPRET = """
import sys
import torch
import triton
from torchao.prototype.blockwise_fp8_training import kernels as theirs
from fp8ref.torch.gemm import blocks as block_gemm, gemm
block_gemm._has_tensor_cores = lambda device: True
block_gemm._is_hopper = lambda device: False
assert max(max(c.kwargs.values()) for c in theirs.fp8_gemm_configs_max_autotune) == block_gemm.TILE
results = []
for a, b in torch.load(sys.argv[1], weights_only=False):
    for size in (64, 256):
        for kernel in (theirs.triton_fp8_gemm_1x128_128x128_kernel, theirs.triton_fp8_gemm_1x128_128x1_kernel):
            kernel.configs = [triton.Config({"BLOCK_SIZE_M": size, "BLOCK_SIZE_N": size})]
        assert block_gemm.kernel(a, b) == "torchao_triton"
        results.append(gemm.matmul(a, b, accumulate="slow"))
torch.save(results, sys.argv[2])
"""


def run_script(script, *args, **environment):
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
@pytest.mark.slow
def test_torchaos_kernels_under_tritons_interpreter(tmp_path, rng):  # G-13, G-17
    exact = [
        list(operands(which, shapes, lambda *how: integers(rng, *how))) for which, shapes in CASES
    ]
    rough = [
        list(
            operands(which, UNEVEN, lambda shape, *_: rng.standard_normal(shape).astype(np.float32))
        )
        for which in GEMMS
    ]
    cases = [*exact, *rough]
    torch.save([(a, b) for a, _, b, _ in cases], tmp_path / "in.pt")
    run_script(INTERPRET, str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), TRITON_INTERPRET="1")
    results = iter(torch.load(tmp_path / "out.pt"))
    for i, (_, sa, _, sb) in enumerate(cases):
        expected = sim_gemm.matmul(sa, sb)
        magnitudes = (
            np.abs(sim_scaling.dequantize(sa)).astype(np.float64)
            @ np.abs(sim_scaling.dequantize(sb)).T
        )
        for out in (next(results).numpy() for _ in range(2)):
            if i < len(exact):
                np.testing.assert_array_equal(out, expected)
            else:
                # as B-1: any order of a block's sum, two products and a sum for each block, in
                # either
                length = sa.codes.shape[1]
                assert (
                    np.abs(out - expected) <= gamma(length + 9 + length // 64) * magnitudes
                ).all()


PTX = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from torchao.prototype.blockwise_fp8_training import kernels as theirs
sizes = {"N": 256, "K": 256, "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128}
kernel = theirs.triton_fp8_gemm_1x128_128x1_kernel.fn
types = {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv", "c_ptr": "*bf16", "a_s_ptr": "*fp32", "b_s_ptr": "*fp32"}
signature = {name: "constexpr" if name in sizes else types.get(name, "i32") for name in kernel.arg_names}
values = {(kernel.arg_names.index(name),): value for name, value in sizes.items()}
ptx = compile(ASTSource(kernel, signature, constexprs=values), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
for op in re.findall(r"wgmma[.]mma_async\\S+|(?:mul|fma|add)[.](?:rn[.])?f32|cvt[.]\\S*bf16\\S*", ptx):
    print(op)
"""


@needs_triton
@pytest.mark.parametrize(
    ("fusion", "scaled"), [("1", {"mul.f32", "fma.rn.f32"}), ("0", {"mul.rn.f32", "add.rn.f32"})]
)
# G-17
def test_for_hopper_torchaos_kernels_compile_to_fp8_tensor_core_instructions(fusion, scaled):
    """A chain of four instructions of K = 32 for a block, no promotion within it, and results
    rounded to nearest even.
    """
    ops = run_script(PTX, TRITON_DEFAULT_FP_FUSION=fusion, TRITON_INTERPRET="0").split()
    assert ops.count("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3") == 4
    assert {op for op in ops if op.startswith(("mul", "fma", "add"))} == scaled
    casts = {op for op in ops if op.startswith("cvt")}
    assert casts
    assert casts <= {"cvt.rn.bf16x2.f32", "cvt.rn.bf16.f32"}  # by Triton's version


@pytest.mark.gpu
@pytest.mark.parametrize(("which", "shapes"), CASES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(which, shapes, out_dtype, rng):  # G-17
    a, sa, b, sb = operands(which, shapes, lambda *how: integers(rng, *how))
    a, b = (
        q._replace(codes=q.codes.cuda(), scale=q.scale.cuda(), scale_inv=q.scale_inv.cuda())
        for q in (a, b)
    )
    if block_gemm.kernel(a, b) == "dequantized":
        pytest.skip("no kernel for this GPU")
    out = gemm.matmul(a, b, accumulate="slow", out_dtype=out_dtype)
    expected = sim_gemm.matmul(
        sa, sb, out_dtype=FLOAT32 if out_dtype == torch.float32 else BFLOAT16
    )
    np.testing.assert_array_equal(out.float().cpu().numpy(), expected)
