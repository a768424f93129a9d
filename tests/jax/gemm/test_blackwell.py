"""MX and NVFP4 by jax.nn.scaled_matmul: what it is handed, who refuses, what the proof says
(G-26)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gemm import scaled_matmul

from fp8ref.formats import E2M1FN
from fp8ref.jax import proof
from fp8ref.jax.experts import arguments
from fp8ref.jax.gemm import blackwell, gemm
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import four_bits
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import OPERANDS, RECIPES
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.spec import products

POLICIES = {"mxfp8": "mx_rceil", "mxfp4": "mx_rceil", "nvfp4": "te_nvfp4"}
HARDWARE = gemm.Execution(products="scaled_matmul")


def operand(kind, granularity, shape, axis, rng):
    """In JAX, and float64 by the simulator, its reduced axis last. Integers times a power of two
    of their block: float32 holds every sum, in any order."""
    x = rng.integers(-7, 8, shape).astype(np.float32)
    lines = x if axis == 1 else np.ascontiguousarray(x.T)
    q = sim_scaling.quantize(
        lines, kind.fmt, granularity=granularity, policy=POLICIES[kind.name], ragged=True
    )
    held = four_bits.numbers(jnp.asarray(q.codes))
    if kind.fmt != E2M1FN:
        held = jax.lax.bitcast_convert_type(jnp.asarray(q.codes), jnp.float8_e4m3fn)
    held, scale = (v if axis == 1 else v.T for v in (held, jnp.asarray(q.scale_inv)))
    exact = sim_scaling.dequantize(q._replace(tensor_scale_inv=None)).astype(np.float64)
    fields = {"fmt": kind.fmt, "granularity": granularity, "axis": axis}
    return Quantized(codes=held, scale=scale, scale_inv=scale, **fields), exact


@pytest.mark.parametrize("shape", [(128, 128, 128), (200, 64, 96), (17, 272, 32)], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("axes", [(1, 1), (1, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
# G-26
def test_scaled_matmul_is_handed_codes_and_scales(name, shape, axes, turned, monkeypatch, rng):
    kernel, kind, (m, n, k) = scaled_matmul.install(monkeypatch), products.KINDS[name], shape
    a, exact_a = operand(kind, kind.line, ((m, k), (k, m))[1 - axes[0]], axes[0], rng)
    b, exact_b = operand(kind, kind.square, ((n, k), (k, n))[1 - axes[1]], axes[1], rng)
    expected = (exact_a @ exact_b.T).astype(np.float32)
    execution = gemm.Execution(products="scaled_matmul", turned=turned)
    for dtype in (jnp.float32, jnp.bfloat16):
        out = gemm.matmul(a, b, accumulate="slow", out_dtype=dtype, execution=execution)
        np.testing.assert_array_equal(out.T if turned else out, expected.astype(dtype))
    rows = ((1, m, k), (1, n, k))[:: -1 if turned else 1]
    assert kernel.calls == [(*rows, "float32"), (*rows, "bfloat16")]


def test_a_last_block_that_is_shorter_is_filled(monkeypatch, rng):  # S-6, G-26
    kernel, kind = scaled_matmul.install(monkeypatch), products.KINDS["mxfp8"]
    (a, exact_a), (b, exact_b) = (operand(kind, kind.line, (40, rows), 0, rng) for rows in (16, 32))
    out = gemm.matmul(a, b, accumulate="slow", execution=HARDWARE)
    np.testing.assert_array_equal(out, (exact_a @ exact_b.T).astype(np.float32))
    assert kernel.calls == [((1, 16, 64), (1, 32, 64), "float32")]


def test_the_smallest_scale_is_handed_as_code_zero(monkeypatch, rng):  # S-14, G-26
    kind = products.KINDS["mxfp8"]
    q = operand(kind, kind.line, (16, 32), 1, rng)[0]
    bits = jnp.full(q.scale_inv.shape, 0x00400000, jnp.uint32)
    tiny = jax.lax.bitcast_convert_type(bits, jnp.float32)  # 2^-127
    handed = []
    monkeypatch.setattr(
        jax.nn, "scaled_matmul", lambda a, b, sa, sb, **_: (handed.append(sa), a @ b.mT)[1]
    )
    small = Quantized(**{**vars(q), "scale_inv": tiny})
    gemm.matmul(small, q, accumulate="slow", execution=HARDWARE)
    assert not jax.lax.bitcast_convert_type(handed[0], jnp.uint8).any()


def test_refusals_name_what_lacks(monkeypatch, rng):  # G-26
    with pytest.raises(ValueError, match=r"products is one of auto, emulated, scaled_matmul"):
        blackwell.multiplying("scaled_mm")
    with pytest.raises(ValueError, match=r"capability 10\.0 or later; got cpu\. Use products 'em"):
        blackwell.multiplying("scaled_matmul")
    scaled_matmul.install(monkeypatch)
    kind = products.KINDS["mxfp4"]
    q = operand(kind, kind.line, (32, 64), 1, rng)[0]
    with pytest.raises(
        ValueError, match="both operands in mxfp8, nvfp4; got e2m1fn x e2m1fn in mx_1x32"
    ):
        gemm.matmul(q, q, accumulate="slow", execution=HARDWARE)
    with (
        blackwell.multiplying("scaled_matmul"),
        pytest.raises(ValueError, match="experts: products 'scaled_matmul' multiply no groups"),
    ):
        arguments.check_recipe("mxfp8", "experts")


def lowered(recipe, by):
    """A linear's three GEMMs, lowered for a CUDA GPU on this machine."""
    x = jnp.ones((64, 96), jnp.bfloat16)
    w = jnp.ones((128, 96), jnp.bfloat16)

    def loss(x, w):
        return linear.apply(x, w, recipe=recipe, name="up")[0].astype(jnp.float32).sum()

    with blackwell.multiplying(by):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(x, w)
    return traced.lower(lowering_platforms=("cuda",))


