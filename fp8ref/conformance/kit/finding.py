"""What identification finds: properties with evidence, counterexamples, the outcome."""

import abc
import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fp8ref.formats import Format
from fp8ref.shared.result import Result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN = 4  # the most other values that are printed


@dataclass(frozen=True)
class Counterexample:
    """One input, and two outputs that differ.

    input     in words; bits: of its numbers, in hexadecimal, as ``dtype``.
    got       what the function gives; expected: what it was compared with gives.
    clause    of docs/spec, by which the expected output is right.
    """

    input: str
    got: str
    expected: str
    clause: str
    _: KW_ONLY
    bits: tuple[str, ...] = ()
    dtype: str = "float32"

    def __str__(self) -> str:
        bits = f" ({self.dtype} {', '.join(self.bits)})" if self.bits else ""
        return f"{self.input}{bits}: got {self.got}, expected {self.expected} ({self.clause})"

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        asked = {"input": self.input, "bits": self.bits, "dtype": self.dtype}
        return asked | {"got": self.got, "expected": self.expected, "clause": self.clause}

    def finding(self, what: str, words: str) -> "Finding":
        """The finding without a value that this shows."""
        return Finding(what, None, str(self), words=words, witness=self)


def bits_of(value: float, dtype: str) -> str:
    """The bits of a number of a dtype, such as 0x3F800000."""
    if dtype == "bfloat16":
        return f"0x{int(np.float32(value).view(np.uint32)) >> 16:04X}"
    unsigned = {
        "float16": (np.float16, np.uint16),
        "float32": (np.float32, np.uint32),
        "float64": (np.float64, np.uint64),
    }[dtype]
    number = np.asarray(value).astype(unsigned[0])
    return f"0x{int(number.view(unsigned[1])):0{2 * number.itemsize}X}"


def show(value: float) -> str:
    """A number as text, exact: nine digits, or seventeen where nine would be another number."""
    if float(f"{float(value):.9g}") != float(value):
        return f"{float(value):.17g}"
    return f"{float(value):.9g}"


