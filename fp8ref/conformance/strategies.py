"""Hypothesis strategies for property tests of any library's casts, scales and quantizers.

Arrays are NumPy's: float32, float16, float64, or bfloat16 of ml_dtypes; ``as_torch`` and ``as_jax``
convert them. Examples shrink to plain numbers and small shapes with one element that matters.
"""

import functools
import math
from typing import TypeVar

import numpy as np

from fp8ref import formats as all_formats
from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.kit import explain
from fp8ref.conformance.kit.arrays import as_jax as as_jax
from fp8ref.conformance.kit.arrays import as_torch as as_torch
from fp8ref.conformance.kit.arrays import numpy_dtype
from fp8ref.conformance.vectors import scale as scales
from fp8ref.conformance.vectors.cast import Cast
from fp8ref.formats import E4M3FN, Format
from fp8ref.policy import POLICIES
from fp8ref.shared import extras
from fp8ref.shared.errors import require
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scales import scales_from_amax
from fp8ref.spec.granularity import GRANULARITIES, by_name

__all__ = ["as_torch", "shards", "tensors"]

try:
    import hypothesis
    from hypothesis import strategies as st
    from hypothesis.extra import numpy as hnp
except ImportError:
    extras.require("conformance", "fp8ref.conformance.strategies", "hypothesis")
    raise

