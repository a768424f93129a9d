import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from fp8ref.check import synthetic
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax import scaling
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.sim import cast as sim_cast
from fp8ref.sim import scaling as sim

AMAX_BF16 = np.arange(0x7F81, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
IMPLEMENTED = [p for p in POLICIES.values() if p.floored_quotient]
policies = pytest.mark.parametrize("policy", [*IMPLEMENTED, ScalePolicy(name="small_eps", eps=1e-27)], ids=lambda p: p.name)


@policies
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_scale_equals_the_simulator(policy, fmt, rng):  # S-3, S-4
    random = rng.integers(0, 0x7F800001, 1 << 20, dtype=np.uint32).view(np.float32)
    k = np.arange(-110, 48)
    near = (fmt.max * 2.0 ** -k[:, None]).astype(np.float32).view(np.int32) + np.arange(-100, 101)  # where exp2_log2 rounds up
    amax = np.concatenate([AMAX_BF16, random, near.astype(np.int32).view(np.float32).ravel()])
    found = jax.jit(lambda a: scaling.scale_from_amax(a, fmt, policy))(amax)
    np.testing.assert_array_equal(np.asarray(found), sim.scale_from_amax(amax, fmt, policy))


@policies
@pytest.mark.parametrize("case", synthetic.tensors())
@pytest.mark.parametrize(("granularity", "axis"), [("tensorwise", 1), ("rowwise", 0), ("rowwise", 1)])
def test_quantize_equals_the_simulator(case, policy, granularity, axis):  # S-1, S-2, S-5, S-6
    x = synthetic.tensors()[case]
    for fmt, dtype in ((E4M3FN, jnp.float32), (E5M2, jnp.bfloat16)):
        quantize = functools.partial(scaling.quantize, fmt=fmt, granularity=granularity, policy=policy, axis=axis)
        q = jax.jit(quantize)(jnp.asarray(x, dtype))
        expected = sim.quantize(x, fmt, granularity=granularity, policy=policy, axis=axis)
        codes = np.asarray(lax.bitcast_convert_type(q.codes, jnp.uint8))
        np.testing.assert_array_equal(sim_cast.canonical_nans(codes, fmt), expected.codes)
        np.testing.assert_array_equal(np.asarray(q.scale), expected.scale)
        np.testing.assert_array_equal(np.asarray(q.scale_inv), expected.scale_inv)
        assert q.scale.shape == expected.scale.shape
        # dequantise, S-8; XLA on a CPU flushes subnormal results
        value, flushed = np.asarray(scaling.dequantize(q)), np.abs(sim.dequantize(expected)) < 2.0**-126
        np.testing.assert_array_equal(np.where(flushed, 0, value), np.where(flushed, 0, sim.dequantize(expected)))


def test_scale_inv_is_the_reciprocal_of_the_scale(rng):
    """S-1. Written without a barrier, 1 / (448 / amax) becomes amax / 448, another number for many amax: the second half."""
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
        ((4, 128), {"granularity": "blockwise_1x128"}, "tensorwise or rowwise"),
        ((4, 4), {"policy": "te"}, "torchao"),
        ((4, 4), {"policy": ScalePolicy(name="mine", eps=1e-28)}, "needs eps >= 1e-27.*'mine'"),
        ((4, 4), {"policy": ScalePolicy(name="room", eps=1e-12, margin=1)}, "'room'.*fp8ref.sim"),
        *(((4, 4), {"policy": p}, f"torchao_mask; got policy '{p.name}'") for p in POLICIES.values() if p not in IMPLEMENTED),
        ((4, 4), {"granularity": "rowwise", "axis": 3}, r"\[-2, 2\)"),
    ],
)
def test_errors(shape, options, message):
    with pytest.raises(ValueError, match=message):
        scaling.quantize(jnp.ones(shape), E4M3FN, **options)


def test_subnormals_underflow_in_every_format_under_every_eps_that_is_taken():  # S-3
    """2^-126 bounds the subnormals of float32; below half a format's smallest subnormal they round to zero."""
    for largest, smallest_subnormal in [(448.0, 2.0**-9), (57344.0, 2.0**-16), (240.0, 2.0**-10), (57344.0, 2.0**-17)]:
        assert 2.0**-126 * largest / 1e-27 < smallest_subnormal / 2
        assert np.isfinite(np.float32(largest / 1e-27))
