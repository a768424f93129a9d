"""Test vectors of a cast: the bits of a value, and its code (spec C).

A set has the specials of the source, every number and tie of the format with their neighbors,
overflow, and then random bits: half of them any, half near the format's range
(``inputs.cast_inputs.vector_bits``).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.inputs import cast_inputs, dtypes, kinds
from fp8ref.conformance.kit import explain
from fp8ref.conformance.kit.explain import Rules as Rules
from fp8ref.conformance.vectors import format as text
from fp8ref.conformance.vectors.verdict import Verdict
from fp8ref.formats import FORMATS, Format
from fp8ref.shared.errors import one_of

FIELDS, ANSWERS = ("value",), ("code",)
NAMES = tuple(f.name for f in FORMATS.values() if f.bits <= 8)
"""The names of the formats of 8 bits, and of 4."""


@dataclass(frozen=True, kw_only=True)
class Cast:
    """A set of vectors: values of a source, to cast to a format; ``count`` random, by ``seed``.

    Raises:   ValueError: an unknown format or source, a seed or count out of range.
    """

    format: str
    source: str = "float32"
    seed: int = 0
    count: int = 10_000

    def __post_init__(self) -> None:
        one_of("a cast's format", self.format, NAMES)
        dtypes.by_name(self.source)
        dtypes.check_random(self.seed, self.count)

    @property
    def fmt(self) -> Format:
        """The format itself."""
        return FORMATS[self.format]

    def inputs(self) -> np.ndarray:
        """The bits of all inputs, each once; uint64."""
        source = dtypes.by_name(self.source)
        return cast_inputs.vector_bits(self.fmt, source, seed=self.seed, count=self.count)

    def vectors(self) -> Iterator[tuple[str, str]]:
        """(kind, line) of each input."""
        inputs = self.inputs()
        names = (kinds.CASTS[kind] for kind in self.kinds(inputs))
        return zip(names, self.lines(inputs), strict=True)

    def lines(self, bits: np.ndarray) -> list[str]:
        """The line of each input."""
        return text.hexadecimal(bits, dtypes.by_name(self.source).bits)

    def kinds(self, bits: np.ndarray) -> np.ndarray:
        """For each input, an index of kinds.CASTS."""
        source = dtypes.by_name(self.source)
        return kinds.cast_kinds(dtypes.values(bits, source), source, self.fmt)


def specified(question: Cast, rules: Rules) -> Iterator[str]:
    """The simulator's answer to each vector."""
    x = dtypes.values(question.inputs(), dtypes.by_name(question.source))
    return iter(text.hexadecimal(rules.encode(x, question.fmt), question.fmt.bits))


def verify(question: Cast, rules: Rules, vectors: Iterator[text.Vector], verdict: Verdict) -> None:
    """Judge every vector, and record it in the verdict. All NaN codes count as equal (C-5); any
    code of a NaN does in a format without NaN (C-9)."""
    source, fmt = dtypes.by_name(question.source), question.fmt
    answered: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in text.batches(vectors):
        bits = np.array([v.number(0, source.bits, f"a {source.name}") for v in batch], np.uint64)
        codes = np.array([v.number(1, fmt.bits, f"a code of {fmt}") for v in batch], np.uint8)
        x = dtypes.values(bits, source)
        differ = rules.differ(x, codes, fmt)
        lines, kind_indices = question.lines(bits), question.kinds(bits)
        answered.append((x, codes))
        for i, vector in enumerate(batch):
            kind = kinds.CASTS[kind_indices[i]]
            if verdict.add(vector.line, lines[i], kind, differs=differ[i]):
                why = _why(question, rules, kind, lines[i], x[i], int(codes[i]))
                verdict.show(vector.line, kind, why)
    if verdict.differ:  # only all answers together can tell which other rule was followed
        x, codes = (np.concatenate(parts) for parts in zip(*answered, strict=True))
        verdict.notes += filter(None, [rules.note(x, codes, fmt)])


def _why(question: Cast, rules: Rules, kind: str, line: str, x, code: int) -> dict[str, str]:
    fmt = question.fmt
    expected = rules.encode(x, fmt)
    guess = rules.guess(np.reshape(x, 1), np.full(1, code, np.uint8), fmt)
    sentence = f" The answer is what {' or '.join(guess)} gives." if guess else ""
    return {
        "vector": f"{line}, {question.source} {explain.decimal(x)} ({kind})",
        "expected": explain.code(int(expected), fmt),
        "got": explain.code(code, fmt),
        "rule": f"{rules.rule(kind, fmt)}.{sentence}",
    }
