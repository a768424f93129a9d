"""The delayed scaling of libraries, replayed exactly: flax by running its op, TransformerEngine by
its source's semantics.
"""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.sim import delayed
from fp8ref.spec.delayed import DELAYED

F32 = np.float32
INF, NAN = np.inf, np.nan


def te_update(history, scale, amax, *, most_recent, limit):
    """delayed_scaling.cu, kernel_bulk (commit 6b71a0ad), for one tensor: (history, scale) after one
    reduced amax.

    A zero amax rolls nothing and, as the maximum is only taken while rolling, leaves the scale.
    fmaxf ignores a NaN.
    """
    largest = 0.0
    if amax != 0:
        rolled = [*history[1:], amax]
        largest = functools.reduce(lambda a, b: a if math.isnan(b) else max(a, b), rolled, 0.0)
        history = [0.0, *rolled[1:]]
    if most_recent:
        largest = amax
    if math.isfinite(largest) and largest > 0:
        with np.errstate(over="ignore"):
            scale = F32(limit) / F32(largest)
    return history, min(scale, np.finfo(F32).max)


@pytest.mark.grid(2)
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize(("fmt", "margin"), [(E4M3FN, 0), (E5M2, 0), (E4M3FN, 2)])
def test_te_traces_equal_its_source(length, most_recent, fmt, margin, rng):  # H-7
    choices = np.array([0, 0, 1e-40, 1e-36, 1e-3, 1, 3, 700, 3e38, INF, NAN], F32)
    config = dataclasses.replace(
        DELAYED["te_delayed"],
        history_length=length,
        amax_compute="most_recent" if most_recent else "max",
        policy=dataclasses.replace(POLICIES["te_delayed"], margin=margin),
    )
    for _ in range(40):
        state, history, scale = delayed.init(config), [0.0] * length, F32(1)
        for amax in rng.choice(choices, 30):
            assert delayed.scales(state, config, fmt).scale == scale
            state = delayed.update(state, delayed.observe(amax), config=config, fmt=fmt)
            history, scale = te_update(
                history, scale, float(amax), most_recent=most_recent, limit=fmt.max * 2.0**-margin
            )
            np.testing.assert_array_equal(state.stored, scale)
            np.testing.assert_array_equal(
                delayed.te_order(state.amax_history), np.array(history, F32)
            )


def test_what_te_does_to_zeros_and_infinities():  # H-7
    """A zero is no observation, so history[0] stays; an infinity holds the scale for a whole
    history; a NaN is forgotten.
    """
    config = dataclasses.replace(DELAYED["te_delayed"], history_length=3)
    state, stored = delayed.init(config), []
    for amax in (8, 0, 0, INF, 16, 16, 16, NAN, 4, 4):
        state = delayed.update(state, delayed.observe(F32(amax)), config=config, fmt=E4M3FN)
        stored.append(float(state.stored))
    assert stored == [56, 56, 56, 56, 56, 56, 28, 28, 28, 112]


class Op(nn.Module):
    """flax's op on several pairs of operands: one module, used several times."""

    length: int

    @nn.compact
    def __call__(self, uses):
        op = fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=self.length)
        return [op(x, w, (((1,), (0,)), ((), ()))) for x, w, _ in uses]


def loss(variables, uses, length):
    """A loss whose gradient with respect to the i-th output is the i-th given tensor."""
    outputs = Op(length).apply(variables, uses)
    return sum(
        (jnp.sum((y * g).astype(jnp.float32)) for y, (_, _, g) in zip(outputs, uses, strict=True)),
        jnp.float32(0),
    )


ROLES = {"input": E4M3FN, "kernel": E4M3FN, "output_grad": E5M2}


def tensor(amax, rng, dtype):
    """[16, 16] with this amax, the other elements below it, none of them subnormal (XLA on a CPU
    would flush those).
    """
    scale = amax if 0 < amax < INF else float(amax != 0)
    x = (rng.uniform(-0.9, 0.9, (16, 16)) * scale).astype(F32)
    x = np.where(np.abs(x) < 2.0**-126, F32(0), x)
    x[rng.integers(16), rng.integers(16)] = amax
    return jnp.asarray(x, dtype)


