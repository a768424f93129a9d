"""One thing that was found out about a cast, a quantizer or a GEMM, and by which answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8ref.conformance.counterexample import Witness

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
    witness: Witness | None = None
    others: tuple = ()

    @property
    def said(self) -> str:
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
        made.add_row(*(Text(cell) for cell in (finding.what, finding.said, finding.evidence)))  # none of it is markup
    return made


def of_strides(taken: list[str], refused: list[str], found: list[Witness]) -> Finding:
    """What is said of views that were taken, or raised for, and of where one is unlike."""
    said = "not all alike" if found else "all alike" if taken else "not taken" if refused else "not asked"
    evidence = f"{', '.join(taken)}: as contiguous" if taken else "" if refused else "jax has none"
    evidence += f"{'; ' * bool(taken)}it raises for {', '.join(refused)}" if refused else ""
    return Finding(what="strides", value=not found, words=said, evidence=str(found[0]) if found else evidence)
