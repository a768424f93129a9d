"""Where two recorded runs first part (SEMANTICS B-10).

What runs keep bounds the step: the first whose recorded loss or grad_norm differ in a bit, or the last before the first common checkpoint whose states do.
Both are then continued, each in its own backend, from their last common checkpoint whose states are equal, or from the weights that their configs begin
with, up to that step (``live.walk``). On the way every step is held to what its run recorded: a run that this machine does not give again is named.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8ref import console, llama
from fp8ref.conformance.compare import Report
from fp8ref.crosscheck.divergence import live, run_records, step_values
from fp8ref.crosscheck.divergence.difference import difference
from fp8ref.crosscheck.divergence.live import Metrics, Side
from fp8ref.crosscheck.divergence.reasons import Reason
from fp8ref.crosscheck.divergence.report import Diverged, Divergence, located
from fp8ref.crosscheck.divergence.run_records import KEYS, Recorded
from fp8ref.errors import ConfigError
from fp8ref.train import checkpoint, export, loop
from fp8ref.train import config as configs
from fp8ref.train.config import Config
from fp8ref.train.data import loader
from fp8ref.train.report import runs
from fp8ref.train.report.runs import Run

INERT = (
    "run.eval_",
    "run.allow_fallback",
    "checkpoint.",
    "log.",
    "statistics.",
    "parallel.timeout_s",
)  # keys that change no bit of training


def of_runs(a: Path, b: Path) -> Diverged:
    """The first divergence of the runs in two directories.

    Raises:   ConfigError: no runs, or damaged ones; models of other shapes; several devices; data that changed since.
    """
    found = runs.read_all([a, b])
    given = [configs.from_dict(run.manifest["config"], source=f"{run.path / 'manifest.json'}") for run in found]
    _check_shapes(found, given)
    settings = {k: v for k, v in configs.differences(found[0].settings, found[1].settings).items() if not k.startswith(INERT)}
    report, names = Report(), (found[0].name, found[1].name)
    past = Recorded(*run_records.first_recorded(found[0], found[1], report))
    sides = [_side(run, config) for run, config in zip(found, given, strict=True)]
    run_records.compare_checkpoints(found, sides, past, report)
    first, stop = None, past.steps
    if past.differs or past.parted:
        stop = min(past.differs[0] + 1 if past.differs else past.steps, past.parted.done if past.parted else past.steps)
        first = _walked(found, sides, past, report, max(stop, past.start))
    versions = configs.differences(found[0].versions, found[1].versions) if first else {}
    return Diverged(
        names=names,
        settings=settings,
        versions=versions,
        start=past.start if first else 0,
        steps=(first.step + 1 - past.start) if first else past.steps,
        first=first,
        report=report,
        recorded=run_records.told(found, past),
        notes=[*past.missed.values(), *live.parts_of(*given)],
    )


def _check_shapes(found: Sequence[Run], given: Sequence[Config]) -> None:
    for run, config in zip(found, given, strict=True):
        live.check_alone(config, run.name)
    if llama.parameter_shapes(given[0].model) != llama.parameter_shapes(given[1].model):
        x, y = ({"model": run.settings["model"]} for run in found)
        differ = configs.differences(x, y)
        told = "; ".join(
            f"{key} is {mine!r} in {found[0].name} and {theirs!r} in {found[1].name}" for key, (mine, theirs) in differ.items()
        )
        raise ConfigError(f"--first-divergence compares models of one shape, value by value; {told}. Train one of them again.")


def _side(run: Run, config: Config) -> Side:
    """A trainer as the run's own began.

    Raises:   ConfigError: the text is not the one that it was trained on.
    """
    batches = loader.open_batches(config)
    before, now = run.manifest["data"].get("sha256"), batches.description["sha256"]
    if before != now:
        raise ConfigError(f"{run.name} was trained on other data: their sha256 was {before} and is {now}. Put the data back.")
    given = export.read(Path(config.run.init_from), config.model) if config.run.init_from else None
    trainer = loop.trainer(run.manifest["backend"], config, given)
    return Side(name=run.name, config=config, trainer=trainer, batches=batches)


def _walked(found: Sequence[Run], sides: list[Side], past: Recorded, report: Report, stop: int) -> Divergence:
    """Continue both; what they recorded, where that cannot be had again."""
    for i, run in enumerate(found):
        if past.start:
            sides[i].trainer.load(run.path / checkpoint.FOLDER / f"{checkpoint.PREFIX}{past.start:08d}" / "state", past.start)
        else:
            sides[i] = _side(run, sides[i].config)

    def held(step: int, mine: Metrics, theirs: Metrics) -> None:
        for run, metrics in zip(found, (mine, theirs), strict=True):
            for key in KEYS:
                before = run.curve(key).get(step)
                if run.name not in past.missed and before is not None and not _same(before, metrics[key]):
                    past.missed[run.name] = (
                        f"{run.name} is not given again: its {key} of step {step} was {before!r}, and is {metrics[key]!r} from step {past.start} on, by "
                        "its own config: it was trained by other code, on another device, or its state was changed"
                    )

    with console.bar("first divergence", stop - past.start) as advance:
        first = live.walk(sides[0], sides[1], report, start=past.start, stop=stop, advance=advance, after=held)
    return first or _only_recorded(found, sides, past)


def _only_recorded(found: Sequence[Run], sides: Sequence[Side], past: Recorded) -> Divergence:
    """Both went on alike, and their records differ: one of them is not what its config gives."""
    text = f"no clause explains it: from step {past.start} on both configs give one run up to there"
    if past.differs and (past.parted is None or past.differs[0] < past.parted.done):
        step, key = past.differs
        x, y = (run_records.recorded(key, run.curve(key).get(step, math.nan)) for run in found)
        apart = difference(x, y, Report().check(key))
        assert apart is not None
        return located(step, x, apart, Reason((), text))
    assert past.parted is not None
    for run, side, saved in zip(found, sides, past.parted.states, strict=True):
        now = step_values.of_state(side.trainer, side.config, "state before")
        if off := live.first_of(saved, now, run.name, "now", Report()):
            v, d = off
            past.missed.setdefault(
                run.name,
                f"{run.name} is not given again: its checkpoint of {past.parted.done} steps has {v.layer}, {v.role}, element "
                f"{list(d.element or ())}: {d.a}; by its config it is {d.b}",
            )
    return located(past.parted.done, *past.parted.first, Reason((), text))


def _same(x: float, y: Any) -> bool:
    return x == y or (math.isnan(x) and math.isnan(y))
