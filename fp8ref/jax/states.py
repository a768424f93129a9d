"""AdamW whose moments are stored in FP8 and other narrow formats, as an optax transformation
(SEMANTICS O).

    optimizer = states.adamw(1e-3, weight_decay=0.1, layout="sqrt_e4m3")
    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)

The bits are those of ``fp8ref.sim.states``, jitted or not, on one device or a mesh. ``moments`` says
what XLA would change in them, and prevents it.

A layout with masters (O-14) keeps them in the state. Parameters are what the model computes with, and
``weights`` reads them from the state, in place of optax.apply_updates:

    optimizer = states.adamw(1e-3, layout="msamp_o2")
    state = optimizer.init(params)                                 # float32 or bfloat16
    params = states.weights(state, "msamp_o2", jnp.bfloat16)       # may be dropped after each step
    _, state = optimizer.update(grads, state, params)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fp8ref import recipe as recipes
from fp8ref import states
from fp8ref.jax import cast, moments, philox, scaling
from fp8ref.jax.moments import MomentState, Scalars
from fp8ref.jax.scaling import Quantized
from fp8ref.recipe import Recipe
from fp8ref.states import Layout


class AdamWState(NamedTuple):
    """The steps that were made, int32, and trees of ``MomentState`` in the structure of the
    parameters; ``master`` is None where parameters are the masters."""

    count: jax.Array  # type: ignore[assignment]  # optax's name, which tuples have too
    m: Any
    v: Any
    master: Any = None


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

    learning_rate  a number, an array, or a schedule of the count of steps before this one, from 0. The rate
                   of a schedule, or of an array under jit, is known only when a program runs: outside of
                   [0, 1024] it is NaN then, and so is every weight (O-2). The other numbers are Python's:
                   under ``optax.inject_hyperparams`` they are among the static_args.
    mask           which parameters decay, as in ``optax.adamw``: a tree of booleans, of the parameters' structure
                   or a prefix of it, or a function of the parameters; None: all.
    seed           of a layout that rounds stochastically. Tensors are numbered as jax.tree flattens
                   the parameters.

    Shapes:   parameters float32 of any shape, under a layout with masters also bfloat16; gradients
              float32, float16 or bfloat16 of theirs.
    Order:    SEMANTICS O-2 to O-10, O-14, O-15; the updates are to be added to the parameters. Under a
              layout with masters the sum may miss the new weight by a rounding, in float32, of the
              old one; the next step does not read it. ``weights`` gives the new weight itself.
    Specials: a gradient that is not finite makes its weight NaN, and the moments of its group (O-2).
    Raises:   ValueError: an unknown layout; a seed of a layout that does not round stochastically; numbers
              outside their ranges (O-2); at ``init`` and ``update``, parameters that are not float32 or empty, or
              missing; a state of another layout.
    Source:   SEMANTICS O.
    """
    layout = states.by_name(layout)
    _check(learning_rate, b1, b2, eps, weight_decay, layout, seed)

    def init(params) -> AdamWState:
        m, v = (jax.tree.map(lambda p, i=i: moments.zeros(p, _layout_of(layout, p), i), params) for i in (0, 1))
        master = jax.tree.map(lambda p: moments.master(p, layout), params) if layout.keeps_master else None
        return AdamWState(jnp.zeros((), jnp.int32), m, v, master)

    def update(grads, state: AdamWState, params=None):
        if params is None:
            raise ValueError("AdamW's decay needs the parameters: call update(grads, state, params).")
        return _of_each(_leaf, params, grads, state, learning_rate, (b1, b2, eps, weight_decay), layout, mask, seed)

    return optax.GradientTransformation(init, update)


def step(
    params,
    grads,
    state: AdamWState,
    *,
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    layout: str | Layout = "sqrt_e4m3",
    mask: Any = None,
    seed: int = 0,
    factor: jax.Array | float = 1.0,
    finite: jax.Array | bool = True,
) -> tuple[Any, AdamWState]:
    """The parameters and the state after ``adamw``'s update: its bits, and fewer bytes on an NVIDIA GPU.

    There one kernel (``adamw_kernel``) reads and writes what a layout in blocks of exact amaxes has of a
    parameter, if the blocks divide its last dim. ``update`` cannot: what it returns is added to the parameters
    after it. Without such blocks, and elsewhere, it is update and ``optax.apply_updates``.

    factor    multiplies the gradients first, RN32(g * factor), such as what clips their norm.
    finite    false: nothing changes, the count included.

    Shapes:   as ``adamw``; factor and finite of shape ().
    Order, specials: as ``adamw``. Under a layout with masters the new parameters are ``weights``.
    Raises:   ValueError: as ``adamw``.
    Source:   SEMANTICS O.
    """
    layout = states.by_name(layout)
    _check(learning_rate, b1, b2, eps, weight_decay, layout, seed)
    factor, finite = jnp.asarray(factor, jnp.float32), jnp.asarray(finite)

    def of_leaf(p, g, stored: list[MomentState], at: Scalars, layout: Layout, draw: tuple):
        own = _layout_of(layout, p)
        _check_stored(p, g, stored, own)

        def by_xla(p, g, stored, at, factor, finite):
            update, *after = _leaf(p, cast.to_f32(g) * factor, stored, at, layout, draw)
            new = moments.read(after[2], layout.master, layout).astype(p.dtype) if layout.keeps_master else p + update
            return jax.tree.map(lambda new, old: jnp.where(finite, new, old), (new, *after), (p, *stored))

        given = (p, g, stored, at, factor, finite)
        # Pallas is slow to import
        from fp8ref.jax import adamw_kernel

        if not adamw_kernel.takes(p.shape, own):
            return by_xla(*given)
        return lax.platform_dependent(*given, cuda=functools.partial(adamw_kernel.step, layout=own), default=by_xla)

    new, after = _of_each(of_leaf, params, grads, state, learning_rate, (b1, b2, eps, weight_decay), layout, mask, seed)
    return new, after._replace(count=jnp.where(finite, after.count, state.count))


