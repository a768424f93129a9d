"""Accumulation over K: exact (G-2), in float32 in order (G-3), by a tensor core's plan (G-12).

    exact_sum   one rounding, of the exact sum
    f32         acc = RN32(acc + a_k * b_k), k ascending
    chains      chains of tensor-core steps, added in float32 as an ``Accumulation`` says

All take finite values; ``with_specials`` puts infinities and NaNs back (G-6). Scales come later, in
``gemm``. ``chains_plain`` and ``f32_plain`` are the definitions; their compiled twins are in
``kernels``. ``exact_sum`` has none: a float64 matrix product does its work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from fp8ref.formats import Format
from fp8ref.shared import errors, registry
from fp8ref.shared.errors import require
from fp8ref.sim import threads
from fp8ref.sim.gemm.tensor_core import K_STEP, UNITS, TensorCore, chain, chain_plain, is_int
from fp8ref.sim.kernels import gemm as kernels
from fp8ref.sim.kernels.chains import chains as chain_kernels
from fp8ref.sim.kernels.chains.loops import CHAIN_END, SPLIT_END
from fp8ref.sim.kernels.chains.vectors import LANES
from fp8ref.sim.kernels.compiled import PRODUCTS, worth
from fp8ref.sim.quantize import cast

__all__ = ["Accumulation"]

SplitOrder = Literal["contiguous", "interleaved"]
"""How split-K gives tiles to its parts: ``contiguous``, in runs; ``interleaved``, in turn."""

SPLIT_ORDERS: tuple[SplitOrder, ...] = ("contiguous", "interleaved")
"""The values of ``SplitOrder``."""

SPLIT_TILE = 128
"""The default length along K of a split-K tile."""


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """A plan (G-12): chains of steps, from 0 every ``promotion`` of K, added in float32 in order.

    promotion    None: one chain over all of K, fast accumulation. 128: slow.
    split_k      parts of K, whose sums are added in float32, in order.
    split_order  ``contiguous``: a part is a run of tiles; ``interleaved``: part i has every
                 split_k-th tile, from the i-th on.
    split_tile   length along K of a tile, which stays together in a part.

    Raises:      ValueError: a unit that is not a TensorCore, or takes block scales; promotion or
                 split_tile not multiples of 32; split_k below 1; another split_order.
    """

    name: str
    unit: TensorCore
    promotion: int | None = None
    split_k: int = 1
    split_order: SplitOrder = "contiguous"
    split_tile: int = SPLIT_TILE

    def __post_init__(self) -> None:
        if not isinstance(self.unit, TensorCore):
            raise ValueError(f"unit is a TensorCore, such as UNITS['hopper']; got {self.unit!r}.")
        text = f"plans take no block scales; got unit {self.unit.name!r}. Use block_scaled.matmul."
        require(not self.unit.block_scales, text)
        if self.promotion is not None and (
            not is_int(self.promotion) or self.promotion < K_STEP or self.promotion % K_STEP
        ):
            raise ValueError(
                f"promotion is None or a multiple of {K_STEP}; got {self.promotion!r}."
            )
        errors.integer("split_k", self.split_k, 1)
        errors.one_of("split_order", self.split_order, SPLIT_ORDERS)
        if not is_int(self.split_tile) or self.split_tile < K_STEP or self.split_tile % K_STEP:
            raise ValueError(f"split_tile is a multiple of {K_STEP}; got {self.split_tile!r}.")


ACCUMULATIONS = {
    a.name: a
    for a in (
        Accumulation(name="hopper_fast", unit=UNITS["hopper"]),
        Accumulation(name="hopper_slow", unit=UNITS["hopper"], promotion=128),
        Accumulation(name="ada", unit=UNITS["ada"]),
        Accumulation(name="blackwell", unit=UNITS["blackwell"]),
    )
}
"""The accumulation plans of tensor cores, by name (G-12)."""


def by_name(accumulate: "str | Accumulation") -> "str | Accumulation":
    """A plan by name; 'exact', 'f32' and an Accumulation are returned as they are."""
    if accumulate in ("exact", "f32"):
        return accumulate
    return registry.lookup(
        "accumulate is an Accumulation, 'exact', 'f32' or", ACCUMULATIONS, accumulate, Accumulation
    )


def chains_plain(
    a: np.ndarray,
    b: np.ndarray,
    fmt_a: Format,
    fmt_b: Format,
    plan: Accumulation,
    chain: Callable = chain_plain,
) -> np.ndarray:
    """The definition of a plan (G-12) over finite values a [M, K] and b [N, K] of the formats, K a
    multiple of 32: float32 [M, N]. chain: what makes a chain."""
    zero = np.zeros((len(a), len(b)), np.float32)
    total = zero
    for indices in parts(a.shape[1], plan):
        left, right = a[:, indices], b[:, indices]
        part = zero
        for begin, end in _chains(len(indices), plan):
            pair = left[:, begin:end], right[:, begin:end]
            part = part + chain(*pair, zero, fmt_a, fmt_b, plan.unit)
        total = total + part
    return total


def parts(k: int, plan: Accumulation) -> list[np.ndarray]:
    """K's indices in each part of the plan, in summation order; parts past the tiles are empty.

    >>> plan = Accumulation(name="two halves", unit=UNITS["hopper"], split_k=2)
    >>> [f"{part.min()} to {part.max()}" for part in parts(384, plan)]
    ['0 to 255', '256 to 383']
    """
    tiles = np.array_split(np.arange(k), range(plan.split_tile, k, plan.split_tile)) if k else []
    size = -(-len(tiles) // plan.split_k)
    if plan.split_order == "contiguous":
        owned = [tiles[i * size : (i + 1) * size] for i in range(plan.split_k)]
    else:
        owned = [tiles[i :: plan.split_k] for i in range(plan.split_k)]
    return [np.concatenate([np.empty(0, np.int64), *own]) for own in owned]


def _chains(length: int, plan: Accumulation) -> list[tuple[int, int]]:
    """(begin, end) of each chain in a part."""
    each = plan.promotion or max(length, 1)
    return [(k, min(k + each, length)) for k in range(0, length, each)]


def chains(
    a: np.ndarray, b: np.ndarray, fmt_a: Format, fmt_b: Format, plan: Accumulation
) -> np.ndarray:
    """``chains_plain`` with compiled kernels; the result may be a transposed view."""
    if not plan.unit.compiled:
        return chains_plain(a, b, fmt_a, fmt_b, plan, chain)
    if not worth(chain_kernels.chains, len(a) * len(b) * a.shape[1], PRODUCTS):
        return chains_plain(a, b, fmt_a, fmt_b, plan)
    return _chains_compiled(cast.codes_of(a, fmt_a), cast.codes_of(b, fmt_b), fmt_a, fmt_b, plan)


def chains_of_codes(
    a: np.ndarray, b: np.ndarray, fmt_a: Format, fmt_b: Format, plan: Accumulation
) -> np.ndarray:
    """``chains`` of codes of finite values, which the faster kernel takes as they are."""
    if not plan.unit.compiled or not worth(
        chain_kernels.chains, len(a) * len(b) * a.shape[1], PRODUCTS
    ):
        return chains(cast.decode(a, fmt_a), cast.decode(b, fmt_b), fmt_a, fmt_b, plan)
    return _chains_compiled(a, b, fmt_a, fmt_b, plan)


def _chains_compiled(
    a: np.ndarray, b: np.ndarray, fmt_a: Format, fmt_b: Format, plan: Accumulation
) -> np.ndarray:
    unit, k = plan.unit, a.shape[1]
    if len(a) * len(b) * k == 0:
        return np.zeros((len(a), len(b)), np.float32)
    # the columns are the kernel's lanes; a step tells its factors apart by nothing
    if len(a) > len(b):
        return _chains_compiled(b, a, fmt_b, fmt_a, plan).T  # [N, M] -> [M, N]
    part_indices = [part for part in parts(k, plan) if len(part)]
    # for each step: does a chain end after it, does a part
    ends = np.zeros(k // unit.fused_width, np.uint8)
    start = 0
    for part in part_indices:
        for _, end in _chains(len(part), plan):
            ends[(start + end) // unit.fused_width - 1] = CHAIN_END
        start += len(part)
        ends[start // unit.fused_width - 1] |= SPLIT_END
    if plan.split_order == "interleaved":
        order = np.concatenate(part_indices)
        a, b = a[:, order], b[:, order]
    rows = chain_kernels.pack(a, fmt_a, unit.fused_width, unit.fraction_bits, unit.output_bits)
    out, b = np.zeros((len(a), len(b)), np.float32), chain_kernels.tiles(b)
    threads.run(
        lambda begin, end: chain_kernels.columns(rows, b, fmt_b, ends, out, begin, end),
        out.shape[1],
        unit=LANES,
    )
    return out


def f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """acc = RN32(acc + a_k * b_k), k ascending from +0 (G-3): a [M, K], b [N, K], float32 [M, N].

    The product of two FP8 numbers is a float32: at most 8 bits. Subnormals are kept, infinities and
    NaNs as in IEEE 754; of K = 0 zeros.
    """
    if not worth(kernels.in_order, len(a) * len(b) * a.shape[1], PRODUCTS):
        return f32_plain(a, b)
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b.T, np.float32)
    out = np.empty((len(a), b.shape[1]), np.float32)
    threads.run(lambda begin, end: kernels.in_order(a, b, out, begin, end), len(a))
    return out


def f32_plain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The definition of ``f32``."""
    acc = np.zeros((len(a), len(b)), np.float32)
    with np.errstate(invalid="ignore"):
        for a_k, b_k in zip(a.T, b.T, strict=True):
            acc += np.outer(a_k, b_k)  # [M] x [N] -> [M, N]
    return acc


