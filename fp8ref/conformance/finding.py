"""What identifying a cast, a quantizer or a GEMM gives: findings, each with its evidence, and the result of them all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fp8ref.conformance.counterexample import Counterexample
from fp8ref.formats import Format
from fp8ref.result import Result

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 4  # of the other values, printed


@dataclass(frozen=True, kw_only=True)
class Finding:
    """what      the name of the thing, such as ``rounding`` or ``fraction_bits``.
    value     what it is; None where that cannot be told, or, of ``double_rounding``, where there is none.
    evidence  what was asked, and answered.
    words     the value as a person reads it, where str(value) is not that.
    witness   a simplest input that shows it, next to what the specification gives.
    others    values under which every answer would have been the same.
    """

    what: str
    value: Any
    evidence: str
    words: str = ""
    witness: Counterexample | None = None
    others: tuple = ()

    @property
    def text(self) -> str:
        """The value as a person reads it."""
        if self.words:
            return self.words
        if self.value is None:
            return "cannot tell" + (f": {' or '.join(map(str, self.others))}" if self.others else "")
        listed = "; ".join(map(str, self.others[:SHOWN])) + (f"; and {len(self.others) - SHOWN} more" if len(self.others) > SHOWN else "")
        return f"{self.value}" + (f", or the same by {listed}" if self.others else "")

    def to_dict(self) -> dict[str, Any]:
        """what, value and evidence, and, next to them, what its kind has: ``witness`` of an array function, ``others`` of a GEMM."""
        return {"what": self.what, "value": self.value, "evidence": self.evidence}


def table(findings: Sequence[Finding], **options: Any) -> "Table":
    """What was found, a row each; options are those of rich's Table."""
    from rich.table import Table
    from rich.text import Text

    made = Table("", "found", "by", **options)
    for finding in findings:
        made.add_row(*(Text(cell) for cell in (finding.what, finding.text, finding.evidence)))  # none of it is markup
    return made


def strides_finding(taken: list[str], refused: list[str], found: list[Counterexample]) -> Finding:
    """What is said of views that were taken, or raised for, and of where one is unlike."""
    text = "not all alike" if found else "all alike" if taken else "not taken" if refused else "not asked"
    evidence = f"{', '.join(taken)}: as contiguous" if taken else "" if refused else "jax has none"
    evidence += f"{'; ' * bool(taken)}it raises for {', '.join(refused)}" if refused else ""
    return Finding(what="strides", value=not found, words=text, evidence=str(found[0]) if found else evidence)


if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Outcome(Result):
    """What a function is.

    found        as in ``is`` of --json: a value for each thing.
    identified   whether every answer is that of what was found.
    named        whether that has a name: one of ``behaviour.KNOWN``, but for NaN codes, or a policy with the cast of S-5.
    summary      in one line.
    unlike       where it is not: the simplest inputs, each with what was found in place of what.
    expected     the name that it was held to, if any, and differences: the simplest inputs on which it is not that, one for each kind.
    """

    name: str
    kind: str
    fmt: Format
    framework: str
    found: dict[str, Any]
    findings: Sequence[Finding]
    identified: bool
    summary: str
    named: bool = True
    unlike: Sequence[Counterexample] = field(default=())
    expected: str | None = None
    differences: Sequence[Counterexample] = field(default=())

    @property
    def ok(self) -> bool:
        """Identified as something that has a name, in the format that was asked for, or, where something was expected, just that."""
        if self.expected is not None:
            return not self.differences and not self.unlike
        return self.identified and self.named and self.found["format"] == self.fmt.name

    @property
    def message(self) -> str:
        """What is to be changed for it to be what was expected: all that somebody needs to do it."""
        if self.expected is None:
            return self.summary + ("" if self.named or not self.identified else ". Nothing that has a name is so")
        if self.ok:
            return f"{self.name} is {self.expected!r}: {self.summary}"
        return "\n".join(
            [f"{self.name} is not {self.expected!r}, but {self.summary}", *(f"  {w}" for w in self.differences or self.unlike)]
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "name": self.name,
            "kind": self.kind,
            "format": self.fmt.name,
            "framework": self.framework,
            "is": self.found,
            "identified": self.identified,
            "named": self.named,
            "summary": self.summary,
            "findings": [f.to_dict() | {"witness": f.witness and f.witness.to_dict()} for f in self.findings],
            "unlike": [witness.to_dict() for witness in self.unlike],
            "expected": self.expected,
            "differences": [witness.to_dict() for witness in self.differences],
        }

    def render(self, console: "Console") -> None:
        from rich.text import Text

        title = Text(f"{self.name}: a {self.kind} of {self.framework} arrays, {self.fmt}")  # a name is no markup
        console.print(table(self.findings, title=title, title_justify="left"))
        for witness in self.unlike if self.expected is None else ():
            console.out(f"unlike: {witness}", highlight=False)
        console.out(self.message, highlight=False)
