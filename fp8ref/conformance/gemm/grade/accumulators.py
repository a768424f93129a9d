"""Accumulators that are narrower than float32, as data, and which of them gives a GEMM's sums.

The sums are of integers, which float32 adds exactly in any order. So all bits follow from where an
accumulator is rounded, and from nothing else.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.formats import BFLOAT16, FLOAT16, Format
from fp8ref.sim.quantize import cast

TF32 = Format(name="tf32", exponent_bits=8, mantissa_bits=10, bias=127)
"""The 19 bits that NVIDIA's tensor cores read of a float32."""

E8M13 = Format(name="e8m13", exponent_bits=8, mantissa_bits=13, bias=127)
"""The bits that Hopper's and Ada's tensor cores keep of a sum of FP8 products (G-10)."""

FORMATS = (BFLOAT16, FLOAT16, TF32, E8M13)  # the formats of accumulators that are tried

EVERY = (*(2**i for i in range(13)), 24, 48, 96, 192)
"""The numbers of products that are added exactly between two roundings."""

SPLITS = (2, 3, 4, 6, 8, 12, 16)  # the equal parts of K that are tried

PROMOTIONS = (128, 32, 64, 256, 512, 1024)  # K after which a promotion is tried

FEWEST = 4  # products between roundings, beside promotions and parts

SAMPLE = 8  # rows and columns of the result that candidates are compared in

SHORT = 512
"""Products compared first, all others 0: few survive to be compared with all of K."""


@dataclass(frozen=True, kw_only=True)
class Narrow:
    """An accumulator of few bits.

    fmt        its format; rounding: ``nearest_even`` or ``toward_zero``.
    every      products that are added exactly between two roundings; None: all of a part.
    promotion  K after which it joins a float32 sum and begins anew; None: at the end of a part.
    split_k    equal parts of K, each with an accumulator of its own, added in float32.
    narrow_sum whether that sum is rounded to fmt too, each time.
    """

    fmt: Format
    every: int | None
    rounding: str = "nearest_even"
    promotion: int | None = None
    split_k: int = 1
    narrow_sum: bool = False

    def __str__(self) -> str:
        cut = "" if self.rounding == "nearest_even" else ", cut off toward zero"
        if self.every is None:
            words = f"sums of parts rounded to {self.fmt}{cut}"
        elif self.every == self.promotion:
            words = f"sums of every {self.every} of K rounded to {self.fmt}{cut}, added in float32"
        else:
            words = f"a {self.fmt} accumulator, rounded every {self.every} of K{cut}"
            if self.promotion:
                words += f", promoted to float32 every {self.promotion} of K"
        if self.split_k > 1:
            words += f", in {self.split_k} parts of K (split-K)"
        return words + (f" and added in {self.fmt}" if self.narrow_sum else "")

    def sums(self, products: np.ndarray, k: int) -> np.ndarray:
        """The sums of products [..., L] over all of K, of which those from L on are 0: integers in
        float64 in, float64 out."""
        length = products.shape[-1]
        size = -(-k // self.split_k)
        total = np.zeros(products.shape[:-1])
        for begin in range(0, length, size):
            total = total + self._part(products[..., begin : begin + size], size)
            total = self._round(total) if self.narrow_sum else total
        return total

    def _part(self, products: np.ndarray, size: int) -> np.ndarray:
        length = products.shape[-1]
        promotion, every = self.promotion or size, self.every or size
        total = np.zeros(products.shape[:-1])
        for begin in range(0, length, promotion):
            chain = np.zeros_like(total)
            end = min(begin + promotion, length)
            for start in range(begin, end, every):
                chain = self._round(chain + products[..., start : min(start + every, end)].sum(-1))
            total = total + chain
        return total

    def _round(self, x: np.ndarray) -> np.ndarray:
        """x rounded once; integers far above a format's subnormals."""
        spacing = np.exp2(np.maximum(np.frexp(x)[1] - (self.fmt.mantissa_bits + 1), 0))
        scaled = x / spacing
        integer = np.rint if self.rounding == "nearest_even" else np.trunc
        rounded = integer(scaled) * spacing
        return np.where(np.abs(rounded) > self.fmt.max, np.copysign(np.inf, x), rounded)


def candidates(k: int) -> Iterator[list[Narrow]]:
    """The accumulators tried for a length of K, by format and rounding, the simplest first."""
    for rounding, fmt in itertools.product(("nearest_even", "toward_zero"), FORMATS):
        yield list(_format_candidates(fmt, rounding, k))


def _format_candidates(fmt: Format, rounding: str, k: int) -> Iterator[Narrow]:
    every = [n for n in EVERY if n < k]
    narrow = functools.partial(Narrow, fmt=fmt, rounding=rounding)
    yield from (narrow(every=n) for n in every)
    yield from (narrow(every=n, promotion=n) for n in every)
    for n, promotion in itertools.product(every, PROMOTIONS):
        if FEWEST <= n < promotion < k:
            yield narrow(every=n, promotion=promotion)
    for count, narrow_sum in itertools.product(SPLITS, (False, True)):
        for length in (None, *(n for n in every if FEWEST <= n < k // count)):
            yield narrow(every=length, split_k=count, narrow_sum=narrow_sum)


def fitting(
    products: np.ndarray,
    results: np.ndarray,
    k: int,
    scale: float,
    out: Format,
    tried: Sequence[Narrow],
) -> list[Narrow]:
    """Those of the accumulators that give the results bit for bit.

    Shapes:   products [R, C, L], integers, the first L of k; results [R, C] of the output dtype;
              scale: what sums are multiplied by, a power of two.
    """
    corner = (slice(0, 2), slice(0, 2))
    with np.errstate(all="ignore"):
        for where in (corner, (slice(None), slice(None))):
            some, expected = products[where], results[where]
            fitting = []
            for one in tried:
                sums = (one.sums(some, k) * scale).astype(np.float32)
                if np.array_equal(cast.round_to(sums, out), expected):
                    fitting.append(one)
            tried = fitting
    return list(tried)


def products_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products [R, C, K] of rows of a [R, K] and of b [C, K]."""
    return a[:, None, :].astype(np.float64) * b[None, :, :]
