"""AdamW whose moments are stored in FP8 and other narrow formats, as an optax transformation
(SEMANTICS O).

    optimizer = states.adamw(1e-3, weight_decay=0.1, layout="sqrt_e4m3")
    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)

The bits are those of ``fp8ref.sim.states``, jitted or not, on one device or a mesh. XLA would change
them in three ways, and each line that prevents one is marked:

    fused       a product and a sum become one operation with one rounding; a clip between them that
                clips nothing prevents it (``_product``)
    rewritten   array / number becomes a product with the reciprocal, a / (b / c) becomes (a c) / b; a
                barrier, or a clip, hides the number or the inner quotient
    shortened   a cast to a narrow format and back is left out; the cast ends in integers or behind a
                barrier
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fp8ref import states
from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32
from fp8ref.jax import cast
from fp8ref.states import Layout, Moment

_LARGEST = np.finfo(np.float32).max
_DTYPES = {FLOAT16.name: jnp.float16, BFLOAT16.name: jnp.bfloat16, FLOAT32.name: jnp.float32}


class MomentState(NamedTuple):
    """A stored moment: codes in the format's own dtype and the tensor's shape; the rest float32 of
    shape () or [blocks], None where the layout has none. Fields as in ``fp8ref.sim.states``."""

    codes: jax.Array
    scale_inv: jax.Array | None = None
    amax: jax.Array | None = None
    exponent: jax.Array | None = None
    center: jax.Array | None = None


class AdamWState(NamedTuple):
    """The steps that were made, int32, and trees of ``MomentState`` in the structure of the
    parameters."""

    count: jax.Array  # type: ignore[assignment]  # optax's name, which tuples have too
    m: Any
    v: Any


class _Scalars(NamedTuple):
    """``fp8ref.states.Scalars`` as float32 arrays."""

    b1: jax.Array
    a1: jax.Array
    b2: jax.Array
    a2: jax.Array
    inverse1: jax.Array
    inverse2: jax.Array
    bound: jax.Array
    learning_rate: jax.Array
    eps: jax.Array
    weight_decay: jax.Array


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    layout: str | Layout = "sqrt_e4m3",
    mask: Any = None,
) -> optax.GradientTransformation:
    """AdamW with the moments of a layout.

    learning_rate  a number, or a schedule of the count of steps before this one, from 0.
    mask           which parameters decay, as in ``optax.adamw``: a tree of booleans, or a function of
                   the parameters; None: all.

    Shapes:   parameters float32 of any shape; gradients float32, float16 or bfloat16 of theirs.
    Order:    SEMANTICS O-2 to O-10; the updates are to be added to the parameters.
    Specials: a gradient that is not finite makes its weight NaN, and the moments of its group (O-2).
    Raises:   ValueError: an unknown layout, or one with stochastic rounding; numbers outside their
              ranges (O-2); at ``init`` and ``update``, parameters that are not float32 or empty, or
              missing; a state of another layout.
    Source:   SEMANTICS O.
    """
    layout = states.by_name(layout)
    if layout.stochastic:
        raise ValueError(f"fp8ref.jax does not round stochastically; layout {layout.name!r} does. Use rounding='nearest_even'.")
    states.check(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, layout=layout)
    schedule = learning_rate if callable(learning_rate) else None
    if schedule is None:
        states.scalars(1, learning_rate=float(learning_rate), b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    table = np.array(states.corrections(b1, b2), np.float32)

    def init(params) -> AdamWState:
        m, v = (jax.tree.map(lambda p, i=i: _zeros(p, _layout_of(layout, p), i), params) for i in (0, 1))
        return AdamWState(jnp.zeros((), jnp.int32), m, v)

    def update(grads, state: AdamWState, params=None):
        if params is None:
            raise ValueError("AdamW's decay needs the parameters: call update(grads, state, params).")
        count = optax.safe_increment(state.count)
        at_step = jnp.asarray(table)[jnp.minimum(count, len(table)) - 1]
        rate = jnp.asarray(learning_rate if schedule is None else schedule(state.count), jnp.float32)
        given = (b1, 1 - b1, b2, 1 - b2, *at_step, rate, eps, weight_decay)
        at = _Scalars(*(jnp.asarray(x, jnp.float32) for x in given))
        decays = jax.tree.map(lambda _: True, params) if mask is None else mask(params) if callable(mask) else mask

        structure: Any
        leaves, structure = jax.tree.flatten(params)
        of_each = [structure.flatten_up_to(tree) for tree in (grads, state.m, state.v, decays)]
        new = [
            _leaf(p, g, m, v, at._replace(weight_decay=jnp.where(d, at.weight_decay, 0)), layout)
            for p, g, m, v, d in zip(leaves, *of_each, strict=True)
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
            return _read(stored, (own.m, own.v)[i], own)

        return jax.tree.map(of_leaf, tree, is_leaf=lambda x: isinstance(x, MomentState))

    return read(0, state.m), read(1, state.v)


def _leaf(p, g, m_state: MomentState, v_state: MomentState, at: _Scalars, layout: Layout):
    """(update, m, v) of one parameter."""
    layout = _layout_of(layout, p)
    _check_gradient(g, p)
    for i, stored in enumerate((m_state, v_state)):
        _check_state(stored, p.shape, layout, i)
    both = (layout.m, layout.v)
    new = _new_moments(g, m_state, v_state, at, layout)
    extremes = [_extremes(x, new[0], moment) for x, moment in zip(new[1:], both, strict=True)]
    if any(extremes):
        # The moments are computed again: kept, they would be 8 bytes a parameter to write and to read.
        g, m_state, v_state, extremes = lax.optimization_barrier((g, m_state, v_state, extremes))
        new = _new_moments(g, m_state, v_state, at, layout)
    g, m, v = new
    ratio = _product(m, at.inverse1) / (_product(jnp.sqrt(v), at.inverse2) + at.eps)
    if layout.bounded:
        ratio = jnp.clip(ratio, -at.bound, at.bound)
    change = _product(at.learning_rate, ratio + _product(at.weight_decay, p))
    change = jnp.where(jnp.abs(change) < states.STEP_MIN, jnp.float32(0), change)
    kept = (_store(x, extremes[i], (m_state, v_state)[i], both[i], i, at, layout) for i, x in enumerate((m, v)))
    return -change, *kept


def _new_moments(g, m_state: MomentState, v_state: MomentState, at: _Scalars, layout: Layout):
    """The gradient in range, and both new moments (O-2 to O-5)."""
    g = _in_range(cast.to_f32(g))
    return g, *_averages(g, _read(m_state, layout.m, layout), _read(v_state, layout.v, layout), at, layout)


def _extremes(x, g, moment: Moment) -> list[jax.Array]:
    """The maxima that a moment's scales are made of: of magnitudes, or of the gradient's where an
    amax is predicted; and of an expansion the negative of the smallest that is not zero."""
    if moment.scaling is None:
        return []
    if moment.amax == "predicted":
        return [_group_max(jnp.abs(g), moment)]
    magnitude = jnp.abs(jnp.sqrt(x) if moment.root else x)
    found = [_group_max(magnitude, moment)]
    if moment.expansion:
        found.append(_group_max(jnp.where(magnitude == 0, -jnp.inf, -magnitude), moment, empty=-np.inf))
    return found


def _product(a, b):
    """a * b, clipped to float32's range, which changes nothing but what XLA may do with it:
    fused."""
    return jnp.clip(a * b, -_LARGEST, _LARGEST)


def _quotient(a, b):
    """a / b of an array. One barrier hides whether b is one number, the other that a quotient may
    divide what follows: rewritten."""
    return lax.optimization_barrier(a / lax.optimization_barrier(jnp.broadcast_to(b, a.shape)))


def _in_range(g):
    """O-2."""
    magnitude = jnp.abs(g)
    kept = jnp.where(magnitude < states.GRADIENT_MIN, jnp.float32(0), g)
    return jnp.where(magnitude <= states.GRADIENT_MAX, kept, jnp.float32(jnp.nan))


def _averages(g, m, v, at: _Scalars, layout: Layout):
    """O-5."""
    square = _product(g, g)
    if layout.average == "products":
        m = _product(at.b1, m) + _product(at.a1, g)
        v = _product(at.b2, v) + _product(at.a2, square)
    else:
        m = m + _product(at.a1, g - m)
        v = v + _product(at.a2, square - v)
    return _not_tiny(m, layout), _not_tiny(v, layout)


def _not_tiny(x, layout: Layout):
    return jnp.where(jnp.abs(x) < layout.smallest_moment, jnp.float32(0), x)


def _read(stored: MomentState, moment: Moment, layout: Layout):
    """O-4."""
    x = _values(stored.codes, moment)
    if stored.scale_inv is not None:
        x = _product(x, _spread(stored.scale_inv, x.shape, moment))
    if stored.exponent is not None:
        magnitude = _root_of_power(jnp.abs(x), _spread(stored.exponent, x.shape, moment))
        x = _signed(_product(magnitude, _spread(stored.center, x.shape, moment)), x)
    if moment.root:
        x = _product(x, x)
    return _not_tiny(x, layout)


def _store(x, extremes: list[jax.Array], old: MomentState, moment: Moment, which: int, at: _Scalars, layout: Layout) -> MomentState:
    """O-7 to O-10."""
    if moment.root:
        x = jnp.sqrt(x)
    if moment.scaling is None:
        return MomentState(_codes(x, x, moment))
    own = amax = extremes[0]
    if moment.amax == "previous":
        assert old.amax is not None
        amax = jnp.where(old.amax == 0, own, old.amax)
    elif moment.amax == "predicted":
        kept = _product(old.amax, old.amax) if moment.root else old.amax
        amax = _averages(own, kept, kept, at, layout)[which]
        amax = jnp.sqrt(amax) if moment.root else amax
    if moment.expansion:
        return _store_expanded(x, amax, -extremes[1], moment)
    scale, scale_inv = _scales(amax, moment)
    if moment.scaling == "divide":
        scaled = _quotient(x, scale_inv) if moment.block is None else x / _spread(scale_inv, x.shape, moment)
    else:
        scaled = _product(x, _spread(scale, x.shape, moment))
    codes = _codes(scaled, x, moment)
    if moment.amax != "predicted":
        return MomentState(codes, scale_inv, own if moment.amax == "previous" else None)
    # Rounding is monotone: the largest code has the largest product.
    return MomentState(codes, scale_inv, _product(_group_max(jnp.abs(_values(codes, moment)), moment), scale_inv))


def _store_expanded(x, amax, smallest, moment: Moment) -> MomentState:
    """O-10."""
    magnitude = jnp.abs(x)
    floor = jnp.float32(moment.floor)
    top = jnp.maximum(amax, floor)
    bottom = jnp.minimum(jnp.maximum(smallest, floor), top)
    center = _product(jnp.sqrt(top), jnp.sqrt(bottom))
    ratio = top / bottom
    exponent = jnp.full_like(ratio, states.EXPONENTS[-1])
    for k in reversed(states.EXPONENTS[:-1]):
        exponent = jnp.where(ratio <= np.float32(states.EXPANDED_RANGE ** (1 / k)), jnp.float32(k), exponent)
    scale_inv = _quotient(_power(_quotient(top, center), exponent), jnp.float32(moment.fmt.max))
    of, k, inverse = (_spread(a, x.shape, moment) for a in (center, exponent, scale_inv))
    scaled = _signed(_power(jnp.clip(magnitude / of, 0, _LARGEST), k), x) / inverse
    return MomentState(_codes(scaled, x, moment), scale_inv, None, exponent, center)


def _power(x, exponent):
    square = _product(x, x)
    return jnp.select([exponent == 4, exponent == 2, exponent == 1], [_product(square, square), square, x], jnp.sqrt(x))


def _root_of_power(y, exponent):
    root = jnp.sqrt(y)
    return jnp.select([exponent == 4, exponent == 2, exponent == 1], [jnp.sqrt(root), root, y], _product(y, y))


def _signed(magnitude, sign):
    return jnp.where(jnp.signbit(sign), -magnitude, magnitude)


def _scales(amax, moment: Moment):
    """(scale, scale_inv) (O-7); scale is None under ``divide``."""
    amax = jnp.maximum(amax, jnp.float32(moment.floor))
    top = jnp.float32(moment.fmt.max)
    if moment.scaling == "divide":
        return None, _quotient(amax, top)
    scale = 1 / _quotient(amax, top) if moment.scaling == "reciprocal" else top / amax
    if moment.scaling == "power_of_two":
        bits = lax.bitcast_convert_type(scale, jnp.uint32) & jnp.uint32(0xFF800000)
        scale = jnp.where(jnp.isnan(scale), scale, lax.bitcast_convert_type(bits, jnp.float32))
    scale = lax.optimization_barrier(scale)  # rewritten
    return scale, 1 / scale


def _codes(scaled, x, moment: Moment):
    """O-8, in the format's dtype."""
    fmt = moment.fmt
    if fmt == FLOAT32:
        return scaled
    if fmt.bits == 8:
        codes = cast.encode(scaled, fmt)  # ends in integers: shortened
        if moment.keep:
            codes = jnp.where((x != 0) & (codes & 0x7F == 0), codes | jnp.uint8(1), codes)
        return lax.bitcast_convert_type(codes, cast.DTYPES[fmt.name])
    codes = jnp.clip(scaled, -fmt.max, fmt.max).astype(_DTYPES[fmt.name])
    if moment.keep:
        smallest = jnp.asarray(fmt.smallest_subnormal, codes.dtype)
        codes = jnp.where((x != 0) & (codes == 0), jnp.where(jnp.signbit(x), -smallest, smallest), codes)
    return lax.optimization_barrier(codes)  # shortened


