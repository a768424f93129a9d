"""Inputs of casts: a format's numbers and midpoints with their neighbors, specials, random values.

Three sets: ``edges`` is small and float32, ``vector_bits`` is what ``fp8ref vectors`` writes, and
``identifying`` tells every decision of an unknown cast from the others.
"""

import numpy as np

from fp8ref.conformance.inputs import dtypes
from fp8ref.formats import E3M4, E4M3, E4M3B11FNUZ, FP8_FORMATS, Format
from fp8ref.sim.quantize import cast

CAST_FORMATS = {**FP8_FORMATS, **{f.name: f for f in (E4M3, E4M3B11FNUZ, E3M4)}}
"""The formats that an unknown cast may have: the specification's, and three of ml_dtypes alone."""

# k of the relative distances 2^-k to a number or a midpoint. They go beyond bfloat16's 8 bits,
# float16's 11 and float32's 24: a cast that first rounds to one of these takes such an input for
# the midpoint itself, and gives another code.
_NEAR = {
    "float32": range(8, 24),
    "bfloat16": range(5, 8),
    "float16": range(5, 11),
    "float64": (*range(8, 24), 25, 28, 40, 50),
}


def non_negative(fmt: Format) -> np.ndarray:
    """The finite non-negative numbers of a format, ascending; float64."""
    return cast.decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)


def with_next(fmt: Format) -> np.ndarray:
    """``non_negative``, and the number that would follow max if the exponent went on; float64."""
    n = non_negative(fmt)
    following = 2 * n[-1] if not fmt.mantissa_bits else 2 * n[-1] - n[-2]
    return np.append(n, following)


def all_numbers(fmt: Format) -> np.ndarray:
    """The finite numbers of fmt and of all CAST_FORMATS, both signs; float64."""
    every = [non_negative(f) for f in (fmt, *CAST_FORMATS.values())]
    magnitudes = np.unique(np.concatenate(every))
    return np.concatenate([magnitudes, -magnitudes[1:]])


def _midpoints(ascending: np.ndarray) -> np.ndarray:
    """Halfway between neighbors; exact in float64, which has bits to spare."""
    return (ascending[1:] + ascending[:-1]) / 2


def edges(fmt: Format) -> np.ndarray:
    """Every number, every midpoint with its neighbors, overflow, specials, both signs; float32."""
    n = with_next(fmt)
    ties = _midpoints(n).astype(np.float32)
    beside = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    special = np.array([n[-1] * 2, 1e30, np.inf, np.nan, fmt.smallest_subnormal / 4], np.float32)
    values = np.concatenate([n.astype(np.float32), ties, *beside, special])
    return np.concatenate([values, -values])


def edges_and_16_bit(fmt: Format) -> np.ndarray:
    """``edges``, and every float16 and every bfloat16 value; float32."""
    half = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = [
            half.view(np.float16).astype(np.float32),
            (half.astype(np.uint32) << np.uint32(16)).view(np.float32),
        ]
    return np.concatenate([edges(fmt), *wide])


def vector_bits(fmt: Format, source: dtypes.Source, *, seed: int, count: int) -> np.ndarray:
    """The bits of a cast's test vectors, each once, uint64: specials, numbers and ties with their
    neighbors, then ``count`` random.
    """
    n = with_next(fmt)
    n = np.append(n, 2 * n[-1])  # well above max too, where overflow is decided
    points = np.concatenate([n, _midpoints(n), [n[1] / 4, n[0] / 2]])
    random = _random_bits(fmt, source, seed, count)
    return dtypes.distinct([dtypes.specials(source), dtypes.around(points, source), random])


def _random_bits(fmt: Format, source: dtypes.Source, seed: int, count: int) -> np.ndarray:
    """Half any bits, half with exponents near the format's range; uint64, reproducible."""
    raw = dtypes.random(seed, count) >> np.uint64(64 - source.bits)
    half = len(raw) // 2
    # Most random exponents are far outside FP8's range: replace the exponent of one half.
    bias = 1 - source.emin
    lowest = max(1, fmt.emin - fmt.mantissa_bits - 2 + bias)
    infinite = source.infinity >> source.mantissa_bits
    highest = min(infinite, int(np.log2(fmt.max)) + 3 + bias)
    drawn = dtypes.random(seed + 1, half) % np.uint64(highest - lowest)
    exponents = (np.uint64(lowest) + drawn) << np.uint64(source.mantissa_bits)
    kept = np.uint64(source.sign | ((1 << source.mantissa_bits) - 1))
    return np.concatenate([raw[:half] & kept | exponents, raw[half:]])


