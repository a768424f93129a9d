import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.conformance.gemm.bound import gamma
from fp8ref.crosscheck import bounds
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.jax.gemm import gemm
from fp8ref.jax.gemm.gemm import Execution
from fp8ref.jax.quantize import scaling
from fp8ref.recipe import RECIPES
from fp8ref.sim.gemm import gemm as sim_gemm
from fp8ref.sim.quantize import cast as sim_cast
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.spec.gemm import MX_BLOCKS
from fp8ref.spec.granularity import GRANULARITIES


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    "formats", [(E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FN, E5M2), (E5M2, E5M2)], ids=str
)
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("epilogue", ["scale_then_round", "unit_round_scale_round"])
# B-1, G-4, G-5
def test_matmul_is_within_its_bound_of_the_exact_result(formats, granularity, epilogue, rng):
    x, y = (rng.standard_normal((n, 96)).astype(np.float32) for n in (48, 32))
    a, b = (
        scaling.quantize(jnp.asarray(v), f, granularity=granularity)
        for v, f in zip((x, y), formats, strict=True)
    )
    sa, sb = (
        sim_scaling.quantize(v, f, granularity=granularity)
        for v, f in zip((x, y), formats, strict=True)
    )
    simulated = sim_gemm.matmul(sa, sb, epilogue=epilogue, out_dtype=BFLOAT16)
    out = jax.jit(
        lambda a, b: gemm.matmul(a, b, accumulate="slow", epilogue=epilogue, out_dtype=jnp.bfloat16)
    )(a, b)
    out = np.asarray(out.astype(jnp.float32))
    spec = (
        RECIPES["rowwise"] if epilogue.startswith("unit") else RECIPES["tensorwise"]
    ).grad_weight
    assert (np.abs(out - simulated) <= bounds.gemm(sa, sb, spec, out, simulated)).all()


@pytest.mark.parametrize("epilogue", ["scale_then_round", "unit_round_scale_round"])
def test_integers_are_exact(epilogue, rng):
    """Sums of small integers are exact in any order, so that the epilogue's bits show: G-4, G-5."""
    x, y = (
        np.where(rng.random((n, 64)) < 0.02, 448, rng.integers(-8, 9, (n, 64))).astype(np.float32)
        for n in (16, 32)
    )
    x *= 2.0 ** rng.integers(-9, 9, (16, 1)) * np.float32(1.7)
    a, b = (scaling.quantize(jnp.asarray(v), E4M3FN, granularity="rowwise") for v in (x, y))
    sa, sb = (sim_scaling.quantize(v, E4M3FN, granularity="rowwise") for v in (x, y))
    out = jax.jit(
        lambda a, b: gemm.matmul(a, b, accumulate="fast", epilogue=epilogue, out_dtype=jnp.bfloat16)
    )(a, b)
    expected = sim_gemm.matmul(sa, sb, epilogue=epilogue, out_dtype=BFLOAT16)
    np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32)), expected)


def test_each_operand_is_contracted_along_its_own_axis(rng):  # G-1
    x, y = (rng.standard_normal((32, n)).astype(np.float32) for n in (16, 48))  # [K, M], [K, N]
    a, b = (scaling.quantize(jnp.asarray(v), E4M3FN, granularity="rowwise", axis=0) for v in (x, y))
    c, d = (
        scaling.quantize(jnp.asarray(v.T), E4M3FN, granularity="rowwise", axis=1) for v in (x, y)
    )
    np.testing.assert_array_equal(
        np.asarray(gemm.matmul(a, b, accumulate="slow")),
        np.asarray(gemm.matmul(c, d, accumulate="slow")),
    )


