"""Inputs of scales and quantizers: amaxes, tensors whose groups have them, named patterns.

``vector_bits`` and ``filled`` make test vectors for any language, of scales and of quantizers.
``identifying`` tells policies apart. ``samples`` makes what the backends are compared on.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np

from fp8ref import policy as policies
from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.inputs.kinds import AMAX_RANGES, NONZERO_RANGES
from fp8ref.formats import BFLOAT16, Format
from fp8ref.shared import package_data
from fp8ref.sim.quantize import cast
from fp8ref.spec.granularity import blocks, scale_shape

PATTERNS: tuple[str, ...] = package_data.tables(__file__, "kinds")["patterns"]
"""The patterns of ``filled``."""

# Elements behind a group's largest, relative to it: both signs, ties, small ones, zeros.
_PARTS = np.array(
    [1, -0.5, 0.3, 0.7, 0.9, 2.0**-5, -(2.0**-9), 2.0**-12, 0, -0.0, -0.99, 0.01], np.float32
)

_DISPUTED = 32

# Amaxes for which policies have rules of their own: eps, bounds, overflow, special cases.
_SPECIAL = {
    "tiny": (
        *(2.0**-126, 1e-37, 1.25e-36, 1.3e-36, 1.32e-36, 1.6e-34, 2e-34),
        *(1e-30, 1e-20, 1e-13, 0.99e-12, 1.01e-12),
    ),
    "huge": (float(np.finfo(np.float32).max), 2.0**127, 3e38, 1e37),
    "subnormal": (2.0**-149, 1e-44, 1e-40, 2.0**-127),
    "zero": (0.0, 0.0),
    "infinite": (np.inf, np.inf),
    "NaN": (np.nan, np.nan),
}


def vector_bits(fmt: Format, policy: str, *, seed: int, count: int) -> np.ndarray:
    """float32 bits of a scale's test vectors, uint64: edges, then ``count`` random amaxes."""
    source = dtypes.by_name("float32")
    powers = 2.0 ** np.arange(-149, 128)
    edges = powers * fmt.max
    overflow = fmt.max / 2.0**128  # below it the scale is no float32
    points = [
        powers,
        edges[edges < 2.0**128],
        np.array([1e-12, policies.by_name(policy).eps, overflow]),
    ]
    # exp2_log2 counts up to 44 numbers below a power of two as it (S-4): here as far from max * 2^k
    beyond = dtypes.bits(points[1], source)[:, None] + np.array(
        [2, 5, 6, 11, 12, 22, 23, 40, 44, 45, 46, 88], np.uint64
    )
    raw = dtypes.random(seed, count) >> np.uint64(32)
    half = len(raw) // 2
    # one half near 1, where scales are ordinary: exponent fields 107 to 146 in place of any
    near = raw[:half] & np.uint64(0x007FFFFF) | (
        np.uint64(107) + (raw[:half] >> np.uint64(23)) % np.uint64(40)
    ) << np.uint64(23)
    bit_arrays = [
        dtypes.specials(source),
        dtypes.around(np.concatenate(points), source),
        beyond.ravel(),
        near,
        raw[half:],
    ]
    return dtypes.distinct([bits & np.uint64(0x7FFFFFFF) for bits in bit_arrays])


@dataclass(frozen=True, kw_only=True)
class Amaxes:
    """Amaxes to ask with, one for each group.

    largest   the elements of largest magnitude, of either sign; float32 [n].
    kind      indices of AMAX_RANGES; int [n].
    beside    for each, smaller elements that ways of scaling cast differently; float32 [n, 32].
    """

    largest: np.ndarray
    kind: np.ndarray
    beside: np.ndarray

    @property
    def amax(self) -> np.ndarray:
        """The magnitudes of ``largest``; float32 [n]."""
        return np.abs(self.largest)


