"""The verdict of ``fp8ref vectors verify``: wrong answers, and counts of each kind."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fp8ref.conformance.vectors.format import short
from fp8ref.shared.result import Result

if TYPE_CHECKING:
    from rich.console import Console

PRINTED = 8  # the most wrong answers that are printed

OF_A_KIND = 2  # most wrong answers of one kind of input, beside other kinds

SHORT = 16  # characters: longer inputs are not shown next to the number of their line


class AskedVector(NamedTuple):
    """A vector of gen: the number of its line, its kind, and the text of its inputs.

    The kind is that of its number (``inputs.kinds``), or the pattern of its tensors.
    """

    line: int
    kind: str
    text: str


class Verdict(Result):
    """Collects the answers of a stream to a set of vectors.

    Answers come in any order, each vector as often as it is asked: once, except tiny random
    tensors, which may be drawn twice.

    asked     the set; inputs are recognized by their text as gen writes it.
    some      vectors may be missing, unasked or repeated.
    unsure    why the set may not be the one that was answered, in words.

    compared  how many vectors came, by kind; differ: how many of their answers are wrong.
    unasked   lines of vectors not in the set; repeated: lines of those that came too often.
    first     some wrong answers; notes: sentences about all of them.
    """

    def __init__(self, vectors: Iterable[AskedVector], *, some: bool = False, unsure: str = ""):
        self.some, self.unsure = some, unsure
        self.compared: Counter[str] = Counter()
        self.differ: Counter[str] = Counter()
        self.unasked: list[int] = []
        self.repeated: list[int] = []
        self.first: list[dict] = []
        self.notes: list[str] = []
        self._asked: dict[bytes, list[AskedVector]] = {}  # by the digest of their inputs
        self._came: Counter[bytes] = Counter()
        for vector in vectors:
            self._asked.setdefault(_digest(vector.text), []).append(
                vector._replace(text=short(vector.text))
            )
        self.asked = Counter(vector.kind for group in self._asked.values() for vector in group)

    def kind(self, inputs: str) -> str:
        """The kind of inputs, if they are of the set, else 'other'."""
        vectors = self._asked.get(_digest(inputs))
        return vectors[0].kind if vectors else "other"

    def add(self, line: int, inputs: str, kind: str, *, differs: bool | np.bool_) -> bool:
        """Record a vector, and whether its answer differs. Returns whether to ``show`` it."""
        key = _digest(inputs)
        self._came[key] += 1
        if key not in self._asked:
            self.unasked.append(line)
        elif self._came[key] > len(self._asked[key]):
            self.repeated.append(line)
        self.compared[kind] += 1
        if not differs:
            return False
        self.differ[kind] += 1
        return self.differ[kind] <= OF_A_KIND and len(self.first) < PRINTED

    def show(self, line: int, kind: str, why: dict[str, str]) -> None:
        """Add a wrong answer to ``first``; why has the keys vector, expected, got and rule."""
        self.first.append({"line": line, "kind": kind} | why)

    @property
    def missing(self) -> list[AskedVector]:
        """The vectors that were asked and did not come, in gen's order."""
        return sorted(
            vector for key, vectors in self._asked.items() for vector in vectors[self._came[key] :]
        )

    @property
    def complete(self) -> bool:
        """Whether the vectors that came are those that were asked."""
        return not (self.missing or self.unasked or self.repeated)

    @property
    def ok(self) -> bool:
        """Whether every answer is right and, unless ``some``, every vector came once."""
        return not self.differ and (self.some or self.complete)

    def text(self) -> str:
        """The text that verify prints."""
        lines = [
            f"line {d['line']}: {d['vector']}: expected {d['expected']}, got {d['got']}. "
            f"{d['rule']}"
            for d in self.first
        ]
        came = self.compared.total()
        wrong = self.differ.total()
        total = self.asked.total()
        if wrong > len(self.first):
            lines.append(f"... and {wrong - len(self.first):,} more")
        lines.extend(self.notes)
        answered = self._answered()
        kinds = list(dict.fromkeys([*self.asked, *self.compared]))
        width = max(len(k) for k in kinds)
        lines.append(
            f"{'inputs':<{width}}  {'asked':>9}  {'answered':>9}  {'compared':>9}  {'differ':>9}"
        )
        for kind in kinds:
            counts = self.asked, answered, self.compared, self.differ
            numbers = [count[kind] for count in counts]
            lines.append(f"{kind:<{width}}" + "".join(f"  {n:>9,}" for n in numbers))
        lines.extend(self._incomplete())
        lines.append(
            f"{answered.total():,} of {total:,} vectors judged; {came - wrong:,} of {came:,} "
            "answers agree"
        )
        return "\n".join(lines)

    def _answered(self) -> Counter[str]:
        return self.asked - Counter(vector.kind for vector in self.missing)

    def _incomplete(self) -> Iterable[str]:
        if self.complete:
            return
        if missing := self.missing:
            places = [
                f"{v.line} ({v.text})" if len(v.text) <= SHORT else f"{v.line}"
                for v in missing[: PRINTED + 1]
            ]
            yield (
                f"missing: {len(missing):,} of the {self.asked.total():,} vectors; in gen's "
                f"output, line {_some(places)}"
            )
        for name, lines in (("not asked", self.unasked), ("repeated", self.repeated)):
            if lines:
                yield (
                    f"{name}: {len(lines):,} of the vectors received, judged like the others; "
                    f"line {_some([str(n) for n in lines])}"
                )
        if self.unsure:
            yield self.unsure
        if not self.some:
            yield "verify expects each vector of gen once; --some judges the vectors received"

    def render(self, console: "Console") -> None:
        """Print ``text``."""
        console.out(self.text(), highlight=False)

    def to_dict(self) -> dict:
        """The contents of --json."""
        return {
            "ok": self.ok,
            "asked": dict(self.asked),
            "answered": dict(self._answered()),
            "compared": dict(self.compared),
            "differ": dict(self.differ),
            "missing": [vector._asdict() for vector in self.missing],
            "unasked": self.unasked,
            "repeated": self.repeated,
            "first": self.first,
            "notes": self.notes,
        }


def _some(places: list[str]) -> str:
    shown = ", ".join(places[:PRINTED])
    return f"{shown}, ..." if len(places) > PRINTED else shown


def _digest(text: str) -> bytes:
    """16 bytes that stand for a text: a set of large tensors would not fit into memory."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
