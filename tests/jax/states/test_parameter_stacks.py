"""Stacks of tensors in JAX: a stack of tensors has the bits of its tensors one by one (spec
O-11).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.states.jax_states import of_parameter
from helpers.states.state_layouts import ALL, MASTERED, differing, gradients
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import scaling
from fp8ref.jax.states import states
from fp8ref.sim.states import states as sim

LAYERS = 3
SHAPES = {"a_stack": (16, 256), "b_plain": (33, 17), "c_stack": (5,), "d_ragged": (3, 43)}
"""Of one tensor; the last has blocks that end within it, and all but b_plain are stacks."""

STACKED = {name: name != "b_plain" for name in SHAPES}
QUICK = ("sqrt_e4m3_f16",)
EVERY = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ALL | MASTERED
]


def whole(name: str) -> tuple[int, ...]:
    return (LAYERS, *SHAPES[name]) if STACKED[name] else SHAPES[name]


def numbers() -> dict[str, list[int]]:
    """The numbers of the tensors of each parameter, as O-8 counts them."""
    found, count = {}, 0
    for name in SHAPES:
        found[name] = list(range(count, count := count + (LAYERS if STACKED[name] else 1)))
    return found


def tensors(name: str, x) -> list:
    return list(x) if STACKED[name] else [x]


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(whole(name)).astype(np.float32) for name in SHAPES}


def grads(t: int) -> dict[str, np.ndarray]:
    """Of each tensor of a stack at another scale, so that one amax for all would show."""
    found = {}
    for i, name in enumerate(SHAPES):
        g = gradients(10 * t + i, int(np.prod(whole(name))), 1, widest=8)[0].reshape(whole(name))
        found[name] = (
            g
            * (2.0 ** (8 * np.arange(LAYERS, dtype=np.float32))).reshape(
                -1, *[1] * len(SHAPES[name])
            )
            if STACKED[name]
            else g
        )
    return {name: g.astype(np.float32) for name, g in found.items()}


def steps_of_each(layout, steps: int):
    """{name: [(weight or master, state) of each tensor]} after each step, by the simulator."""

    def begun(x):
        return sim.master(x, layout) if layout.keeps_master else x, sim.init(x.shape, layout)

    held = {name: [begun(x) for x in tensors(name, w)] for name, w in weights().items()}
    seed = 5 if layout.stochastic else 0
    for t in range(steps):
        for name, g in grads(t).items():
            held[name] = [
                sim.step(
                    p,
                    one,
                    state,
                    sim.AdamW(learning_rate=1e-2, weight_decay=0.1, layout=layout, seed=seed),
                    tensor=number,
                )
                for (p, state), one, number in zip(
                    held[name], tensors(name, g), numbers()[name], strict=True
                )
            ]
        yield held


def count(p, state: states.AdamWState, held) -> int:
    """Elements that differ, of weights or masters, codes, scales and amaxes."""
    total = 0
    for name, of_each in held.items():
        for i, (weight, wanted) in enumerate(of_each):
            trees = [(state.m, wanted.m), (state.v, wanted.v)]
            if state.master is None:
                total += differing(tensors(name, p[name])[i], weight)
            else:
                trees.append((state.master, weight))
            for tree, expected in trees:
                for one, two in zip(of_parameter(tree, name), expected, strict=True):
                    assert one is not None or two is None
                    total += 0 if two is None else differing(tensors(name, one)[i], two)
    return total


def trained(layout, steps: int, place=lambda x: x) -> int:
    given = {
        "weight_decay": 0.1,
        "layout": layout,
        "parameters": states.Parameters(stacked=STACKED),
        "seed": 5 if layout.stochastic else 0,
    }
    optimizer = states.adamw(1e-2, **given)
    by = states.AdamW(learning_rate=1e-2, **given)
    step = jax.jit(lambda p, g, state: states.step(p, g, state, by))
    p = {name: place(jnp.asarray(w)) for name, w in weights().items()}
    state, total = optimizer.init(p), 0
    for t, held in enumerate(steps_of_each(layout, steps)):
        p, state = step(p, {name: place(jnp.asarray(g)) for name, g in grads(t).items()}, state)
        total += count(p, state, held)
    if layout.keeps_master:
        read = states.weights(state, layout, jnp.float32, stacked=STACKED)
        total += sum(
            differing(x, sim.weight(master, layout))
            for name in SHAPES
            for x, (master, _) in zip(tensors(name, read[name]), held[name], strict=True)
        )
    for i, tree in enumerate(states.decode(state, layout, stacked=STACKED)):
        for name in SHAPES:
            for found, (_, one) in zip(tensors(name, tree[name]), held[name], strict=True):
                total += differing(found, sim.decode(one, layout)[i])
    return total


@pytest.mark.parametrize("name", EVERY)
def test_a_stack_has_the_bits_of_its_tensors(name):  # O-2 to O-11, O-14, O-15
    assert trained((ALL | MASTERED)[name], 3) == 0


def cut(x):
    """On 8 devices, by the rows of each tensor of a stack."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(
        x, NamedSharding(mesh, P(None, "data") if x.ndim == 3 and x.shape[1] % 8 == 0 else P())
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sqrt_e4m3", "sqrt_e4m3_f16", "msamp", "coat", "stochastic"])
def test_a_mesh_changes_nothing_of_stacks(name):  # O-11
    assert trained((ALL | MASTERED)[name], 3, place=cut) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["msamp_o2", "sqrt_e4m3_f16"])
