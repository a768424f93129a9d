"""What two recorded runs say of where they part, before either is continued: their metrics, and the states of their checkpoints (SEMANTICS B-10)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fp8ref import console
from fp8ref.conformance.compare import Report
from fp8ref.crosscheck.divergence import live, step_values
from fp8ref.crosscheck.divergence.difference import Difference, difference
from fp8ref.crosscheck.divergence.live import Side
from fp8ref.crosscheck.divergence.step_values import Value
from fp8ref.errors import ConfigError
from fp8ref.train import checkpoint
from fp8ref.train.report import runs
from fp8ref.train.report.runs import Run

KEYS = ("loss", "grad_norm")


@dataclass(frozen=True)
class Parted:
    """The first checkpoint of both, of so many steps, whose states differ, and where."""

    done: int
    states: tuple[list[Value], list[Value]]
    first: tuple[Value, Difference]


@dataclass
class Recorded:
    """What both runs wrote.

    steps     how many both recorded; differs: the first, and its metric, that is not the same in both.
    start     steps of the last checkpoint of both whose states are equal.
    missed    by run: what it recorded and this machine does not give again.
    """

    steps: int
    differs: tuple[int, str] | None
    start: int = 0
    parted: Parted | None = None
    missed: dict[str, str] = field(default_factory=dict)


def first_recorded(a: Run, b: Run, report: Report) -> tuple[int, tuple[int, str] | None]:
    """How many steps both recorded, and the first whose loss or norm differ; the step that ended one run, where the other took it."""
    steps = [int(s) for s in runs.common_steps([a, b])]
    for step in steps:
        for key in KEYS:
            found = [run.curve(key).get(step) for run in (a, b)]
            if None in found:  # of a line that lacks it
                continue
            x, y = (recorded(key, value) for value in found)
            if difference(x, y, report.check(f"{key}/recorded/value/{b.name}-{a.name}", bound=0.0)):
                return len(steps), (step, key)
    ends = [max(run.losses, default=-1) + 1 for run in (a, b)]
    if bool(a.diverged) != bool(b.diverged) or (a.diverged and ends[0] != ends[1]):
        short = min(end for run, end in zip((a, b), ends, strict=True) if run.diverged)
        if short < max(ends):
            return short + 1, (short, "loss")
    if not steps and not (a.diverged and b.diverged):
        raise ConfigError(f"{a.name} and {b.name} have no step in common. Train one of them again.")
    return len(steps), None


def compare_checkpoints(found: Sequence[Run], sides: Sequence[Side], past: Recorded, report: Report) -> None:
    """States that both runs saved after as many steps: the last that are equal, and the first that are not. The trainers are left at one of them, or
    where they began."""
    initial = [(side.trainer, side.config) for side in sides]
    common = sorted(set.intersection(*({int(p.name.removeprefix(checkpoint.PREFIX)) for p in checkpoint.saved(run.path)} for run in found)))
    for done in common:
        states = []
        for run, (trainer, config) in zip(found, initial, strict=True):
            path = run.path / checkpoint.FOLDER / f"{checkpoint.PREFIX}{done:08d}"
            try:
                checkpoint.verify(path)
            except ConfigError as error:
                console.say(f"{error} It is passed over.")
                break
            trainer.load(path / "state", done)
            states.append(step_values.of_state(trainer, config, "state before"))
        if len(states) < 2:
            continue
        if first := live.first_of(states[0], states[1], sides[0].name, sides[1].name, report):
            past.parted = Parted(done, (states[0], states[1]), first)
            return
        if past.differs is None or done <= past.differs[0]:
            past.start = done


def recorded(key: str, value: float | None) -> Value:
    return Value(phase="loss", layer=key, role="recorded", value=np.asarray(value, np.float64))


def told(found: Sequence[Run], past: Recorded) -> str:
    """What the records say."""
    if past.differs:
        step, key = past.differs
        values = [run.curve(key).get(step) for run in found]
        said = f"recorded: the first difference is {key} of step {step}, " + " and ".join("none" if v is None else repr(v) for v in values)
    else:
        said = f"recorded: {' and '.join(KEYS)} of {past.steps} steps are equal"
    if past.parted:
        v, d = past.parted.first
        said += f"; states after {past.parted.done} steps differ first in {v.layer}, {v.role}, element {list(d.element or ())}"
    return said + (f"; states after {past.start} steps are equal" if past.start else "")
