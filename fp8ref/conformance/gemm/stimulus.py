"""Stimuli for a GEMM: rows of products whose sum shows how it is computed.

One stimulus is a row of a and a row of b; the GEMM's result for the pair is its answer. Many are
run in one GEMM: stimulus i is row i of a and row i of b, and both repeat along M and N. The answer
to stimulus i then stands at every place [r, c] with r = c = i modulo the number of stimuli. All of
these must be equal, which exposes a GEMM whose arithmetic differs between tiles of its result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp8ref.conformance.gemm.scaled_gemm import ProbeError, ScaledGemm
from fp8ref.formats import FLOAT32, Format
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized

SAMPLED = 256  # the most rows, and the most columns, that the simulator computes too

Terms = Mapping[int, tuple[float, float]]
"""A stimulus: index in K -> the two factors of its product; elsewhere zeros."""

Pairs = Mapping[int, tuple[int, int]]
"""A stimulus in codes: index in K -> the two codes of its product; elsewhere zeros."""


class VariesError(ProbeError):
    """Equal operands have unequal results at different places of one result."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A GEMM of one shape, with the formats of its operands and the rounding of its results."""

    gemm: ScaledGemm
    m: int
    n: int
    k: int
    fmt_a: Format
    fmt_b: Format
    out: Format = FLOAT32
    rounding: Literal["nearest_even", "toward_zero"] = "nearest_even"

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Sums rounded as the GEMM rounds its results."""
        return cast.round_to(values, self.out, rounding=self.rounding)

    def operands(self, a: np.ndarray, b: np.ndarray) -> tuple[Quantized, Quantized]:
        """Operands from codes, under scales of one."""
        return self.gemm.operands((a, b), (self.fmt_a, self.fmt_b))

    @property
    def sampled(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of a result that the simulator computes too.

        All, or at most 256, evenly spaced from first to last.
        """
        return tuple(
            np.unique(np.linspace(0, n - 1, min(n, SAMPLED)).astype(int)) for n in (self.m, self.n)
        )  # type: ignore[return-value]

    @property
    def top(self) -> int:
        """The exponent of the largest product of two powers of two."""
        return _emax(self.fmt_a) + _emax(self.fmt_b)

    @property
    def bottom(self) -> int:
        """The exponent of the smallest product of two normal powers of two."""
        return self.fmt_a.emin + self.fmt_b.emin

    def power(self, exponent: int, sign: int = 1) -> tuple[float, float]:
        """Two normal numbers whose product is sign * 2^exponent."""
        least = max(self.fmt_a.emin, exponent - _emax(self.fmt_b))
        most = min(_emax(self.fmt_a), exponent - self.fmt_b.emin)
        assert least <= most, exponent
        exponent_a = min(max(exponent // 2, least), most)
        return sign * 2.0**exponent_a, 2.0 ** (exponent - exponent_a)

    @property
    def largest(self) -> tuple[float, float]:
        """The largest powers of two of a and of b."""
        return 2.0 ** _emax(self.fmt_a), 2.0 ** _emax(self.fmt_b)

    def tiny(self, exponent: int) -> tuple[float, float] | None:
        """Two numbers whose product is 2^exponent, subnormal if necessary.

        None if the formats have none.
        """
        if exponent >= self.bottom:
            return self.power(exponent)
        x = 2.0**exponent / self.fmt_b.smallest_subnormal
        if x >= self.fmt_a.smallest_subnormal:
            return (x, self.fmt_b.smallest_subnormal)
        return None

    def codes(self, stimuli: Sequence[Terms]) -> tuple[np.ndarray, np.ndarray]:
        """Codes [Q, K] of a and of b for Q stimuli; zeros next to the terms."""
        values = np.zeros((2, len(stimuli), self.k))
        for i, terms in enumerate(stimuli):
            for at, pair in terms.items():
                values[:, i, at] = pair
        a, b = cast.encode(values[0], self.fmt_a), cast.encode(values[1], self.fmt_b)
        assert np.array_equal(cast.decode(a, self.fmt_a), values[0])
        assert np.array_equal(cast.decode(b, self.fmt_b), values[1])
        return a, b

    def run(self, stimuli: Sequence[Terms]) -> np.ndarray:
        """The results of stimuli, float32 [Q], under scales of one."""
        return self.run_codes(*self.codes(stimuli))

    def run_codes(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The results, float32 [Q], of stimuli in codes [Q, K].

        Raises:   VariesError: one stimulus has several results.
        """
        side = min(self.m, self.n)
        parts = [slice(i, i + side) for i in range(0, len(a), side)]
        return np.concatenate([self._run(a[part], b[part]) for part in parts])

    def _run(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        count = len(a)
        rows, columns = np.arange(self.m) % count, np.arange(self.n) % count
        outputs, _ = self.gemm.multiply(*self.operands(a[rows], b[columns]))
        results = outputs[np.arange(count), np.arange(count)]
        same = (outputs.view(np.uint32) == results.view(np.uint32)[rows][:, None]) | (
            rows[:, None] != columns[None, :]
        )
        if not same.all():
            i, j = (int(x) for x in np.argwhere(~same)[0])
            raise VariesError(
                f"{self.gemm.name} sums in different ways within one result [{self.m}, "
                f"{self.n}], K = {self.k}: equal operands gave {results[rows[i]]:.9g} at "
                f"{[int(rows[i])] * 2} and {outputs[i, j]:.9g} at {[i, j]}. Probe a smaller M and "
                "N, of one tile."
            )
        return results


def coded(stimuli: Iterable[Pairs], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [Q, K] of a and of b for Q stimuli in codes."""
    rows = list(stimuli)
    codes = np.zeros((2, len(rows), k), np.uint8)
    for i, pairs in enumerate(rows):
        for at, pair in pairs.items():
            codes[:, i, at] = pair
    return codes[0], codes[1]


def finite_codes(rng: np.random.Generator, shape: tuple[int, ...], fmt: Format) -> np.ndarray:
    """Random codes of all finite numbers of a format."""
    codes = np.arange(256, dtype=np.uint8)
    return rng.choice(codes[np.isfinite(cast.decode(codes, fmt))], shape)


def _emax(fmt: Format) -> int:
    """The exponent of the largest power of two of a format."""
    return int(np.frexp(fmt.max)[1]) - 1
