"""AdamW whose moments are stored in FP8 and other narrow formats (SEMANTICS O). Pure functions of
one tensor.

    state = states.init(p.shape, "sqrt_e4m3")
    p, state = states.step(p, g, state, learning_rate=1e-3, layout="sqrt_e4m3")
    m, v = states.decode(state, "sqrt_e4m3")

Order of a step: gradients out of range (O-2); the moments read back (O-4); their averages (O-5);
the weight (O-6); the scales of the new moments (O-7, O-9, O-10); their codes (O-8). Every operation
is one float32 operation, rounded to nearest even. A layout is a ``fp8ref.states.Layout``. A step
knows nothing of elements but their flat index and the amaxes of their group, so that any cut of a
tensor gives the same (O-11): ``cuts`` makes the step as several ranks make it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fp8ref import states
from fp8ref.formats import FLOAT32
from fp8ref.sim import cast, philox
from fp8ref.sim.scales import round_to_power_of_two
from fp8ref.states import Layout, Moment, Scalars

_ONE = np.float32(1)


class MomentState(NamedTuple):
    """A stored moment. Scales and what travels with them are float32 of shape (), or [blocks], or
    None where the layout has none.

    codes      uint8 codes of an FP8 format; otherwise float32 that holds numbers of the format.
    scale_inv  of these codes.
    amax       ``previous``: of the moment before it was rounded; ``predicted``: of the stored one.
    exponent, center
               of an expansion (O-10).
    """

    codes: np.ndarray
    scale_inv: np.ndarray | None = None
    amax: np.ndarray | None = None
    exponent: np.ndarray | None = None
    center: np.ndarray | None = None


class State(NamedTuple):
    """The state of one tensor: the steps that were made, and both moments, in the tensor's
    shape."""

    step: int
    m: MomentState
    v: MomentState


@dataclass(frozen=True, kw_only=True)
class Health:
    """What storing the moments of one step cost (O-12). Counts are of elements.

    count         all of them
    v_lost        v is stored as 0 beside an m that is not
    bounded       ratios of moments that the bound clipped
    clipped_m, clipped_v
                  values above the range of their scale
    stalled_m, stalled_v
                  stored values that are not 0 and stay the same under a gradient of 0
    root_bias     sum of sqrt(stored v) / sum of sqrt(v) - 1
    update_error  rms of the change of the next ratio that storing makes / rms of the ratio
    largest_ratio largest magnitude of the ratio of stored moments
    bytes_per_parameter
                  of both moments, scales included
    """

    count: int
    v_lost: int
    bounded: int
    clipped_m: int
    clipped_v: int
    stalled_m: int
    stalled_v: int
    root_bias: float
    update_error: float
    largest_ratio: float
    bytes_per_parameter: float


def init(shape: tuple[int, ...], layout: str | Layout = "sqrt_e4m3") -> State:
    """The state before the first step: zero codes, scales 1 (SEMANTICS O-4).

    Shapes:   codes of that shape; scales () or [blocks of the flattened tensor].
    Raises:   ValueError: an unknown layout; a tensor without elements.
    """
    layout = _layout_of(layout, shape)
    return State(0, *(_zeros(shape, moment) for moment in (layout.m, layout.v)))


def decode(state: State, layout: str | Layout = "sqrt_e4m3") -> tuple[np.ndarray, np.ndarray]:
    """m and v as the next step reads them, float32 (SEMANTICS O-4).

    Order:    RN32(decode(code) * scale_inv); the inverse of an expansion; RN32(x * x) of a root; a
              magnitude below ``layout.smallest_moment`` is +0.
    Raises:   ValueError: an unknown layout, or a state of another.
    """
    layout = _layout_of(layout, state.m.codes.shape)
    _check_state(state, layout, state.m.codes.shape)
    shape = state.m.codes.shape
    both = ((state.m, layout.m), (state.v, layout.v))
    m, v = (_read(stored, moment, stored.codes.reshape(-1), 0, layout).reshape(shape) for stored, moment in both)
    return m, v


def step(
    p,
    g,
    state: State,
    *,
    learning_rate: float,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    layout: str | Layout = "sqrt_e4m3",
    seed: int = 0,
    tensor: int = 0,
    cuts: Sequence[int] = (),
) -> tuple[np.ndarray, State]:
    """One step of AdamW: the weight and the state after it (SEMANTICS O).

    seed, tensor  key the random numbers of a stochastic layout: tensor is the number of the tensor
                  among those of the optimizer (O-8).
    cuts          ascending flat indices at which ranks cut the tensor; the result is the same for
                  any (O-11).
    Shapes:       p float32 of any shape; g of that shape, float32, float16 or bfloat16.
    Order:        O-2 to O-10, see the module.
    Specials:     a gradient below 2^-56 counts as zero, one above 2^56 or not finite as NaN. A NaN
                  makes its weight NaN, and both moments of all that share its scale.
    Raises:       ValueError: as ``states.scalars`` and ``decode``; p or g of another dtype or
                  shape; cuts not ascending; a seed or tensor out of range.
    """
    p, g = cast.array(p), cast.array(g)
    if p.dtype != np.float32:
        raise ValueError(f"weights are float32; got {p.dtype}. Keep float32 masters.")
    if g.shape != p.shape or g.dtype.name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"a gradient is float32, float16 or bfloat16 of its weight's shape, {p.shape}; got {g.dtype} {g.shape}.")
    layout = _layout_of(layout, p.shape)
    states.check(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, layout=layout)
    _check_state(state, layout, p.shape)
    _check_key(seed, tensor)
    edges = [0, *cuts, p.size]
    if sorted(set(edges)) != edges:
        raise ValueError(f"cuts ascend strictly between 0 and {p.size}, the elements of the tensor; got {list(cuts)}.")
    at = states.scalars(state.step + 1, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    flat_p, flat_g = np.ascontiguousarray(p).reshape(-1), cast.exact(np.ascontiguousarray(g)).astype(np.float32).reshape(-1)
    weights, before, seen = [], [], []
    with np.errstate(all="ignore"):
        for start, stop in itertools.pairwise(edges):
            gradient = in_range(flat_g[start:stop])
            m, v = _averages(gradient, *_read_both(state, layout, start, stop), at, layout)
            weights.append(_weight(flat_p[start:stop], m, v, at, layout))
            before.append((gradient, m, v))
            seen.append(start)
        after = []
        for which, moment in enumerate((layout.m, layout.v)):
            key = _key(seed, state.step + 1, 2 * tensor + which) if moment.rounding == "stochastic" else None
            pieces = [(start, gradient, (m, v)[which]) for start, (gradient, m, v) in zip(seen, before, strict=True)]
            after.append(_store(pieces, (state.m, state.v)[which], moment, which, p.shape, at, key, layout))
    return np.concatenate(weights).reshape(p.shape), State(state.step + 1, *after)


def health(
    g,
    before: State,
    after: State,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    layout: str | Layout = "sqrt_e4m3",
) -> Health:
    """What the step from before to after cost, by the gradient that it took (SEMANTICS O-12).

    Order:    float64 sums, in no stated order.
    Specials: figures of a state that holds NaN are NaN where they are not counts.
    Raises:   ValueError: states of another layout, or not one step apart.
    """
    shape = after.m.codes.shape
    layout = _layout_of(layout, shape)
    _check_state(before, layout, shape)
    _check_state(after, layout, shape)
    if after.step != before.step + 1:
        raise ValueError(f"health is of one step; got states after {before.step} and {after.step} steps.")
    at = states.scalars(after.step, learning_rate=0.0, b1=b1, b2=b2, eps=eps, weight_decay=0.0)
    with np.errstate(all="ignore"):
        m, v = _averages(
            in_range(cast.exact(g).astype(np.float32).reshape(-1)), *_read_both(before, layout, 0, after.m.codes.size), at, layout
        )
        stored_m, stored_v = _read_both(after, layout, 0, after.m.codes.size)
        wanted, found = _ratio(m, v, at).astype(np.float64), _ratio(stored_m, stored_v, at).astype(np.float64)
        clipped = [int(_clipped(x, stored, moment).sum()) for x, stored, moment in ((m, after.m, layout.m), (v, after.v, layout.v))]
        idle = _averages(np.zeros_like(m), stored_m, stored_v, at, layout)
        stalled = [int(_stalled(x, stored, moment).sum()) for x, stored, moment in zip(idle, after[1:], (layout.m, layout.v), strict=True)]
        roots = [float(np.sqrt(x.astype(np.float64)).sum()) for x in (v, stored_v)]
        rms = float(np.sqrt(np.mean(wanted**2)))
        return Health(
            count=m.size,
            v_lost=int(((stored_v == 0) & (stored_m != 0)).sum()),
            bounded=int((np.abs(wanted) > at.bound).sum()) if layout.bounded else 0,
            clipped_m=clipped[0],
            clipped_v=clipped[1],
            stalled_m=stalled[0],
            stalled_v=stalled[1],
            root_bias=roots[1] / roots[0] - 1 if roots[0] else 0.0,
            update_error=float(np.sqrt(np.mean((found - wanted) ** 2))) / rms if rms else 0.0,
            largest_ratio=float(np.abs(found).max()),
            bytes_per_parameter=layout.bytes_per_parameter(m.size),
        )


def in_range(g: np.ndarray) -> np.ndarray:
    """Gradients below 2^-56 as +0, above 2^56 and not finite as NaN (SEMANTICS O-2); float32."""
    magnitude = np.abs(g)
    kept = np.where(magnitude < np.float32(states.GRADIENT_MIN), np.float32(0), g)
    return np.where(magnitude <= np.float32(states.GRADIENT_MAX), kept, np.float32(np.nan))


def scales(amax, moment: Moment) -> tuple[np.ndarray, np.ndarray]:
    """(scale, scale_inv) of an amax (SEMANTICS O-7); float32 of its shape. Under ``divide`` the
    first is not used, and is RN32(1 / scale_inv)."""
    amax = np.maximum(np.asarray(amax, np.float32), np.float32(moment.floor))
    top = np.float32(moment.fmt.max)
    if moment.scaling == "divide":
        return _ONE / (amax / top), amax / top
    if moment.scaling == "reciprocal":
        scale = _ONE / (amax / top)
    else:
        scale = top / amax
        if moment.scaling == "power_of_two":
            scale = round_to_power_of_two(np.atleast_1d(scale), by_log2=False).reshape(scale.shape)
    return scale, _ONE / scale


def _averages(g: np.ndarray, m: np.ndarray, v: np.ndarray, at: Scalars, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """The new moments (O-5)."""
    square = g * g
    if layout.average == "products":
        m = np.float32(at.b1) * m + np.float32(at.a1) * g
        v = np.float32(at.b2) * v + np.float32(at.a2) * square
    else:
        m = m + np.float32(at.a1) * (g - m)
        v = v + np.float32(at.a2) * (square - v)
    return _not_tiny(m, layout), _not_tiny(v, layout)


def _not_tiny(x: np.ndarray, layout: Layout) -> np.ndarray:
    """x with +0 in place of magnitudes below the layout's smallest (O-5)."""
    return np.where(np.abs(x) < np.float32(layout.smallest_moment), np.float32(0), x)


