"""Steps of JAX's AdamW against the simulator's, for its tests of states and of moments."""

import functools

import jax
import jax.numpy as jnp
import optax
from helpers.states.state_layouts import SHAPES, differing, gradients_of, start

from fp8ref.jax.states import states
from fp8ref.sim.states import states as sim

HYPER = {"weight_decay": 0.1}
SEED = 0xFEDCBA9876543210


def seeded(layout) -> dict:
    return {**HYPER, "seed": SEED * layout.stochastic}


def simulated(layout, steps: int, learning_rate=1e-3, **hyper):
    """Weights and states by name after each step."""
    p, state = start(), {name: sim.init(shape, layout) for name, shape in SHAPES.items()}
    for t in range(steps):
        g = gradients_of(t)
        rate = learning_rate(t) if callable(learning_rate) else learning_rate
        for name in SHAPES:
            given = {**seeded(layout), **hyper}
            optimizer = sim.AdamW(learning_rate=rate, layout=layout, **given)
            number = sorted(SHAPES).index(name)
            p[name], state[name] = sim.step(p[name], g[name], state[name], optimizer, tensor=number)
        yield p, state


def of_parameter(stored, *path):
    """What is stored of one parameter, by its path in the trees of the fields."""
    trees = [
        None if tree is None else functools.reduce(lambda tree, key: tree[key], path, tree)
        for tree in stored
    ]
    return type(stored)(*trees)


def count(p, state: states.AdamWState, wanted) -> int:
    """How many elements of weights, codes, scales and amaxes differ."""
    total = 0
    for name in SHAPES:
        total += differing(p[name], wanted[0][name])
        for found, expected in (
            (of_parameter(state.m, name), wanted[1][name].m),
            (of_parameter(state.v, name), wanted[1][name].v),
        ):
            for one, two in zip(found, expected, strict=True):
                assert one is not None or two is None
                total += 0 if two is None else differing(one, two)
    return total


def compiled(optimizer):
    def step(g, state, p):
        updates, state = optimizer.update(g, state, p)
        return optax.apply_updates(p, updates), state

    return jax.jit(step)


def trained(step, optimizer, layout, steps: int, *, place=lambda x: x, **hyper) -> int:
    p = jax.tree.map(lambda x: place(jnp.asarray(x)), start())
    state, total = optimizer.init(p), 0
    for t, wanted in enumerate(simulated(layout, steps, **hyper)):
        p, state = step(jax.tree.map(lambda x: place(jnp.asarray(x)), gradients_of(t)), state, p)
        total += count(p, state, wanted)
    return total
