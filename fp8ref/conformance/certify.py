"""Certificates: casts and scales of every installed library against the simulator.

``certify(exhaustive=True)`` goes through all 2^32 inputs of a cast and all 2^31 non-negative
amaxes. Without ``exhaustive`` it takes one in 1009 of them, and every float16, every bfloat16, and
every tie of the format with its neighbors. A difference in range is a failure. A library that
decides overflow or NaN otherwise than C-4 and C-5 is listed with the number of inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fp8ref.conformance import drift
from fp8ref.conformance.exhaustive import Tally, Task, run
from fp8ref.conformance.kit.compare import Report
from fp8ref.conformance.libraries import profiles as libraries
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.shared import console
from fp8ref.shared.result import Result
from fp8ref.sim import threads

__all__ = ["CHUNK", "SCALES", "STRIDE", "Certificate", "certify"]

if TYPE_CHECKING:
    from rich.console import Console

CHUNK = 1 << 22
"""Inputs of a task."""

STRIDE = 1009
"""One in so many float32 inputs is compared, unless all are."""

SCALES = (
    ("e4m3fn", "torchao"),
    ("e4m3fn", "torchao_pow2"),
    ("e4m3fn", "torchao_mask"),
    ("e5m2", "torchao"),
)
"""The (format, policy) of the scales that are compared."""


def certify(*, exhaustive: bool = False) -> "Certificate":
    """Compare every installed library with the simulator.

    exhaustive  all 2^32 inputs of a cast and 2^31 amaxes, by a process for each processor: minutes.
    """
    tasks = list(_tasks(exhaustive))
    result = Certificate(exhaustive=exhaustive)
    with console.bar("certify", len(tasks)) as advance:
        for task, tally in run(tasks, threads.threads() if exhaustive else 1):
            result.tallies.setdefault((task.fmt, task.kind), Tally()).add(tally)
            advance(f"{task.fmt} {task.kind}")
    return replace(result, answers=drift.installed())


@dataclass
class Certificate(Result):
    """Each library's differences by (format, ``cast`` or policy), and ``drift``'s table."""

    exhaustive: bool
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def report(self) -> Report:
        """A check for each format, cast or policy, and library.

        Libraries are held to the specification in range; fp8ref's own casts on every input.
        """
        report = Report()
        for (fmt, kind), tally in self.tallies.items():
            for (subject, where), compared in tally.compared.items():
                if where not in ("in range", "scale") and subject not in libraries.OURS:
                    continue
                what = "cast" if kind == "cast" else f"scale.{kind}"
                check = report.check(f"{fmt}/{what}/{subject}")
                pairs = tally.differ.items()
                differ = sum(n for (s, w, *_), n in pairs if (s, w) == (subject, where))
                check.compared += compared
                check.equal += compared - differ
                check.worst = max(check.worst, float(differ > 0))
                check.detail = check.detail or tally.first.get((subject, where), "")
        return report

    def disagreements(self) -> list[dict]:
        """A row for each kind of input where a library differs: codes specified, found; counts."""
        classes: dict[tuple, dict] = {}
        for (fmt, kind), tally in self.tallies.items():
            for (subject, where, ours, theirs), count in sorted(tally.differ.items()):
                key = {"format": fmt, "what": kind, "library": subject, "inputs": where}
                counts = {"compared": tally.compared[subject, where], "differ": 0}
                row = classes.setdefault(
                    tuple(key.values()), key | counts | {"specified": [], "found": []}
                )
                row["differ"] += count
                for side, code in (("specified", ours), ("found", theirs)):
                    if code not in row[side]:
                        row[side].append(code)
        return list(classes.values())

    @property
    def ok(self) -> bool:
        """Whether every check of ``report`` holds."""
        return self.report().ok

    def to_dict(self) -> dict[str, Any]:
        """``report``, ``disagreements`` and ``answers``."""
        return self.report().to_dict() | {
            "exhaustive": self.exhaustive,
            "disagreements": self.disagreements(),
            "answers": self.answers,
        }

    def render(self, console: "Console") -> None:
        """Print the checks, the kinds of input that libraries decide otherwise, and the first
        difference of each failed check.
        """
        from rich.table import Table

        report = self.report()
        title = "inputs in range, and all inputs of fp8ref's own"
        table = Table("what", "library", "compared", "equal", "", title=title)
        for check in report.checks.values():
            name, subject = check.name.rsplit("/", 1)
            numbers = f"{check.compared:,}", f"{check.equal:,}"
            table.add_row(name, subject, *numbers, "ok" if check.ok else "FAILS")
        console.print(table)
        columns = ("format", "library", "inputs", "specified", "found", "differ", "of")
        table = Table(*columns, title="decided otherwise (spec C-4, C-5)")
        for row in self.disagreements():
            names = (row[key] for key in columns[:3])
            codes = (" ".join(row[key]) for key in columns[3:5])
            table.add_row(*names, *codes, f"{row['differ']:,}", f"{row['compared']:,}")
        console.print(table)
        for check in report.failures:
            console.print(f"{check.name}: {check.detail}", markup=False, soft_wrap=True)
        some = f"one in {STRIDE} float32 inputs, all bfloat16, float16 and ties"
        console.print("all float32 inputs" if self.exhaustive else some)


def _tasks(exhaustive: bool) -> Iterator[Task]:
    stride, chunk = (1, CHUNK) if exhaustive else (STRIDE, CHUNK * STRIDE)
    casts = [("cast", f.name, 1 << 32) for f in (E4M3FN, E5M2)]
    for kind, fmt, size in [*casts, *((p, f, 1 << 31) for f, p in SCALES)]:
        if not exhaustive:  # all inputs contain these, and count each once
            yield Task(kind=kind, fmt=fmt, special=True)
        # Successive strided chunks start where the stride left off: chunk is a multiple of it.
        yield from (
            Task(kind=kind, fmt=fmt, begin=i, end=min(i + chunk, size), stride=stride)
            for i in range(0, size, chunk)
        )
