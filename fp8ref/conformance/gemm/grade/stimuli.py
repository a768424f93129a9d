"""Operands that a GEMM is graded with, each chosen so that one kind of fault shows.

``integers``  sums that have at most 8 bits in any order, under scales that are powers of two: every
              GEMM whose accumulator has 8 bits gives the same bits, and another result is wrong.
``single``    products alone, one for each index of K.
``codes``     all products of two codes, one for each result.
``pairs``     sums of two products under random scales: what scales and output do to a float32.
``wide``      sums of integers that float32 holds in any order, and a narrower accumulator does not.
``random``    numbers of many sizes under random scales.
``thinned``   the same in few blocks of a long K, zeros elsewhere.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fp8ref.conformance.gemm import plans
from fp8ref.conformance.gemm.scaled_gemm import RefusedError, ScaledGemm, operand
from fp8ref.conformance.gemm.stimulus import Bench
from fp8ref.formats import FLOAT16, Format
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec.epilogue import EPILOGUES, Epilogue
from fp8ref.spec.granularity import by_name, scale_shape

Shape = tuple[int, int, int]  # M, N and K
SHORT = 1024  # K with which codes, scales and roundings are asked, if no shorter one is
TERMS = 40
"""Products of a sum of ``integers``: of 3 x 2 at most each, so that 40 of them stay below 2^8."""

TERMS_OF_BLOCKS = 10
"""The same under scales of blocks, which differ by a factor of 4 within a sum."""

LONG = 4096
"""Of a longer K few indices are asked for by chance: its ends are asked for on purpose, and
``thinned`` has as many products as this."""

END = 256  # indices at each end of a long K: a quarter of ``integers`` each

BLOCK = 128  # length of the blocks of ``thinned``: a multiple of those that scales have


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A GEMM, and what it is asked with."""

    scaled: ScaledGemm
    formats: tuple[Format, Format]
    epilogue: Epilogue = EPILOGUES["scale_then_round"]
    accumulate: str | Accumulation = "exact"
    seed: int = 0

    def run(self, stimulus: "Stimulus") -> tuple[np.ndarray, Format]:
        """The results of a stimulus, and their dtype."""
        return self.scaled.multiply(stimulus.a, stimulus.b, stimulus.bias, repeat=False)

    def short(self, shapes: Iterable[Shape]) -> Shape:
        """The shape of the least K, cut to ``SHORT`` if the GEMM takes that."""
        m, n, k = min(shapes, key=lambda shape: shape[2])
        cut = (m, n, min(k, SHORT))
        try:
            self.run(integers(self, cut))
        except RefusedError:
            return m, n, k
        return cut

    def stimulus(
        self, name: str, values: Iterable[np.ndarray], scales: Iterable[Any] = (1.0, 1.0)
    ) -> "Stimulus":
        """A stimulus of numbers [M, K] and [N, K] under scales."""
        codes = [cast.encode(x, fmt) for x, fmt in zip(values, self.formats, strict=True)]
        return Stimulus(name, *self.scaled.operands(codes, self.formats, scales))

    def scale_shapes(self, *shapes: tuple[int, int]) -> list[tuple[int, ...]]:
        """The shapes of the scales of a and of b of these shapes."""
        both = zip(self.scaled.granularities, shapes, strict=True)
        return [scale_shape(granularity, shape, -1) for granularity, shape in both]


class Stimulus(NamedTuple):
    """Two operands, and a bias [N] or none."""

    name: str
    a: Quantized
    b: Quantized
    bias: np.ndarray | None = None

    @property
    def shape(self) -> Shape:
        """M, N and K."""
        return len(self.a.codes), len(self.b.codes), self.a.codes.shape[1]

    def __str__(self) -> str:
        m, n, k = self.shape
        bias = "" if self.bias is None else ", with a bias"
        return (
            f"{self.name} [{m}, {n}], K = {k}, {self.a.fmt} x {self.b.fmt}, "
            f"{self.a.granularity} x {self.b.granularity}{bias}"
        )


