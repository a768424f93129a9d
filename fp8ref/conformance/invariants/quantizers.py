"""Invariants of a function x float32 [M, K] -> (codes uint8 or FP8 [M, K], scale) (spec S-19).

Scales are of the whole tensor, or of its rows.
"""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from fp8ref.conformance.invariants.invariant import Clause, tensors, text
from fp8ref.conformance.kit.arrays import as_numpy
from fp8ref.formats import Format
from fp8ref.sim.quantize import cast

_F32 = np.float32
SHAPE = (3, 4)  # the shape of the tensors that quantizers get


def _parts(function: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of x's shape, and scales that broadcast to it."""
    codes, scale = function(x)
    return as_numpy(codes).reshape(x.shape), as_numpy(scale).astype(_F32)


def _values(function: Any, fmt: Format, x: np.ndarray) -> np.ndarray:
    """The values that codes stand for."""
    codes, scale = _parts(function, x)
    return cast.decode(codes, fmt) * (_F32(1) / scale)


def _codes_differ(
    x: np.ndarray, got: np.ndarray, expected: np.ndarray, which: str, fmt: Format
) -> str:
    got, expected = cast.canonical_nans(got, fmt), cast.canonical_nans(expected, fmt)
    if np.array_equal(got, expected):
        return ""
    at = tuple(np.argwhere(got != expected)[0])
    element = _element(x, at)
    return f"{which}, {element} has code 0x{got[at]:02X}, not 0x{expected[at]:02X}"


def _element(x: np.ndarray, at: tuple) -> str:
    return f"element {text(x[at])} of {text(x)}"


_TENSOR = tensors(SHAPE)
_CUT = st.tuples(_TENSOR, st.integers(1, SHAPE[0] - 1))
_PERMUTED = st.tuples(_TENSOR, *(st.permutations(range(n)) for n in SHAPE))

QUANTIZERS = Clause("S-19")
"""The invariants of quantizers (S-19)."""

_POWERS = st.integers(-6, 40)


@QUANTIZERS.states("2^k times a tensor has its codes", st.tuples(_TENSOR, _POWERS))
def _power_of_two_equivariance(function: Any, fmt: Format, inputs: tuple[np.ndarray, int]) -> str:
    x, k = inputs
    scaled = _parts(function, np.ldexp(x, k))[0]
    return _codes_differ(x, scaled, _parts(function, x)[0], f"times 2^{k}", fmt)


@QUANTIZERS.states("permuted rows and columns have permuted codes", _PERMUTED)
def _permutation(
    function: Any, fmt: Format, inputs: tuple[np.ndarray, list[int], list[int]]
) -> str:
    x, rows, columns = inputs
    moved = x[rows][:, columns]
    got, whole = _parts(function, moved)[0], _parts(function, x)[0]
    return _codes_differ(moved, got, whole[rows][:, columns], "permuted", fmt)


@QUANTIZERS.states("rows of one amax have the same codes as a shard", _CUT)
def _sharding(function: Any, fmt: Format, inputs: tuple[np.ndarray, int]) -> str:
    x, n = inputs
    whole = _parts(function, x)[0]
    for rows, which in ((slice(n), f"{n} rows"), (slice(n, None), "the other rows")):
        shard = x[rows].copy()
        got = _parts(function, shard)[0]
        if differ := _codes_differ(shard, got, whole[rows], f"as a shard of {which}", fmt):
            return differ
    return ""


@QUANTIZERS.states("a negated tensor has negated codes", _TENSOR)
def _odd(function: Any, fmt: Format, x: np.ndarray) -> str:
    expected = _parts(function, x)[0] ^ np.uint8(0x80)
    if not fmt.negative_zero:
        expected = np.where(expected == 0x80, 0, expected).astype(np.uint8)  # the one zero
    return _codes_differ(x, _parts(function, -x)[0], expected, "negated", fmt)


@QUANTIZERS.states("codes of a row are in the order of its elements", _TENSOR)
def _monotone(function: Any, fmt: Format, x: np.ndarray) -> str:
    values = cast.decode(_parts(function, x)[0], fmt)
    for row, row_values in zip(x, values, strict=True):
        order = np.argsort(row, kind="stable")
        falls = np.flatnonzero(np.diff(row_values[order]) < 0)
        if falls.size:
            a, b = order[falls[0]], order[falls[0] + 1]
            return (
                f"in row {text(row)}, {text(row[a])} becomes {text(row_values[a])}, and "
                f"{text(row[b])} becomes {text(row_values[b])}"
            )
    return ""


@QUANTIZERS.states("quantizing what was dequantized gives its codes or its values", _TENSOR)
def _idempotent(function: Any, fmt: Format, x: np.ndarray) -> str:
    once = _values(function, fmt, x)
    twice = _values(function, fmt, once)
    if np.array_equal(_parts(function, once)[0], _parts(function, x)[0]) or np.array_equal(
        once, twice
    ):
        return ""
    at = tuple(np.argwhere(once != twice)[0])
    return f"{_element(x, at)} becomes {text(once[at])}, and that becomes {text(twice[at])}"


@QUANTIZERS.states("a scaled element is off by half a spacing at most", _TENSOR)
def _error_bound(function: Any, fmt: Format, x: np.ndarray) -> str:
    codes, scale = _parts(function, x)
    scaled = np.abs(x.astype(np.float64) * scale)
    spacing = np.exp2(
        np.maximum(np.floor(np.log2(np.maximum(scaled, 1e-300))), fmt.emin) - fmt.mantissa_bits
    )
    # half a spacing, and the float32 rounding of the product, 2^-24 of it
    bound = spacing / 2 + scaled * 2.0**-23
    error = np.abs(cast.decode(codes, fmt).astype(np.float64) - x.astype(np.float64) * scale)
    if (error <= bound).all():
        return ""
    at = tuple(np.argwhere(~(error <= bound))[0])
    off, most = text(error[at]), text(bound[at])
    return f"{_element(x, at)} is off by {off} after scaling, not by {most} at most"


@QUANTIZERS.states(
    "an element becomes max only if it is nearest, and nothing is clipped or special", _TENSOR
)
def _saturation(function: Any, fmt: Format, x: np.ndarray) -> str:
    codes, scale = _parts(function, x)
    scaled = np.abs(x.astype(np.float64) * np.broadcast_to(scale, x.shape))
    values = np.abs(cast.decode(codes, fmt).astype(np.float64))
    spacing = fmt.max - float(cast.decode(np.uint8(fmt.max_code - 1), fmt))
    # a product that reaches max has, before rounding, at least the midpoint below it; and max,
    # beyond float32's rounding, is not passed
    needless = (values >= fmt.max) & (scaled < fmt.max - spacing / 2 - fmt.max * 2.0**-23)
    special = ~np.isfinite(values)
    clipped = scaled > fmt.max * (1 + 2.0**-22)
    for met, words in (
        (special, "becomes no number"),
        (needless, "becomes max"),
        (clipped, "is clipped"),
    ):
        if met.any():
            at = tuple(np.argwhere(met)[0])
            return f"{_element(x, at)} {words}: scaled it is {text(scaled[at])}"
    return ""
