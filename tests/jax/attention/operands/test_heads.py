"""Codes, amaxes and scales of attention's tensors are the simulator's (spec A-2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT32
from fp8ref.jax.attention.operands import heads as head_scaling
from fp8ref.sim.attention.operands import heads as sim

CASES = [
    ("tensor", "te_current"),
    ("head", "te_current"),
    ("rows_128", "te_current"),
    ("mx_1x32", "mx_rceil"),
    ("tensor", "torchao_pow2"),
]


def tensor(t=150, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((2, 4, t, 64)) * np.exp(rng.standard_normal((2, 4, t, 1)))).astype(
        np.float32
    )


def same(found, wanted):
    np.testing.assert_array_equal(np.asarray(found.codes).view(np.uint8), wanted.codes)
    for key in ("amax", "scale", "scale_inv"):
        np.testing.assert_array_equal(np.asarray(getattr(found, key)), getattr(wanted, key))


@pytest.mark.grid(4)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize(("granularity", "policy"), CASES)
def test_bits(granularity, policy, along_tokens, fmt):
    x = tensor()
    how = {"heads": 2, "along_tokens": along_tokens}
    same(
        jax.jit(lambda x: head_scaling.quantize(x, fmt, granularity, policy, **how))(x),
        sim.quantize(x, fmt, granularity, policy, **how),
    )


@pytest.mark.parametrize("size", [0, 1e-45, 1.2e-38, 1e-36, 1e-30, 1, 3e38])
def test_scales_at_the_ends_of_the_range(size):  # A-2, S-9
    """The scale_inv of float32's maximum, 2^-128, is subnormal: XLA flushes it."""
    x = np.full((1, 1, 4, 32), size, np.float32)
    found, wanted = (
        jax.jit(lambda x: head_scaling.quantize(x, E4M3FN, "head", "te_current", heads=1))(x),
        sim.quantize(x, E4M3FN, "head", "te_current", heads=1),
    )
    np.testing.assert_array_equal(found.scale, wanted.scale)
    assert found.scale_inv == (wanted.scale_inv if wanted.scale_inv > 1e-37 else 0)


def test_special_amaxes():  # S-9
    for special in (np.inf, np.nan):
        x = tensor(4)
        x[0, 0, 0, 0] = special
        found = head_scaling.quantize(jnp.asarray(x), E4M3FN, "head", "te_current", heads=4)
        assert found.scale[0, 0, 0, 0] == 1
        assert (found.scale.reshape(-1)[1:] > 1).all()


def test_given_scales():
    x, scale = tensor(), np.full((2, 2, 1, 1), 77, np.float32)
    how = {"heads": 2, "scale": scale}
    same(
        head_scaling.quantize(x, E4M3FN, "head", "te_current", **how),
        sim.quantize(x, E4M3FN, "head", "te_current", **how),
    )
    with pytest.raises(ValueError, match=r"of shape \(2, 2, 1, 1\); got float32 \(\)"):
        head_scaling.quantize(x, E4M3FN, "head", "te_current", heads=2, scale=jnp.float32(1))
    with pytest.raises(ValueError, match="a passed scale is float32"):
        head_scaling.quantize(x, E4M3FN, "tensor", "te_current", heads=2, scale=1.0)


def test_high_precision():
    x = tensor()
    found = jax.jit(lambda x: head_scaling.quantize(x, BFLOAT16, None, "te_current", heads=2))(x)
    assert found.codes.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(found.codes.astype(jnp.float32)),
        sim.quantize(x, BFLOAT16, None, "te_current", heads=2).values,
    )
    assert head_scaling.to_hp(jnp.float32(3.4e38), BFLOAT16) < jnp.inf
    assert head_scaling.to_hp(x, FLOAT32).dtype == jnp.float32


def test_what_is_refused():
    with pytest.raises(ValueError, match="features divisible by 32; got 48"):
        head_scaling.quantize(jnp.ones((1, 1, 4, 48)), E4M3FN, "mx_1x32", "mx_rceil", heads=1)
    with pytest.raises(ValueError, match=r"fp8ref.jax scales by .*; got policy 'msamp'"):
        head_scaling.implemented("msamp")
