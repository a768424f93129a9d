"""What an audit says: each kind of finding, with the texts of findings.toml."""

from dataclasses import dataclass, field
from typing import Any

from fp8ref.shared import package_data

__all__ = ["KINDS", "Finding", "Kind"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of finding. ``alarm``: the bytes contradict each other or the config; else a note,
    which a right checkpoint may have too."""

    cause: str
    remedy: str = "Quantize this weight again from its high-precision original."
    alarm: bool = True


KINDS = {name: Kind(**texts) for name, texts in package_data.tables(__file__, "findings").items()}
"""Kinds of findings by name."""


@dataclass(frozen=True)
class Finding:
    """A finding of one tensor, or of the checkpoint (tensor "").

    what      the contradiction, a sentence.
    evidence  the smallest place that shows it: block, code, scale.
    cause     the likely cause, where it is another than the kind's.
    """

    kind: str
    tensor: str
    what: str
    evidence: dict[str, Any] = field(default_factory=dict)
    cause: str = ""

    @property
    def alarm(self) -> bool:
        """Whether it is a contradiction, and not a note."""
        return KINDS[self.kind].alarm

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        kind = KINDS[self.kind]
        fields = {"kind": self.kind, "alarm": kind.alarm, "tensor": self.tensor, "what": self.what}
        texts = {"cause": self.cause or kind.cause, "remedy": kind.remedy}
        return fields | {"evidence": self.evidence} | texts