# What a GEMM of G-22 multiplies and writes on an NVIDIA GPU: granularity, epilogue, output dtype,
# are scales powers of two.
ON_A_GPU = [
    ("tensorwise", "scale_then_round", "bfloat16", False, "bf16", "bf16"),
    ("tensorwise", "product_then_round", "float32", False, "bf16", "f32"),
    ("tensorwise", "scale_then_round", "float16", False, "f8E4M3FN", "f32"),
    ("tensorwise", "unit_round_scale_round", "float16", False, "f8E4M3FN", "f16"),
    ("rowwise", "unit_round_scale_round", "bfloat16", False, "f8E4M3FN", "bf16"),
    ("rowwise", "scale_then_round", "bfloat16", True, "f8E4M3FN", "bf16"),
    ("rowwise", "scale_then_round", "float32", True, "f8E4M3FN", "f32"),
    ("rowwise", "scale_then_round", "bfloat16", False, "f8E4M3FN", "f32"),
]


@pytest.mark.parametrize(
    ("granularity", "epilogue", "dtype", "powers", "multiplied", "written"), ON_A_GPU
)
@pytest.mark.parametrize("in_steps", [False, True])
# G-22
def test_on_a_gpu_the_gemm_writes_the_output_dtype(
    granularity, epilogue, dtype, powers, multiplied, written, in_steps
):
    a, b = (scaling.quantize(jnp.ones((32, 64)), E4M3FN, granularity=granularity) for _ in range(2))
    how = {
        "epilogue": epilogue,
        "out_dtype": jnp.dtype(dtype),
        "execution": Execution(powers_of_two=powers, in_steps=in_steps),
    }
    traced = jax.jit(lambda a, b: gemm.matmul(a, b, accumulate="slow", **how)).trace(a, b)
    steps = "tensor<32x64xf8E4M3FN>, tensor<32x64xf8E4M3FN>) -> tensor<32x32xf32>"
    on_gpu = (
        steps
        if in_steps
        else f"tensor<32x64x{multiplied}>, tensor<32x64x{multiplied}>) -> tensor<32x32x{written}>"
    )
    for platform, expected in (("cpu", steps), ("cuda", on_gpu)):
        [dot] = [
            line
            for line in traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
            if "dot_general" in line
        ]
        assert expected in dot, platform
        assert "precision = [HIGHEST, HIGHEST]" in dot


@pytest.mark.parametrize(
    ("granularity", "dtype", "multiplied", "guarded"),
    [
        ("tensorwise", "bfloat16", "bf16", 1),
        ("rowwise", "bfloat16", "bf16", 1),
        ("rowwise", "float16", "f8E4M3FN", 0),
    ],
)
# G-22
def test_on_a_gpu_nothing_joins_a_gemm_that_is_written_as_dequantized(
    granularity, dtype, multiplied, guarded
):
    """XLA's epilogues are patterns that begin with the dot: a rounding that changes nothing stands
    between.
    """
    a, b = (scaling.quantize(jnp.ones((32, 64)), E4M3FN, granularity=granularity) for _ in range(2))
    how = {
        "epilogue": "unit_round_scale_round" if granularity == "rowwise" else "scale_then_round",
        "execution": Execution(dequantized=True),
    }
    traced = jax.jit(
        lambda a, b: gemm.matmul(a, b, accumulate="fast", out_dtype=jnp.dtype(dtype), **how) + 1
    ).trace(a, b)
    on_cpu, on_gpu = (
        traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
        for platform in ("cpu", "cuda")
    )
    [dot] = [line for line in on_gpu if "dot_general" in line]
    assert f"tensor<32x64x{multiplied}>, tensor<32x64x{multiplied}>" in dot
    result = dot.split()[0]
    users = [
        line
        for line in on_gpu
        if f"{result}," in line.partition("=")[2] or f"{result} " in line.partition("=")[2]
    ]
    assert len(users) == 1
    assert ("reduce_precision" in users[0]) == bool(guarded)
    assert "tensor<32x64xf8E4M3FN>, tensor<32x64xf8E4M3FN>" in next(
        line for line in on_cpu if "dot_general" in line
    )


