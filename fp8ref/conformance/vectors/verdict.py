"""What verify finds: disagreements, and by kind of input, which of the vectors that were asked were answered."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fp8ref.conformance.vectors.format import short
from fp8ref.result import Result

if TYPE_CHECKING:
    from rich.console import Console

PRINTED = 8  # disagreements in all, and
OF_A_KIND = 2  # of one kind of input, so that each is seen
SHORT = 16  # characters of inputs that are shown beside their line


class Asked(NamedTuple):
    """A vector of gen: its line there, the kind of its inputs, and their text."""

    line: int
    kind: str
    text: str


class Verdict(Result):
    """Of a stream of answers. A set of vectors is answered in any order, each as often as it is asked: once, but for tiny random tensors.

    asked:    the set; inputs are told apart by their text as gen writes it.
    some:     vectors may be missing, unasked or repeated.
    unsure:   why the set may be another one than was asked, in words.

    compared, differ: how many vectors came and how many of their answers are wrong, by kind; unasked and repeated: the lines of those that
    the set does not have, or not as often; first: some that differ; notes: of all that differ.
    """

    def __init__(self, asked: Iterable[Asked], *, some: bool = False, unsure: str = ""):
        self.some, self.unsure = some, unsure
        self.compared: Counter[str] = Counter()
        self.differ: Counter[str] = Counter()
        self.unasked: list[int] = []
        self.repeated: list[int] = []
        self.first: list[dict] = []
        self.notes: list[str] = []
        self._asked: dict[bytes, list[Asked]] = {}  # by the digest of their inputs
        self._came: Counter[bytes] = Counter()
        for vector in asked:
            self._asked.setdefault(_digest(vector.text), []).append(vector._replace(text=short(vector.text)))
        self.asked = Counter(vector.kind for vectors in self._asked.values() for vector in vectors)

    def kind(self, inputs: str) -> str:
        """That of inputs of the set, else 'other'."""
        vectors = self._asked.get(_digest(inputs))
        return vectors[0].kind if vectors else "other"

    def add(self, line: int, inputs: str, kind: str, *, differs: bool | np.bool_) -> bool:
        """A vector came with an answer, which is not the expected one where it differs; whether that is to be shown."""
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
        """why has the vector, what was expected, what was got and the rule, in words."""
        self.first.append({"line": line, "kind": kind} | why)

    @property
    def missing(self) -> list[Asked]:
        """What was asked and did not come, in gen's order."""
        return sorted(vector for key, vectors in self._asked.items() for vector in vectors[self._came[key] :])

    @property
    def complete(self) -> bool:
        """The vectors that came are those that were asked."""
        return not (self.missing or self.unasked or self.repeated)

    @property
    def ok(self) -> bool:
        """Whether every answer is right and, unless ``some``, all that was asked came, once."""
        return not self.differ and (self.some or self.complete)

    def text(self) -> str:
        """What verify prints."""
        lines = [f"line {d['line']}: {d['vector']}: expected {d['expected']}, got {d['got']}. {d['rule']}" for d in self.first]
        came, wrong, asked = self.compared.total(), self.differ.total(), self.asked.total()
        if wrong > len(self.first):
            lines.append(f"... and {wrong - len(self.first):,} more")
        lines.extend(self.notes)
        answered = self._answered()
        kinds = list(dict.fromkeys([*self.asked, *self.compared]))
        width = max(len(k) for k in kinds)
        lines.append(f"{'inputs':<{width}}  {'asked':>9}  {'answered':>9}  {'compared':>9}  {'differ':>9}")
        for kind in kinds:
            numbers = self.asked[kind], answered[kind], self.compared[kind], self.differ[kind]
            lines.append(f"{kind:<{width}}" + "".join(f"  {n:>9,}" for n in numbers))
        lines.extend(self._incomplete())
        lines.append(f"{answered.total():,} of {asked:,} vectors judged; {came - wrong:,} of {came:,} answers agree")
        return "\n".join(lines)

    def _answered(self) -> Counter[str]:
        return self.asked - Counter(vector.kind for vector in self.missing)

    def _incomplete(self) -> Iterable[str]:
        if self.complete:
            return
        if missing := self.missing:
            places = [f"{v.line} ({v.text})" if len(v.text) <= SHORT else f"{v.line}" for v in missing[: PRINTED + 1]]
            yield f"missing: {len(missing):,} of the {self.asked.total():,} vectors; in gen's output, line {_some(places)}"
        for name, lines in (("not asked", self.unasked), ("repeated", self.repeated)):
            if lines:
                yield f"{name}: {len(lines):,} of those that came, judged like the others; line {_some([str(n) for n in lines])}"
        if self.unsure:
            yield self.unsure
        if not self.some:
            yield "each vector that gen writes is wanted once; --some judges those that come"

    def render(self, console: "Console") -> None:
        """``text``."""
        console.out(self.text(), highlight=False)

    def to_dict(self) -> dict:
        """What --json keeps."""
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
    """16 bytes for a text, which may be a large tensor's."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
