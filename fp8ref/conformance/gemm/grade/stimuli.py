"""Operands that a GEMM is graded with, each chosen so that one kind of fault shows.

``integers``  sums that have at most 8 bits in any order, under scales that are powers of two: every
              GEMM whose accumulator has 8 bits gives the same bits, and another result is wrong.
``single``    products alone, one for each index of K.
``codes``     all products of two codes, one for each result.
``pairs``     sums of two products under random scales: what the scales and the output do to a
              float32.
``wide``      sums of integers that float32 holds in any order, and a narrower accumulator does not.
``random``    numbers of many sizes under random scales.
``thinned``   the same in few blocks of a long K, zeros elsewhere.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.gemm import plans
from fp8ref.conformance.gemm.scaled_gemm import ScaledGemm, operand
from fp8ref.conformance.gemm.stimulus import Bench
from fp8ref.formats import FLOAT16, Format
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec.granularity import by_name, scale_shape

TERMS = 40
"""Products of a sum of ``integers``: of 3 x 2 at most each, so that 40 of them stay below 2^8."""

TERMS_OF_BLOCKS = 10
"""The same under scales of blocks, which differ by a factor of 4 within a sum."""

LONG = 4096
"""Of a longer K few indices are asked for by chance: its ends are asked for on purpose, and
``thinned`` has as many products as this."""

END = 256
"""The indices at each end of a long K that have a quarter of the products of ``integers``."""

BLOCK = 128  # length of the blocks of ``thinned``: a multiple of those that scales have


class Stimulus(NamedTuple):
    """Two operands, and a bias [N] or none."""

    name: str
    a: Quantized
    b: Quantized
    bias: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, N and K."""
        return len(self.a.codes), len(self.b.codes), self.a.codes.shape[1]

    def __str__(self) -> str:
        m, n, k = self.shape
        bias = "" if self.bias is None else ", with a bias"
        return (
            f"{self.name} [{m}, {n}], K = {k}, {self.a.fmt} x {self.b.fmt}, "
            f"{self.a.granularity} x {self.b.granularity}{bias}"
        )