_T = TypeVar("_T")

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that numbers and tensors are drawn in."""

PATTERNS = (
    "plain",
    "points",
    "amax",
    "scaled points",
    "outliers",
    "zero groups",
    "all zero",
    "subnormal",
    "any",
    "specials",
)
"""The patterns of drawn tensors (see ``tensors``)."""

# Patterns that tell scales and roundings of products apart are repeated, and so are infinities and
# NaN. Of a hundred examples hypothesis draws some twenty afresh. It mutates these into the others,
# which mostly keep the pattern: a pattern drawn once may never come.
_DRAWN = (
    "plain",
    "points",
    *2 * ("amax", "scaled points"),
    *PATTERNS[2:-2],
    *2 * ("any",),
    *8 * ("specials",),
)
PLAIN = (0.0, 1.0, -1.0, 2.0, 0.5, -0.0, 3.0, 0.0625, -448.0, 100.0)
"""Simple values that strategies of numbers include, the simplest first."""


def formats() -> st.SearchStrategy[Format]:
    """The four FP8 formats, e4m3fn first."""
    return st.sampled_from(list(all_formats.FP8_FORMATS.values()))


def policies() -> st.SearchStrategy[str]:
    """Names of scale policies, ``torchao`` first."""
    return st.sampled_from(list(POLICIES))


def granularities() -> st.SearchStrategy[str]:
    """Names of granularities, ``tensorwise`` first."""
    return st.sampled_from(list(GRANULARITIES))


def shapes(
    granularity: str = "tensorwise", *, axis: int = -1, most: int = 6, ragged: bool = False
) -> st.SearchStrategy[tuple[int, int]]:
    """Shapes (M, N) that a granularity takes.

    The reduced axis has one or two whole blocks; the other may also end in a ragged one. An axis
    without blocks has 1 to ``most`` elements.

    ragged  the last block of the reduced axis may be ragged too, as of a function that fills it
            with zeros: give the shape to ``tensors``, and compare with a tensor that zeros fill up.

    Raises:   ValueError: an unknown granularity.
    """
    of = by_name(granularity)
    block = of.reduced or 1
    whole = st.integers(1, 2).map(lambda n: n * block)
    if ragged:
        whole = st.one_of(st.sampled_from([block + 1, 2 * block - 1, 1]), st.integers(1, 2 * block))
    reduced = st.integers(1, most) if of.reduced is None else whole
    if of.other in (None, 1):
        other = st.integers(1, most)
    else:
        other = st.sampled_from([1, 2, of.other, (of.other or 1) + 1])
    return st.tuples(other, reduced) if axis % 2 else st.tuples(reduced, other)


@functools.lru_cache(maxsize=256)
def numbers(
    fmt: Format = E4M3FN, dtype: str = "float32", *, finite: bool = False
) -> st.SearchStrategy[float]:
    """Values of a dtype: plain ones, each number and tie of fmt with its neighbors, and any other.

    Specials: infinities and NaN are among them, unless ``finite``.
    Raises:   ValueError: a fmt that is not of 8 bits; an unknown dtype.
    """
    points, width = _points(fmt, dtype), 16 if dtype == "float16" else 32
    anything = st.floats(width=width, allow_nan=not finite, allow_infinity=not finite)  # type: ignore[arg-type]
    if dtype == "bfloat16":
        anything = anything.map(lambda v: _bfloat16(v, finite))
    chosen = [v for v in points if not finite or np.isfinite(v)]
    return st.one_of(st.sampled_from(PLAIN), _among(chosen), anything)


@functools.lru_cache(maxsize=256)
def amaxes(
    fmt: Format = E4M3FN, policy: str = "torchao", *, dtype: str = "float32", finite: bool = False
) -> st.SearchStrategy[float]:
    """Amaxes at a policy's edges, and any other; none is negative.

    Edges are zero, subnormals, eps, the amax whose scale overflows, and powers of two and max times
    them, each with its neighbors.
    Specials: Inf and NaN are among them, unless ``finite``.
    Raises:   ValueError: a fmt that is not FP8; an unknown policy or dtype.
    """
    edges = [v for v in _edges(fmt, policy, dtype) if not finite or np.isfinite(v)]
    return st.one_of(_among(edges), numbers(fmt, dtype, finite=finite).map(abs))


@st.composite
def tensors(
    draw,
    dtype: str = "float32",
    *,
    fmt: Format = E4M3FN,
    policy: str = "torchao",
    granularity: str = "tensorwise",
    axis: int = -1,
    shape: tuple[int, ...] | None = None,
    finite: bool = False,
) -> np.ndarray:
    """Tensors of one of PATTERNS, in ``shape`` or one of ``shapes(granularity, axis=axis)``.

    ``points``         elements are fmt's numbers and ties with their neighbors.
    ``scaled points``  elements become such under the policy's scale.
    ``amax``           every group has one of ``amaxes``, above its other elements.
    ``outliers``       one element is up to 2^60 times as large as the rest.
    ``zero groups``    some lines are zero, along any axis.
    ``specials``       one or two elements are infinite or NaN; never drawn if ``finite``.
    Zeros have both signs.

    Raises:   ValueError: a fmt that is not FP8; an unknown policy, dtype or granularity; a shape
              without elements or axes; ImportError: bfloat16 without ml_dtypes.
    """
    block = by_name(granularity).reduced
    if shape is not None and (not shape or min(shape) < 1):
        raise ValueError(
            "a tensor has at least one axis, and each at least one element; got shape "
            f"{tuple(shape)}."
        )
    shape = draw(shapes(granularity, axis=axis)) if shape is None else shape
    pattern = draw(st.sampled_from([p for p in _DRAWN if not finite or p != "specials"]))
    if pattern == "all zero":
        return _as(np.where(draw(hnp.arrays(np.bool_, shape)), -0.0, 0.0), dtype)
    # repeated to fill the shape, so that examples of any shape shrink to few values
    elements = st.lists(_elements(pattern, fmt, dtype, finite), min_size=1, max_size=24)
    x = np.resize(np.float64(draw(elements)), shape)
    place = tuple(draw(st.integers(0, n - 1)) for n in shape)
    if pattern in ("amax", "scaled points"):
        amax = draw(amaxes(fmt, policy, dtype=dtype, finite=True))
        if pattern == "scaled points":
            x = _unscaled(x, amax, fmt, policy)
        x = np.clip(x, -amax, amax)
        block = block or shape[axis]
        np.moveaxis(x, axis, -1)[..., place[axis] % block :: block] = amax
    else:
        _plant(draw, x, pattern, dtype, place)
    return _as(x, dtype)


def _plant(
    draw: st.DrawFn, x: np.ndarray, pattern: str, dtype: str, place: tuple[int, ...]
) -> None:
    """Write to x, float64, what its pattern has that its elements have not."""
    shape = x.shape
    if pattern == "outliers":
        x[place] = (x[place] or 1.0) * 2.0 ** draw(st.integers(4, 12 if dtype == "float16" else 60))
    elif pattern == "zero groups":
        along = draw(st.integers(0, len(shape) - 1))
        lines = draw(hnp.arrays(np.bool_, shape[along]))
        np.moveaxis(x, along, 0)[lines] = 0
    elif pattern == "specials":
        x[place] = draw(st.sampled_from([1.0, np.inf, np.nan]))
        # Counted from the end: hypothesis prefers the beginning, where a lost NaN may be kept.
        x[tuple(-1 - draw(st.integers(0, n - 1)) for n in shape)] = draw(
            st.sampled_from([np.inf, np.nan, -np.inf, np.nan, np.nan])
        )


def repeatable(most: int, *phases: hypothesis.Phase) -> hypothesis.settings:
    """Settings for at most so many examples, the same in every call, which keep nothing."""
    return hypothesis.settings(
        max_examples=most,
        phases=phases,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def examples(strategy: st.SearchStrategy[_T], most: int) -> list[_T]:
    """At most so many examples of a strategy, the same in every call.

    ValueError: fewer than one.
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"examples is an integer of at least 1; got {most!r}.")
    drawn_examples: list[_T] = []

    @repeatable(most, hypothesis.Phase.generate)
    @hypothesis.given(strategy)
    def collect(example: _T) -> None:
        drawn_examples.append(example)

    collect()
    return drawn_examples


