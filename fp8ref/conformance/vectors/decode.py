"""Test vectors of a decoder: a code, the bits of its scale_inv, and those of its value (spec S-8).

A set has every code under scales of 1 and at the ends of their range, then random codes and scales.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.decoder.products import ENDS
from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.kit import explain
from fp8ref.conformance.kit.arrays import equal
from fp8ref.conformance.vectors import format as text
from fp8ref.conformance.vectors.verdict import Verdict
from fp8ref.formats import E4M3FN, E8M0FNU, FORMATS, Format
from fp8ref.shared.errors import one_of
from fp8ref.sim.quantize import cast

FIELDS, ANSWERS = ("code", "scale_inv"), ("value",)
NAMES = tuple(f.name for f in FORMATS.values() if f.bits <= 8)
"""The names of the formats of at most 8 bits."""
SCALES = {"float32": None, "e8m0fnu": E8M0FNU, "e4m3fn": E4M3FN}
"""{what a scale_inv is: the format of its code; None: a float32}."""
KINDS = ("NaN code", "infinite", "zero", "subnormal", "number", "scale at an end")
"""What decides a value: the code, or the scale."""


@dataclass(frozen=True, kw_only=True)
class Decode:
    """A set of vectors: codes of a format and scales; ``count`` of them random, from ``seed``.

    Raises:   ValueError: an unknown format, scales or out_dtype; a seed or count out of range.
    """

    format: str
    scales: str = "float32"
    out_dtype: str = "float32"
    seed: int = 0
    count: int = 5_000

    def __post_init__(self) -> None:
        for what, name, names in (
            ("format", self.format, NAMES),
            ("scales", self.scales, tuple(SCALES)),
            ("out_dtype", self.out_dtype, ("float32", "bfloat16", "float16")),
        ):
            one_of(f"a decoder's {what}", name, names)
        dtypes.check_random(self.seed, self.count)

    @property
    def fmt(self) -> Format:
        """The format itself."""
        return FORMATS[self.format]

    @property
    def width(self) -> int:
        """The bits of a scale_inv."""
        return 32 if SCALES[self.scales] is None else 8

    def scale_bits(self, scales: np.ndarray) -> np.ndarray:
        """The bits of the nearest scales; uint64."""
        fmt = SCALES[self.scales]
        bits = scales.view(np.uint32) if fmt is None else cast.encode(scales, fmt)
        return bits.astype(np.uint64)

    def scale_values(self, bits: np.ndarray) -> np.ndarray:
        """The scales of bits; float32."""
        fmt = SCALES[self.scales]
        if fmt is None:
            return bits.astype(np.uint32).view(np.float32)
        return cast.decode(bits.astype(np.uint8), fmt)

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """(codes, bits of scales), uint64 [n] each."""
        ends = np.array([1, *np.exp2(np.array(ENDS, np.float64)), np.nan], np.float32)
        kept = np.unique(self.scale_bits(ends))
        codes = np.arange(1 << self.fmt.bits, dtype=np.uint64)
        random = dtypes.random(self.seed, 2 * self.count).reshape(2, self.count)
        some = np.exp2((random[1] >> np.uint64(40)).astype(np.float64) / 2**20 - 8)
        return (
            np.concatenate([np.repeat(codes, kept.size), random[0] % np.uint64(codes.size)]),
            np.concatenate([np.tile(kept, codes.size), self.scale_bits(some.astype(np.float32))]),
        )

    def vectors(self) -> Iterator[tuple[str, str]]:
        """(kind, line) of each code and scale, each pair once."""
        lines = dict.fromkeys(zip(*self.inputs(), strict=True))
        codes, scales = (np.array(part, np.uint64) for part in zip(*lines, strict=True))
        kinds = (KINDS[kind] for kind in self.kinds(codes, scales))
        return zip(kinds, self.lines(codes, scales), strict=True)

    def lines(self, codes: np.ndarray, scales: np.ndarray) -> list[str]:
        """The line of each code and scale."""
        codes_text = text.hexadecimal(codes, self.fmt.bits)
        fields = codes_text, text.hexadecimal(scales, self.width)
        return [f"{code} {scale}" for code, scale in zip(*fields, strict=True)]

    def kinds(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """For each, an index of KINDS."""
        value = cast.decode(codes.astype(np.uint8), self.fmt)
        scale = self.scale_values(scales)
        small = np.abs(value) < self.fmt.smallest_normal
        cases = [np.isnan(value), np.isinf(value), value == 0, small]
        kinds = np.select(cases, range(4), 4)
        with np.errstate(invalid="ignore"):
            usual = (scale >= 2.0**-9) & (scale <= 2.0**9)
        return np.where(usual, kinds, KINDS.index("scale at an end"))

    def expected(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """RN32(decode(code) * scale_inv), rounded to out_dtype (S-8); float32."""
        with np.errstate(over="ignore", invalid="ignore"):
            product = cast.decode(codes.astype(np.uint8), self.fmt) * self.scale_values(scales)
            return dtypes.rounded(product, self.out_dtype)

    def rounded_once(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """The product rounded to out_dtype alone, which is right too; float32."""
        with np.errstate(over="ignore", invalid="ignore"):
            value = cast.decode(codes.astype(np.uint8), self.fmt).astype(np.float64)
            return dtypes.rounded(value * self.scale_values(scales), self.out_dtype)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A value has one right answer: there is nothing to choose."""


def specified(question: Decode, rules: Rules) -> Iterator[str]:
    """The simulator's answer to each vector."""
    fields = zip(*(line.split() for _, line in question.vectors()), strict=True)
    codes, scales = (np.array([int(bits, 16) for bits in field], np.uint64) for field in fields)
    out = dtypes.by_name(question.out_dtype)
    return iter(text.hexadecimal(dtypes.bits(question.expected(codes, scales), out), out.bits))


def verify(
    question: Decode, rules: Rules, vectors: Iterator[text.Vector], verdict: Verdict
) -> None:
    """Judge every vector, and record it in the verdict. All NaNs count as equal."""
    out = dtypes.by_name(question.out_dtype)
    for batch in text.batches(vectors):
        codes = [v.number(0, question.fmt.bits, f"a code of {question.fmt}") for v in batch]
        scales = [v.number(1, question.width, "a scale_inv") for v in batch]
        answers = [v.number(2, out.bits, f"a {out.name}") for v in batch]
        asked = np.array(codes, np.uint64), np.array(scales, np.uint64)
        got = dtypes.values(np.array(answers, np.uint64), out).astype(np.float32)
        expected = question.expected(*asked)
        same = equal(got, expected) | equal(got, question.rounded_once(*asked))
        differ = ~same | ((got == 0) & (np.signbit(got) != np.signbit(expected)))
        lines, kinds = question.lines(*asked), question.kinds(*asked)
        for i, vector in enumerate(batch):
            kind = KINDS[kinds[i]]
            if verdict.add(vector.line, lines[i], kind, differs=bool(differ[i])):
                code, scale = (part[i : i + 1] for part in asked)
                under = explain.decimal(question.scale_values(scale)[0])
                why = {
                    "vector": f"{lines[i]}, {explain.code(codes[i], question.fmt)} under scale_inv "
                    f"{under} ({kind})",
                    "expected": explain.decimal(question.expected(code, scale)[0]),
                    "got": explain.decimal(got[i]),
                    "rule": "the code's number times scale_inv, rounded to float32 (S-8).",
                }
                verdict.show(vector.line, kind, why)
