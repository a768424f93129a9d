"""The first element at which two arrays differ in their bits, and by how much they differ."""

from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.kit.compare import Check
from fp8ref.crosscheck.divergence.step_values import Value
from fp8ref.formats import Format
from fp8ref.sim.quantize import cast


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two arrays.

    element   the first differing element's index, row-major; None if shapes or formats differ.
    a, b      the two elements, with their bits; or the two shapes and formats.
    differ    how many of ``of`` elements differ.
    worst     the largest distance, in neighboring numbers of ``unit``; None without elements.
    largest   the largest distance as a number; None if it is not finite, or without elements.
    """

    element: tuple[int, ...] | None
    a: str
    b: str
    differ: int
    of: int
    worst: int | None = None
    largest: float | None = None
    unit: str = ""


def difference(a: Value, b: Value, check: Check) -> Difference | None:
    """The first difference of two arrays, or None if their bits are equal; check counts elements.

    Specials: all NaNs are equal (C-5); -0 and +0 differ.
    """
    x, y = np.asarray(a.value), np.asarray(b.value)
    if x.shape != y.shape or a.fmt != b.fmt:
        check.fail(f"{_kind(a)} and {_kind(b)}")
        return Difference(element=None, a=_kind(a), b=_kind(b), differ=x.size, of=x.size)
    distance, equal, unit = _distance(x, y, a.fmt)
    wide = np.atleast_1d(x, y)
    check.add(equal, distance, lambda at: " and ".join(_shown(v, at, a.fmt, unit) for v in wide))
    bad = np.flatnonzero(~equal)
    if not bad.size:
        return None
    index = tuple(int(i) for i in np.unravel_index(bad[0], x.shape))
    return Difference(
        element=index,
        a=_shown(x, index, a.fmt, unit),
        b=_shown(y, index, a.fmt, unit),
        differ=int(bad.size),
        of=x.size,
        worst=int(distance[~equal].max()),
        largest=_largest(x, y, a.fmt),
        unit=unit,
    )


def _distance(
    x: np.ndarray, y: np.ndarray, fmt: Format | None
) -> tuple[np.ndarray, np.ndarray, str]:
    """The distance between elements as integers; which elements are equal; the distance's unit."""
    if fmt is not None:
        x, y = (cast.canonical_nans(v, fmt) for v in (x, y))
        # Codes are sign and magnitude. As signed integers they are ordered like their values, and
        # neighboring numbers are 1 apart.
        magnitudes = [(v & ~np.uint8(fmt.sign_bit)).astype(np.int64) for v in (x, y)]
        left, right = (
            np.where(v & fmt.sign_bit, -m, m) for v, m in zip((x, y), magnitudes, strict=True)
        )
        return np.abs(left - right), x == y, f"codes of {fmt.name}"
    if not np.issubdtype(x.dtype, np.floating):
        return np.abs(x.astype(np.int64) - y), x == y, "tokens"
    bits = np.dtype(f"i{x.dtype.itemsize}")
    equal = (x.view(bits) == y.view(bits)) | (np.isnan(x) & np.isnan(y))
    # A bfloat16 is a float32's upper half: without the lower one, distances count bfloat16.
    low = 16 if _is_bfloat16(x) and _is_bfloat16(y) else 0
    left, right = (_ordered(v.astype(np.float32)) >> low for v in (x, y))
    distance = np.where(equal, 0, np.abs(left - right))
    return distance, equal, "bfloat16" if low else "float32"


def _largest(x: np.ndarray, y: np.ndarray, fmt: Format | None) -> float | None:
    left, right = (
        np.asarray(v if fmt is None else cast.decode(v, fmt), np.float64) for v in (x, y)
    )
    with np.errstate(invalid="ignore"):
        distance = np.where(left == right, 0.0, np.abs(left - right)).max(initial=0.0)
    return float(distance) if np.isfinite(distance) else None


def _is_bfloat16(x: np.ndarray) -> bool:
    """True if every element is a bfloat16 number; the array is then taken for bfloat16."""
    return x.dtype == np.float32 and x.ndim > 0 and not (x.view(np.uint32) & 0xFFFF).any()


def _ordered(x: np.ndarray) -> np.ndarray:
    """float32 bits as integers that increase with the value."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _shown(x: np.ndarray, index: tuple[int, ...], fmt: Format | None, unit: str) -> str:
    """An element and its bits, as text."""
    value = x[index]
    if fmt is not None:
        return f"{float(cast.decode(np.uint8(value), fmt)):.9g} (code 0x{int(value):02X})"
    if unit == "tokens":
        return str(int(value))
    bits = int(np.float32(value).view(np.uint32))
    shown = f"0x{bits >> 16:04X}" if unit == "bfloat16" else f"0x{bits:08X}"
    if x.dtype == np.float64:
        return f"{float(value):.17g}"
    return f"{float(value):.9g} ({shown})"


def _kind(v: Value) -> str:
    return f"{v.fmt.name if v.fmt else v.value.dtype.name} {list(np.shape(v.value))}"