def _unscaled(points: np.ndarray, amax: float, fmt: Format, policy: str) -> np.ndarray:
    """What the scale of an amax turns into points; unchanged if it is zero or infinite."""
    factor = float(scales_from_amax(np.float32(amax), fmt, policy).scale)
    return points / factor if 0 < factor < math.inf else points


@st.composite
def shards(draw, dtype: str = "float32", *, most: int = 4, **options) -> list[np.ndarray]:
    """A tensor's rows cut into up to ``most`` ragged shards, of which some may be empty.

    options   keywords of ``tensors``, one of which the shards are if concatenated.
    Raises:   ValueError: most below 1; as ``tensors``.
    """
    require(most >= 1, f"a tensor is cut into at least one shard; got most={most!r}.")
    x = draw(tensors(dtype, **options))
    cuts = draw(st.lists(st.integers(0, len(x)), max_size=most - 1))
    return np.split(x, sorted(cuts))


def _among(values: list[float]) -> st.SearchStrategy[float]:
    """One of many values, each about as likely; examples shrink to the first.

    Drawn by two short ranges, since hypothesis prefers the beginning of a long one.
    """
    last = len(values) - 1
    return st.tuples(st.integers(0, last // 64), st.integers(0, 63)).map(
        lambda place: values[min(64 * place[0] + place[1], last)]
    )


@functools.lru_cache(maxsize=256)
def _elements(pattern: str, fmt: Format, dtype: str, finite: bool) -> st.SearchStrategy[float]:
    """The numbers that a tensor of that pattern is made of."""
    if pattern == "any":
        return numbers(fmt, dtype, finite=finite)
    if pattern == "points":
        return _among([v for v in _points(fmt, dtype) if np.isfinite(v)])
    if pattern == "scaled points":
        return _among([v for v in _points(fmt, "float32") if abs(v) <= fmt.max])
    if pattern == "subnormal":
        source = dtypes.by_name(dtype)
        tiny = 2.0 ** (source.emin - source.mantissa_bits)  # the smallest subnormal
        return st.integers(-(1 << 12), 1 << 12).map(lambda n: n * tiny)
    return st.one_of(st.sampled_from(PLAIN), st.integers(-64, 64).map(lambda n: n / 16))


@functools.lru_cache(maxsize=256)
def _points(fmt: Format, dtype: str) -> list[float]:
    """The inputs of a cast's vectors without the random ones, the simplest first."""
    return _ordered(Cast(format=fmt.name, source=dtype, count=0).inputs(), dtype)


@functools.lru_cache(maxsize=256)
def _edges(fmt: Format, policy: str, dtype: str) -> list[float]:
    """The amaxes of a scale's vectors, rounded to a dtype, the simplest first."""
    bits = scales.Scale(format=fmt.name, policy=policy, count=0).inputs()
    amax = bits.astype(np.uint32).view(np.float32)
    source = dtypes.by_name(dtype)
    return _ordered(dtypes.distinct([dtypes.bits(cast.exact(amax), source)]), dtype)


def _ordered(bits: np.ndarray, dtype: str) -> list[float]:
    values = cast.exact(dtypes.values(bits, dtypes.by_name(dtype)))
    values = np.where(np.isnan(values), np.nan, values)  # hypothesis knows one NaN
    return values[explain.simplicity(values)].tolist()


def _bfloat16(value: float, finite: bool) -> float:
    """A value rounded to bfloat16; its largest number for an infinity, if values are finite."""
    value = float(cast.round_to(np.float32(value), all_formats.BFLOAT16))
    if finite and np.isinf(value):
        return float(np.copysign(all_formats.BFLOAT16.max, value))
    return value


def _as(x: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values rounded to a dtype, as NumPy's array of that dtype."""
    source = dtypes.by_name(dtype)
    return dtypes.bits(x, source).astype(f"uint{source.bits}").view(numpy_dtype(dtype))
