"""Questions to a GEMM: rows of products whose sum tells something. Many are asked at once, and each all over the result.

Question i is row i of a against row i of b. They repeat along M and N, so that an answer stands wherever the indices of row and column have
the same remainder, and a GEMM whose arithmetic differs from one tile of its result to another is found out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp8ref.conformance.gemm.adapter import ProbeError, Subject, operand
from fp8ref.formats import FLOAT32, Format
from fp8ref.sim import cast

SEEN = 256  # rows, and columns
Terms = Mapping[int, tuple[float, float]]


class VariesError(ProbeError):
    """Equal operands have unequal results at different places of one GEMM."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where questions are asked: a subject, the shape of its GEMM, the formats of its operands, and what its results are rounded to, and how."""

    subject: Subject
    m: int
    n: int
    k: int
    fmt_a: Format
    fmt_b: Format
    out: Format = FLOAT32
    rounding: Literal["nearest_even", "toward_zero"] = "nearest_even"

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Sums as results."""
        return cast.round_to(values, self.out, rounding=self.rounding)

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of random results that are computed again: all, or of many some, evenly spaced, the first and the last among them."""
        return tuple(np.unique(np.linspace(0, n - 1, min(n, SEEN)).astype(int)) for n in (self.m, self.n))  # type: ignore[return-value]

    @property
    def top(self) -> int:
        """The exponent of the largest power of two that is a product."""
        return _emax(self.fmt_a) + _emax(self.fmt_b)

    @property
    def bottom(self) -> int:
        """The exponent of the smallest power of two that is a product of normal numbers."""
        return self.fmt_a.emin + self.fmt_b.emin

    def power(self, exponent: int, sign: int = 1) -> tuple[float, float]:
        """Two normal numbers whose product is sign * 2^exponent; nothing else is said of them."""
        least, most = max(self.fmt_a.emin, exponent - _emax(self.fmt_b)), min(_emax(self.fmt_a), exponent - self.fmt_b.emin)
        assert least <= most, exponent
        of_a = min(max(exponent // 2, least), most)
        return sign * 2.0**of_a, 2.0 ** (exponent - of_a)

    @property
    def largest(self) -> tuple[float, float]:
        """The largest powers of two of a and of b."""
        return 2.0 ** _emax(self.fmt_a), 2.0 ** _emax(self.fmt_b)

    def tiny(self, exponent: int) -> tuple[float, float] | None:
        """Two numbers whose product is 2^exponent, subnormal ones if need be; None where there are none."""
        if exponent >= self.bottom:
            return self.power(exponent)
        x = 2.0**exponent / self.fmt_b.smallest_subnormal
        return (x, self.fmt_b.smallest_subnormal) if x >= self.fmt_a.smallest_subnormal else None

    def codes(self, questions: Sequence[Terms]) -> tuple[np.ndarray, np.ndarray]:
        """[Q, K] codes of a and of b; K beyond the terms is zeros."""
        values = np.zeros((2, len(questions), self.k))
        for i, terms in enumerate(questions):
            for at, pair in terms.items():
                values[:, i, at] = pair
        encoded = cast.encode(values[0], self.fmt_a), cast.encode(values[1], self.fmt_b)
        assert all(np.array_equal(cast.decode(c, f), v) for c, f, v in zip(encoded, (self.fmt_a, self.fmt_b), values, strict=True))
        return encoded

    def ask(self, questions: Sequence[Terms]) -> np.ndarray:
        """The answers, float32 [Q], under scales of one."""
        return self.ask_codes(*self.codes(questions))

    def ask_codes(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The answers to questions [Q, K] in codes.

        Raises:   VariesError: one has several.
        """
        side = min(self.m, self.n)
        return np.concatenate([self._ask(a[i : i + side], b[i : i + side]) for i in range(0, len(a), side)])

    def _ask(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        count = len(a)
        rows, columns = np.arange(self.m) % count, np.arange(self.n) % count
        left, right = (
            operand(np.ascontiguousarray(codes[index]), fmt, self.subject.granularity)
            for codes, index, fmt in ((a, rows, self.fmt_a), (b, columns, self.fmt_b))
        )
        found, _ = self.subject.multiply(left, right)
        answers = found[np.arange(count), np.arange(count)]
        same = (found.view(np.uint32) == answers.view(np.uint32)[rows][:, None]) | (rows[:, None] != columns[None, :])
        if not same.all():
            i, j = (int(x) for x in np.argwhere(~same)[0])
            raise VariesError(
                f"{self.subject.name} sums in different ways within one result [{self.m}, {self.n}], K = {self.k}: equal operands gave "
                f"{answers[rows[i]]:.9g} at {[int(rows[i])] * 2} and {found[i, j]:.9g} at {[i, j]}. Probe a smaller M and N, of one tile."
            )
        return answers


def finite_codes(rng: np.random.Generator, shape: tuple[int, ...], fmt: Format) -> np.ndarray:
    """Any codes of numbers."""
    codes = np.arange(256, dtype=np.uint8)
    return rng.choice(codes[np.isfinite(cast.decode(codes, fmt))], shape)


def _emax(fmt: Format) -> int:
    """The exponent of the largest power of two of a format."""
    return int(np.frexp(fmt.max)[1]) - 1
