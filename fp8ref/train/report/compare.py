"""Compare two runs, or logs of other trainers: config, versions, and the gap of their losses (spec
E-6).
"""

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

METRICS = ("loss", "grad_norm", "val_loss")
"""The metrics of which two identical runs have equal bits."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """The result of ``compare``.

    settings, versions: {dotted key: (A's value, B's value)} where they differ.
    known       whether settings and versions are known: those of a log are not, and then both are
                empty.

    by          what decides: equal ``bits``; how runs ``end``; matched ``seeds``; ``steps`` of one
                pair; ``unmatched`` runs. None if nothing does.
    difference  B's loss minus A's, the mean over the last window, with its interval; None if a run
                diverged.
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
    pairs: int
    difference: float | None
    low: float | None
    high: float | None
    margin: float | None
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
                table.add_row(
                    key, *("-" if value is None else json.dumps(value) for value in values)
                )
            console.print(table, markup=False)
        console.print(one_line(self.said), markup=False, highlight=False, soft_wrap=True)


def read(path: Path, *, loss: str | None = None) -> Run | Log:
    """A run directory, or a log of another trainer, whose losses are in the column or tag
    ``loss``.
    """
    return (
        runs.read(path)
        if (path / "manifest.json").exists() or not path.exists()
        else foreign_logs.read(path, loss=loss)
    )


def compare(
    a: Run | Log,
    b: Run | Log,
    more: Sequence[Run | Log] = (),
    *,
    confidence: float = gaps.CONFIDENCE,
    margin: float | None = None,
) -> Comparison:
    """Compare B with A.

    more      further runs of A's and of B's config with other seeds, in any order; of logs, pairs
              in the order A, B.
    Raises:   ConfigError: the losses are not comparable: another text; fewer than 5 common steps;
              ``more`` of neither config.
    """
    settings, versions = {}, {}
    both_runs = isinstance(a, Run) and isinstance(b, Run)
    if isinstance(a, Run) and isinstance(b, Run):
        settings, versions = (
            configs.differences(a.settings, b.settings),
            configs.differences(a.versions, b.versions),
        )
    for key in ("data.sequence_length", "text"):
        if key in settings:
            raise ConfigError(
                f"losses are compared on one text; {key} is {settings[key][0]!r} in {a.name} "
                f"and {settings[key][1]!r} in {b.name}."
            )
    about = {
        "a": a.name,
        "b": b.name,
        "settings": settings,
        "versions": versions,
        "known": both_runs,
    }
    nothing = {"difference": None, "low": None, "high": None, "margin": None, "pairs": 1}
    if _identical(a, b):
        steps = len(runs.common_steps([a, b]))
        text = (
            f"identical: {', '.join(METRICS) if both_runs else 'loss'} of all {steps} steps, bit "
            "for bit"
        )
        text += f"; both ended with {_end(a)}" if a.diverged else ""
        equal = {"difference": 0.0, "low": 0.0, "high": 0.0}
        return Comparison(
            **about,  # type: ignore[arg-type]
            **(nothing | equal),  # type: ignore[arg-type]
            steps=steps,
            result="identical",
            by="bits",
            said=text,
        )
    mine, others = _sides(a, b, more)
    ended = [run for run in (*others, *mine) if run.diverged]
    if ended:
        result: Kind = (
            "cannot tell"
            if all(any(run.diverged for run in side) for side in (mine, others))
            else "worse"
        )
        result = "better" if result == "worse" and ended[0] in others else result
        text = f"{result}: " + "; ".join(f"{run.name} ended by {_end(run)}" for run in ended)
        return Comparison(
            **about,  # type: ignore[arg-type]
            **nothing,  # type: ignore[arg-type]
            steps=len(runs.common_steps([a, b])),
            result=result,
            by="end",
            said=text,
        )
    judged = verdict.between(mine, others, confidence=confidence, margin=margin)
    if judged.compared is None:
        raise ConfigError(f"{judged.reason}.")
    gap = judged.compared.gap.last
    numbers = {"difference": float(gap.mean), "low": float(gap.low), "high": float(gap.high)}
    rest = {
        "margin": judged.margin,
        "pairs": len(judged.compared.runs),
        "steps": judged.compared.count,
    }
    text = f"{judged.kind}: the loss of {b.name} is {judged.said.removeprefix(f'{judged.kind}: ')}"
    return Comparison(**about, **numbers, **rest, result=judged.kind, by=gap.by, said=text)  # type: ignore[arg-type]


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
        near = [
            configs.differences(verdict.arm_settings(first), verdict.arm_settings(run))
            for first in (a, b)
        ]
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