def integers(
    scaled: ScaledGemm,
    shape: tuple[int, int, int],
    formats: tuple[Format, Format],
    *,
    bias: bool = False,
) -> Stimulus:
    """Few small integers in each row of a, small integers everywhere in b; of a long K, half of
    them at its ends.

    Scales of a and b are other powers of two, so that a scale in the place of another one shows.
    Where blocks do not divide K, zeros follow up to the next block: ``cut`` takes them away.
    """
    m, n, k = shape
    rng = np.random.default_rng([m, n, k])
    block = by_name(scaled.granularity).reduced
    count = min(4 if bias else TERMS_OF_BLOCKS if block else TERMS, k)
    padded = -(-k // block) * block if block else k
    a, b = np.zeros((m, padded), np.float32), np.zeros((n, padded), np.float32)
    for row in a:
        row[_places(rng, k, count)] = rng.choice([-3, -2, -1, 1, 2, 3], count)
    b[:, :k] = rng.choice(np.array([-2, -1, 1, 2], np.float32), (n, k))
    scales = [
        _powers(rng, granularity, x.shape, centre)
        for granularity, x, centre in zip(
            scaled.granularities, (a, b), (0 if bias else 1, 0 if bias else -5), strict=True
        )
    ]
    operands = [
        operand(cast.encode(x, fmt), fmt, granularity, 1 / scale)
        for x, fmt, granularity, scale in zip(
            (a, b), formats, scaled.granularities, scales, strict=True
        )
    ]
    added = rng.integers(-63, 64, n).astype(np.float32) if bias else None
    if bias:  # scale_inv 8 and 1/2: a bias that is added before one of them or both shows
        operands = [
            operand(q.codes, q.fmt, q.granularity, scale)
            for q, scale in zip(operands, (0.125, 2.0), strict=True)
        ]
    return Stimulus("integers", operands[0], operands[1], added)


def cut(stimulus: Stimulus, k: int) -> Stimulus:
    """The first k of K, with the scales of all blocks: the last one may be shorter (spec S-6)."""
    a, b = (
        q._replace(codes=np.ascontiguousarray(q.codes[:, :k])) for q in (stimulus.a, stimulus.b)
    )
    return stimulus._replace(a=a, b=b)


def _places(rng: np.random.Generator, k: int, count: int) -> np.ndarray:
    """Different indices of K: of a long one, a quarter of them in each end."""
    if k <= LONG:
        return rng.choice(k, count, replace=False)
    first, last = (rng.choice(END, count // 4, replace=False) for _ in range(2))
    others = END + rng.choice(k - 2 * END, count - 2 * (count // 4), replace=False)
    return np.concatenate([first, others, k - 1 - last])


def _powers(
    rng: np.random.Generator, granularity: str, shape: tuple[int, int], centre: int
) -> np.ndarray:
    """Scale_inv of a granularity: powers of two, which differ by row, and by a factor of 2 along K.

    The last block along K, which may be cut, has another one than the block before it: the larger,
    in both operands, so that their products do not make up for each other.
    """
    counts = scale_shape(granularity, shape, -1)
    if not counts:
        return np.asarray(2.0**centre, np.float32)
    by_row = rng.integers(-3, 4, (counts[0], 1))
    along_k = rng.integers(0, 2, (1, counts[1]))
    along_k[0, -2:] = (0, 1) if counts[1] > 1 else 0
    return (2.0 ** (centre + by_row + along_k)).astype(np.float32)


def single(
    scaled: ScaledGemm, shape: tuple[int, int, int], formats: tuple[Format, Format]
) -> Iterator[tuple[np.ndarray, Stimulus]]:
    """Pairs of (k [M, N], the index of K whose product alone a result has, -1 of none; the
    operands).

    Row r of a is one at the indices of K that its results ask for, and column c at those of its
    results: they meet in one k.
    """
    m, n, k = shape
    for begin in range(0, k, m * n):
        indices = np.arange(begin, begin + m * n).reshape(m, n)
        indices[indices >= k] = -1
        a, b = np.zeros((m, k), np.float32), np.zeros((n, k), np.float32)
        where = np.arange(begin, min(begin + m * n, k))
        a[(where - begin) // n, where] = 1
        b[(where - begin) % n, where] = 1
        operands = [
            operand(cast.encode(x, fmt), fmt, granularity)
            for x, fmt, granularity in zip((a, b), formats, scaled.granularities, strict=True)
        ]
        yield indices, Stimulus("single products", operands[0], operands[1])


def codes(
    scaled: ScaledGemm, shape: tuple[int, int, int], formats: tuple[Format, Format]
) -> Iterator[Stimulus]:
    """All codes of a times all of b, each the only product of its result."""
    m, n, k = shape
    for first_a in range(0, 1 << formats[0].bits, m):
        for first_b in range(0, 1 << formats[1].bits, n):
            operands = []
            for count, first, fmt, granularity in (
                (m, first_a, formats[0], scaled.granularities[0]),
                (n, first_b, formats[1], scaled.granularities[1]),
            ):
                drawn = np.zeros((count, k), np.uint8)
                drawn[:, 0] = (first + np.arange(count)) % (1 << fmt.bits)
                operands.append(operand(drawn, fmt, granularity))
            yield Stimulus("all codes", operands[0], operands[1])


def pairs(
    scaled: ScaledGemm,
    shape: tuple[int, int, int],
    formats: tuple[Format, Format],
    out: Format,
    *,
    terms: int = 2,
) -> Iterator[Stimulus]:
    """Sums of one or two products under random scales, also at large and small results.

    A sum of two products rounds once in float32, whatever the order.
    """
    m, n, k = shape
    for seed, exponent in enumerate((0, 0, 0, 0) if out == FLOAT16 else (0, 0, 20, -40)):
        rng = np.random.default_rng([seed, terms])
        operands = []
        for count, fmt, granularity in zip((m, n), formats, scaled.granularities, strict=True):
            values = np.zeros((count, k), np.float32)
            if fmt.bits == 8:
                values[:, 0] = rng.integers(8, 16, count)
                # 2^-12 of the first product
                values[:, 1] = rng.integers(8, 16, count) / 64 * (terms > 1)
            else:
                values[:, 0] = rng.choice([3, 4, 6], count)
                values[:, 1] = rng.choice([0.5, 1, 1.5], count) * (terms > 1)
            scales = 2.0 ** (
                rng.uniform(-1, 1, (scale_shape(granularity, values.shape, -1))) - exponent / 2
            )
            operands.append(operand(cast.encode(values, fmt), fmt, granularity, scales))
        yield Stimulus(
            f"{'single products' if terms == 1 else 'sums of two products'} under random scales",
            operands[0],
            operands[1],
        )


def wide(
    scaled: ScaledGemm, shape: tuple[int, int, int], formats: tuple[Format, Format], *, length: int
) -> Stimulus:
    """Integers in the first ``length`` of K: of one sign in every other row, of both in the others.

    Sums of magnitudes are below 2^24, and scale_inv of a brings them into float16's range.
    """
    m, n, k = shape
    # the mean product of two numbers from 1 to 15 is 64, of two from 1 to 3 it is 4
    most = 15 if 100 * k < 1 << 24 else 3
    assert 9 * k < 1 << 24, k
    rng = np.random.default_rng([m, n, k, 1])
    operands = []
    scale = 2.0 ** max(int(100 * k).bit_length() - 15, 0)
    for count, fmt, granularity, factor in zip(
        (m, n), formats, scaled.granularities, (scale, 1.0), strict=True
    ):
        values = np.zeros((count, k), np.float32)
        values[:, :length] = rng.integers(1, most + 1, (count, length))
        values[1::2, :length] *= rng.choice(np.array([-1, 1], np.float32), (count // 2, length))
        operands.append(operand(cast.encode(values, fmt), fmt, granularity, factor))
    return Stimulus("integers of many bits", operands[0], operands[1])


def random(
    scaled: ScaledGemm,
    shape: tuple[int, int, int],
    formats: tuple[Format, Format],
    out: Format,
    seed: int,
) -> Stimulus:
    """Normal numbers whose width varies by row and along K, under random scales."""
    m, n, k = shape
    rng = np.random.default_rng([seed, m, n, k])
    bench = Bench(gemm=scaled, m=m, n=n, k=-(-k // 32) * 32, fmt_a=formats[0], fmt_b=formats[1])
    drawn = [np.ascontiguousarray(x[:, :k]) for x in plans.draw_codes(bench, rng)]
    operands = []
    for granularity, fmt, x in zip(scaled.granularities, formats, drawn, strict=True):
        # values reach 2^7, and sums 2^14 K: float16 holds those of operands that are smaller by the
        # root of K each
        scales = 2.0 ** (
            rng.uniform(-1, 1, scale_shape(granularity, x.shape, -1))
            + (k.bit_length() / 2 + 1) * (out == FLOAT16)
        )
        operands.append(operand(x, fmt, granularity, scales))
    return Stimulus("random operands", operands[0], operands[1])


def thinned(few: Stimulus, k: int) -> Stimulus:
    """A stimulus of ``LONG`` products in blocks of a longer K, the first and the last among them.

    All else is zero: a sum rounds as often as that of ``few``, and has its value, wherever parts of
    K begin.
    """
    blocks = np.linspace(0, k // BLOCK - 2, LONG // BLOCK - 1).astype(np.int64) * BLOCK
    where = (np.append(blocks, k - BLOCK)[:, None] + np.arange(BLOCK)).reshape(-1)
    operands = []
    for q in (few.a, few.b):
        codes = np.zeros((len(q.codes), k), np.uint8)
        codes[:, where] = q.codes
        scales = q.scale
        if scales.ndim and scales.shape[1] > 1:
            size = LONG // scales.shape[1]
            scales = np.ones(scale_shape(q.granularity, codes.shape, -1), np.float32)
            scales[:, where[::size] // size] = q.scale
        operands.append(operand(codes, q.fmt, q.granularity, scales))
    return Stimulus(f"random operands in {LONG} of K", operands[0], operands[1])
