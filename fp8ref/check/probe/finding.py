"""What a probe found out: one thing each, and by what it is known."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

SHOWN = 4  # of the other values, printed


@dataclass(frozen=True, kw_only=True)
class Finding:
    """what      the name of the thing, such as ``fraction_bits``.
    value     what it is; None where that cannot be told.
    evidence  what was asked, and answered.
    others    values under which every answer would have been the same.
    """

    what: str
    value: Any
    evidence: str
    others: tuple = field(default=())

    @property
    def said(self) -> str:
        """The value as a person reads it."""
        if self.value is None:
            return "cannot tell" + (f": {' or '.join(map(str, self.others))}" if self.others else "")
        listed = "; ".join(map(str, self.others[:SHOWN])) + (f"; and {len(self.others) - SHOWN} more" if len(self.others) > SHOWN else "")
        return f"{self.value}" + (f", or the same by {listed}" if self.others else "")

    def to_dict(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


def table(findings: Sequence[Finding]) -> Table:
    """What was found, a row each."""
    made = Table("", "found", "by")
    for finding in findings:
        made.add_row(finding.what, finding.said, finding.evidence)
    return made
