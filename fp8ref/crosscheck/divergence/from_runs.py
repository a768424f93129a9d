"""Find the first divergence of two recorded runs (spec B-10).

1. The records bound the step: the first step whose recorded loss or grad_norm differ in a bit, or
   the last step before the first common checkpoint whose states differ.
2. Both runs are continued, each in its own backend, up to that step (``live.find_divergence``).
   They begin at their last common checkpoint with equal states, or at the weights of their configs.
3. On the way every step is compared with what its run recorded. A run that this machine does not
   reproduce is named in the report's notes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck.divergence import live, step_values
from fp8ref.crosscheck.divergence.difference import Difference, difference
from fp8ref.crosscheck.divergence.live import Metrics, Side
from fp8ref.crosscheck.divergence.report import Divergence, DivergenceReport, Reason, located
from fp8ref.crosscheck.divergence.step_values import Value
from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError, require
from fp8ref.spec import llama
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.data import loader
from fp8ref.train.models import export
from fp8ref.train.report import runs
from fp8ref.train.report.runs import Run
from fp8ref.train.run import checkpoint

__all__ = ["compare_runs"]

KEYS = ("loss", "grad_norm")  # the recorded metrics of a step that are compared

INERT = (
    *("run.eval_", "run.allow_fallback", "checkpoint.", "log.", "statistics."),
    "parallel.timeout_s",
)
"""Keys of a config, or their beginnings, that change no bit of training."""


@dataclass(frozen=True)
class CheckpointDifference:
    """The first common checkpoint whose states differ, after ``done`` steps, and where."""

    done: int
    states: tuple[list[Value], list[Value]]
    first: tuple[Value, Difference]


@dataclass
class Recorded:
    """What the records of both runs show.

    steps               how many steps both recorded.
    metric_differs      the first step and metric that differ.
    start               steps of the last common checkpoint with equal states.
    checkpoint_differs  the first common checkpoint whose states differ.
    not_reproduced      by run, what it recorded that this machine does not reproduce.
    """

    steps: int
    metric_differs: tuple[int, str] | None
    start: int = 0
    checkpoint_differs: CheckpointDifference | None = None
    not_reproduced: dict[str, str] = field(default_factory=dict)


def compare_runs(a: Path, b: Path) -> DivergenceReport:
    """The first divergence of the runs in two directories.

    Raises:   ConfigError: no runs, or damaged ones; other shapes; several devices; changed data.
    """
    pair = runs.read_all([a, b])
    run_configs = [
        configs.from_dict(run.manifest["config"], source=f"{run.path / 'manifest.json'}")
        for run in pair
    ]
    _check_shapes(pair, run_configs)
    differ = configs.differences(pair[0].settings, pair[1].settings)
    report = Report()
    records = Recorded(*_compare_metrics(pair[0], pair[1], report))
    sides = [_side(run, config) for run, config in zip(pair, run_configs, strict=True)]
    _compare_checkpoints(pair, sides, records, report)
    first = None
    if records.metric_differs or records.checkpoint_differs:
        stop = min(
            records.metric_differs[0] + 1 if records.metric_differs else records.steps,
            records.checkpoint_differs.done if records.checkpoint_differs else records.steps,
        )
        first = _continue_both(pair, sides, records, report, max(stop, records.start))
    return DivergenceReport(
        names=(pair[0].name, pair[1].name),
        settings={key: both for key, both in differ.items() if not key.startswith(INERT)},
        versions=configs.differences(pair[0].versions, pair[1].versions) if first else {},
        start=records.start if first else 0,
        steps=(first.step + 1 - records.start) if first else records.steps,
        first=first,
        report=report,
        recorded=_summary(pair, records),
        notes=[*records.not_reproduced.values(), *live.parts_of(*run_configs)],
    )


def _check_shapes(pair: Sequence[Run], run_configs: Sequence[Config]) -> None:
    for run, config in zip(pair, run_configs, strict=True):
        live.check_alone(config, run.name)
    if llama.parameter_shapes(run_configs[0].model) != llama.parameter_shapes(run_configs[1].model):
        x, y = ({"model": run.settings["model"]} for run in pair)
        differ = configs.differences(x, y)
        listed = "; ".join(
            f"{key} is {mine!r} in {pair[0].name} and {theirs!r} in {pair[1].name}"
            for key, (mine, theirs) in differ.items()
        )
        raise ConfigError(
            f"--first-divergence compares models of one shape, value by value; {listed}. Train "
            "one of them again."
        )


def _side(run: Run, config: Config) -> Side:
    """A trainer in the state that the run began with.

    Raises:   ConfigError: the text is not the one that it was trained on.
    """
    batches = loader.open_batches(config)
    before, now = run.manifest["data"].get("sha256"), batches.description["sha256"]
    if before != now:
        raise ConfigError(
            f"{run.name} was trained on different data: its sha256 was {before} and is {now}. "
            "Put the data back."
        )
    path = config.run.init_from
    weights = export.read(Path(path), config.model) if path else None
    trainer = loop.trainer(run.manifest["backend"], config, weights)
    return Side(name=run.name, config=config, trainer=trainer, batches=batches)


def _continue_both(
    pair: Sequence[Run], sides: list[Side], records: Recorded, report: Report, stop: int
) -> Divergence:
    """Continue both up to step ``stop``; the first divergence, or what only the records show."""
    for i, run in enumerate(pair):
        if records.start:
            saved = checkpoint.of_step(run.path, records.start)
            sides[i].trainer.load(saved / "state", records.start)
        else:
            sides[i] = _side(run, sides[i].config)

    def compare_with_record(step: int, mine: Metrics, theirs: Metrics) -> None:
        for run, metrics in zip(pair, (mine, theirs), strict=True):
            for key in KEYS:
                before = run.curve(key).get(step)
                if before is None or _same(before, metrics[key]):
                    continue
                records.not_reproduced.setdefault(
                    run.name,
                    f"{run.name} is not reproduced: its {key} of step {step} was "
                    f"{before!r}, and is {metrics[key]!r} when its own config is trained "
                    f"from step {records.start}. It was trained by other code or on "
                    "another device, or its state was changed",
                )

    with console.bar("first divergence", stop - records.start) as advance:
        first = live.find_divergence(
            sides[0],
            sides[1],
            report,
            start=records.start,
            stop=stop,
            advance=advance,
            after=compare_with_record,
        )
    return first or _only_recorded(pair, sides, records)


def _only_recorded(pair: Sequence[Run], sides: Sequence[Side], records: Recorded) -> Divergence:
    """The divergence of records whose runs, continued here, are equal: a config lost its run."""
    text = (
        f"no clause explains it: trained from step {records.start}, both configs give equal "
        "runs up to there"
    )
    if records.metric_differs and (
        records.checkpoint_differs is None
        or records.metric_differs[0] < records.checkpoint_differs.done
    ):
        step, key = records.metric_differs
        x, y = (_recorded_value(key, run.curve(key).get(step, math.nan)) for run in pair)
        apart = difference(x, y, Report().check(key))
        assert apart is not None
        return located(step, x, apart, Reason((), text))
    assert records.checkpoint_differs is not None
    for run, side, saved in zip(pair, sides, records.checkpoint_differs.states, strict=True):
        now = step_values.state_values(side.trainer, side.config, "state before")
        if off := live.first_of(saved, now, run.name, "now", Report()):
            v, d = off
            records.not_reproduced.setdefault(
                run.name,
                f"{run.name} is not reproduced: in its checkpoint of "
                f"{records.checkpoint_differs.done} steps, {v.layer}, {v.role}, element "
                f"{list(d.element or ())} is {d.a}; its config gives {d.b}",
            )
    return located(
        records.checkpoint_differs.done, *records.checkpoint_differs.first, Reason((), text)
    )


def _same(x: float, y: Any) -> bool:
    return x == y or (math.isnan(x) and math.isnan(y))


def _compare_metrics(a: Run, b: Run, report: Report) -> tuple[int, tuple[int, str] | None]:
    """Compare recorded metrics.

    Returns:  how many steps both recorded, and the first step and metric that differ.

    A step that ended one run as diverged, and that the other run took, differs in its loss.
    """
    steps = [int(s) for s in runs.common_steps([a, b])]
    for step in steps:
        for key in KEYS:
            values = [run.curve(key).get(step) for run in (a, b)]
            if None in values:  # the log line lacks this metric
                continue
            x, y = (_recorded_value(key, value) for value in values)
            if difference(x, y, report.check(f"{key}/recorded/value/{b.name}-{a.name}", bound=0.0)):
                return len(steps), (step, key)
    ends = [max(run.losses, default=-1) + 1 for run in (a, b)]
    if bool(a.diverged) != bool(b.diverged) or (a.diverged and ends[0] != ends[1]):
        short = min(end for run, end in zip((a, b), ends, strict=True) if run.diverged)
        if short < max(ends):
            return short + 1, (short, "loss")
    text = f"{a.name} and {b.name} have no step in common. Train one of them again."
    require(bool(steps or (a.diverged and b.diverged)), text, ConfigError)
    return len(steps), None


def _compare_checkpoints(
    pair: Sequence[Run], sides: Sequence[Side], records: Recorded, report: Report
) -> None:
    """Compare the states that both runs saved after the same steps, up to the first that differ.

    The trainers are left in the state of the last checkpoint that was loaded, or where they began.
    """
    initial = [(side.trainer, side.config) for side in sides]
    steps_a, steps_b = ({checkpoint.step_of(p) for p in checkpoint.saved(run.path)} for run in pair)
    for done in sorted(steps_a & steps_b):
        states = []
        for run, (trainer, config) in zip(pair, initial, strict=True):
            path = checkpoint.of_step(run.path, done)
            try:
                checkpoint.verify(path)
            except ConfigError as error:
                console.say(f"{error} This checkpoint is skipped.")
                break
            trainer.load(path / "state", done)
            states.append(step_values.state_values(trainer, config, "state before"))
        if len(states) < 2:
            continue
        if first := live.first_of(states[0], states[1], sides[0].name, sides[1].name, report):
            records.checkpoint_differs = CheckpointDifference(done, (states[0], states[1]), first)
            return
        if records.metric_differs is None or done <= records.metric_differs[0]:
            records.start = done


def _recorded_value(key: str, value: float | None) -> Value:
    return Value(phase="loss", layer=key, role="recorded", value=np.asarray(value, np.float64))


def _summary(pair: Sequence[Run], records: Recorded) -> str:
    """The first differences of the records, as text."""
    if records.metric_differs:
        step, key = records.metric_differs
        values = [run.curve(key).get(step) for run in pair]
        shown = " and ".join("none" if v is None else repr(v) for v in values)
        text = f"recorded: the first difference is {key} of step {step}, {shown}"
    else:
        text = f"recorded: {' and '.join(KEYS)} of {records.steps} steps are equal"
    if records.checkpoint_differs:
        v, d = records.checkpoint_differs.first
        text += (
            f"; states after {records.checkpoint_differs.done} steps differ first in "
            f"{v.layer}, {v.role}, element {list(d.element or ())}"
        )
    return text + (f"; states after {records.start} steps are equal" if records.start else "")
