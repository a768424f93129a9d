"""The dtypes that inputs have, as bits and as values, by NumPy alone."""

from typing import NamedTuple

import numpy as np

from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32, Format
from fp8ref.shared.errors import one_of
from fp8ref.sim.quantize import cast


class Source(NamedTuple):
    """The layout of an input's dtype; its bits are kept in unsigned integers."""

    name: str
    bits: int
    mantissa_bits: int
    emin: int

    @property
    def infinity(self) -> int:
        """The bits of +Inf; above them are NaNs."""
        return ((1 << (self.bits - 1 - self.mantissa_bits)) - 1) << self.mantissa_bits

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.bits - 1)


SOURCES = {
    s.name: s
    for s in (
        Source("float32", 32, 23, -126),
        Source("bfloat16", 16, 7, -126),
        Source("float16", 16, 10, -14),
        Source("float64", 64, 52, -1022),
    )
}
"""The dtypes that inputs may have, by name."""

_WIDE: dict[str, Format] = {f.name: f for f in (FLOAT32, BFLOAT16, FLOAT16)}


def by_name(name: str) -> Source:
    """The source of a name; ValueError if it is unknown."""
    one_of("a source", name, SOURCES)
    return SOURCES[name]


def values(bits: np.ndarray, source: Source) -> np.ndarray:
    """The values of bits in a dtype that casts take; bfloat16 as float32, which is exact."""
    if source.name == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.astype(f"uint{source.bits}").view(source.name)


def bits(x: np.ndarray, source: Source) -> np.ndarray:
    """The bits of float64 values rounded to a source; uint64."""
    x = np.asarray(x, np.float64)
    if source.name == "float64":
        return x.view(np.uint64)
    narrow = rounded(x, source.name)
    if source.name == "float16":
        with np.errstate(invalid="ignore"):
            return narrow.astype(np.float16).view(np.uint16).astype(np.uint64)
    return (narrow.view(np.uint32) >> np.uint32(32 - source.bits)).astype(np.uint64)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """x rounded to the numbers of a dtype; held as float64 for float64, else as float32."""
    if dtype == "float64":
        return x.astype(np.float64)
    if x.dtype == np.float32 and dtype == "float32":
        return x.astype(np.float32)
    return cast.round_to(x, _WIDE[dtype])


def spacing(x: np.ndarray, source: Source) -> np.ndarray:
    """The distance from each finite value to the next number of the source; float64."""
    magnitude = np.abs(x).astype(np.float64)
    exponent = np.where(
        magnitude == 0, source.emin, np.maximum(np.frexp(magnitude)[1] - 1, source.emin)
    )
    return np.ldexp(1.0, exponent - source.mantissa_bits)


def specials(source: Source) -> np.ndarray:
    """Bits of zero, the ends of subnormal and normal numbers, Inf, NaNs, both signs; uint64."""
    infinity, normal = source.infinity, 1 << source.mantissa_bits
    positive = [0, 1, 2, normal - 1, normal, infinity - 1, infinity, infinity + 1]
    positive += [infinity | normal >> 1, source.sign - 1]
    return np.array([sign | p for p in positive for sign in (0, source.sign)], np.uint64)


def around(x: np.ndarray, source: Source) -> np.ndarray:
    """The bits of positive finite values and their neighbors in the source, both signs; uint64."""
    middle = bits(x, source)
    magnitude_bits = np.concatenate([middle, middle - (middle > 0), middle + np.uint64(1)])
    return np.concatenate([magnitude_bits, magnitude_bits | np.uint64(source.sign)])


def random(seed: int, count: int) -> np.ndarray:
    """uint64 [count] of NumPy's PCG64, whose stream is the same in every version."""
    return np.asarray(np.random.PCG64(seed).random_raw(count), np.uint64)


def distinct(parts: list[np.ndarray]) -> np.ndarray:
    """The numbers of several arrays, each once, in the order of their first appearance."""
    together = np.concatenate(parts)
    return together[np.sort(np.unique(together, return_index=True)[1])]


def check_random(seed: int, count: int) -> None:
    """Raise ValueError unless 0 <= seed < 2^32 and 0 <= count < 2^24."""
    for name, value, bits in (("seed", seed, 32), ("count", count, 24)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} is an integer in [0, 2^{bits}); got {value}.")