def decode(state: AdamWState, layout: str | Layout = "sqrt_e4m3") -> tuple[Any, Any]:
    """Trees of m and v, float32, as the next step reads them (SEMANTICS O-4).

    Raises:   ValueError: an unknown layout, or a state of another.
    """
    layout = states.by_name(layout)

    def read(i: int, tree):
        def of_leaf(stored: MomentState):
            own = layout.of(stored.codes.size)
            check_state(stored, stored.codes.shape, own, i)
            return moments.read(stored, (own.m, own.v)[i], own)

        return jax.tree.map(of_leaf, tree, is_leaf=lambda x: isinstance(x, MomentState))

    m, v, *_ = _trees(state, layout)
    return read(0, m), read(1, v)


def weights(state: AdamWState, layout: str | Layout, dtype=jnp.bfloat16) -> Any:
    """The tree of parameters that the masters hold, in a dtype: what a model computes with after the
    step (SEMANTICS O-14).

    Order:    code * scale_inv, exactly, then one rounding to the dtype.
    Raises:   ValueError: an unknown layout, or one without masters; a state of another layout.
    """
    layout = states.by_name(layout)
    if not layout.keeps_master:
        raise ValueError(f"the masters of layout {layout.name!r} are the parameters themselves; got it for weights. Use the parameters.")

    def of_leaf(stored: MomentState):
        check_state(stored, getattr(stored.codes, "shape", ()), layout, 2)
        return moments.read(stored, layout.master, layout).astype(dtype)

    return jax.tree.map(of_leaf, _trees(state, layout)[2], is_leaf=lambda x: isinstance(x, MomentState))


def copies(state: AdamWState, layout: str | Layout, recipe: str | Recipe, dtype=jnp.bfloat16) -> Any:
    """The tree of FP8 copies of the weights that the masters hold, ``Quantized``, which linears of a
    recipe take as they are: ``linear.apply(x, w, recipe=recipe, quantized=copy)`` (SEMANTICS O-16).

    dtype     that the model computes in.
    Order:    ``weights`` in that dtype, then ``scaling.quantize`` by the cast that the recipe has for
              weights. The amax of a copy is that which a predicted master keeps, and no pass over the
              weights; else it is taken of them.
    Raises:   ValueError: as ``weights`` and ``recipe.weight_copy``.
    """
    layout, spec = states.by_name(layout), recipes.weight_copy(recipe)

    def of_leaf(w, stored: MomentState) -> Quantized:
        if stored.amax is None:
            return scaling.quantize(w, spec.fmt, policy=spec.policy)
        # Rounding is monotone: the largest weight has the largest master.
        largest = moments.not_tiny(stored.amax, layout).astype(dtype)
        return scaling.quantize_with(w, scaling.scale_from_amax(cast.to_f32(largest), spec.fmt, spec.policy), spec.fmt)

    return jax.tree.map(of_leaf, weights(state, layout, dtype), state.master, is_leaf=lambda x: isinstance(x, MomentState))


def _decays(mask: Any, params) -> Any:
    """The tree of booleans of a mask."""
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    given = mask(params) if callable(mask) else mask
    try:
        return jax.tree.broadcast(given, params)
    except ValueError as error:
        raise ValueError(
            f"mask is a tree of booleans, of the parameters' structure or a prefix of it; got {jax.tree.structure(given)} for "
            f"{jax.tree.structure(params)}. Make it of the parameters, by jax.tree.map."
        ) from error


def _trees(state: AdamWState, layout: Layout) -> list[Any]:
    """m, v and, where the layout keeps them, the masters."""
    if not isinstance(state, AdamWState):
        raise ValueError(
            f"a state is an AdamWState of fp8ref.jax.states; got {type(state).__name__}. Of an optax.chain take its part, such as state[1]."
        )
    if (state.master is not None) != layout.keeps_master:
        raise ValueError(
            f"a state of layout {layout.name!r} has {'' if layout.keeps_master else 'no '}masters; got one with"
            f"{'out' if layout.keeps_master else ''}. States of another layout are not converted: use init."
        )
    return [state.m, state.v, state.master][: len(layout.kept)]