def _ratio(m: np.ndarray, v: np.ndarray, at: Scalars) -> np.ndarray:
    """The ratio of corrected moments, before a bound (O-6)."""
    return (m * np.float32(at.inverse1)) / (np.sqrt(v) * np.float32(at.inverse2) + np.float32(at.eps))


def _weight(p: np.ndarray, m: np.ndarray, v: np.ndarray, at: Scalars, layout: Layout) -> np.ndarray:
    """The new weight (O-6)."""
    ratio = _ratio(m, v, at)
    if layout.bounded:
        ratio = np.clip(ratio, -np.float32(at.bound), np.float32(at.bound))
    change = np.float32(at.learning_rate) * (ratio + np.float32(at.weight_decay) * p)
    change = np.where(np.abs(change) < np.float32(states.STEP_MIN), np.float32(0), change)
    return p - change


def _read_both(state: State, layout: Layout, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """m and v of the elements from start to stop, flat."""
    both = ((state.m, layout.m), (state.v, layout.v))
    m, v = (_read(stored, moment, stored.codes.reshape(-1)[start:stop], start, layout) for stored, moment in both)
    return m, v


def _read(stored: MomentState, moment: Moment, codes: np.ndarray, start: int, layout: Layout) -> np.ndarray:
    """The moment that these codes hold (O-4); start is the flat index of the first."""
    x = cast.decode(codes, moment.fmt) if codes.dtype == np.uint8 else codes
    with np.errstate(all="ignore"):
        if stored.scale_inv is not None:
            x = x * _spread(stored.scale_inv, start, codes.size, moment)
        if stored.exponent is not None and stored.center is not None:
            exponent = _spread(stored.exponent, start, codes.size, moment)
            x = np.copysign(_root_of_power(np.abs(x), exponent) * _spread(stored.center, start, codes.size, moment), x)
        if moment.root:
            x = x * x
        return _not_tiny(x, layout)


def _store(
    pieces: list[tuple[int, np.ndarray, np.ndarray]],
    old: MomentState,
    moment: Moment,
    which: int,
    shape: tuple[int, ...],
    at: Scalars,
    key: int | None,
    layout: Layout,
) -> MomentState:
    """The stored moment (O-7 to O-10) of pieces (flat index of the first element, gradient,
    moment); which is 0 for m and 1 for v."""
    size = int(np.prod(shape, dtype=np.int64))
    xs = [(start, np.sqrt(x) if moment.root else x) for start, _, x in pieces]
    if moment.scaling is None:
        codes = [_kept(_round(x, moment, start, key), x, moment) for start, x in xs]
        return MomentState(np.concatenate(codes).reshape(shape))
    amax = own = _group_max(xs, size, moment)
    if moment.amax == "previous":
        assert old.amax is not None
        amax = np.where(old.amax == 0, own, old.amax)
    elif moment.amax == "predicted":
        gradients = _group_max([(start, g) for start, g, _ in pieces], size, moment)
        amax = _predicted(old.amax, gradients, moment, which, at, layout)
    if moment.expansion:
        return _store_expanded(xs, amax, moment, shape, key)
    scale, scale_inv = scales(amax, moment)
    codes = []
    for start, x in xs:
        scaled = x / _spread(scale_inv, start, x.size, moment) if moment.scaling == "divide" else x * _spread(scale, start, x.size, moment)
        codes.append(_kept(_round(scaled, moment, start, key), x, moment))
    kept = own if moment.amax == "previous" else None
    if moment.amax == "predicted":
        decoded = [(start, _values(c, moment) * _spread(scale_inv, start, c.size, moment)) for (start, _), c in zip(xs, codes, strict=True)]
        kept = _group_max(decoded, size, moment)
    return MomentState(np.concatenate(codes).reshape(shape), scale_inv, kept)


def _predicted(stored, gradients: np.ndarray, moment: Moment, which: int, at: Scalars, layout: Layout) -> np.ndarray:
    """A bound of what will be stored, from the amax of what is stored and that of the gradients
    (O-9): the same operations on magnitudes, which rounding keeps in order."""
    if moment.root:
        stored = stored * stored
    m, v = _averages(gradients, stored, stored, at, layout)
    bound = (m, v)[which]
    return np.sqrt(bound) if moment.root else bound


def _store_expanded(xs: list[tuple[int, np.ndarray]], amax: np.ndarray, moment: Moment, shape: tuple[int, ...], key: int | None):
    """The stored moment under an expansion (O-10)."""
    size = int(np.prod(shape, dtype=np.int64))
    # The smallest magnitude that is not zero: the largest of reciprocals is not exact, so that
    # magnitudes are compared as negative numbers.
    smallest = -_group_max([(s, np.where(x == 0, -np.float32(np.inf), -np.abs(x))) for s, x in xs], size, moment, magnitudes=False)
    floor = np.float32(moment.floor)
    top = np.maximum(amax, floor)
    bottom = np.minimum(np.maximum(smallest, floor), top)
    center = np.sqrt(top) * np.sqrt(bottom)
    ratio = top / bottom
    exponent = np.full(ratio.shape, np.float32(states.EXPONENTS[-1]))
    for k in reversed(states.EXPONENTS[:-1]):
        exponent = np.where(ratio <= np.float32(states.EXPANDED_RANGE ** (1 / k)), np.float32(k), exponent)
    scale_inv = _power(top / center, exponent) / np.float32(moment.fmt.max)
    codes = []
    for start, x in xs:
        of, k, inverse = (_spread(a, start, x.size, moment) for a in (center, exponent, scale_inv))
        scaled = np.copysign(_power(np.abs(x) / of, k), x) / inverse
        codes.append(_kept(_round(scaled, moment, start, key), x, moment))
    return MomentState(np.concatenate(codes).reshape(shape), scale_inv, None, exponent, center)


def _power(x: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """x to the powers 4, 2, 1 and 1/2, by products and roots (O-10)."""
    square = x * x
    return np.select([exponent == 4, exponent == 2, exponent == 1], [square * square, square, x], np.sqrt(x))


def _root_of_power(y: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """The inverse of ``_power``, by roots and a product."""
    root = np.sqrt(y)
    return np.select([exponent == 4, exponent == 2, exponent == 1], [np.sqrt(root), root, y], y * y)


def _round(scaled: np.ndarray, moment: Moment, start: int, key: int | None) -> np.ndarray:
    """uint8 codes, or float32 numbers of the format, saturated (O-8); start is the flat index of
    the first."""
    fmt = moment.fmt
    if fmt == FLOAT32:
        return scaled
    if fmt.bits == 8:
        if key is None:
            return cast.encode(scaled, fmt)
        return cast.encode_plain(scaled, fmt, rounding="stochastic", seed=key, start=start)
    if key is None:
        return cast.round_to(np.clip(scaled, -np.float32(fmt.max), np.float32(fmt.max)), fmt)
    value = cast.exact(scaled)
    n, exponent = cast.in_spacings(value, fmt)
    n = cast.round_spacings(n, fmt, "stochastic", seed=key, start=start)
    rounded = np.minimum(np.ldexp(n, exponent - fmt.mantissa_bits), fmt.max)
    return np.where(np.isnan(value), np.nan, np.copysign(rounded, value)).astype(np.float32)


def _kept(codes: np.ndarray, x: np.ndarray, moment: Moment) -> np.ndarray:
    """codes with the smallest one in place of the zeros of values that are not zero (O-8)."""
    if not moment.keep:
        return codes
    if codes.dtype == np.uint8:
        return np.where((x != 0) & (codes & 0x7F == 0), codes | np.uint8(1), codes)
    return np.where((x != 0) & (codes == 0), np.copysign(np.float32(moment.fmt.smallest_subnormal), x), codes)


def _values(codes: np.ndarray, moment: Moment) -> np.ndarray:
    return cast.decode(codes, moment.fmt) if codes.dtype == np.uint8 else codes


def _group_max(pieces: list[tuple[int, np.ndarray]], size: int, moment: Moment, *, magnitudes: bool = True) -> np.ndarray:
    """float32 () or [blocks]: the largest magnitude of each group, a NaN over all (O-7); of each
    piece first, then of the pieces, as ranks do it."""
    found = np.full(moment.groups(size), np.float32(0 if magnitudes else -np.inf))
    for start, x in pieces:
        value = np.abs(x) if magnitudes else x
        group = np.zeros(x.size, np.int64) if moment.block is None else np.arange(start, start + x.size) // moment.block
        np.maximum.at(found, group, value)  # propagates NaN
    return found[0] if moment.block is None else found


def _spread(of_groups, start: int, count: int, moment: Moment) -> np.ndarray:
    """The values of the groups of the elements start, start + 1, ..."""
    return of_groups if moment.block is None else of_groups[np.arange(start, start + count) // moment.block]


def _clipped(x: np.ndarray, stored: MomentState, moment: Moment) -> np.ndarray:
    """Whether values are above what the scale of the stored codes reaches (O-12)."""
    if stored.scale_inv is None or moment.expansion:
        return np.zeros(x.shape, bool)
    x = np.sqrt(x) if moment.root else x
    half_spacing = 2.0 ** (np.frexp(moment.fmt.max)[1] - 2 - moment.fmt.mantissa_bits)
    return np.abs(x.astype(np.float64)) / _spread(stored.scale_inv, 0, x.size, moment) > moment.fmt.max + half_spacing


def _stalled(x: np.ndarray, stored: MomentState, moment: Moment) -> np.ndarray:
    """Whether x, a stored moment one step without gradient later, is stored as it was, under the
    same scale (O-12)."""
    codes = stored.codes.reshape(-1)
    not_zero = (codes & 0x7F != 0) if codes.dtype == np.uint8 else codes != 0
    if moment.rounding == "stochastic":
        return np.zeros(x.shape, bool)
    x = np.sqrt(x) if moment.root else x
    if stored.exponent is not None and stored.center is not None:
        of, k, inverse = (_spread(a, 0, x.size, moment) for a in (stored.center, stored.exponent, stored.scale_inv))
        x = np.copysign(_power(np.abs(x) / of, k), x) / inverse
    elif stored.scale_inv is not None:
        x = x / _spread(stored.scale_inv, 0, x.size, moment)
    return not_zero & (_round(x, moment, 0, None) == codes)


def _zeros(shape: tuple[int, ...], moment: Moment) -> MomentState:
    size = int(np.prod(shape, dtype=np.int64))
    codes = np.zeros(shape, np.uint8 if moment.fmt.bits == 8 else np.float32)
    if moment.scaling is None:
        return MomentState(codes)
    groups = () if moment.block is None else (moment.groups(size),)
    ones, amax = np.ones(groups, np.float32), None if moment.amax == "exact" else np.zeros(groups, np.float32)
    return MomentState(codes, ones, amax, ones.copy() if moment.expansion else None, ones.copy() if moment.expansion else None)


def _key(seed: int, step: int, stream: int) -> int:
    """The seed of one moment of one tensor at one step (O-8)."""
    low, high = (int(word) for word in philox.words(np.array([step], np.uint64), stream, seed)[0, :2])
    return low | high << 32


def _check_key(seed: int, tensor: int) -> None:
    for name, value, bits in (("seed", seed, 64), ("tensor", tensor, 31)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 1 << bits:
            raise ValueError(f"{name} is an integer in [0, 2^{bits}); got {value!r}.")


def _layout_of(layout: str | Layout, shape: tuple[int, ...]) -> Layout:
    """The layout of a tensor of that shape."""
    size = int(np.prod(shape, dtype=np.int64))
    if size == 0:
        raise ValueError(f"states are of tensors with at least one element; got shape {shape}. Leave the tensor out.")
    return states.by_name(layout).of(size)


def _check_state(state: State, layout: Layout, shape: tuple[int, ...]) -> None:
    """ValueError unless a state is one of this layout and shape."""
    if not isinstance(state, State):
        raise ValueError(f"a state is a states.State; got {type(state).__name__}. Use states.init.")
    for name, stored, moment in (("m", state.m, layout.m), ("v", state.v, layout.v)):
        wanted = _zeros(shape, moment)
        for field, has, needs in zip(MomentState._fields, stored, wanted, strict=True):
            described = [None if a is None else (np.asarray(a).dtype.name, np.shape(a)) for a in (has, needs)]
            if described[0] != described[1]:
                raise ValueError(
                    f"a state of layout {layout.name!r} and shape {shape} has {field} of {name} = {described[1]}; got "
                    f"{described[0]}. States of another layout, or of another tensor, are not converted: use states.init."
                )
