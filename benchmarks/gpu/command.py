"""What the scripts have in common: their options, running sections while there is time, and what is
printed last.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fp8ref.estimate.kernels import Fusion
from measuring import environment, results
from measuring.results import LEFT, Results
from measuring.timing import Budget, Clock, message
from reporting import report, tables
from reporting.targets import Target

BUDGET = 510.0  # seconds: what begins within it ends within nine minutes


class Bench(Protocol):
    """What sections are given."""

    clock: Clock
    budget: Budget

    @property
    def dry(self) -> bool: ...

    @property
    def casts(self) -> str:
        """What casts tensors of fp8ref's variants, and why."""
        ...

    def free(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Suite:
    """sections: by name, in the order in which they run. needed: seconds that one may take,
    compiling included, by its group.

    how: who fuses casts, for the ledger.
    """

    sections: Mapping[str, Callable[..., dict]]
    needed: Mapping[str, float]
    targets: Sequence[Target]
    of_floor: Sequence[str]
    how: Fusion


def options(
    description: str | None, names: Sequence[str], default: Path
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups = sorted({group(name) for name in names if ":" in name})
    parser.add_argument(
        "--section",
        action="append",
        choices=[*names, *groups],
        help="only this one, or this group; may be repeated",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET,
        metavar="SECONDS",
        help=f"begin nothing that would take longer ({BUDGET:.0f})",
    )
    there = parser.add_mutually_exclusive_group()
    there.add_argument(
        "--resume",
        action="store_true",
        help="keep what the file has, and run what is missing or failed",
    )
    there.add_argument("--overwrite", action="store_true", help="begin the file anew")
    parser.add_argument(
        "--json",
        type=Path,
        default=default,
        metavar="FILE",
        help="where results go, and a table of them as .md next to it",
    )
    parser.add_argument("--dry", action="store_true", help="on a CPU, small; needs --json")
    return parser


def execute(known: Bench, suite: Suite, kept: Results, chosen: Sequence[str] | None) -> int:
    """Run what is chosen (names and groups; None: all) and print what it came to. Returns the exit
    code: 1 where something failed, LEFT where no time was left.
    """
    wanted = [
        name for name in suite.sections if chosen is None or name in chosen or group(name) in chosen
    ]
    # after those that were never tried
    again = [name for name in wanted if kept.tried(name) and not kept.finished(name)]
    todo = [name for name in wanted if not kept.tried(name)] + again
    left = [name for name in todo if not _run(known, suite, kept, name)]
    report.conclude(kept.data, suite.targets, suite.of_floor, suite.how)
    title = (
        "A dry run on a cpu: no figure here is a GPU's"
        if known.dry
        else f"{kept.data['device']}, fp8 / bf16"
    )
    tables.show(title, ("what", "value", "quartiles", "asked", ""), report.asked(kept.data))
    print(report.noise(kept.data))
    if left:
        print(f"no time was left for {', '.join(left)}: run again with --resume")
    broken = [
        f"{name}: {what}"
        for name in wanted
        for what in results.failed(kept.data["sections"].get(name, {}))
    ]
    print(*broken, sep="\n", file=sys.stderr)
    return 1 if broken else LEFT if left else 0


def group(name: str) -> str:
    """linear:q_o -> linear."""
    return name.partition(":")[0]


def _run(known: Bench, suite: Suite, kept: Results, name: str) -> bool:
    """Run one section and write it; False where there is no time for it."""
    if not known.dry and known.budget.left < suite.needed[group(name)]:
        return False
    before, begun = environment.clocks(), time.monotonic()
    try:
        found = suite.sections[name](known)
    except Exception as error:  # later sections are still to be measured
        found = {"rows": [{"name": name, "error": message(error)}]}
    clocks = None if known.dry else [before, environment.clocks()]
    took = time.monotonic() - begun
    kept.put(
        name,
        found
        | {
            "timed_by": known.clock.kind,
            "took_seconds": took,
            "casts": known.casts,
            "clocks": clocks,
            "revision": environment.revision(),
        },
    )
    report.conclude(kept.data, suite.targets, suite.of_floor, suite.how)
    kept.write(report.markdown(kept.data))
    known.free()
    print(f"{name}: {took:.0f} s", *results.failed(found), sep="\n  ", flush=True)
    return True
