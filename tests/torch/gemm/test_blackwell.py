"""MX and NVFP4 by torch's scaled_mm: what it is handed, who refuses, what the proof says (G-26)."""

import numpy as np
import pytest
import torch
from helpers.gemm import scaled_mm
from torch import nn

from fp8ref.formats import E2M1FN, E4M3FN
from fp8ref.recipe import RECIPES
from fp8ref.sim.quantize import packing
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.spec import products
from fp8ref.torch import proof
from fp8ref.torch.gemm import blocks, gemm
from fp8ref.torch.model import convert
from fp8ref.torch.model.report import report
from fp8ref.torch.quantize import four_bits
from fp8ref.torch.quantize.scaling import Quantized

POLICIES = {"mxfp8": "mx_rceil", "mxfp4": "mx_rceil", "nvfp4": "te_nvfp4"}
SHAPES = [(128, 128, 128), (200, 64, 96), (17, 272, 32), (1, 16, 48)]  # M, N, K


def operand(kind, granularity, shape, axis, rng):
    """In torch, and float64 by the simulator, its reduced axis last."""
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)).astype(np.float32)
    lines = x if axis == 1 else np.ascontiguousarray(x.T)
    q = sim_scaling.quantize(
        lines, kind.fmt, granularity=granularity, policy=POLICIES[kind.name], ragged=True
    )
    codes, scale = torch.from_numpy(q.codes), torch.from_numpy(q.scale_inv)
    held = four_bits.numbers(codes) if kind.fmt == E2M1FN else codes.view(torch.float8_e4m3fn)
    held, scale = (v if axis == 1 else v.t().contiguous() for v in (held, scale))
    q = q._replace(tensor_scale_inv=None)
    exact = sim_scaling.dequantize(q).astype(np.float64)
    return Quantized(held, scale, scale, kind.fmt, granularity, axis), exact


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", products.KINDS)
@pytest.mark.parametrize("axes", [(1, 1), (1, 0), (0, 0)], ids=str)
# F-5, G-26, S-25
def test_scaled_mm_is_handed_codes_and_scales_in_its_layouts(name, shape, axes, monkeypatch, rng):
    """Bit for bit: a float64 holds these sums, and the stand-in rounds them once."""
    kernel, kind, (m, n, k) = scaled_mm.install(monkeypatch), products.KINDS[name], shape
    if name != "nvfp4" and k % 32:
        k = 32
    a, exact_a = operand(kind, kind.line, ((m, k), (k, m))[1 - axes[0]], axes[0], rng)
    b, exact_b = operand(kind, kind.square, ((n, k), (k, n))[1 - axes[1]], axes[1], rng)
    expected = torch.from_numpy(exact_a @ exact_b.T)
    with blocks.multiplying("scaled_mm"):
        for dtype in (torch.float32, torch.bfloat16):
            out = gemm.matmul(a, b, accumulate="slow", out_dtype=dtype)
            assert torch.equal(out, expected.to(dtype))
    assert {call[2] for call in kernel.calls} == {16 if name == "nvfp4" else 32}


def test_the_tensors_scales_of_nvfp4_reach_the_kernel(monkeypatch, rng):  # G-26, S-22
    scaled_mm.install(monkeypatch)
    kind = products.KINDS["nvfp4"]
    (a, exact_a), (b, exact_b) = (
        operand(kind, kind.line, (32, 64), 1, rng),
        operand(kind, kind.line, (16, 64), 1, rng),
    )
    a, b = (q._replace(tensor_scale_inv=torch.tensor(f)) for q, f in ((a, 3.0), (b, 2.0**-9)))
    with blocks.multiplying("scaled_mm"):
        out = gemm.matmul(a, b, accumulate="slow")
    expected = torch.from_numpy(exact_a @ exact_b.T) * (3.0 * 2**-9)
    assert torch.equal(out, expected.float())


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_the_first_code_of_a_byte_is_in_its_low_half(name, monkeypatch, rng):  # F-5, G-26
    """No product shows it: both operands' codes would change places alike."""
    kernel, kind = scaled_mm.install(monkeypatch), products.KINDS[name]
    q = operand(kind, kind.line, (32, 64), 1, rng)[0]
    with blocks.multiplying("scaled_mm"):
        gemm.matmul(q, q, accumulate="slow")
    packed = packing.pack(q.code_bits.numpy())
    for handed in kernel.operands:
        np.testing.assert_array_equal(handed.view(torch.uint8).numpy(), packed)