@pytest.mark.parametrize("dequantized", [False, True])
@pytest.mark.parametrize(
    ("granularity", "epilogue", "dtype", "powers"), [case[:4] for case in ON_A_GPU]
)
# G-22
def test_what_runs_on_a_gpu_gives_the_same_bits_where_sums_are_exact(
    granularity, epilogue, dtype, powers, dequantized, rng, monkeypatch
):
    """Integers of up to 8 bits have exact sums, in bfloat16 too: so scales that are powers of two
    leave nothing to the order.
    """
    x, y = (
        rng.integers(-3, 4, (n, 16)).astype(np.float32) * 2.0 ** rng.integers(-30, 30, (n, 1))
        for n in (16, 32)
    )
    a, b = (
        scaling.quantize(jnp.asarray(v), E4M3FN, granularity=granularity, policy="torchao_pow2")
        for v in (x, y)
    )
    how = {"epilogue": epilogue, "out_dtype": jnp.dtype(dtype), "accumulate": "fast"}
    on_cpu = gemm.matmul(a, b, **how)
    monkeypatch.setattr(
        gemm.lax, "platform_dependent", lambda *arrays, cuda, default: cuda(*arrays)
    )
    execution = Execution(powers_of_two=powers, dequantized=dequantized)
    on_gpu = gemm.matmul(a, b, **how, execution=execution)
    assert on_gpu.dtype == on_cpu.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(
        np.asarray(on_gpu.astype(jnp.float32)), np.asarray(on_cpu.astype(jnp.float32))
    )


# G-22's example
def test_a_result_that_is_rounded_before_its_scale_is_rounded_twice_where_it_is_subnormal():
    scaled = np.float32(261) * np.float32(2.0**-136)  # exact: a subnormal float32
    rounded = sim_cast.round_to(np.float32(261), BFLOAT16)
    twice = sim_cast.round_to(np.float32(rounded) * np.float32(2.0**-136), BFLOAT16)
    once = sim_cast.round_to(scaled, BFLOAT16)
    assert [int(np.asarray(v, np.float32).view(np.uint32)) >> 16 for v in (once, twice)] == [
        0x0021,
        0x0020,
    ]


@pytest.mark.parametrize(("accumulate", "precision"), [("fast", "DEFAULT"), ("slow", "HIGHEST")])
def test_the_dot_takes_float8_operands_and_names_its_accumulation(accumulate, precision):  # G-7
    a, b = (scaling.quantize(jnp.ones((32, 32)), f) for f in (E5M2, E4M3FN))
    # must not matter
    with jax.default_matmul_precision("float32" if accumulate == "fast" else "bfloat16"):
        hlo = jax.jit(lambda a, b: gemm.matmul(a, b, accumulate=accumulate)).lower(a, b).as_text()
    [dot] = [line for line in hlo.splitlines() if "dot_general" in line]
    assert "f8E5M2>, tensor<32x32xf8E4M3FN>) -> tensor<32x32xf32>" in dot
    assert f"precision = [{precision}, {precision}]" in dot


@pytest.mark.grid(2)
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
        scaling.quantize(jnp.asarray(v.astype(np.float32)), E4M3FN, **o)
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
    out = gemm.matmul(*operands, accumulate="slow", out_dtype=jnp.bfloat16)
    magnitudes = [np.abs(sim_scaling.dequantize(q).astype(np.float64)) for q in simulated]
    # both rounded once; float32 sums in any order
    bound = 2**-7 * np.abs(expected) + 2 * gamma(256) * (magnitudes[0] @ magnitudes[1].T)
    assert (np.abs(np.asarray(out.astype(jnp.float32)) - expected) <= bound).all()


def test_blocks_have_no_epilogue_of_a_rounded_sum():  # G-5, G-13
    q = scaling.quantize(jnp.ones((16, 128)), E4M3FN, granularity="blockwise_1x128")
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
    q = scaling.quantize(jnp.ones((16, 16)), E4M3FN)
    with pytest.raises(ValueError, match=message):
        gemm.matmul(q, q, **options)
    with pytest.raises(ValueError, match="one length"):
        gemm.matmul(q, scaling.quantize(jnp.ones((16, 32)), E4M3FN), accumulate="fast")