def identifying(fmt: Format, source: str, *, limit: float = np.inf) -> np.ndarray:
    """Inputs that tell the decisions of a cast apart, as numbers of the source's dtype, each once.

    limit     keeps finite magnitudes up to it, and no NaN; without one, NaNs are included.
    """
    chosen = [coarse(fmt), fine(fmt, source), special(fmt), all_numbers(fmt)]
    inputs = np.concatenate([*chosen, _random_values()])
    with np.errstate(over="ignore"):
        inputs = dtypes.rounded(inputs, source)
    if limit < np.inf:
        return _distinct(inputs[np.abs(inputs) <= limit])
    return np.concatenate([_distinct(inputs), nans(source, fmt)])


def coarse(fmt: Format) -> np.ndarray:
    """Numbers and the three quarter points between neighbors, both signs.

    bfloat16 and float16 hold them exactly, but at float16's ends: a first rounding changes none.
    """
    n = with_next(fmt)
    magnitudes = np.concatenate(
        [n, *(n[:-1] + (n[1:] - n[:-1]) * part for part in (0.25, 0.5, 0.75))]
    )
    return np.concatenate([magnitudes, -magnitudes])


def fine(fmt: Format, source: str) -> np.ndarray:
    """Just next to every number and midpoint, at each distance that the source's dtype can tell;
    both signs. The nearest are the two neighbors in that dtype.
    """
    n = with_next(fmt)
    at = np.concatenate([n[1:], _midpoints(n)])
    near = np.array([side * 2.0**-k for k in _NEAR[source] for side in (-1, 1)])
    nearby_numbers = (at[:, None] + np.ldexp(near, np.frexp(at)[1][:, None] - 1)).ravel()
    kind = dtypes.by_name(source)
    neighbors = dtypes.values(dtypes.around(at, kind), kind).astype(np.float64)
    return np.concatenate([nearby_numbers, -nearby_numbers, neighbors])


def special(fmt: Format) -> np.ndarray:
    """Zeros, infinities, overflow, underflow; float64."""
    least = fmt.smallest_subnormal
    large = [2 * fmt.max, 1e30, np.finfo(np.float32).max]
    finite = np.array([0.0, *large, least / 4, 2.0**-126, 1e-39, 2.0**-149])
    return np.concatenate([finite, -finite, [np.inf, -np.inf]])


def nans(source: str, fmt: Format) -> np.ndarray:
    """NaNs of both signs, with several payloads in float32 and float64; those of arithmetic alone
    if fmt has no NaN, where none of their codes is right (C-9).
    """
    if not fmt.has_nan:
        return np.array([np.nan, -np.nan], np.float64 if source == "float64" else np.float32)
    if source == "float64":
        return np.array(
            [0x7FF8 << 48, 0xFFF8 << 48, 0x7FFFFFFFFFFFFFFF, 0xFFF0000000000001], np.uint64
        ).view(np.float64)
    payloads = [0x7FC00000, 0xFFC00000] + (
        [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF] if source == "float32" else []
    )
    return np.array(payloads, np.uint32).view(np.float32)


def _random_values() -> np.ndarray:
    """Half any finite float32, half spread over FP8's exponents; float64."""
    rng, half = np.random.default_rng(0), 1 << 12
    anything = rng.integers(0, 1 << 32, half, dtype=np.uint32).view(np.float32)
    spread = rng.standard_normal(half) * 2.0 ** rng.integers(-18, 17, half)
    return np.concatenate([anything[np.isfinite(anything)].astype(np.float64), spread])


def _distinct(x: np.ndarray) -> np.ndarray:
    """Each number once, -0 and 0 both: compared by their bits."""
    unsigned = x.view(np.uint64 if x.dtype == np.float64 else np.uint32)
    return np.unique(unsigned).view(x.dtype)