def _values(codes, moment: Moment):
    return cast.decode(codes, moment.fmt) if moment.fmt.bits == 8 else codes.astype(jnp.float32)


def _group_max(x, moment: Moment, empty: float = 0.0):
    """() or [blocks]: the maximum of each group of the flattened tensor; empty fills a last
    block."""
    if moment.block is None:
        return jnp.max(x)
    if x.ndim and x.shape[-1] % moment.block == 0:  # a cut along other axes then needs no collective
        return jnp.max(x.reshape(*x.shape[:-1], -1, moment.block), axis=-1).reshape(-1)
    padded = jnp.pad(x.reshape(-1), (0, -x.size % moment.block), constant_values=empty)
    return jnp.max(padded.reshape(-1, moment.block), axis=-1)


def _spread(of_groups, shape: tuple[int, ...], moment: Moment):
    """The values of the groups, for each element."""
    block = moment.block
    if block is None:
        return of_groups
    if shape and shape[-1] % block == 0:
        lead = (*shape[:-1], shape[-1] // block)
        return jnp.broadcast_to(of_groups.reshape(*lead, 1), (*lead, block)).reshape(shape)
    return jnp.repeat(of_groups, block)[: int(np.prod(shape))].reshape(shape)


def _zeros(p, layout: Layout, which: int) -> MomentState:
    moment = (layout.m, layout.v)[which]
    dtype = cast.DTYPES[moment.fmt.name] if moment.fmt.bits == 8 else _DTYPES[moment.fmt.name]
    # zeros_like: a state is placed as its parameter is
    codes = jnp.zeros_like(p, dtype=dtype)
    if moment.scaling is None:
        return MomentState(codes)
    groups = () if moment.block is None else (moment.groups(codes.size),)
    amax = None if moment.amax == "exact" else jnp.zeros(groups, jnp.float32)
    ones = [jnp.ones(groups, jnp.float32) if has else None for has in (True, moment.expansion, moment.expansion)]
    return MomentState(codes, ones[0], amax, ones[1], ones[2])


def _layout_of(layout: Layout, p) -> Layout:
    """The layout of a parameter, which is float32 and not empty."""
    if getattr(p, "dtype", None) != jnp.float32 or p.size == 0:
        has = f"{p.dtype} {p.shape}" if hasattr(p, "dtype") else type(p).__name__
        raise ValueError(f"fp8ref.jax.states takes float32 parameters with at least one element; got {has}. Keep float32 masters.")
    return layout.of(p.size)


def _check_gradient(g, p) -> None:
    if getattr(g, "shape", None) != p.shape:
        raise ValueError(f"a gradient has its parameter's shape, {p.shape}; got {getattr(g, 'shape', type(g).__name__)}.")


def _check_state(stored, shape: tuple[int, ...], layout: Layout, which: int) -> None:
    """ValueError unless a stored moment is one of this layout and shape."""
    wanted = jax.eval_shape(lambda: _zeros(jnp.zeros(shape, jnp.float32), layout, which))
    described = [
        [None if a is None else (jnp.dtype(a.dtype).name, tuple(a.shape)) for a in s] if isinstance(s, MomentState) else s
        for s in (stored, wanted)
    ]
    if described[0] != described[1]:
        raise ValueError(
            f"the state of a moment under layout {layout.name!r} is {described[1]}; got {described[0]}. States of another layout are not "
            "converted: use the layout that they were made with, or init."
        )
