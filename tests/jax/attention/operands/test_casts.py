"""Attention with single casts in JAX, held to the simulator (spec E-9)."""

import jax
import numpy as np
import pytest

from fp8ref.jax.attention.operands import casts as attention_casts_of_jax
from fp8ref.jax.gemm import hardware
from fp8ref.selection import attention_casts
from fp8ref.sim.attention.operands import casts as sim
from fp8ref.sim.gemm import hardware as sim_hardware

LAYER = "model.layers.0.self_attn"


def tensors():
    rng = np.random.default_rng(0)
    shapes = ((2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16), (2, 4, 24, 16))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
    "roles", [(), *((role,) for role in attention_casts.ROLES), attention_casts.ROLES], ids=" ".join
)
def test_output_and_gradients_are_the_simulators(roles):
    q, k, v, do = tensors()
    casts = attention_casts.of("cudnn", roles, LAYER)
    o, grads = _passed(q, k, v, do, casts)
    expected = sim.forward(q, k, v, casts).o, *sim.backward(do, q, k, v, casts)
    for mine, his in zip((o, *grads), expected, strict=True):
        # A sum of 24 or 16 float32 terms has an error of at most 24 2^-24 of the sum of magnitudes,
        # here below 2^6; three of them follow each other. Of p and ds an element beside a tie may
        # have the next code, which changes a few rows.
        far = np.abs(mine - his) > 3 * 24 * 2**-24 * 2**6
        assert far.mean() <= (0.02 if set(roles) & {"p", "ds"} else 0)


def test_simulated_hardware_is_refused():  # G-19
    q, k, v, _ = tensors()
    casts = attention_casts.of("cudnn", ("q",), LAYER)
    with (
        hardware.simulating(sim_hardware.by_name("hopper")),
        pytest.raises(
            ValueError, match=r"single casts: .* got products of their values in float32"
        ),
    ):
        attention_casts_of_jax.apply(q, k, v, casts)


def _passed(q, k, v, do, casts):
    o, back = jax.vjp(lambda *x: attention_casts_of_jax.apply(*x, casts), q, k, v)
    return np.asarray(o), [np.asarray(g) for g in back(do)]


@pytest.mark.parametrize("by", [0, 1, 2])
def test_second_derivatives_are_refused(by):
    """Of a loss that is linear in o, what the forward pass saved has them; of one that is not, do
    has them too.
    """
    given, casts = list(tensors()[:3]), attention_casts.of("cudnn", ["p"], LAYER)

    def loss(x, power):
        return (
            attention_casts_of_jax.apply(*given[:by], x, *given[by + 1 :], casts) ** power
        ).sum()

    for power in (1, 2):
        with pytest.raises(
            ValueError,
            match=r"^attention with single casts: the gradients of attention are not "
            r"differentiated again",
        ):
            jax.grad(lambda x, power=power: jax.grad(loss)(x, power).sum())(given[by])