@dataclass(frozen=True)
class Finding:
    """One property of a function, its value, and the evidence.

    what      the property, such as ``rounding`` or ``fraction_bits``.
    value     None if it cannot be told; for ``double_rounding``, None if there is none.
    evidence  which inputs, and what came out.
    words     the value for a reader, if str(value) does not say it.
    witness   a simplest input that shows it, compared with the specification.
    others    values that explain all outputs as well.
    unasked   what could not be asked for this property, in words.
    """

    what: str
    value: Any
    evidence: str
    _: KW_ONLY
    words: str = ""
    witness: Counterexample | None = None
    others: tuple = ()
    unasked: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The value for a reader."""
        if self.words:
            return self.words
        others = [str(other) for other in self.others]
        if self.value is None:
            return "cannot tell" + (f": {' or '.join(others)}" if others else "")
        if len(others) > SHOWN:
            others[SHOWN:] = [f"and {len(others) - SHOWN} more"]
        return f"{self.value}" + (f", or the same by {'; '.join(others)}" if others else "")

    def to_dict(self) -> dict[str, Any]:
        """what, value and evidence. Results add ``witness`` or ``others``."""
        return {"what": self.what, "value": self.value, "evidence": self.evidence}

    def witnessed(self) -> dict[str, Any]:
        """The witness, for JSON."""
        return {"witness": self.witness and self.witness.to_dict()}


def table(findings: Sequence[Finding], title: str = "") -> "Table":
    """The findings as a table, a row each."""
    from rich.table import Table
    from rich.text import Text

    # Text: brackets in a name are not parsed as markup
    rich_table = Table("", "found", "by", title=Text(title) if title else None)
    rich_table.title_justify = "left"
    for finding in findings:
        rich_table.add_row(*(Text(cell) for cell in (finding.what, finding.text, finding.evidence)))
    return rich_table


def listed(shapes: Iterable[tuple[int, ...]]) -> str:
    """Shapes as text."""
    return ", ".join(str(list(shape)) for shape in shapes)


def shapes_finding(
    accepted: Sequence[tuple[int, ...]],
    refused: Sequence[tuple[int, ...]],
    wrong: Sequence[Counterexample],
    same: str,
    *,
    most: bool = True,
) -> Finding:
    """The finding on other shapes: those taken, those that raise, and the first counterexample.

    same   what holds for those taken, in words; most: whether larger ones count as not asked.
    """
    evidence = f"{listed(accepted)}: {same}"
    evidence += f"; it raises for {listed(refused)}" if refused else ""
    unasked = [f"shapes {listed(refused)}, for which it raises"] if refused else []
    if accepted and most:
        unasked.append(f"more than {max(map(math.prod, accepted)):,} elements")
    words = "not all alike" if wrong else "all alike"
    evidence = str(wrong[0]) if wrong else evidence
    return Finding("shapes", not wrong, evidence, words=words, unasked=tuple(unasked))


def strides_finding(
    accepted: list[str], refused: list[str], counterexamples: list[Counterexample]
) -> Finding:
    """The finding on strides: the views taken, those that raise, and the first counterexample."""
    parts = [f"{', '.join(accepted)}: as contiguous"] if accepted else []
    parts += [f"it raises for {', '.join(refused)}"] if refused else []
    evidence = "; ".join(parts) or "jax arrays have no strides"
    text = "all alike" if accepted else "not taken" if refused else "not tested"
    if counterexamples:
        text, evidence = "not all alike", str(counterexamples[0])
    unasked = (f"strides {', '.join(refused)}, for which it raises",) if refused else ()
    return Finding("strides", not counterexamples, evidence, words=text, unasked=unasked)


class Described(Result):
    """A result that is printed as a table, of rows if it has them, and a ``message``."""

    @property
    @abc.abstractmethod
    def message(self) -> str:
        """What it is, in words."""

    @property
    def title(self) -> str:
        """Of the table."""
        return ""

    @property
    def table_rows(self) -> Sequence[Finding] | None:
        """Of the table; None without one."""
        return None

    def render(self, console: "Console") -> None:
        """Print the table, then the message."""
        if self.table_rows is not None:
            console.print(table(self.table_rows, self.title))
        console.out(self.message, highlight=False)

    def require(self) -> Self:
        """This result, if it is ok; else an AssertionError with the message."""
        if not self.ok:
            raise AssertionError(self.message)
        return self


@dataclass(frozen=True, kw_only=True)
class Outcome(Described):
    """What a cast or a quantizer was identified as.

    found        ``is`` of --json: each property and its value.
    identified   whether what was found explains every output.
    named        whether that has a name: a known cast (except for NaN codes), or a policy with the
                 cast of S-5.
    summary      in one line.
    unlike       the simplest inputs that it does not explain.
    expected     the name that it should have, if any.
    differences  the simplest inputs on which it differs from that, one of each kind.
    limits       what was not asked, besides that of the findings.
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
    limits: Sequence[str] = field(default=())

    @property
    def unasked(self) -> list[str]:
        """What was not asked, and what the verdict so does not cover, in words."""
        parts = [part for finding in self.findings for part in finding.unasked]
        return list(dict.fromkeys([*parts, *self.limits]))

    @property
    def ok(self) -> bool:
        """Equal to what was expected; else identified, with a name, and in the format asked for."""
        if self.expected is not None:
            return not self.differences and not self.unlike
        return self.identified and self.named and self.found["format"] == self.fmt.name

    @property
    def message(self) -> str:
        """The summary; what is not explained or not as expected; what was not asked."""
        if self.expected is None:
            nameless = self.identified and not self.named
            lines = [self.summary + ". It matches no known name" * nameless]
            lines += [f"  {w}" for w in self.unlike]
        elif self.ok:
            lines = [f"{self.name} is {self.expected!r}: {self.summary}"]
        else:
            lines = [f"{self.name} is not {self.expected!r}, but {self.summary}"]
            lines += [f"  {w}" for w in self.differences or self.unlike]
        lines += [f"  not tested: {'; '.join(self.unasked)}"] if self.unasked else []
        return "\n".join(lines)

    @property
    def paragraph(self) -> str:
        """The verdict, what was asked and what was not, in one paragraph to paste."""
        verdict, *rest = self.message.split("\n")
        asked = "; ".join(f"{f.what}: {f.evidence}" for f in self.findings)
        sentences = [verdict, f"Asked of {self.framework} arrays, {asked}", *map(str.strip, rest)]
        return f"{'. '.join(sentences)}."

    def to_dict(self) -> dict[str, Any]:
        """What --json writes."""
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
            "paragraph": self.paragraph,
            "findings": [f.to_dict() | f.witnessed() for f in self.findings],
            "unlike": [witness.to_dict() for witness in self.unlike],
            "expected": self.expected,
            "differences": [witness.to_dict() for witness in self.differences],
            "unasked": self.unasked,
        }

    def render(self, console: "Console") -> None:
        """Print the findings, then the message."""
        title = f"{self.name}: a {self.kind} of {self.framework} arrays, {self.fmt}"
        console.print(table(self.findings, title))
        console.out(self.message, highlight=False)