def test_the_proof_lists_each_gemm_of_scaled_matmul(monkeypatch):  # B-7, G-26
    monkeypatch.setattr(blackwell, "capability", lambda device: (10, 0))
    planned = {"up": RECIPES["mxfp8"]}
    program = proof.read(lowered("mxfp8", "scaled_matmul"))
    manifest = proof.manifest(program, planned, proof.missing(program, planned))
    assert [(g["gemm"], g["a"], g["b"]) for g in manifest["gemms"]] == [
        (f"up/{which}", "f8e4m3fn", "f8e4m3fn") for which in OPERANDS
    ]
    assert not manifest["on_dequantised_operands"] + manifest["missing"]
    emulated = proof.read(lowered("mxfp8", "emulated"))
    manifest = proof.manifest(emulated, planned, [])
    assert manifest["on_dequantised_operands"] == [f"up/{which}" for which in OPERANDS]


CALL = (
    "  %c = (bf16[1,1024,1024]{2,1,0}, u8[0]{0}) custom-call(%a, %b, %s, %t), "
    'custom_call_target="__cudnn$blockScaledDot", '
    'metadata={op_name="jit(f)/up/output/jit(_scaled_matmul)/scaled_matmul"}'
)
WIDE = (
    "  %c = (f32[2,1024,1024]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b), "
    'custom_call_target="__cublas$lt$matmul", '
    'metadata={op_name="jit(f)/up/output/jit(_scaled_matmul)/scaled_matmul"}'
)


def compiled(call, dtype):
    """Lines of what XLA compiled jax.nn.scaled_matmul to, for a B200 and for an H200."""
    parameters = [
        f"  %{name} = {dtype}[1,1024,2048]{{2,1,0}} parameter({i})" for i, name in enumerate("ab")
    ]
    scales = [f"  %{name} = u8[65536]{{0}} parameter({i + 2})" for i, name in enumerate("st")]
    lines = ["ENTRY %main (a: f8e4m3fn[1]) -> bf16[1] {", *parameters, *scales, call, "}"]
    return proof.read_compiled("\n".join(lines))


def test_a_gemm_that_xla_dequantizes_is_lost(monkeypatch):  # B-7, G-26
    monkeypatch.setattr(blackwell, "capability", lambda device: (10, 0))
    program = proof.read(lowered("mxfp8", "scaled_matmul"))
    kernel = compiled(CALL, "f8e4m3fn")
    assert proof.kernels(kernel) == {"__cudnn$blockScaledDot: f8e4m3fn x f8e4m3fn": 1}
    lines = "\n".join(proof.lost(compiled(WIDE, "bf16"), program))
    assert "up/output: f8e4m3fn x f8e4m3fn, fast, is compiled to bf16 x bf16" in lines
    assert "up/output" not in "\n".join(proof.lost(kernel, program))