def identifying(fmt: Format, dtype: str, *, seed: int = 0) -> Amaxes:
    """Amaxes that tell scale policies apart: near max * 2^k and powers of two, random, special.

    Every second one is negative. A narrow dtype such as float16 gets those that it can hold.
    """
    rng = np.random.default_rng(seed)
    near = (
        np.ldexp(fmt.max, np.arange(-46, 110, 3))[:, None].astype(np.float32).view(np.int32)
        + np.array([-2, -1, 0, 1, 2, 17])
    ).astype(np.int32)
    powers = np.ldexp(1.0, np.arange(-37, 110, 8)).astype(np.float32)
    # 0.999 is 1 in bfloat16
    below = np.concatenate([np.nextafter(powers, np.float32(0)), np.float32(0.999) * powers])
    ordinary = [
        2.0 ** np.arange(-30, 61, 5),
        near.ravel().view(np.float32),
        below,
        np.abs(rng.standard_normal(64)) * 10.0 ** rng.integers(-6, 7, 64),
        _separating(fmt, dtype),
    ]
    by_kind = {"ordinary": np.concatenate(ordinary), **_SPECIAL}
    largest, kind = [], []
    for i, name in enumerate(AMAX_RANGES):
        values = dtypes.rounded(np.asarray(by_kind[name], np.float32), dtype)
        # rounding may carry the largest to Inf, and float16's smallest to zero: another range
        if name in NONZERO_RANGES:
            values = np.unique(values[np.isfinite(values) & (values != 0)])
        signs = np.where(np.arange(values.size) % 2 == 0, np.float32(1), np.float32(-1))
        largest.append(values.astype(np.float32) * signs)
        kind.append(np.full(values.size, i))
    every = np.concatenate(largest)
    return Amaxes(largest=every, kind=np.concatenate(kind), beside=disputed(every, fmt, dtype))


def disputed(largest: np.ndarray, fmt: Format, dtype: str) -> np.ndarray:
    """For each amax, 32 numbers of dtype that tell ways of scaling apart; float32 [n, 32].

    A way has one or two roundings more than another, so that its scaled numbers are on another side
    of a tie. Random numbers show that once in thousands, so the candidates are all ties of the
    format and their neighbors. Where fewer are disputed, other candidates follow. Zeros beside a
    zero, NaN or Inf.
    """
    amax = np.abs(largest)
    amax = np.where(np.isfinite(amax), amax, np.float32(0))[:, None]
    x, codes = _cast_near_ties(amax, fmt, dtype)
    order = np.random.default_rng(0).random(x.shape) - np.any(
        [c != codes[0] for c in codes], axis=0
    )
    # few are exact: groups of 32 have room for a third, which shall tell all ways apart
    if dtype == "float16":
        order -= _covering(np.stack(codes))
    return np.take_along_axis(x, np.argsort(order, axis=1)[:, :_DISPUTED], axis=1)


def _covering(codes: np.ndarray) -> np.ndarray:
    """For each of [n, ties] numbers, how early it comes, above 1, if each next one is that which
    tells most further ways apart; else 0.

    codes  in each way [ways, n, ties].
    """
    apart = np.stack([a != b for a, b in itertools.combinations(codes, 2)])
    together, rank = np.ones(apart.shape[:2], bool), np.zeros(apart.shape[1:])
    every = np.arange(codes.shape[1])
    for early in range(_DISPUTED, 1, -1):
        gain = (apart & together[..., None]).sum(0)
        at = gain.argmax(1)
        gained = gain[every, at] > 0
        if not gained.any():
            break
        rank[every[gained], at[gained]] = early
        together &= ~apart[:, every, at]
    return rank


@functools.lru_cache(maxsize=64)
def _separating(fmt: Format, dtype: str) -> np.ndarray:
    """Amaxes of a 16-bit dtype beside which two ways of scaling differ: up to three for each two.

    In float32 a tie has a neighbor that shows it beside nearly every amax.
    """
    if dtype == "float32":
        return np.zeros(0)
    bits = dtypes.by_name(dtype).mantissa_bits
    # float16 holds few elements exactly far below their amax: more amaxes show more.
    powers = np.array(
        [[2.0**14], [2.0**15], [2.0**13]][: 3 if dtype == "float16" else 1], np.float32
    )
    amax = (powers * np.arange(1.0, 2.0, 2.0**-bits, dtype=np.float32)).ravel()
    amax = amax[amax <= 65504]
    _, codes = _cast_near_ties(amax[:, None], fmt, dtype)
    return np.concatenate(
        [amax[np.any(a != b, axis=1)][:3] for a, b in itertools.combinations(codes, 2)]
    )