TRACES = {
    "ordinary": [[1.0], [3.0], [0.01], [7.3], [0.4], [0.4], [0.4], [0.4], [0.4]],
    "zeros": [[0.0], [0.0], [2.7], [0.0], [0.0], [0.0], [0.0], [0.0], [5.0]],
    "infinite": [[1.7], [INF], [3.3], [3.3], [3.3], [3.3], [3.3], [3.3]],
    "nan": [[1.7], [NAN], [3.3], [3.3], [3.3], [3.3], [3.3], [3.3]],
    "tiny": [[1e-36], [1e-36], [1e-36], [1.3], [0.7], [0.7], [0.7], [0.7], [0.7]],
    "huge": [[3e38], [3e38, 3e38], [3e38], [1.0], [1.0], [1.0], [1.0], [1.0]],
    "unused": [[2.3], [2.3], [], [1.1], [1.1], [], [], [0.3], [0.3]],
    "shared": [[2.3, 0.7], [2.3, 0.7], [1.1, 0.3, 1.7], [1.1], [0.1, 0.7, 1.3, 2.9], [2.0]],
    "everything": [
        [1.0, INF],
        [2.0],
        [],
        [0.0, 3.1],
        [NAN],
        [0.0],
        [0.7, 0.7, 0.1],
        [0.0],
        [5.5],
        [0.2],
    ],
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("dtype", "policy"), [(jnp.float32, "flax"), (jnp.bfloat16, "flax_bf16")], ids=["f32", "bf16"]
)
@pytest.mark.parametrize("trace", TRACES)
def test_flax_traces_equal_flax(trace, dtype, policy, jitted, rng):  # H-8
    """Bits of scale and amax_history after every step, for input, weight and output gradient, each
    with amaxes of its own.
    """
    length = 4
    config = dataclasses.replace(DELAYED["flax"], history_length=length, policy=POLICIES[policy])
    gradient = jax.grad(loss)
    gradient = jax.jit(gradient, static_argnums=2) if jitted else gradient
    variables = Op(length).init(jax.random.key(0), [(tensor(1.0, rng, dtype),) * 3])
    states = dict.fromkeys(ROLES, delayed.init(config))
    for step in TRACES[trace]:
        factors = dict(zip(ROLES, (1.0, 0.37, 2.0**-9), strict=True))
        uses = [
            tuple(tensor(a if a * f < 2.0**-120 else a * f, rng, dtype) for f in factors.values())
            for a in step
        ]
        variables = gradient(variables, uses, length)
        (flax_state,) = variables["_overwrite_with_gradient"].values()
        for i, (role, fmt) in enumerate(ROLES.items()):
            seen = [delayed.observe(np.abs(np.asarray(use[i], F32)).max()) for use in uses]
            used, before = delayed.scales(states[role], config, fmt), states[role]
            states[role] = delayed.update(before, *seen, config=config, fmt=fmt)
            np.testing.assert_array_equal(
                flax_state[f"{role}_scale"], states[role].stored[None], err_msg=f"{role} {step}"
            )
            np.testing.assert_array_equal(
                flax_state[f"{role}_amax_history"], delayed.flax_order(states[role].amax_history)
            )
            if len(step) == 1:
                np.testing.assert_array_equal(used.scale_inv, states[role].stored)


def test_what_flax_does_wrong():  # H-8
    """An unused step zeroes the state, and the next tensor is divided by zero; a module used twice
    doubles its scale.
    """
    config = dataclasses.replace(DELAYED["flax"], history_length=4)
    update = functools.partial(delayed.update, config=config, fmt=E4M3FN)
    two = delayed.observe(F32(2))
    ordinary = update(update(delayed.init(config), two), two)
    unused = update(ordinary)
    assert delayed.scales(ordinary, config, E4M3FN).scale == 224
    assert delayed.scales(unused, config, E4M3FN) == (INF, 0)
    assert delayed.scales(update(unused, two), config, E4M3FN).scale == 224
    shared = update(ordinary, two, two)
    assert shared.stored == 2 * ordinary.stored
    assert delayed.scales(shared, config, E4M3FN).scale == 112
