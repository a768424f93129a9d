"""Attention sinks in JAX: rows of extreme sinks, and gradients under shard_map and vmap (spec
A-23).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention.attention_cases import call_options
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp8ref.jax.attention import attention
from fp8ref.jax.attention import sinks as attention_sinks
from fp8ref.jax.attention.operands import inputs as attention_inputs
from fp8ref.spec.attention.variants import VARIANTS

CALL = attention_inputs.DeviceCall(variant=VARIANTS["fa4"], scale=0.125, arithmetic="stated")


def test_a_sink_joins_the_sum_or_replaces_it():
    """Powers of two, so that nothing is rounded: a maximum m = 4 with f = 2 is an exponent of 8."""
    log2e = np.float32(np.log2(np.e))
    o, total, maximum = (
        jnp.ones((1, 1, 3, 1, 2)),
        jnp.full((1, 1, 3, 1), 512.0),
        jnp.array([4.0, 4.0, -jnp.inf]).reshape(1, 1, 3, 1),
    )
    sinks = jnp.array([6 / log2e, 100.0, 3.0], jnp.float32)
    o, total, maximum = (
        np.asarray(x).reshape(3, -1)
        for x in attention_sinks.add(o, total, maximum, sinks, CALL, jnp.float32(2))
    )
    assert total[0] == pytest.approx(512 + 2.0 ** (6 - 8 + 8), rel=2.0**-20)
    assert maximum[0] == 4
    for n, sink in ((1, 100), (2, 3)):
        assert not o[n].any()
        assert total[n] == 256
        assert maximum[n] == pytest.approx(sink * log2e / 2, rel=2.0**-22)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("variant", ["cudnn", "exact"])
def test_second_derivatives_are_refused(variant, wrap):
    """The loss is linear in o, so that do has no derivative: only what the forward pass saved
    has.
    """
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 2, 8, 16)), jnp.float32) for _ in range(3))
    first = wrap(
        jax.grad(lambda sinks: attention.apply(q, k, v, variant=variant, sinks=sinks).sum())
    )
    with pytest.raises(
        ValueError,
        match=f"^attention by variant '{variant}': the gradients of attention are not "
        "differentiated again",
    ):
        jax.grad(lambda sinks: first(sinks).sum())(jnp.zeros(2))


@pytest.mark.slow
def test_the_gradient_sums_over_devices_and_vmap():
    """In float32, two parts of a sum in place of one: B Tq + 8 roundings of its terms."""
    rng = np.random.default_rng(0)
    q, k, v, do = (jnp.asarray(rng.normal(size=(2, h, 32, 32)), jnp.float32) for h in (4, 2, 2, 4))
    sinks = jnp.asarray([0.5, -1, 2, 1], jnp.bfloat16)

    def gradients(q, k, v, sinks, do, over=()):
        how = {"variant": "cudnn", "softcap": 3.0, "over": over}
        return jax.vjp(
            lambda *x: attention.apply(*x[:3], **call_options(sinks=x[3], **how)), q, k, v, sinks
        )[1](do)

    mesh = jax.make_mesh(
        (2, 2), ("data", "heads"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2
    )
    cut, of_sinks = P("data", "heads"), P("heads")
    sharded = jax.shard_map(
        lambda *x: gradients(*x, over=("data", "heads")),
        mesh=mesh,
        in_specs=(cut, cut, cut, of_sinks, cut),
        out_specs=(cut, cut, cut, of_sinks),
    )
    found, right = jax.jit(sharded)(q, k, v, sinks, do), jax.jit(gradients)(q, k, v, sinks, do)
    for mine, other in zip(found[:3], right[:3], strict=True):
        np.testing.assert_array_equal(mine, other)
    assert found[3].dtype == jnp.bfloat16
    np.testing.assert_allclose(
        found[3].astype(np.float32), right[3].astype(np.float32), rtol=2.0**-7
    )

    def mapped(sinks):
        o = jax.vmap(
            lambda *x: attention.apply(*(y[None] for y in x), sinks=sinks, variant="exact"), 0
        )(q, k, v)
        return (o[:, 0] * do).sum()

    whole = jax.grad(
        lambda sinks: (attention.apply(q, k, v, sinks=sinks, variant="exact") * do).sum()
    )
    wide = sinks.astype(jnp.float32)
    np.testing.assert_allclose(jax.grad(mapped)(wide), whole(wide), rtol=2.0**-20)