def _cast_near_ties(
    amax: np.ndarray, fmt: Format, dtype: str
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Numbers next to the ties under an amax [n, 1]: float32 [n, ties]; and codes each way."""
    numbers = cast.decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)
    ties = (numbers[1:] + numbers[:-1]) / 2
    most = np.finfo(np.float32).max
    with np.errstate(all="ignore"):
        scale = np.minimum(fmt.max / amax.astype(np.float64), most)
        at = dtypes.rounded((ties / scale).astype(np.float32), dtype)
        ends = np.array([0, np.inf], np.float32)
        x = np.concatenate([at, *(np.nextafter(at, end) for end in ends)], axis=1)
        x = np.minimum(dtypes.rounded(x, dtype), amax)
        x = np.where(amax > 0, x, np.float32(0))
        clipped = (np.clip(y, -fmt.max, fmt.max) for y in _scaled(x, amax, fmt))
        return x, [cast.encode(y, fmt) for y in clipped]


def _scaled(x: np.ndarray, amax: np.ndarray, fmt: Format) -> list[np.ndarray]:
    """x in each of the ways that libraries scale it by its amax; S-9, S-13, S-17, S-20."""
    most, bfloat16_most = np.float32(np.finfo(np.float32).max), np.float32(BFLOAT16.max)
    scale = (fmt.max / amax.astype(np.float64)).astype(np.float32)
    inverses = [
        (amax.astype(np.float64) / fmt.max).astype(np.float32),
        amax * np.float32(1 / fmt.max),
        np.float32(1) / scale,
    ]
    scales = [
        np.minimum(scale, most),
        np.minimum(scale, bfloat16_most),
        *(np.float32(1) / inverse for inverse in inverses),
    ]
    in_bfloat16 = cast.round_to(x, BFLOAT16) / cast.round_to(inverses[0], BFLOAT16)
    return [
        *(x * scale for scale in scales),
        *(x / inverse for inverse in inverses),
        cast.round_to(in_bfloat16, BFLOAT16),
    ]


def groups(shape: tuple[int, int], granularity: str, axis: int) -> np.ndarray:
    """The index of each element's group, in the C order of the scales; int [M, K]."""
    counts = scale_shape(granularity, shape, axis) or (1, 1)
    sizes = blocks(granularity, shape, axis)
    rows, columns = (np.arange(n) // size for n, size in zip(shape, sizes, strict=True))
    return rows[:, None] * counts[1] + columns[None, :]


def tensor(largest: np.ndarray, beside: np.ndarray, group: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers [M, K] of dtype whose groups have these elements of largest magnitude.

    Order:    a group's first element is its largest; fixed fractions of it follow, then four
              ``beside`` it [n, 32], then in turn one of these and a random one, then random ones.
    """
    x = np.zeros(group.shape, np.float32)
    flat, of = x.reshape(-1), group.reshape(-1)
    order = np.argsort(of, kind="stable")
    starts = np.searchsorted(of[order], np.arange(largest.size))
    place = np.arange(of.size) - starts[of[order]]
    rng = np.random.default_rng(0)
    parts = np.where(
        place < _PARTS.size, _PARTS[np.minimum(place, _PARTS.size - 1)], rng.uniform(-1, 1, of.size)
    ).astype(np.float32)
    base = largest[of[order]]
    finite = np.where(np.isfinite(base), base, np.copysign(np.float32(1), base))
    with np.errstate(under="ignore"):
        values = finite * parts
    flat[order] = np.where((place == 0) & ~np.isfinite(base), base, values)
    turn, odd = np.divmod(place - _PARTS.size + 4, 2)
    # groups of 16 have four of them
    turn = np.where(place < _PARTS.size + 4, place - _PARTS.size, turn)
    at = (
        (turn >= 0)
        & (turn < beside.shape[1])
        & ((odd == 0) | (turn < 4))
        & (base != 0)
        & np.isfinite(base)
    )
    flat[order[at]] = beside[of[order][at], turn[at]] * np.where(
        turn[at] % 2, np.float32(-1), np.float32(1)
    )
    return dtypes.rounded(x, dtype)


def filled(pattern: str, shape: tuple[int, ...], source: dtypes.Source, seed: int) -> np.ndarray:
    """The bits of a tensor that has one of PATTERNS, uint64 of that shape; made of random bits
    alone, so the same on every machine.

    ``ordinary`` numbers have uniform mantissas, and exponents that fall off geometrically from 1.
    The other patterns change some of them:
    ``outliers``      a few are 2^11 times as large.
    ``wide``          exponents cover half the source's range.
    ``subnormal``     all are.
    ``zeros``         all are, of both signs.
    ``zero lines``    every third line is zero.
    ``power of two``  the largest magnitude is one.
    ``huge``          exponents are at the top of the range.
    ``infinity``      one element is, or with ``NaN`` is NaN.
    """
    # two words an element, for its sign and mantissa and for its exponent, and one for a place
    raw = dtypes.random(seed, 2 * math.prod(shape) + 1)
    fractions = raw[: math.prod(shape)]
    others = raw[math.prod(shape) : -1]
    place = int(raw[-1])
    mantissa = fractions & np.uint64((1 << source.mantissa_bits) - 1)
    sign = (fractions >> np.uint64(63)) << np.uint64(source.bits - 1)
    zeros = _leading_zeros(others)
    bias = 1 - source.emin
    field = bias - np.minimum(zeros, 12)
    if pattern == "outliers":
        field = np.where(others % np.uint64(97) == 0, bias + 11, field)
    elif pattern == "wide":
        field = bias // 2 + (others % np.uint64(bias)).astype(np.int64)
    elif pattern == "subnormal":
        field = np.zeros_like(field)
    elif pattern == "huge":
        field = 2 * bias - np.minimum(zeros, 2)
    elif pattern == "power of two":
        largest = field == field.max()
        mantissa, field = np.where(largest, np.uint64(0), mantissa), field
    elif pattern == "zeros":
        mantissa, field = np.zeros_like(mantissa), np.zeros_like(field)
    bits = (sign | field.astype(np.uint64) << np.uint64(source.mantissa_bits) | mantissa).reshape(
        shape
    )
    if pattern == "zero lines":
        bits[np.indices(shape)[0] % 3 == 0] = 0
    if pattern in ("infinity", "NaN"):
        special = source.infinity | (1 << (source.mantissa_bits - 1) if pattern == "NaN" else 0)
        flat, at = bits.reshape(-1), place % bits.size
        flat[at] = flat[at] & np.uint64(source.sign) | np.uint64(special)
    return bits


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    """Of 64 random bits: geometrically distributed.

    By frexp of 53 bits, which is exact, where log2 would differ between machines.
    """
    return 64 - np.frexp((x >> np.uint64(11)).astype(np.float64))[1] - 11


def samples(seed: int = 0) -> dict[str, np.ndarray]:
    """Patterns that training rarely shows, by name: float32 [48, 128], of bfloat16 numbers."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((48, 128))
    at = np.arange(normal.size).reshape(normal.shape)
    cases = {
        "normal": normal,
        "outlier": np.where(rng.random(normal.shape) < 0.002, normal * 1e4, normal),
        "wide": normal * 2.0 ** rng.integers(-60, 60, normal.shape),
        "tiny": normal * 1e-13,
        "subnormal": normal * 1e-39,
        "zero": np.zeros_like(normal),
        "zero_rows": np.where(np.arange(48)[:, None] % 3 == 0, 0, normal),
        "negative_zero": np.where(normal > 0, -0.0, normal),
        "inf": np.where(at == 1234, -np.inf, normal),
        "nan": np.where(at == 77, np.nan, normal),
        "huge": normal * 1e38 / np.abs(normal).max(),
    }
    with np.errstate(under="ignore"):
        return {name: cast.round_to(value, BFLOAT16) for name, value in cases.items()}