def test_emulated_products_leave_kernels_out(monkeypatch, rng):  # G-16, G-26
    kernel = scaled_mm.install(monkeypatch)
    kind = products.KINDS["mxfp8"]
    a, b = (operand(kind, kind.line, (32, 64), 1, rng)[0] for _ in "ab")
    blockwise = Quantized(a.codes, a.scale, a.scale_inv, E4M3FN, "blockwise_1x128", 1)
    monkeypatch.setattr(blocks, "_has_tensor_cores", lambda device: True)
    monkeypatch.setattr(blocks, "_is_hopper", lambda device: False)
    monkeypatch.setattr(blocks, "kernels", lambda: (None, None))
    assert blocks.kernel(blockwise, blockwise) == "torchao_triton"
    with blocks.multiplying("emulated"):
        assert blocks.kernel(blockwise, blockwise) == "dequantized"
    assert blocks.kernel(a, b) == "dequantized"
    assert not kernel.calls


def test_refusals_name_what_lacks(monkeypatch, rng):  # G-26
    kind = products.KINDS["mxfp8"]
    a = operand(kind, kind.line, (32, 64), 1, rng)[0]
    four = products.KINDS["mxfp4"]
    b = operand(four, four.line, (32, 64), 1, rng)[0]
    with pytest.raises(ValueError, match=r"products is one of auto, emulated, scaled_mm; got"):
        blocks.multiplying("scaled_matmul").__enter__()
    with blocks.multiplying("scaled_mm"):
        with pytest.raises(ValueError, match=r"capability 10\.0 or later; got cpu\. Use products"):
            gemm.matmul(a, a, accumulate="slow")
        scaled_mm.install(monkeypatch)
        with pytest.raises(ValueError, match="got e4m3fn x e2m1fn in mx_1x32"):
            gemm.matmul(a, b, accumulate="slow")
        scaled_mm.install(monkeypatch, (9, 0))
        with pytest.raises(ValueError, match=r"capability 10\.0 or later"):
            gemm.matmul(a, a, accumulate="slow")


def stepped(recipe, by, trace):
    """Proof and report of a step of a linear."""
    torch.manual_seed(0)
    model = convert.convert(nn.Sequential(nn.Linear(64, 96, bias=False)).bfloat16(), recipe)
    x = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
    with blocks.multiplying(by), trace(model) as traced:
        model(x).sum().backward()
        rows = report(model).rows
    planned = {"0": RECIPES[recipe]}
    return proof.manifest(traced, planned, proof.missing(traced, planned)), rows[0].kernel


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_the_proof_lists_each_gemm_of_scaled_mm(recipe, monkeypatch):  # B-8, G-26, R-7
    scaled_mm.install(monkeypatch)
    manifest, kernel = stepped(recipe, "scaled_mm", proof.trace_eager)
    assert kernel == f"torch's scaled_mm of {recipe}"
    assert [(g["gemm"], g["accumulate"], g["granularity"]) for g in manifest["gemms"]] == [
        (f"0/{which}", f"{recipe}, cuBLASLt", "mx_1x32 x mx_1x32")
        for which in ("output", "grad_input", "grad_weight")
    ]
    assert not manifest["missing"] + manifest["on_dequantised_operands"]
    assert "emulated" not in manifest
    emulated, kernel = stepped(recipe, "emulated", proof.trace_eager)
    assert kernel == "float32 on dequantized codes"
    assert len(emulated["on_dequantised_operands"]) == 3
    assert ("emulated" in emulated) == (recipe == "mxfp4")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
@pytest.mark.slow
def test_a_compiled_graph_has_the_operator(monkeypatch):  # B-8, G-26
    scaled_mm.install(monkeypatch)
    torch._dynamo.reset()
    model = convert.convert(nn.Sequential(nn.Linear(64, 96, bias=False)).bfloat16(), "mxfp4")
    x = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
    with blocks.multiplying("scaled_mm"), proof.trace_compiled(model) as traced:
        torch.compile(model)(x).sum().backward()
    assert [g.accumulate for g in traced.gemms] == ["mxfp4, cuBLASLt"] * 3
    torch._dynamo.reset()
