"""The inputs of a cast that tell its decisions apart."""

import numpy as np

from fp8ref.conformance.cast.behaviour import CAST_FORMATS
from fp8ref.conformance.counterexample import rounded
from fp8ref.formats import Format
from fp8ref.sim import cast

# Distances to a number or a midpoint, relative: beyond bfloat16's 8 bits, float16's 11, float32's 24.
_NEAR = {"float32": range(8, 24), "bfloat16": range(5, 8), "float16": range(5, 11), "float64": (*range(8, 24), 25, 28, 40, 50)}


def numbers(fmt: Format) -> np.ndarray:
    """The non-negative numbers of a format, ascending, and the one that would follow max; float64."""
    found = cast.decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)
    return np.append(found, 2 * found[-1] - found[-2])


def all_numbers() -> np.ndarray:
    """The numbers of every layout, both signs; float64."""
    found = np.unique(np.concatenate([numbers(fmt)[:-1] for fmt in CAST_FORMATS.values()]))
    return np.concatenate([found, -found[1:]])


def coarse(fmt: Format) -> np.ndarray:
    """Numbers and the three quarter points between neighbours, both signs: exact in bfloat16 and in float16 too, but at its ends."""
    n = numbers(fmt)
    found = np.concatenate([n, *(n[:-1] + (n[1:] - n[:-1]) * part for part in (0.25, 0.5, 0.75))])
    return np.concatenate([found, -found])


def fine(fmt: Format, source: str) -> np.ndarray:
    """Just beside every number and midpoint, at each distance that the source's dtype can tell; both signs."""
    n = numbers(fmt)[1:]
    at = np.concatenate([n, (n[1:] + n[:-1]) / 2])
    near = np.array([side * 2.0**-k for k in _NEAR[source] for side in (-1, 1)])
    found = (at[:, None] + np.ldexp(near, np.frexp(at)[1][:, None] - 1)).ravel()
    return np.concatenate([found, -found])


def special(fmt: Format) -> np.ndarray:
    """Zeros, infinities, overflow, underflow; float64."""
    least = fmt.smallest_subnormal
    finite = np.array([0.0, 2 * fmt.max, 1e30, np.finfo(np.float32).max, least / 4, 2.0**-126, 1e-39, 2.0**-149])
    return np.concatenate([finite, -finite, [np.inf, -np.inf]])


def nans(source: str) -> np.ndarray:
    """NaNs of both signs, with several payloads in float32 and float64."""
    if source == "float64":
        return np.array([0x7FF8 << 48, 0xFFF8 << 48, 0x7FFFFFFFFFFFFFFF, 0xFFF0000000000001], np.uint64).view(np.float64)
    payloads = [0x7FC00000, 0xFFC00000] + ([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF] if source == "float32" else [])
    return np.array(payloads, np.uint32).view(np.float32)


def random(seed: int = 0, count: int = 1 << 13) -> np.ndarray:
    """Half of it any float32 bits that are finite, half of it spread over FP8's exponents; float64."""
    rng = np.random.default_rng(seed)
    anything = rng.integers(0, 1 << 32, count // 2, dtype=np.uint32).view(np.float32)
    spread = rng.standard_normal(count // 2) * 2.0 ** rng.integers(-18, 17, count // 2)
    return np.concatenate([anything[np.isfinite(anything)].astype(np.float64), spread])


def inputs(fmt: Format, source: str, *, limit: float = np.inf) -> np.ndarray:
    """All of them as numbers of the source's dtype, without duplicates; finite magnitudes up to ``limit``, and, if there is none, NaNs."""
    found = np.concatenate([coarse(fmt), fine(fmt, source), special(fmt), all_numbers(), random()])
    with np.errstate(over="ignore"):
        found = rounded(found, source)
    if limit < np.inf:
        return _distinct(found[np.abs(found) <= limit])
    return np.concatenate([_distinct(found), nans(source)])


def _distinct(x: np.ndarray) -> np.ndarray:
    """Each number once, -0 and 0 both."""
    unsigned = x.view(np.uint64 if x.dtype == np.float64 else np.uint32)
    return np.unique(unsigned).view(x.dtype)
