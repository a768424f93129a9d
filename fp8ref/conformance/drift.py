"""What changed since a stored table of libraries' casts and scales: ``fp8ref certify --against``.

A table has each library's answers to every number, tie and edge of a format or a scale, as far as
they are not the simulator's.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp8ref.conformance.inputs import dtypes, kinds
from fp8ref.conformance.kit import explain
from fp8ref.conformance.libraries import cuda_header, profiles
from fp8ref.conformance.libraries.profiles import Function
from fp8ref.conformance.vectors import scale
from fp8ref.conformance.vectors.cast import Cast
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.shared import console as consoles
from fp8ref.shared import extras, files
from fp8ref.shared.errors import require
from fp8ref.shared.result import Result

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Drift", "compare", "installed"]

_RULES, _FLOAT32 = explain.Rules(), dtypes.by_name("float32")

_POLICIES = {name: name for name in POLICIES} | {
    "amax_to_scale_pow2": "torchao_pow2",
    "adamw_fp8": "torchao_adamw_fp8",
    "compute_scale": "flax",
    "compute_scale_amax": "gfloat",
}
"""{variant of a library's scale: the policy that it is compared with}; of others torchao."""


class Question(NamedTuple):
    """A function of a library, and the inputs float32 [n] that it is asked."""

    function: Function
    x: np.ndarray

    @property
    def policy(self) -> str:
        """The policy that a scale is compared with."""
        return _POLICIES.get(self.function.variant, "torchao")

    def specified(self, x: np.ndarray) -> np.ndarray:
        """The simulator's answers as bits: of a saturating cast, or the scales of the policy."""
        of = self.function
        if of.made:
            return scale.expected_bits(x, of.fmt, self.policy, of.made)
        return _RULES.encode(x, of.fmt)

    def answers(self) -> dict[str, Any]:
        """The row of a table.

        version    of the library.
        specified  a digest of the inputs and the simulator's answers.
        differ     {bits of an input: bits of the answer}, in hexadecimal, where it is another.
        """
        with np.errstate(all="ignore"):
            raw = self.function.run(self.x)
        bits = raw.view(f"u{raw.itemsize}")
        inputs, specified = self.x.view("u4"), self.specified
        expected = specified(self.x)
        pairs = zip(inputs[bits != expected], bits[bits != expected], strict=True)
        digest = hashlib.sha256(inputs.tobytes() + expected.tobytes())
        name = self.function.library
        version = extras.versions(name).get(name, "unknown").partition("+")[0]
        return {
            "version": cuda_header.version() if name == profiles.CUDA_HEADER else version,
            "specified": digest.hexdigest()[:16],
            "differ": {f"{x:08X}": f"{answer:02X}" for x, answer in pairs},
        }

    def change(self, before: dict[str, str], after: dict[str, str]) -> str:
        """How many answers are others than before, the simplest input, and its rule; "" if none."""
        of, changed = self.function, sorted(dict(before.items() ^ after.items()))
        if not changed:
            return ""
        x = np.array([int(bits, 16) for bits in changed], np.uint32).view(np.float32)
        i = explain.simplest(x, np.ones(len(x), bool))
        right = self.specified(x[i : i + 1])[0]
        both = [answers.get(changed[i], f"{right:X}") for answers in (before, after)]
        bits = [int(answer, 16) for answer in both]
        if of.made:
            kind = kinds.AMAXES[kinds.amax_kinds(x[i : i + 1], of.fmt, self.policy)[0]]
            texts = [scale.scale_text(code, of.made) for code in (*bits, int(right))]
            rule = explain.scale_rule(kind, self.policy)
        else:
            kind = kinds.CASTS[kinds.cast_kinds(x[i : i + 1], _FLOAT32, of.fmt)[0]]
            texts = [explain.code(code, of.fmt) for code in (*bits, int(right))]
            rule = _RULES.rule(kind, of.fmt)
        return (
            f"{len(changed):,} of {self.x.size:,} answers changed; the simplest: "
            f"{'amax' if of.made else 'float32'} {explain.decimal(x[i])}, bits {changed[i]} "
            f"({kind}): was {texts[0]}, is {texts[1]}, specified {texts[2]}: {rule}"
        )


def questions() -> Iterator[Question]:
    """The casts and scales of all installed libraries, with every edge of theirs."""
    scales = (profiles.library_scales(fmt) for fmt in (E4M3FN, E5M2))
    for function in itertools.chain(profiles.every_cast(), *scales):
        if function.library not in profiles.OURS:
            asked = scale.Scale if function.made else Cast
            bits = asked(format=function.fmt.name, count=0).inputs()
            yield Question(function, bits.astype(np.uint32).view(np.float32))


def installed() -> dict[str, dict[str, Any]]:
    """The table of the installed libraries: {name of a function: its row}."""
    return {question.function.row: question.answers() for question in questions()}


class Row(NamedTuple):
    """A function in two tables: its versions, "-" where it is missing, and how answers changed."""

    name: str
    before: str
    now: str
    verdict: str
    change: str


@dataclass(frozen=True)
class Drift(Result):
    """A stored table and that of the installed libraries."""

    rows: list[Row]

    @property
    def ok(self) -> bool:
        """Whether no answer changed."""
        return not any(row.change for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The rows."""
        return {"ok": self.ok, "rows": [row._asdict() for row in self.rows]}

    def render(self, console: "Console") -> None:
        """Print the rows, then every change, in red."""
        table = consoles.table("library", "before", "now", "")
        for row in self.rows:
            table.add_row(*row[:4], style="red" if row.change else None)
        console.print(table)
        for row in filter(lambda row: row.change, self.rows):
            text = f"{row.name}, {row.before} -> {row.now}: {row.change}"
            console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        changed = sum(bool(row.change) for row in self.rows)
        console.print(f"{len(self.rows)} casts and scales, {changed} changed")


def compare(path: Path) -> Drift:
    """The installed libraries against the table in a file of ``fp8ref certify --json``.

    Raises:   ValueError: no such file; a table of other inputs, of another simulator, or of no
              library that is installed. ImportError: none is installed.
    """
    rows, asked = [], [(question, question.answers()) for question in questions()]
    try:
        stored = dict(files.read_object(path)["answers"])
        for question, now in asked:
            name, version = question.function.row, now["version"]
            if (before := stored.pop(name, None)) is None:
                rows.append(Row(name, "-", version, "new", ""))
                continue
            text = f"{name} is of other inputs or of another simulator"
            require(before["specified"] == now["specified"], text)
            change = question.change(before["differ"], now["differ"])
            verdict = "CHANGED" if change else "same"
            rows.append(Row(name, str(before["version"]), version, verdict, change))
        require(any(row.before != "-" for row in rows), "none of its libraries is installed")
        for name, before in stored.items():
            rows.append(Row(name, str(before["version"]), "-", "not installed", ""))
    except (AttributeError, OSError, TypeError, ValueError) as error:
        text = f"--against names a file of this fp8ref's certify --json; got {path}: {error}."
        raise ValueError(f"{text} Write it again.") from error
    return Drift(rows)
