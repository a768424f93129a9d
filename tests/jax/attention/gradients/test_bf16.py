"""The backward pass in bfloat16 of a forward pass in FP8, next to the simulator (spec A-25)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.jax.attention import attention
from fp8ref.sim.attention import attention as simulator
from fp8ref.sim.attention.gradients import gradients as attention_gradients
from fp8ref.spec.attention.variants import Mask, differentiated

MASK = Mask(causal=True)


def given():
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(1, heads, 150, 32)), jnp.bfloat16) for heads in (4, 2, 2, 4)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fa4", "cudnn", "mxfp8"])
def test_gradients_are_the_simulators(name):
    """Sums are the library's, and so are exponentials: a rounding to bfloat16 in a hundred falls
    the other way.
    """
    variant, (q, k, v, do) = differentiated(name, "bf16"), given()

    @jax.jit
    def gradients(q, k, v, do):
        return jax.vjp(lambda *x: attention.apply(*x, variant=variant, mask=MASK), q, k, v)[1](do)

    arrays = [np.asarray(x, np.float32) for x in (q, k, v, do)]
    result = simulator.forward(*arrays[:3], variant=variant, mask=MASK)
    right = attention_gradients.backward(arrays[3], *arrays[:3], result, variant=variant, mask=MASK)
    for mine, other in zip(gradients(q, k, v, do), right[:3], strict=True):
        mine = np.asarray(mine, np.float32)
        assert (mine == other).mean() > 0.98
        assert np.linalg.norm(mine - other) < 2**-10 * np.linalg.norm(other)


def test_the_backward_pass_keeps_sixteen_bits_an_element():
    variant, (q, k, v, _) = differentiated("fa3", "bf16"), given()
    _, vjp = jax.eval_shape(
        lambda *x: jax.vjp(lambda *y: attention.apply(*y, variant=variant, mask=MASK), *x), q, k, v
    )
    kept = [x for x in jax.tree.leaves(vjp) if x.ndim == 4]
    assert [x.dtype for x in kept] == [jnp.bfloat16] * 4  # q, k, v and o


def test_the_way_out_is_named():
    q, k, v, _ = given()
    with pytest.raises(
        ValueError,
        match=r"variant 'fa3' has no backward pass.*"
        r"fp8ref.spec.attention.variants.differentiated\(variant, 'bf16'\)",
    ):
        jax.grad(lambda q: attention.apply(q, k, v, variant="fa3").astype(jnp.float32).sum())(q)