def exact_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """RN32 of the exact sum over K (G-2): finite FP8 [M, K], [N, K]; float32 [M, N]; 0 is +0."""
    total, tail = exact_pair(a, b)
    rounded = round_sum(total, tail) if tail.any() else total.astype(np.float32)
    return rounded + np.float32(0)  # -0 becomes +0


def exact_pair(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two float64 arrays [M, N] whose exact sum is that over K; finite FP8 a [M, K], b [N, K].

    A float64 does not always hold the exact sum of products of e5m2 numbers: it takes several.
    """
    parts = _exact_products(_Operand.of(a), _Operand.of(b))
    # Parts are multiples of 2^-34 below 2^48, so that errors, at most 2^-4, add unrounded.
    total, tail = parts[0], np.zeros_like(parts[0])
    for part in parts[1:]:
        total, error = _two_sum(total, part)
        tail += error
    return total, tail


def multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """RN32(x * y + z), rounded once; float64 holds float32 products exactly."""
    with np.errstate(invalid="ignore", over="ignore"):
        # An infinity or a NaN needs no single rounding: the ordinary sum has the right result.
        product = x.astype(np.float64) * y.astype(np.float64)
        return np.where(
            np.isfinite(product) & np.isfinite(z),
            round_sum(product, z.astype(np.float64)),
            (product + z).astype(np.float32),
        )


def round_sum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """RN32(x + y) of finite float64 numbers, rounded once: to odd in float64, then to float32.

    A float64 rounded to odd rounds to float32 as the exact sum does (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    total, tail = _two_sum(x, y)
    bits = total.view(np.int64)
    # Round to odd: an inexact, even sum moves to the neighbor on the tail's side, an odd one.
    even = (tail != 0) & (bits % 2 == 0)
    outward = np.where(np.signbit(tail) == np.signbit(total), 1, -1)
    with np.errstate(over="ignore", under="ignore"):
        return (bits + even * outward).view(np.float64).astype(np.float32)


@dataclass(frozen=True)
class _Operand:
    """Numbers of an FP8 format, float64 [rows, K], and the magnitudes among them that are not 0."""

    numbers: np.ndarray
    magnitudes: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray) -> "_Operand":
        """An operand of float32 numbers, which are bfloat16 numbers too: 16 bits name each."""
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16
        there = np.flatnonzero(np.bincount(bits.ravel(), minlength=1 << 16)).astype(np.uint32)
        magnitudes = np.unique(abs((there << 16).view(np.float32))).astype(np.float64)
        return cls(x.astype(np.float64), magnitudes[magnitudes > 0])

    @property
    def width(self) -> int:
        """Bits of an integer with each number in units of the largest power of two dividing all."""
        if not self.magnitudes.size:
            return 0
        fractions, exponents = np.frexp(self.magnitudes)
        integers = np.ldexp(fractions, 53).astype(np.int64)
        units = exponents - 53 + np.log2(integers & -integers).astype(int)
        return int(exponents.max() - units.min())

    def halves(self) -> "list[_Operand]":
        """Two operands that sum to this one: the larger and the smaller half of its exponents."""
        exponents = np.frexp(self.magnitudes)[1]
        middle = 2.0 ** ((int(exponents.max()) + int(exponents.min())) // 2 - 1)
        large = np.where(abs(self.numbers) >= middle, self.numbers, 0)
        above = self.magnitudes >= middle
        parts = ((large, above), (self.numbers - large, ~above))
        return [_Operand(numbers, self.magnitudes[held]) for numbers, held in parts]

    def columns(self, start: int, stop: int) -> "_Operand":
        """The operand of some of K."""
        return _Operand(self.numbers[:, start:stop], self.magnitudes)


def _exact_products(a: _Operand, b: _Operand) -> list[np.ndarray]:
    """Float64 [M, N] arrays whose exact sum is a @ b.T.

    A float64 product sums in any order without rounding where its sums are below 2^53 in units that
    divide all products: for all numbers of E4M3 and K up to 2^17, and for e5m2 if they lie close
    enough. Else operands are split by magnitude, and then along K.
    """
    k = a.numbers.shape[1]
    if a.width + b.width + int(np.ceil(np.log2(max(k, 1)))) <= 53:
        return [a.numbers @ b.numbers.T]  # [M, K] x [N, K] -> [M, N]
    if max(a.width, b.width) > 19:
        left, right = (x.halves() if x.width > 19 else [x] for x in (a, b))
        pairs = list(product(left, right))
    else:
        spans = ((0, k // 2), (k // 2, k))
        pairs = [(a.columns(*span), b.columns(*span)) for span in spans]
    return [part for pair in pairs for part in _exact_products(*pair)]


def _two_sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(RN64(x + y), x + y - RN64(x + y)), both exact (Knuth)."""
    total = x + y
    back = total - x
    return total, (x - (total - back)) + (y - back)


def with_specials(
    finite: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None
) -> np.ndarray:
    """``finite``, the sum of the finite terms, replaced where infinities or NaNs decide it (G-6): a
    [M, K], b [N, K], c [M, N].

    NaN where a term is NaN, Inf meets a zero factor, or Infs of both signs meet; else that Inf.
    """
    if np.isfinite(a).all() and np.isfinite(b).all() and (c is None or np.isfinite(c).all()):
        return finite
    c = np.zeros(finite.shape, np.float32) if c is None else c

    # how many k have both: [M, K] x [N, K] -> [M, N], exact
    def count(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return left.astype(np.float32) @ right.astype(np.float32).T

    inf_a, inf_b = np.isinf(a), np.isinf(b)

    # how many of them are infinite in a or in b
    def infinite(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return count(inf_a & left, right) + count(left, inf_b & right)

    positive = infinite(a > 0, b > 0) + infinite(a < 0, b < 0)
    negative = infinite(a > 0, b < 0) + infinite(a < 0, b > 0)
    # The sum contains an infinity of that sign.
    above, below = (positive > 0) | (c == np.inf), (negative > 0) | (c == -np.inf)
    invalid = count(inf_a, b == 0) + count(a == 0, inf_b) > 0
    nan = (
        np.isnan(a).any(axis=1)[:, None]
        | np.isnan(b).any(axis=1)[None, :]
        | np.isnan(c)
        | invalid
        | (above & below)
    )
    return np.select(
        [nan, above, below], [np.float32(np.nan), np.float32(np.inf), np.float32(-np.inf)], finite
    ).astype(np.float32)


def finite_part(values: np.ndarray) -> np.ndarray:
    """values with infinities and NaNs replaced by 0, which changes no other term."""
    finite = np.isfinite(values)
    return values if finite.all() else np.where(finite, values, np.float32(0))