def test_copies_of_a_stack_are_scanned(name):  # O-16
    """Each layer of a scan takes its own codes and scale, and has the bits of a cast of its
    weight.
    """
    rng = np.random.default_rng(0)
    w = jnp.asarray(
        rng.standard_normal((LAYERS, 32, 32)) * 4.0 ** np.arange(LAYERS).reshape(-1, 1, 1),
        jnp.float32,
    )
    state = states.adamw(1e-3, layout=name, parameters=states.Parameters(stacked=True)).init(
        {"w": w}
    )
    x = jnp.asarray(rng.standard_normal((16, 32)), jnp.bfloat16)

    @jax.jit
    def of_copies(state):
        p, copies = (
            states.weights(state, name, stacked=True),
            states.copies(state, name, "tensorwise", stacked=True),
        )
        return jax.lax.scan(
            lambda h, one: (linear.apply(h, one[0], recipe="tensorwise", prepared=one[1])[0], None),
            x,
            (p["w"], copies["w"]),
        )[0]

    h = x
    for one in states.weights(state, name, stacked=True)["w"]:
        h = linear.apply(h, one, recipe="tensorwise")[0]
        assert scaling.quantize(
            one, states.copies(state, name, "tensorwise", stacked=True)["w"].fmt
        ).codes.shape == (32, 32)
    assert differing(of_copies(state), np.asarray(h, np.float32)) == 0


def test_stacks_are_named_as_masks_are():
    p = {"layers": {"w": jnp.ones((LAYERS, 128))}, "head": jnp.ones((2, 128))}

    def optimizer(stacked):
        return states.adamw(1e-3, parameters=states.Parameters(stacked=stacked))

    by_function = optimizer(lambda p: jax.tree.map(lambda x: x.shape[0] == LAYERS, p))
    for tx in (optimizer({"layers": True, "head": False}), by_function):
        assert tx.init(p).m.scale_inv["layers"]["w"].shape == (LAYERS, 1)
        assert tx.init(p).m.scale_inv["head"].shape == (2,)
    with pytest.raises(
        ValueError,
        match="stacked is a tree of booleans, of the parameters' structure or a prefix of it; got",
    ):
        optimizer({"layers": True}).init(p)
    with pytest.raises(
        ValueError, match=r"a stack has its tensors along its first dim; got one of shape \(\)"
    ):
        optimizer(True).init(jnp.float32(1))
    other = states.adamw(1e-3).init(p)  # one tensor of 3 * 128 elements
    with pytest.raises(ValueError, match=r"States of another layout are not converted"):
        by_function.update(p, other, p)
