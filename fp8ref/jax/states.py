"""AdamW whose moments are stored in FP8 and other narrow formats, as an optax transformation
(SEMANTICS O).

    optimizer = states.adamw(1e-3, weight_decay=0.1, layout="sqrt_e4m3")
    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)

The bits are those of ``fp8ref.sim.states``, jitted or not, on one device or a mesh. ``moments`` says
what XLA would change in them, and prevents it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fp8ref import states
from fp8ref.jax import cast, moments, philox
from fp8ref.jax.moments import MomentState, Scalars
from fp8ref.states import Layout


class AdamWState(NamedTuple):
    """The steps that were made, int32, and trees of ``MomentState`` in the structure of the
    parameters."""

    count: jax.Array  # type: ignore[assignment]  # optax's name, which tuples have too
    m: Any
    v: Any


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    layout: str | Layout = "sqrt_e4m3",
    mask: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """AdamW with the moments of a layout.

    learning_rate  a number, or a schedule of the count of steps before this one, from 0.
    mask           which parameters decay, as in ``optax.adamw``: a tree of booleans, or a function of
                   the parameters; None: all.
    seed           of a layout that rounds stochastically. Tensors are numbered as jax.tree flattens
                   the parameters.

    Shapes:   parameters float32 of any shape; gradients float32, float16 or bfloat16 of theirs.
    Order:    SEMANTICS O-2 to O-10; the updates are to be added to the parameters.
    Specials: a gradient that is not finite makes its weight NaN, and the moments of its group (O-2).
    Raises:   ValueError: an unknown layout; a seed of a layout that does not round stochastically; numbers
              outside their ranges (O-2); at ``init`` and ``update``, parameters that are not float32 or empty, or
              missing; a state of another layout.
    Source:   SEMANTICS O.
    """
    layout = states.by_name(layout)
    states.check_seed(seed, layout)
    states.check(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, layout=layout)
    schedule = learning_rate if callable(learning_rate) else None
    if schedule is None:
        states.scalars(1, learning_rate=float(learning_rate), b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    table = np.array(states.corrections(b1, b2), np.float32)

    def init(params) -> AdamWState:
        m, v = (jax.tree.map(lambda p, i=i: moments.zeros(p, _layout_of(layout, p), i), params) for i in (0, 1))
        return AdamWState(jnp.zeros((), jnp.int32), m, v)

    def update(grads, state: AdamWState, params=None):
        if params is None:
            raise ValueError("AdamW's decay needs the parameters: call update(grads, state, params).")
        count = optax.safe_increment(state.count)
        at_step = jnp.asarray(table)[jnp.minimum(count, len(table)) - 1]
        rate = jnp.asarray(learning_rate if schedule is None else schedule(state.count), jnp.float32)
        given = (b1, 1 - b1, b2, 1 - b2, *at_step, rate, eps, weight_decay)
        at = Scalars(*(jnp.asarray(x, jnp.float32) for x in given))
        decays = jax.tree.map(lambda _: True, params) if mask is None else mask(params) if callable(mask) else mask

        structure: Any
        leaves, structure = jax.tree.flatten(params)
        of_each = [structure.flatten_up_to(tree) for tree in (grads, state.m, state.v, decays)]
        new = [
            _leaf(p, g, m, v, at._replace(weight_decay=jnp.where(d, at.weight_decay, 0)), layout, (seed, count, number))
            for number, (p, g, m, v, d) in enumerate(zip(leaves, *of_each, strict=True))
        ]
        updates, m, v = (structure.unflatten(parts) for parts in zip(*new, strict=True)) if new else (grads, state.m, state.v)
        return updates, AdamWState(count, m, v)

    return optax.GradientTransformation(init, update)


def decode(state: AdamWState, layout: str | Layout = "sqrt_e4m3") -> tuple[Any, Any]:
    """Trees of m and v, float32, as the next step reads them (SEMANTICS O-4).

    Raises:   ValueError: an unknown layout, or a state of another.
    """
    layout = states.by_name(layout)

    def read(i: int, tree):
        def of_leaf(stored: MomentState):
            own = layout.of(stored.codes.size)
            _check_state(stored, stored.codes.shape, own, i)
            return moments.read(stored, (own.m, own.v)[i], own)

        return jax.tree.map(of_leaf, tree, is_leaf=lambda x: isinstance(x, MomentState))

    return read(0, state.m), read(1, state.v)


def _leaf(p, g, m_state: MomentState, v_state: MomentState, at: Scalars, layout: Layout, draw: tuple):
    """(update, m, v) of one parameter; draw: the seed, the number of the step and that of the
    tensor."""
    layout = _layout_of(layout, p)
    _check_gradient(g, p)
    for i, stored in enumerate((m_state, v_state)):
        _check_state(stored, p.shape, layout, i)
    both = (layout.m, layout.v)
    new = _new_moments(g, m_state, v_state, at, layout)
    extremes = [moments.extremes(x, new[0], moment) for x, moment in zip(new[1:], both, strict=True)]
    if any(extremes):
        # The moments are computed again: kept, they would be 8 bytes a parameter to write and to read.
        g, m_state, v_state, extremes = lax.optimization_barrier((g, m_state, v_state, extremes))
        new = _new_moments(g, m_state, v_state, at, layout)
    g, m, v = new
    ratio = moments.ratio(m, v, at)
    if layout.bounded:
        ratio = jnp.clip(ratio, -at.bound, at.bound)
    change = moments.product(at.learning_rate, ratio + moments.product(at.weight_decay, p))
    change = jnp.where(jnp.abs(change) < states.STEP_MIN, jnp.float32(0), change)
    seed, step, number = draw
    keys = [philox.key_of(seed, step, 2 * number + i) if moment.rounding == "stochastic" else None for i, moment in enumerate(both)]
    kept = (moments.store(x, extremes[i], (m_state, v_state)[i], i, at, layout, keys[i]) for i, x in enumerate((m, v)))
    return -change, *kept


def _new_moments(g, m_state: MomentState, v_state: MomentState, at: Scalars, layout: Layout):
    """The gradient in range, and both new moments (O-2 to O-5)."""
    g = in_range(cast.to_f32(g))
    return g, *moments.averages(g, moments.read(m_state, layout.m, layout), moments.read(v_state, layout.v, layout), at, layout)


def in_range(g):
    """O-2."""
    magnitude = jnp.abs(g)
    kept = jnp.where(magnitude < states.GRADIENT_MIN, jnp.float32(0), g)
    return jnp.where(magnitude <= states.GRADIENT_MAX, kept, jnp.float32(jnp.nan))


def _layout_of(layout: Layout, p) -> Layout:
    """The layout of a parameter, which is float32 and not empty."""
    if getattr(p, "dtype", None) != jnp.float32 or p.size == 0:
        has = f"{p.dtype} {p.shape}" if hasattr(p, "dtype") else type(p).__name__
        raise ValueError(f"fp8ref.jax.states takes float32 parameters with at least one element; got {has}. Keep float32 masters.")
    if layout.stochastic and p.size >= 1 << 32:
        raise ValueError(
            f"fp8ref.jax rounds stochastically tensors of fewer than 2^32 elements; got {p.shape} under layout {layout.name!r}. "
            "Use a layout that rounds to nearest."
        )
    return layout.of(p.size)


def _check_gradient(g, p) -> None:
    if getattr(g, "shape", None) != p.shape:
        raise ValueError(f"a gradient has its parameter's shape, {p.shape}; got {getattr(g, 'shape', type(g).__name__)}.")


def _check_state(stored, shape: tuple[int, ...], layout: Layout, which: int) -> None:
    """ValueError unless a stored moment is one of this layout and shape."""
    wanted = jax.eval_shape(lambda: moments.zeros(jnp.zeros(shape, jnp.float32), layout, which))
    described = [
        [None if a is None else (jnp.dtype(a.dtype).name, tuple(a.shape)) for a in s] if isinstance(s, MomentState) else s
        for s in (stored, wanted)
    ]
    if described[0] != described[1]:
        raise ValueError(
            f"the state of a moment under layout {layout.name!r} is {described[1]}; got {described[0]}. States of another layout are not "
            "converted: use the layout that they were made with, or init."
        )
