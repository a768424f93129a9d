import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8ref.conformance.inputs import quantizer_inputs
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import cast, scaling
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.sim.quantize import cast as sim_cast
from fp8ref.sim.quantize import scaling as sim

IMPLEMENTED = [p for p in POLICIES.values() if p.in_backends]
FLOORED = [p for p in IMPLEMENTED if p.floored_quotient]
policies = pytest.mark.parametrize(
    "policy", [*FLOORED, ScalePolicy(name="small_eps", eps=1e-27)], ids=lambda p: p.name
)


@pytest.mark.grid(5)
@policies
@pytest.mark.parametrize("case", quantizer_inputs.samples())
@pytest.mark.parametrize(
    ("granularity", "axis"), [("tensorwise", 1), ("rowwise", 0), ("rowwise", 1)]
)
def test_quantize_equals_the_simulator(case, policy, granularity, axis):  # S-1, S-2, S-5, S-6
    x = quantizer_inputs.samples()[case]
    for fmt, dtype in ((E4M3FN, jnp.float32), (E5M2, jnp.bfloat16)):
        quantize = functools.partial(
            scaling.quantize, fmt=fmt, granularity=granularity, policy=policy, axis=axis
        )
        q = jax.jit(quantize)(jnp.asarray(x, dtype))
        expected = sim.quantize(x, fmt, granularity=granularity, policy=policy, axis=axis)
        codes = np.asarray(lax.bitcast_convert_type(q.codes, jnp.uint8))
        np.testing.assert_array_equal(sim_cast.canonical_nans(codes, fmt), expected.codes)
        np.testing.assert_array_equal(np.asarray(q.scale), expected.scale)
        np.testing.assert_array_equal(np.asarray(q.scale_inv), expected.scale_inv)
        assert q.scale.shape == expected.scale.shape
        # dequantize, S-8; XLA on a CPU flushes subnormal results
        value, flushed = (
            np.asarray(scaling.dequantize(q)),
            np.abs(sim.dequantize(expected)) < 2.0**-126,
        )
        np.testing.assert_array_equal(
            np.where(flushed, 0, value), np.where(flushed, 0, sim.dequantize(expected))
        )


