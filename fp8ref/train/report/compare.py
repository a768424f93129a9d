"""Compare two runs, or logs of other trainers: config, versions, gap of the losses (spec E-6)."""

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from fp8ref.shared.console import one_line
from fp8ref.shared.errors import ConfigError
from fp8ref.shared.result import Result
from fp8ref.train.config import config as configs
from fp8ref.train.report import foreign_logs, runs, verdict
from fp8ref.train.report import gap as gaps
from fp8ref.train.report.foreign_logs import Log
from fp8ref.train.report.gap import By, Kind
from fp8ref.train.report.runs import Run

__all__ = ["Comparison", "compare", "read"]

METRICS = ("loss", "grad_norm", "val_loss")
"""The metrics of which two identical runs have equal bits."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """The result of ``compare``.

    settings, versions: {dotted key: (A's value, B's value)} where they differ.
    known       whether settings and versions are known: a log's are not, and are empty.

    by          what decides: equal ``bits``; how runs ``end``; matched ``seeds``; ``steps`` of one
                pair; ``unmatched`` runs. None if nothing does.
    difference  B's mean loss minus A's over the last window, with interval; None: one diverged.
    pairs       how many runs of B's side there are.
    margin      the magnitude within which losses are equivalent.
    """

    a: str
    b: str
    settings: dict[str, tuple]
    versions: dict[str, tuple]
    steps: int
    result: Kind | Literal["identical"]
    by: By | Literal["bits", "end"] | None
    pairs: int = 1
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    said: str
    known: bool = True

    @property
    def ok(self) -> bool:
        """Whether the losses are identical, or shown to be equivalent."""
        return self.result in ("identical", "equivalent")

    def to_dict(self) -> dict:
        """ok and the fields."""
        return {"ok": self.ok, **asdict(self)}

    def render(self, console: Console) -> None:
        """Print the differences in config and versions, and the verdict on the losses."""
        for title, changes in (("config", self.settings), ("versions", self.versions)):
            if not self.known:
                console.print(f"{title}: not known of a log")
                continue
            if not changes:
                console.print(f"{title}: no difference")
                continue
            table = Table(title, self.a, self.b)
            for key, values in changes.items():
                shown = ("-" if value is None else json.dumps(value) for value in values)
                table.add_row(key, *shown)
            console.print(table, markup=False)
        console.print(one_line(self.said), markup=False, highlight=False, soft_wrap=True)


def read(path: Path, *, loss: str | None = None) -> Run | Log:
    """A run directory, or a log of another trainer with its losses in column or tag ``loss``."""
    if (path / "manifest.json").exists() or not path.exists():
        return runs.read(path)
    return foreign_logs.read(path, loss=loss)


def compare(
    a: Run | Log,
    b: Run | Log,
    more: Sequence[Run | Log] = (),
    *,
    confidence: float = gaps.CONFIDENCE,
    margin: float | None = None,
) -> Comparison:
    """Compare B with A.

    more      further runs of A's or B's config with other seeds; of logs, pairs in the order A, B.
    Raises:   ConfigError: the losses are not comparable: another text; fewer than 5 common steps;
              ``more`` of neither config.
    """
    settings, versions, both_runs = {}, {}, False
    if isinstance(a, Run) and isinstance(b, Run):
        settings = configs.differences(a.settings, b.settings)
        versions, both_runs = configs.differences(a.versions, b.versions), True
    for key in ("data.sequence_length", "text"):
        if key in settings:
            raise ConfigError(
                f"losses are compared on one text; {key} is {settings[key][0]!r} in {a.name} "
                f"and {settings[key][1]!r} in {b.name}."
            )
    comparison = functools.partial(
        Comparison, a=a.name, b=b.name, settings=settings, versions=versions, known=both_runs
    )
    if _identical(a, b):
        steps = len(runs.common_steps([a, b]))
        metrics = ", ".join(METRICS) if both_runs else "loss"
        said = f"identical: {metrics} of all {steps} steps, bit for bit"
        said += f"; both ended with {_end(a)}" if a.diverged else ""
        return comparison(
            steps=steps, result="identical", by="bits", difference=0.0, low=0.0, high=0.0, said=said
        )
    mine, others = _sides(a, b, more)
    if ended := [run for run in (*others, *mine) if run.diverged]:
        result: Kind = "better" if ended[0] in others else "worse"
        if all(any(run.diverged for run in side) for side in (mine, others)):
            result = "cannot tell"
        said = f"{result}: " + "; ".join(f"{run.name} ended by {_end(run)}" for run in ended)
        steps = len(runs.common_steps([a, b]))
        return comparison(steps=steps, result=result, by="end", said=said)
    judged = verdict.between(mine, others, confidence=confidence, margin=margin)
    if judged.compared is None:
        raise ConfigError(f"{judged.reason}.")
    gap = judged.compared.gap.last
    return comparison(
        steps=judged.compared.count,
        result=judged.kind,
        by=gap.by,
        pairs=len(judged.compared.runs),
        difference=float(gap.mean),
        low=float(gap.low),
        high=float(gap.high),
        margin=judged.margin,
        said=f"{judged.kind}: the loss of {b.name} is "
        f"{judged.said.removeprefix(f'{judged.kind}: ')}",
    )


def _identical(a: Run | Log, b: Run | Log) -> bool:
    if bool(a.diverged) != bool(b.diverged):
        return False
    if isinstance(a, Run) and isinstance(b, Run):
        return all(a.curve(key) == b.curve(key) for key in METRICS)
    return a.losses == b.losses


def _end(run: Run | Log) -> str:
    return run.diverged.rstrip(".")


def _sides(a: Run | Log, b: Run | Log, more: Sequence[Run | Log]) -> tuple[list, list]:
    """(runs of B's side, runs of A's), each with the first of every pair of seeds."""
    mine: list[Run | Log] = [b]
    others: list[Run | Log] = [a]
    own_runs = [run for run in more if isinstance(run, Run)]
    if not isinstance(a, Run) or not isinstance(b, Run) or len(own_runs) < len(more):
        if len(more) % 2:
            raise ConfigError(
                f"--seeds takes logs in pairs, one like A and one like B; got {len(more)}. "
                "Leave one out, or add its partner."
            )
        return [*mine, *more[1::2]], [*others, *more[::2]]
    for run in own_runs:
        own = verdict.arm_settings(run)
        near = [configs.differences(verdict.arm_settings(first), own) for first in (a, b)]
        if all(near):
            nearest = min(near, key=len)
            raise ConfigError(
                f"--seeds takes runs of A's config, or of B's, with other seeds; {run.name} "
                f"differs from both, from the nearer in {next(iter(nearest))}. Leave it out."
            )
        (others if not near[0] else mine).append(run)
    return [
        list({run.seeds: run for run in reversed(side)}.values())[::-1] for side in (mine, others)
    ]  # type: ignore[return-value]