def integers(asked: Asked, shape: Shape, *, bias: bool = False) -> Stimulus:
    """Few small integers in each row of a, small integers everywhere in b; of a long K, half of
    them at its ends.

    Scales of a and b are other powers of two, so that a scale in the place of another one shows.
    Where blocks do not divide K, zeros follow up to the next block: ``cut`` takes them away.
    """
    m, n, k = shape
    rng = np.random.default_rng([m, n, k])
    block = by_name(asked.scaled.granularity).reduced
    count = min(4 if bias else TERMS_OF_BLOCKS if block else TERMS, k)
    padded = -(-k // block) * block if block else k
    a, b = np.zeros((m, padded), np.float32), np.zeros((n, padded), np.float32)
    for row in a:
        row[_places(rng, k, count)] = rng.choice([-3, -2, -1, 1, 2, 3], count)
    b[:, :k] = rng.choice(np.array([-2, -1, 1, 2], np.float32), (n, k))
    shapes = zip(asked.scale_shapes(a.shape, b.shape), (1, -5), _ENDS, strict=True)
    scales = [1 / _powers(rng, *shape) for shape in shapes]
    if not bias:
        return asked.stimulus("integers", (a, b), scales)
    # scale_inv 8 and 1/2: a bias that is added before one of them or both shows
    added = rng.integers(-63, 64, n).astype(np.float32)
    return asked.stimulus("integers", (a, b), (0.125, 2.0))._replace(bias=added)


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


_ENDS = ((0, 1), (0, 1)), ((1, 0), (2, 0))
"""log2 of the first and of the last two scale_inv along K, of a and of b. The last block reads that
of the block before it as 1/2 in a, 4 in b, 2 in both; products differ by a factor of 4 at most."""


def _powers(
    rng: np.random.Generator,
    counts: tuple[int, ...],
    centre: int,
    ends: tuple[tuple[int, int], tuple[int, int]],
) -> np.ndarray:
    """Scale_inv of a shape: powers of two, which differ by row, and by a factor of 2 along K.

    ends   ``_ENDS`` of the operand: the last block along K, which may be cut, has another one than
           the first and the one before it.
    """
    if not counts:
        return np.asarray(2.0**centre, np.float32)
    by_row = rng.integers(-3, 4, (counts[0], 1))
    along_k = rng.integers(0, 2, (1, counts[1]))
    if counts[1] > 3:
        along_k[0, :2] = ends[0]
    along_k[0, -2:] = ends[1] if counts[1] > 1 else 0
    return (2.0 ** (centre + by_row + along_k)).astype(np.float32)


def single(asked: Asked, shape: Shape) -> Iterator[tuple[np.ndarray, Stimulus]]:
    """Pairs of (k [M, N], the index of K of a result's only product, -1 of none; the operands).

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
        yield indices, asked.stimulus("single products", (a, b))


def codes(asked: Asked, shape: Shape) -> Iterator[Stimulus]:
    """All codes of a times all of b, each the only product of its result."""
    m, n, k = shape
    a, b = np.zeros((m, k), np.uint8), np.zeros((n, k), np.uint8)
    count_a, count_b = (1 << fmt.bits for fmt in asked.formats)
    for first_a, first_b in itertools.product(range(0, count_a, m), range(0, count_b, n)):
        a[:, 0] = (first_a + np.arange(m)) % count_a
        b[:, 0] = (first_b + np.arange(n)) % count_b
        operands = asked.scaled.operands((a.copy(), b.copy()), asked.formats)
        yield Stimulus("all codes", *operands)


def pairs(asked: Asked, shape: Shape, out: Format, *, terms: int = 2) -> Iterator[Stimulus]:
    """Sums of one or two products under random scales, also at large and small results.

    A sum of two products rounds once in float32, whatever the order.
    """
    m, n, k = shape
    for seed, exponent in enumerate((0, 0, 0, 0) if out == FLOAT16 else (0, 0, 20, -40)):
        rng = np.random.default_rng([seed, terms])
        operands = np.zeros((m, k), np.float32), np.zeros((n, k), np.float32)
        scales = []
        scale_shapes = asked.scale_shapes((m, k), (n, k))
        for values, fmt, scale in zip(operands, asked.formats, scale_shapes, strict=True):
            if fmt.bits == 8:
                values[:, 0] = rng.integers(8, 16, len(values))
                # 2^-12 of the first product
                values[:, 1] = rng.integers(8, 16, len(values)) / 64 * (terms > 1)
            else:
                values[:, 0] = rng.choice([3, 4, 6], len(values))
                values[:, 1] = rng.choice([0.5, 1, 1.5], len(values)) * (terms > 1)
            scales.append(2.0 ** (rng.uniform(-1, 1, scale) - exponent / 2))
        sums = "single products" if terms == 1 else "sums of two products"
        yield asked.stimulus(f"{sums} under random scales", operands, scales)


def wide(asked: Asked, shape: Shape, *, length: int) -> Stimulus:
    """Integers in the first ``length`` of K: of one sign in every other row, of both in the others.

    Sums of magnitudes are below 2^24, and scale_inv of a brings them into float16's range.
    """
    m, n, k = shape
    # the mean product of two numbers from 1 to 15 is 64, of two from 1 to 3 it is 4
    most = 15 if 100 * k < 1 << 24 else 3
    assert 9 * k < 1 << 24, k
    rng = np.random.default_rng([m, n, k, 1])
    operands = np.zeros((m, k), np.float32), np.zeros((n, k), np.float32)
    for values in operands:
        drawn = values[:, :length]
        drawn[:] = rng.integers(1, most + 1, drawn.shape)
        drawn[1::2] *= rng.choice(np.array([-1, 1], np.float32), drawn[1::2].shape)
    scale = 2.0 ** max(int(100 * k).bit_length() - 15, 0)
    return asked.stimulus("integers of many bits", operands, (scale, 1.0))


def random(asked: Asked, shape: Shape, out: Format) -> Stimulus:
    """Normal numbers whose width varies by row and along K, under random scales."""
    m, n, k = shape
    rng = np.random.default_rng([asked.seed, m, n, k])
    fmt_a, fmt_b = asked.formats
    bench = Bench(gemm=asked.scaled, m=m, n=n, k=-(-k // 32) * 32, fmt_a=fmt_a, fmt_b=fmt_b)
    drawn = [np.ascontiguousarray(x[:, :k]) for x in plans.draw_codes(bench, rng)]
    # values reach 2^7, and sums 2^14 K: float16 holds those of operands that are smaller by the
    # root of K each
    smaller = (k.bit_length() / 2 + 1) * (out == FLOAT16)
    scale_shapes = asked.scale_shapes((m, k), (n, k))
    scales = [2.0 ** (rng.uniform(-1, 1, shape) + smaller) for shape in scale_shapes]
    return Stimulus("random operands", *asked.scaled.operands(drawn, asked.formats, scales))


def thinned(few: Stimulus, k: int) -> Stimulus:
    """A stimulus of ``LONG`` products in blocks of a longer K, the first and the last among them.

    All else is zero: wherever parts of K begin, a sum has the value and roundings of ``few``'s.
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