@pytest.mark.grid(5)
@pytest.mark.parametrize("case", quantizer_inputs.samples())
@pytest.mark.parametrize(
    ("granularity", "policy"),
    [
        ("blockwise_1x128", "torchao"),
        ("blockwise_128x128", "torchao"),
        ("mx_1x32", "mx_rceil"),
        ("mx_1x32", "mx_floor"),
        ("mx_1x32", "te_mxfp8"),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_equal_the_simulator(case, granularity, policy, axis):  # S-6, S-14
    """[150, 384] and its transpose: a last block of 22 along the other axis."""
    x = np.resize(quantizer_inputs.samples()[case], (384, 150) if axis == 0 else (150, 384))
    # as XLA on a CPU takes subnormals (S-12)
    x = np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)
    q = jax.jit(
        functools.partial(
            scaling.quantize, fmt=E4M3FN, granularity=granularity, policy=policy, axis=axis
        )
    )(jnp.asarray(x, jnp.bfloat16))
    expected = sim.quantize(x, E4M3FN, granularity=granularity, policy=policy, axis=axis)
    codes = np.asarray(lax.bitcast_convert_type(q.codes, jnp.uint8))
    np.testing.assert_array_equal(sim_cast.canonical_nans(codes, E4M3FN), expected.codes)
    np.testing.assert_array_equal(np.asarray(q.scale), expected.scale)
    np.testing.assert_array_equal(np.asarray(q.scale_inv), expected.scale_inv)
    value, flushed = np.asarray(scaling.dequantize(q)), np.abs(sim.dequantize(expected)) < 2.0**-126
    np.testing.assert_array_equal(
        np.where(flushed, 0, value), np.where(flushed, 0, sim.dequantize(expected))
    )


def test_amax_is_that_of_the_tensor_as_its_dtype_holds_it(rng):  # S-2
    """Fused with its producer, a bfloat16 tensor may still have float32's digits; without the guard
    the amax shows them.
    """
    x = jnp.asarray(rng.standard_normal((64, 64)), jnp.float32)
    fused = jax.jit(lambda x: scaling.amax((x * 1.001).astype(jnp.bfloat16)))(x)
    assert float(fused) == float(jnp.max(jnp.abs((x * 1.001).astype(jnp.bfloat16))))
    unguarded = jax.jit(
        lambda x: jnp.max(jnp.abs((x * 1.001).astype(jnp.bfloat16).astype(jnp.float32)))
    )(x)
    assert float(unguarded) != float(fused)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_amax_of_a_large_tensor_keeps_its_nan(dtype):  # S-2
    """XLA's float maximum on a CPU drops a NaN among 57,600 elements, though not among 3,000: the
    last line.
    """
    x = jnp.ones((384, 150), dtype).at[100, 77].set(jnp.nan)
    for granularity, groups in (("tensorwise", 1), ("rowwise", 1), ("blockwise_1x128", 1)):
        assert (
            int(
                jnp.isnan(
                    jax.jit(functools.partial(scaling.amax, granularity=granularity, axis=0))(x)
                ).sum()
            )
            == groups
        )
    assert not jnp.isnan(jax.jit(jnp.max)(x.astype(jnp.float32)))


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "shape", [(32, 127), (32, 128), (4096, 1), (1, 4096), (4, 8, 128)], ids=str
)
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_amax_keeps_a_nan_in_every_place(dtype, granularity, shape):  # S-2
    """Of shapes below and above 4,096 elements, from which on XLA's float32 maximum on a CPU drops
    NaNs.
    """

    @jax.jit
    def nans(place):
        x = jnp.ones(math.prod(shape), dtype).at[place].set(jnp.nan).reshape(shape)
        lost = jnp.isnan(jnp.max(lax.optimization_barrier(x).astype(jnp.float32)))
        return jnp.isnan(scaling.amax(lax.optimization_barrier(x), granularity)).reshape(-1), ~lost

    found = [nans(place) for place in range(math.prod(shape))]
    groups = shape[-1] if granularity == "rowwise" else math.prod(shape)
    expected = np.arange(math.prod(shape)) // groups
    np.testing.assert_array_equal(
        [np.flatnonzero(ours).tolist() for ours, _ in found], expected[:, None]
    )
    assert all(lost for _, lost in found) == (math.prod(shape) >= 4096)


@pytest.mark.grid(2)
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), (0, 1)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_all_ways_to_an_amax_find_the_same(rng, dtype, axis):  # S-2
    """The integers' and the absolutes', which a GPU compiles, and the floats': of any bits, and of
    groups all positive, all negative, or without a NaN.
    """
    sign, exponent = 1 << 8 * dtype.dtype.itemsize - 1, 1 << jnp.finfo(dtype).nmant
    anything = rng.integers(0, 2 * sign, (16, 8, 12), np.uint64)
    for bits in (
        anything,
        anything & ~np.uint64(sign),
        anything | np.uint64(sign),
        anything & ~np.uint64(exponent),
    ):
        bits = jnp.asarray(bits.astype(f"u{dtype.dtype.itemsize}").view(f"i{dtype.dtype.itemsize}"))
        found = scaling._integer_max(bits, axis, True)
        np.testing.assert_array_equal(found, scaling._float_max(bits, axis, True, dtype))
        expected = np.max(np.asarray(bits) & (sign - 1), axis=axis, keepdims=True)
        np.testing.assert_array_equal(found, expected)
        absolutes, infinite = (
            np.asarray(scaling._absolute_max(bits, axis, True, dtype)),
            np.asarray(jnp.asarray(jnp.inf, dtype)).view(bits.dtype),
        )
        # a CPU's NaN has other bits, compiled for an H200 the same
        np.testing.assert_array_equal(absolutes > infinite, expected > infinite)
        np.testing.assert_array_equal(
            absolutes[expected <= infinite], expected[expected <= infinite]
        )


