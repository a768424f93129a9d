"""How a GEMM sums (SEMANTICS G-3, G-10 to G-13): in float32 in order, or as a tensor core does. ``exact.py`` has the exact sum.

Tensor cores are data: what one multiply-accumulate step keeps of its products, and how a GEMM strings steps together.
``step_plain`` and ``chains_plain`` are the definition; ``chains`` is the same by a compiled kernel.
"""

from dataclasses import dataclass

import numpy as np

from fp8ref import formats
from fp8ref.formats import E4M3FN, E5M2, Format
from fp8ref.sim import parallel
from fp8ref.sim.kernels import gemm as kernels

K_STEP = 32  # of one instruction: a tensor core's K is a multiple of it
SPLIT_TILE = 128
_NONE = -(1 << 20)  # the exponent of a zero: it takes no part in a maximum


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class TensorCore:
    """One step: ``fused_width`` products and the accumulator, aligned to the largest exponent and cut off, summed exactly, cut off (G-10).

    fraction_bits  kept of each term below the largest exponent of the step.
    output_bits    fraction bits of the result, an 8-bit exponent beside them.
    evidence       what the numbers rest on. The rule for zeros (G-11) rests on the two emulators named in G-10, not on a recording.
    """

    name: str
    fused_width: int
    fraction_bits: int
    output_bits: int
    evidence: str

    def __post_init__(self) -> None:
        if not _is_int(self.fused_width) or self.fused_width not in (4, 8, 16, 32):
            raise ValueError(f"fused_width divides the instruction's K = 32 and is at least 4; got {self.fused_width!r}.")
        for key, most in (("fraction_bits", 25), ("output_bits", 23)):
            value = getattr(self, key)
            if not _is_int(value) or not 1 <= value <= most:
                raise ValueError(f"{key} is an integer in [1, {most}]; got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """A GEMM's plan (G-12): chains of steps that start from 0 every ``promotion`` of K and are added in float32, in order.

    promotion  None: one chain over all of K, fast accumulation. 128: slow.
    split_k    parts of K, contiguous runs of 128, whose sums are added in float32, in order.
    """

    name: str
    unit: TensorCore
    promotion: int | None = None
    split_k: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.unit, TensorCore):
            raise ValueError(f"unit is a TensorCore, such as UNITS['hopper']; got {self.unit!r}.")
        if self.promotion is not None and (not _is_int(self.promotion) or self.promotion < K_STEP or self.promotion % K_STEP):
            raise ValueError(f"promotion is None or a multiple of {K_STEP}; got {self.promotion!r}.")
        if not _is_int(self.split_k) or self.split_k < 1:
            raise ValueError(f"split_k is an integer of at least 1; got {self.split_k!r}.")


UNITS = {
    u.name: u
    for u in (
        TensorCore(
            name="hopper",
            fused_width=32,
            fraction_bits=13,
            output_bits=13,
            evidence="20,000 published H100 and H200 outputs from an accumulator of 0; others unconfirmed by a recording of this project",
        ),
        TensorCore(
            name="ada",
            fused_width=16,
            fraction_bits=13,
            output_bits=13,
            evidence="20,000 published RTX 4000 Ada and L40S outputs; unconfirmed by a recording of this project",
        ),
        TensorCore(
            name="blackwell",
            fused_width=32,
            fraction_bits=25,
            output_bits=23,
            evidence="as MMA-Sim models tcgen05.mma; unconfirmed by any recording at hand",
        ),
    )
}
ACCUMULATIONS = {
    a.name: a
    for a in (
        Accumulation(name="hopper_fast", unit=UNITS["hopper"]),
        Accumulation(name="hopper_slow", unit=UNITS["hopper"], promotion=128),
        Accumulation(name="ada", unit=UNITS["ada"]),
        Accumulation(name="blackwell", unit=UNITS["blackwell"]),
    )
}


def by_name(accumulate: "str | Accumulation") -> "str | Accumulation":
    """The plan of that name; 'exact', 'f32' and an Accumulation are themselves."""
    if isinstance(accumulate, Accumulation) or accumulate in ("exact", "f32"):
        return accumulate
    if not isinstance(accumulate, str) or accumulate not in ACCUMULATIONS:
        raise ValueError(f"accumulate is an Accumulation, 'exact', 'f32' or one of {', '.join(ACCUMULATIONS)}; got {accumulate!r}.")
    return ACCUMULATIONS[accumulate]


def unit_by_name(unit: str | TensorCore) -> TensorCore:
    """The unit of that name; a TensorCore is itself."""
    if isinstance(unit, TensorCore):
        return unit
    if not isinstance(unit, str) or unit not in UNITS:
        raise ValueError(f"unit is a TensorCore or one of {', '.join(UNITS)}; got {unit!r}.")
    return UNITS[unit]


def exponents(values: np.ndarray, emin: int) -> np.ndarray:
    """max(floor(log2|v|), emin) as int32; of a zero, a number below every sum of two of them."""
    return np.where(values == 0, _NONE, np.maximum(np.frexp(values)[1] - 1, emin)).astype(np.int32)


def step_plain(a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt_a: Format, fmt_b: Format, unit: TensorCore) -> np.ndarray:
    """One step: a [M, w] and b [N, w] values of FP8 formats, c [M, N] values of float32, all float64 and finite; float64 [M, N].

    Everything is exact in float64: a term has at most 27 bits above its unit, and 33 of them are summed.
    """
    products = a[:, None, :] * b[None, :, :]  # [M, 1, w] x [1, N, w] -> [M, N, w]
    of_products = exponents(a, fmt_a.emin)[:, None, :] + exponents(b, fmt_b.emin)[None, :, :]
    largest = np.maximum(of_products.max(axis=-1), exponents(c, -126))
    largest = np.where(largest < -1000, 0, largest)  # nothing but zeros
    scale = unit.fraction_bits - largest
    total = np.trunc(np.ldexp(products, scale[..., None])).sum(axis=-1) + np.trunc(np.ldexp(c, scale))
    return _truncate(np.ldexp(total, -scale), unit.output_bits)


def chain_plain(a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt_a: Format, fmt_b: Format, unit: TensorCore) -> np.ndarray:
    """Steps over all of K, each from the result of the one before: a [M, K], b [N, K], c [M, N]; float32 [M, N]."""
    acc = c.astype(np.float64)
    for k in range(0, a.shape[1], unit.fused_width):
        part = slice(k, k + unit.fused_width)
        acc = step_plain(a[:, part].astype(np.float64), b[:, part].astype(np.float64), acc, fmt_a, fmt_b, unit)
    return acc.astype(np.float32)


def chains_plain(a: np.ndarray, b: np.ndarray, fmt_a: Format, fmt_b: Format, plan: Accumulation) -> np.ndarray:
    """The definition of a plan over finite values (G-12): float32 [M, N]."""
    zero = np.zeros((len(a), len(b)), np.float32)
    total = zero
    for begin, end in splits(a.shape[1], plan.split_k):
        part = zero
        length = plan.promotion or max(end - begin, 1)
        for k in range(begin, end, length):
            chain = slice(k, min(k + length, end))
            part = part + chain_plain(a[:, chain], b[:, chain], zero, fmt_a, fmt_b, plan.unit)
        total = total + part
    return total


def splits(k: int, count: int) -> list[tuple[int, int]]:
    """The contiguous parts of K: ceil(tiles / count) tiles of 128 each, the last ones shorter or empty.

    >>> splits(384, 2), splits(256, 3)
    ([(0, 256), (256, 384)], [(0, 128), (128, 256), (256, 256)])
    """
    tiles = -(-k // SPLIT_TILE)
    size = -(-tiles // count) * SPLIT_TILE
    return [(min(i * size, k), min((i + 1) * size, k)) for i in range(count)]


def chains(a: np.ndarray, b: np.ndarray, fmt_a: Format, fmt_b: Format, plan: Accumulation) -> np.ndarray:
    """``chains_plain`` by a compiled kernel."""
    unit, k = plan.unit, a.shape[1]
    if k == 0:
        return np.zeros((len(a), len(b)), np.float32)
    ends = np.zeros(k // unit.fused_width, np.uint8)
    for begin, end in splits(k, plan.split_k):
        if begin < end:
            length = plan.promotion or end - begin
            for at in (*range(begin + length, end, length), end):
                ends[at // unit.fused_width - 1] = kernels.CHAIN_END
            ends[end // unit.fused_width - 1] |= kernels.SPLIT_END
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    out = np.empty((len(a), len(b)), np.float32)
    numbers = unit.fused_width, unit.fraction_bits, unit.output_bits

    def columns(begin: int, end: int) -> None:
        for j in range(begin, end, kernels.COLUMNS):
            kernels.chains(a, fmt_a.emin, b, fmt_b.emin, ends, out, j, min(j + kernels.COLUMNS, end), *numbers)

    parallel.run(columns, len(b), unit=32)
    return out


def check_pair(fmt_a: Format, fmt_b: Format) -> None:
    """Tensor cores take e4m3fn and e5m2, in any pairing."""
    formats.check(fmt_a)
    formats.check(fmt_b)
    if fmt_a not in (E4M3FN, E5M2) or fmt_b not in (E4M3FN, E5M2):
        raise ValueError(f"tensor cores multiply e4m3fn and e5m2; got {fmt_a} and {fmt_b}. Use accumulate 'exact' or 'f32'.")


def f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """acc = RN32(acc + a_k * b_k), k ascending from +0 (G-3). The product of two FP8 numbers is a float32: at most 8 bits."""
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b.T, np.float32)
    out = np.empty((len(a), b.shape[1]), np.float32)
    parallel.run(lambda begin, end: kernels.in_order(a, b, out, begin, end), len(a))
    return out


def f32_plain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The definition of ``f32``."""
    acc = np.zeros((len(a), len(b)), np.float32)
    with np.errstate(invalid="ignore"):
        for a_k, b_k in zip(a.T, b.T, strict=True):
            acc += np.outer(a_k, b_k)  # [M] x [N] -> [M, N]
    return acc


def with_specials(finite: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None) -> np.ndarray:
    """``finite``, the sum of the finite terms, replaced where infinities or NaNs decide it (G-6): a [M, K], b [N, K], c [M, N].

    NaN where a term is NaN, an infinity meets a zero factor, or infinities of both signs meet; else the infinity.
    """
    c = np.zeros(finite.shape, np.float32) if c is None else c
    if np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all():
        return finite

    def count(left: np.ndarray, right: np.ndarray) -> np.ndarray:  # how many k have both: [M, K] x [N, K] -> [M, N], exact
        return left.astype(np.float32) @ right.astype(np.float32).T

    inf_a, inf_b = np.isinf(a), np.isinf(b)
    up_a, down_a, up_b, down_b = a > 0, a < 0, b > 0, b < 0
    positive = count(inf_a & up_a, up_b) + count(inf_a & down_a, down_b) + count(up_a, inf_b & up_b) + count(down_a, inf_b & down_b)
    negative = count(inf_a & up_a, down_b) + count(inf_a & down_a, up_b) + count(up_a, inf_b & down_b) + count(down_a, inf_b & up_b)
    above, below = (positive > 0) | (c == np.inf), (negative > 0) | (c == -np.inf)
    invalid = count(inf_a, b == 0) + count(a == 0, inf_b) > 0
    nan = np.isnan(a).any(axis=1)[:, None] | np.isnan(b).any(axis=1)[None, :] | np.isnan(c) | invalid | (above & below)
    return np.select([nan, above, below], [np.float32(np.nan), np.float32(np.inf), np.float32(-np.inf)], finite).astype(np.float32)


def finite_part(values: np.ndarray) -> np.ndarray:
    """values with infinities and NaNs replaced by 0, which changes no other term."""
    finite = np.isfinite(values)
    return values if finite.all() else np.where(finite, values, np.float32(0))


def _truncate(value: np.ndarray, bits: int) -> np.ndarray:
    """value cut off after ``bits`` fraction bits, the exponent at least -126; from 2^128 on, infinity; a zero result is +0."""
    exponent = np.maximum(np.frexp(value)[1] - 1, -126)
    cut = np.ldexp(np.trunc(np.ldexp(value, bits - exponent)), exponent - bits)
    return np.where(np.abs(cut) >= 2.0**128, np.copysign(np.inf, cut), cut) + 0.0
