"""Report the first divergence of two trainings: where it is, and why (spec B-10)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck.divergence.difference import Difference
from fp8ref.crosscheck.divergence.step_values import Value, site_before
from fp8ref.recipe import OPERANDS, REDUCED_AXES
from fp8ref.shared.console import one_line
from fp8ref.shared.result import Result

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 8  # the most codes of an operand that are printed; JSON has all


@dataclass(frozen=True)
class Reason:
    """Why two values differ. clauses: those that allow it; empty if no clause explains it."""

    clauses: tuple[str, ...]
    text: str


def fault(text: str) -> Reason:
    """The reason of a difference that no clause explains."""
    return Reason((), f"no clause explains it: {text}")


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first value that differs.

    layer, role  of M-3 or of the linear (L-2).
    gemm         the FP8 GEMM that has the value, as "<linear> <gemm>".
    operands     the equal bits that the first differing element was computed from.
    """

    step: int
    phase: str
    layer: str
    role: str
    part: str
    gemm: str
    difference: Difference
    reason: Reason
    operands: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON, with those of the difference and of the reason among them."""
        fields = asdict(self)
        fields |= fields.pop("difference") | {
            "clauses": list(self.reason.clauses),
            "why": fields.pop("reason")["text"],
        }
        return fields

    def __str__(self) -> str:
        element = self.difference.element
        at = f", element {list(element)}" if element else ""
        part = "" if self.part == "value" else f" {self.part}"
        of = f" (operand of GEMM {self.gemm})" if self.gemm else ""
        return f"step {self.step}, {self.phase}: {self.layer}, {self.role}{part}{of}{at}"


@dataclass(frozen=True, kw_only=True)
class DivergenceReport(Result):
    """The first divergence of A and B, or that there is none.

    settings, versions   {dotted key: (A's, B's)} where they differ, but keys that change no bit.
    start, steps         the step that the comparison began at, and how many steps were compared.
    notes                what limits the result, such as operands that were not observed.
    """

    names: tuple[str, str]
    settings: dict[str, tuple]
    versions: dict[str, tuple]
    start: int
    steps: int
    first: Divergence | None
    report: Report
    recorded: str = ""
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether no value differs."""
        return self.first is None

    @property
    def compared(self) -> int:
        """How many elements were compared, over all checks."""
        return sum(check.compared for check in self.report.checks.values())

    def to_dict(self) -> dict[str, Any]:
        """The report and the divergence, as --json writes them."""
        return self.report.to_dict() | {
            "ok": self.ok,
            "names": list(self.names),
            "first": self.first and self.first.to_dict(),
            "settings": self.settings,
            "versions": self.versions,
            "start": self.start,
            "steps": self.steps,
            "compared": self.compared,
            "recorded": self.recorded,
            "notes": list(self.notes),
        }

    def render(self, console: "Console") -> None:
        """Print settings and versions that differ, then the first divergence."""

        def say(text: str) -> None:
            console.print(one_line(text), markup=False, highlight=False, soft_wrap=True)

        a, b = self.names
        for label, differ in (
            ("configs differ in", self.settings),
            ("versions differ in", self.versions),
        ):
            for key, values in differ.items():
                say(
                    f"{label} {key}: "
                    f"{' and '.join('unset' if v is None else json.dumps(v) for v in values)}"
                )
        if self.recorded:
            say(self.recorded)
        if self.first is None:
            begun = f" from step {self.start} on" if self.start else ""
            say(
                f"no divergence: {self.compared:,} values of {self.steps} steps{begun} are "
                "equal, bit for bit"
            )
        else:
            d = self.first.difference
            say(f"first divergence, {self.first}")
            for name, value in ((a, d.a), (b, d.b)):
                say(f"  {name}: {value}")
            if d.element is not None and d.of > 1:
                say(f"  {d.differ:,} of {d.of:,} differ{_by(d)}")
            for name, bits in self.first.operands.items():
                say(f"  {name}: {_shortened(bits)}")
            clauses = ", ".join(self.first.reason.clauses)
            say(f"  {clauses + ': ' if clauses else ''}{self.first.reason.text}")
        for note in self.notes:
            say(note)


def located(step: int, v: Value, d: Difference, reason: Reason) -> Divergence:
    """Place a difference at its layer and role; a linear's input at the site that computed it."""
    layer, role = v.layer, v.role
    gemm = f"{v.layer} {v.gemm}" if v.gemm and v.gemm != v.role else ""
    if v.gemm == "output" and (role, v.part) == ("input", "value"):
        layer, role = site_before(v.layer)
    return Divergence(
        step=step,
        phase=v.phase,
        layer=layer,
        role=role,
        part=v.part,
        gemm=gemm,
        difference=d,
        reason=reason,
        operands=_operands(v, d),
    )


def _operands(v: Value, d: Difference) -> dict[str, str]:
    """The equal bits that the first differing element was computed from, if observed."""
    o = v.observation
    if o is None or v.gemm is None or d.element is None:
        return {}
    if v.role == v.gemm:
        at = np.unravel_index(np.ravel_multi_index(d.element, np.shape(v.value)), np.shape(o.out))
        shown = {}
        for role, (_, codes, scale), i, axis in zip(
            OPERANDS[v.gemm], (o.a, o.b), map(int, at), REDUCED_AXES[v.gemm], strict=True
        ):
            line = f"{role} {'row' if axis == 1 else 'column'} {i}"
            bits = np.take(np.asarray(codes), i, axis=1 - axis).tobytes().hex(" ")
            shown[line] = f"scale {_scale(scale, i, axis)}, codes {bits}"
        return shown
    roles: tuple[str, str] = OPERANDS[v.gemm]
    hp, _, scale = (o.a, o.b)[roles.index(v.role)]
    hp = np.asarray(hp, np.float32)
    if v.part == "scale":
        return {f"{v.role} amax": f"{float(np.abs(hp).max()):.9g}"}
    if v.part == "codes":
        shown = {v.role: _bits(hp.reshape(np.shape(v.value))[d.element])}
        if np.size(scale) == 1:
            shown["scale"] = _bits(np.asarray(scale, np.float32).reshape(-1)[0])
        return shown
    return {}


def _scale(scale: np.ndarray, line: int, axis: int) -> str:
    """The scale of a row or column: its own, the tensor's, or the number of its blocks."""
    scale = np.asarray(scale, np.float32)
    if scale.ndim == 0:
        return _bits(scale)
    own = np.take(scale, min(line, scale.shape[1 - axis] - 1), axis=1 - axis).reshape(-1)
    return _bits(own[0]) if own.size == 1 else f"of {own.size} blocks"


def _bits(x: np.ndarray) -> str:
    return f"{float(x):.9g} (0x{int(np.float32(x).view(np.uint32)):08X})"


def _by(d: Difference) -> str:
    """The largest distance of two elements, as text."""
    if d.unit == "tokens" or d.worst is None:
        return ""
    largest = "" if d.largest is None else f" by {d.largest:.3g} at most,"
    numbers = "" if d.unit.startswith("codes") else f" number{'s' * (d.worst != 1)}"
    return f",{largest} {d.worst:,} {d.unit}{numbers} apart"


def _shortened(text: str) -> str:
    """The first codes of a line, and how many there are."""
    head, word, codes = text.partition("codes ")
    parts = codes.split(" ")
    if len(parts) <= SHOWN:
        return text
    return f"{head}{word}{' '.join(parts[:SHOWN])} ... ({len(parts)} codes)"
