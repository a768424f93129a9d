"""One moment of AdamW, or the master of a weight: what is stored of it, and how it is read (spec
O-4, O-5, O-7 to O-10, O-15)."""

from typing import NamedTuple

import numpy as np

from fp8ref.formats import FLOAT32
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scales import Scales, round_to_power_of_two
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states.layouts import Layout, Moment, Scalars

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


def zeros(shape: tuple[int, ...], moment: Moment) -> MomentState:
    """The stored moment of a tensor before the first step (O-4)."""
    size = int(np.prod(shape, dtype=np.int64))
    codes = np.zeros(shape, np.uint8 if moment.fmt.bits == 8 else np.float32)
    if moment.scaling is None:
        return MomentState(codes)
    groups = () if moment.block is None else (moment.groups(size),)
    ones = np.ones(groups, np.float32)
    amax = None if moment.amax == "exact" else np.zeros(groups, np.float32)
    rest = [ones.copy() if moment.expansion else None for _ in range(2)]
    return MomentState(codes, ones, amax, *rest)


def scales(amax, moment: Moment) -> tuple[np.ndarray, np.ndarray]:
    """(scale, scale_inv) of an amax (spec O-7); float32 of its shape. Under ``divide`` the
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


def averages(
    g: np.ndarray, m: np.ndarray, v: np.ndarray, at: Scalars, layout: Layout
) -> tuple[np.ndarray, np.ndarray]:
    """The new moments (O-5)."""
    square = g * g
    if layout.average == "products":
        m = np.float32(at.b1) * m + np.float32(at.a1) * g
        v = np.float32(at.b2) * v + np.float32(at.a2) * square
    else:
        m = m + np.float32(at.a1) * (g - m)
        v = v + np.float32(at.a2) * (square - v)
    return not_tiny(m, layout), not_tiny(v, layout)


def ratio(m: np.ndarray, v: np.ndarray, at: Scalars) -> np.ndarray:
    """The ratio of corrected moments, before a bound (O-6)."""
    return (m * np.float32(at.inverse1)) / (
        np.sqrt(v) * np.float32(at.inverse2) + np.float32(at.eps)
    )


def not_tiny(x: np.ndarray, layout: Layout) -> np.ndarray:
    """x with +0 in place of magnitudes below the layout's smallest (O-5)."""
    return np.where(np.abs(x) < np.float32(layout.smallest_moment), np.float32(0), x)


def read(
    stored: MomentState, moment: Moment, codes: np.ndarray, start: int, layout: Layout
) -> np.ndarray:
    """The moment that these codes hold (O-4); start is the flat index of the first."""
    x = _values(codes, moment)
    with np.errstate(all="ignore"):
        if stored.scale_inv is not None:
            x = x * spread(stored.scale_inv, start, codes.size, moment)
        if stored.exponent is not None and stored.center is not None:
            exponent = spread(stored.exponent, start, codes.size, moment)
            center = spread(stored.center, start, codes.size, moment)
            x = np.copysign(_root_of_power(np.abs(x), exponent) * center, x)
        if moment.root:
            x = x * x
        return not_tiny(x, layout)


def store(
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
    moment); which is 0 for m, 1 for v and 2 for the master."""
    size = int(np.prod(shape, dtype=np.int64))
    xs = [(start, np.sqrt(x) if moment.root else x) for start, _, x in pieces]
    if moment.scaling is None:
        codes = [_kept(round_codes(x, moment, start, key), x, moment) for start, x in xs]
        return MomentState(np.concatenate(codes).reshape(shape))
    amax = own = _group_max(xs, size, moment)
    if moment.amax == "previous":
        assert old.amax is not None
        amax = np.where(old.amax == 0, own, old.amax)
    elif moment.amax == "predicted" and which == 2:
        assert old.amax is not None
        amax = old.amax + change(np.float32(at.bound), old.amax, at)
    elif moment.amax == "predicted":
        gradients = _group_max([(start, g) for start, g, _ in pieces], size, moment)
        amax = _predicted(old.amax, gradients, moment, which, at, layout)
    if moment.expansion:
        return _store_expanded(xs, amax, moment, shape, key)
    scale, scale_inv = scales(amax, moment)
    divides_in = FLOAT32 if moment.scaling == "divide" else None
    blocks = (None,) if moment.block is None else (1,)  # a piece may begin within a block
    codes = []
    for start, x in xs:
        scales_of_x = Scales(*(spread(s, start, x.size, moment) for s in (scale, scale_inv)))
        scaled = scaling.scale_blocks(x, scales_of_x, blocks, divides_in)
        codes.append(_kept(round_codes(scaled, moment, start, key), x, moment))
    kept = own if moment.amax == "previous" else None
    if moment.amax == "predicted":
        decoded = [
            (start, _values(c, moment) * spread(scale_inv, start, c.size, moment))
            for (start, _), c in zip(xs, codes, strict=True)
        ]
        kept = _group_max(decoded, size, moment)
    return MomentState(np.concatenate(codes).reshape(shape), scale_inv, kept)


def change(ratio: np.ndarray | np.float32, p: np.ndarray, at: Scalars) -> np.ndarray:
    """A step's change of a weight (O-6), by a ratio of moments; of magnitudes, a bound (O-15)."""
    changes = np.float32(at.learning_rate) * (ratio + np.float32(at.weight_decay) * p)
    return np.where(np.abs(changes) < np.float32(states.STEP_MIN), np.float32(0), changes)