def _check(learning_rate, b1: float, b2: float, eps: float, weight_decay: float, layout: Layout, seed: int) -> None:
    for name, value in (("b1", b1), ("b2", b2), ("eps", eps), ("weight_decay", weight_decay), ("seed", seed)):
        if isinstance(value, jax.Array):
            raise ValueError(
                f"{name} is a Python number; got a jax array. Under optax.inject_hyperparams only learning_rate varies: name b1, b2, eps, "
                "weight_decay and seed in static_args."
            )
    states.check_seed(seed, layout)
    states.check(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, layout=layout)
    if not callable(learning_rate) and not isinstance(learning_rate, jax.core.Tracer):
        states.scalars(1, learning_rate=float(learning_rate), b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)


def _of_each(leaf, params, grads, state: AdamWState, learning_rate, numbers: tuple, layout: Layout, mask, seed: int):
    """leaf of each parameter: (the tree of what it gives first, the state after the step)."""
    b1, b2, eps, weight_decay = numbers
    held, table = _trees(state, layout), np.array(states.corrections(b1, b2), np.float32)
    count = optax.safe_increment(state.count)
    at_step = jnp.asarray(table)[jnp.minimum(count, len(table)) - 1]
    rate = jnp.asarray(learning_rate(state.count) if callable(learning_rate) else learning_rate, jnp.float32)
    rate = jnp.where((rate >= 0) & (rate <= 1024), rate, jnp.nan)  # too late to refuse it
    given = (b1, 1 - b1, b2, 1 - b2, *at_step, rate, eps, weight_decay)
    at = Scalars(*(jnp.asarray(x, jnp.float32) for x in given))
    decays = _decays(mask, params)

    structure: Any
    leaves, structure = jax.tree.flatten(params)
    of_each = [structure.flatten_up_to(tree) for tree in (grads, decays, *held)]
    new = [
        leaf(p, g, stored, at._replace(weight_decay=jnp.where(d, at.weight_decay, 0)), layout, (seed, count, number))
        for number, (p, g, d, *stored) in enumerate(zip(leaves, *of_each, strict=True))
    ]
    first, *trees = (structure.unflatten(parts) for parts in zip(*new, strict=True)) if new else (grads, *state[1:])
    return first, AdamWState(count, *trees)


def _leaf(p, g, stored: list[MomentState], at: Scalars, layout: Layout, draw: tuple):
    """(update, m, v) of one parameter, and its master if one is kept; draw: the seed, the number of the
    step and that of the tensor."""
    layout = _layout_of(layout, p)
    _check_stored(p, g, stored, layout)
    new, change = moments.new(p, g, stored, at, layout)
    extremes = [moments.extremes(x, new[0], moment, i) for i, (x, moment) in enumerate(zip(new[1:], layout.kept, strict=True))]
    if any(extremes):
        # The moments are computed again: kept, they would be 8 bytes a parameter to write and to read.
        g, stored, extremes = lax.optimization_barrier((g, stored, extremes))
        new, change = moments.new(p, g, stored, at, layout)
    seed, step, number = draw
    keys = [
        philox.key_of(seed, step, 2 * number + i % 2, of_master=i == 2) if moment.rounding == "stochastic" else None
        for i, moment in enumerate(layout.kept)
    ]
    after = [moments.store(x, extremes[i], stored[i], i, at, layout, keys[i]) for i, x in enumerate(new[1:])]
    if not layout.keeps_master:
        return -change, *after
    return moments.read(after[2], layout.master, layout).astype(p.dtype).astype(jnp.float32) - cast.to_f32(p), *after


def _layout_of(layout: Layout, p) -> Layout:
    """The layout of a parameter, which is not empty, and float32 unless a master is kept of it."""
    dtypes = (jnp.float32, jnp.bfloat16)[: 1 + layout.keeps_master]
    if getattr(p, "dtype", None) not in dtypes or p.size == 0:
        has = f"{p.dtype} {p.shape}" if hasattr(p, "dtype") else type(p).__name__
        raise ValueError(
            f"fp8ref.jax.states takes {' or '.join(d.dtype.name for d in dtypes)} parameters with at least one element under layout "
            f"{layout.name!r}; got {has}. Keep float32 masters."
        )
    if layout.stochastic and p.size >= 1 << 32:
        raise ValueError(
            f"fp8ref.jax rounds stochastically tensors of fewer than 2^32 elements; got {p.shape} under layout {layout.name!r}. "
            "Use a layout that rounds to nearest."
        )
    return layout.of(p.size)


def _check_stored(p, g, stored: list, layout: Layout) -> None:
    """ValueError unless gradient and state are a parameter's."""
    if getattr(g, "shape", None) != p.shape:
        raise ValueError(f"a gradient has its parameter's shape, {p.shape}; got {getattr(g, 'shape', type(g).__name__)}.")
    for i, one in enumerate(stored):
        check_state(one, p.shape, layout, i)


def check_state(stored, shape: tuple[int, ...], layout: Layout, which: int) -> None:
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
