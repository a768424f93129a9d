"""What verify finds: disagreements, and how much of what was asked was answered, by kind of input."""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

PRINTED = 8  # disagreements in all, and
OF_A_KIND = 2  # of one kind of input, so that each is seen


@dataclass
class Verdict:
    """asked: the kind of every vector of the set, by its inputs; None where no header says which set it is."""

    asked: Mapping[Hashable, str] | None
    compared: Counter = field(default_factory=Counter)
    differ: Counter = field(default_factory=Counter)
    first: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # of all that differs
    _answered: set = field(default_factory=set)
    _others: int = 0

    def add(self, key: Hashable, kind: str) -> None:
        """A vector came with an answer."""
        self.compared[kind] += 1
        if self.asked is not None and key in self.asked:
            self._answered.add(key)
        else:
            self._others += 1

    def disagree(self, kind: str) -> bool:
        """... which is not the expected one; whether it is to be shown."""
        self.differ[kind] += 1
        return self.differ[kind] <= OF_A_KIND and len(self.first) < PRINTED

    def show(self, line: int, kind: str, why: dict[str, str]) -> None:
        """why has the vector, what was expected, what was got and the rule, in words."""
        self.first.append({"line": line, "kind": kind} | why)

    @property
    def ok(self) -> bool:
        return not self.differ

    @property
    def missing(self) -> dict[str, int] | None:
        """Of each kind of input, how many vectors were asked and did not come."""
        if self.asked is None:
            return None
        return dict(Counter(kind for key, kind in self.asked.items() if key not in self._answered))

    def text(self) -> str:
        lines = [f"line {d['line']}: {d['vector']}: expected {d['expected']}, got {d['got']}. {d['rule']}" for d in self.first]
        total = sum(self.differ.values())
        if total > len(self.first):
            lines.append(f"... and {total - len(self.first):,} more")
        lines.extend(self.notes)
        asked = Counter(self.asked.values()) if self.asked is not None else None
        answered = Counter(self.asked[key] for key in self._answered) if self.asked is not None else Counter()
        kinds = list(dict.fromkeys([*(asked or ()), *self.compared]))
        width = max(len(k) for k in kinds)
        lines.append(f"{'inputs':<{width}}  {'asked':>9}  {'answered':>9}  {'compared':>9}  {'differ':>9}")
        for kind in kinds:
            of_asked = "-" if asked is None else f"{asked[kind]:,}"
            lines.append(f"{kind:<{width}}  {of_asked:>9}  {answered[kind]:>9,}  {self.compared[kind]:>9,}  {self.differ[kind]:>9,}")
        missing = self.missing
        if missing is None:
            lines.append("no header: how many vectors are missing is not known")
        elif missing:
            lines.append(f"missing: {sum(missing.values()):,} of {len(self.asked or ()):,} vectors were not answered")
        if self._others and self.asked is not None:
            lines.append(f"{self._others:,} vectors are not of the set that the header names; they were compared too")
        lines.append(f"{sum(self.compared.values()) - total:,} of {sum(self.compared.values()):,} answers agree")
        return "\n".join(lines)

    def to_dict(self) -> dict:
        return {
            "ok": self.ok,
            "compared": dict(self.compared),
            "differ": dict(self.differ),
            "missing": self.missing,
            "others": self._others if self.asked is not None else None,
            "first": self.first,
            "notes": self.notes,
        }