def _predicted(
    stored, gradients: np.ndarray, moment: Moment, which: int, at: Scalars, layout: Layout
) -> np.ndarray:
    """A bound of the new amax from the stored one and the gradients' (O-9)."""
    if moment.root:
        stored = stored * stored
    m, v = averages(gradients, stored, stored, at, layout)
    bound = (m, v)[which]
    return np.sqrt(bound) if moment.root else bound


def _store_expanded(
    xs: list[tuple[int, np.ndarray]],
    amax: np.ndarray,
    moment: Moment,
    shape: tuple[int, ...],
    key: int | None,
):
    """The stored moment under an expansion (O-10)."""
    size = int(np.prod(shape, dtype=np.int64))
    # The smallest magnitude that is not zero: the largest of reciprocals is not exact, so that
    # magnitudes are compared as negative numbers.
    negated = [(s, np.where(x == 0, -np.float32(np.inf), -np.abs(x))) for s, x in xs]
    smallest = -_group_max(negated, size, moment, magnitudes=False)
    floor = np.float32(moment.floor)
    top = np.maximum(amax, floor)
    bottom = np.minimum(np.maximum(smallest, floor), top)
    center = np.sqrt(top) * np.sqrt(bottom)
    ratio = top / bottom
    exponent = np.full(ratio.shape, np.float32(states.EXPONENTS[-1]))
    for k in reversed(states.EXPONENTS[:-1]):
        exponent = np.where(
            ratio <= np.float32(states.EXPANDED_RANGE ** (1 / k)), np.float32(k), exponent
        )
    scale_inv = power(top / center, exponent) / np.float32(moment.fmt.max)
    codes = []
    for start, x in xs:
        scaled = expanded(x, center, exponent, scale_inv, start, moment)
        codes.append(_kept(round_codes(scaled, moment, start, key), x, moment))
    return MomentState(np.concatenate(codes).reshape(shape), scale_inv, None, exponent, center)


def expanded(x: np.ndarray, center, exponent, scale_inv, start: int, moment: Moment) -> np.ndarray:
    """The numbers that are rounded to codes under an expansion (O-10)."""
    of, k, inverse = (spread(a, start, x.size, moment) for a in (center, exponent, scale_inv))
    return np.copysign(power(np.abs(x) / of, k), x) / inverse


def power(x: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """x to the powers 4, 2, 1 and 1/2, by products and roots (O-10)."""
    square = x * x
    return np.select(
        [exponent == 4, exponent == 2, exponent == 1], [square * square, square, x], np.sqrt(x)
    )


def _root_of_power(y: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """The inverse of ``power``, from roots and a product."""
    root = np.sqrt(y)
    return np.select([exponent == 4, exponent == 2, exponent == 1], [np.sqrt(root), root, y], y * y)


def round_codes(scaled: np.ndarray, moment: Moment, start: int, key: int | None) -> np.ndarray:
    """uint8 codes, or float32 numbers, saturated (O-8); start is the flat index of the first."""
    if moment.fmt == FLOAT32:
        return scaled
    rounding: cast.Rounding = "nearest_even" if key is None else "stochastic"
    return scaling.saturate(scaled, moment.fmt, rounding=rounding, seed=key, start=start)


def _kept(codes: np.ndarray, x: np.ndarray, moment: Moment) -> np.ndarray:
    """codes, with the smallest code for non-zero values that rounded to 0 (O-8)."""
    if not moment.keep:
        return codes
    if codes.dtype == np.uint8:
        return np.where((x != 0) & (codes & 0x7F == 0), codes | np.uint8(1), codes)
    return np.where(
        (x != 0) & (codes == 0), np.copysign(np.float32(moment.fmt.smallest_subnormal), x), codes
    )


def _values(codes: np.ndarray, moment: Moment) -> np.ndarray:
    return cast.decode(codes, moment.fmt) if codes.dtype == np.uint8 else codes


def _group_max(
    pieces: list[tuple[int, np.ndarray]], size: int, moment: Moment, *, magnitudes: bool = True
) -> np.ndarray:
    """float32 () or [blocks]: the largest magnitude of each group; NaN wins (O-7)."""
    maxima = np.full(moment.groups(size), np.float32(0 if magnitudes else -np.inf))
    for start, x in pieces:
        value = np.abs(x) if magnitudes else x
        group = np.arange(start, start + x.size) // (moment.block or size)
        np.maximum.at(maxima, group, value)  # propagates NaN
    return maxima[0] if moment.block is None else maxima


def spread(group_values, start: int, count: int, moment: Moment) -> np.ndarray:
    """The values of the groups of the elements start, start + 1, ..."""
    if moment.block is None:
        return group_values
    return group_values[np.arange(start, start + count) // moment.block]