def test_amax_keeps_subnormals():  # S-12
    x = np.array([1e-40, -3e-41, 0], np.float32)
    found = np.asarray(jax.jit(scaling.amax)(x))
    assert found.view(np.int32) == np.float32(1e-40).view(np.int32)


def test_scale_inv_is_the_reciprocal_of_the_scale(rng):
    """S-1.

    Written without a barrier, 1 / (448 / amax) becomes amax / 448, another number for many amax:
    the second half.
    """
    x = jnp.asarray(rng.standard_normal((4096, 8)), jnp.float32)
    scale = sim.scale_from_amax(sim.amax(np.asarray(x), "rowwise"), E4M3FN)
    q = jax.jit(lambda x: scaling.quantize(x, E4M3FN, granularity="rowwise").scale_inv)(x)
    np.testing.assert_array_equal(np.asarray(q), np.float32(1) / scale)
    naive = jax.jit(lambda x: 1 / (448 / scaling.amax(x, "rowwise")))(x)
    assert (np.asarray(naive) != np.float32(1) / scale).any()


def test_quantized_is_a_pytree_whose_format_is_static():
    q = scaling.quantize(jnp.ones((4, 4)), E4M3FN)
    assert len(jax.tree.leaves(q)) == 3
    doubled = jax.jit(lambda q: jax.tree.map(lambda v: v, q))(q)
    assert (doubled.fmt, doubled.granularity, doubled.axis) == (E4M3FN, "tensorwise", -1)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((0, 4), {}, "at least one element"),  # S-7
        ((4, 64), {"granularity": "blockwise_1x128"}, "divisible by 128"),
        ((4, 4), {"policy": "te"}, "torchao"),
        ((4, 4), {"policy": ScalePolicy(name="mine", eps=1e-28)}, "needs eps >= 1e-27.*'mine'"),
        ((4, 4), {"policy": ScalePolicy(name="room", eps=1e-12, margin=1)}, "'room'.*fp8ref.sim"),
        *(
            (
                (4, 4),
                {"policy": p},
                f"deepgemm_ue8m0, sglang, vllm_native, sglang_token; got policy '{p.name}'",
            )
            for p in POLICIES.values()
            if p not in IMPLEMENTED
        ),
        ((4, 4), {"granularity": "rowwise", "axis": 3}, r"\[-2, 2\)"),
    ],
)
def test_errors(shape, options, message):
    with pytest.raises(ValueError, match=message):
        scaling.quantize(jnp.ones(shape), E4M3FN, **options)


@pytest.mark.parametrize("x", [[1.0] * 16, None, "x", 1.0])
def test_what_is_no_array_is_refused(x):
    ones = jnp.ones((4, 16))
    for call in (
        lambda: scaling.quantize(x, E4M3FN),
        lambda: scaling.quantize_with(x, jnp.ones(()), E4M3FN),
        lambda: scaling.quantize_with(ones, x, E4M3FN),
        lambda: scaling.quantize_divided(ones, x, E4M3FN),
        lambda: scaling.amax(x),
        lambda: scaling.dequantize(x),
        lambda: cast.decode(x, E4M3FN),
    ):
        with pytest.raises(ValueError, match=f"; got {type(x).__name__}"):
            call()
    with pytest.raises(ValueError, match=f"^up: x is an array .*; got {type(x).__name__}"):
        linear.apply(x, jnp.ones((16, 16)), recipe="tensorwise", name="up")
    with pytest.raises(ValueError, match=f"^up: w is an array .*; got {type(x).__name__}"):
        linear.apply(ones, x, recipe="tensorwise", name="up")
