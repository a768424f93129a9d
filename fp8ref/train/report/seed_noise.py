"""Which runs are whose noise, and what that noise says of a run (SEMANTICS E): ``noise`` applied to run directories."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp8ref.train import config as configs
from fp8ref.train.report import noise, runs
from fp8ref.train.report.noise import Band, Gap
from fp8ref.train.report.runs import Run

Kind = Literal["within noise", "outside noise", "cannot tell"]


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """The finished bf16 runs of a group, one for each pair of seeds; band and limit are None where runs or steps are too few."""

    runs: tuple[Run, ...]
    common: np.ndarray  # steps
    width: int
    band: Band | None = None
    limit: np.ndarray | None = None

    @property
    def steps(self) -> np.ndarray:
        """Where band and limit are: the last step of each window."""
        return self.common[self.width - 1 :]

    @property
    def varied(self) -> str:
        """Which seeds differ: run.seed, data.seed or both."""
        return " and ".join(key for key in ("run.seed", "data.seed") if len({run.key(key) for run in self.runs}) > 1)


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The gap of a run to another that saw the same batches, at ``steps``, the last of each window."""

    run: Run
    to: Run
    steps: np.ndarray
    gap: Gap


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether one run's loss is higher than another seed of bf16 would show. reason: why it cannot be told, or that the loss is no number."""

    kind: Kind
    seeds: Seeds
    reason: str = ""
    to: Run | None = None  # the bf16 run of equal seeds; without it the loss itself is judged
    step: int | None = None  # the one that is judged
    value: float | None = None  # gap or loss: the mean over the window that ends there
    limit: float | None = None  # what value stays below
    left_step: int | None = None
    left_tokens: int | None = None


def groups(given: Sequence[Run]) -> list[list[Run]]:
    """Runs by what they have in common with their reference (E-1), in the order given."""
    found: list[list[Run]] = []
    for run in given:
        mine = next((group for group in found if not configs.differences(group[0].reference, run.reference)), None)
        found.append([run]) if mine is None else mine.append(run)
    return found


def seeds_of(group: Sequence[Run], *, but: Run | None = None, among: Sequence[Run] = (), confidence: float = noise.CONFIDENCE) -> Seeds:
    """The noise of a group (E-1, E-2): its finished bf16 runs, one for each pair of seeds, the first given.

    but       a run whose seeds are left out.
    among     more runs that have the steps in common.
    """
    chosen: dict[tuple[int, int], Run] = {}
    for run in group:
        if run.bf16 and run.finished and (but is None or run.seeds != but.seeds):
            chosen.setdefault(run.seeds, run)
    members = tuple(chosen.values())
    steps = runs.common_steps([*members, *among]) if members else np.array([], np.int64)
    width = noise.window(len(steps))
    if len(members) < 2 or len(steps) < width:
        return Seeds(runs=members, common=steps, width=width)
    curves = noise.running_mean(np.stack([runs.at(run.losses, steps) for run in members]), width)
    return Seeds(
        runs=members,
        common=steps,
        width=width,
        band=noise.band(curves, confidence=confidence),
        limit=noise.limit(curves, confidence=confidence),
    )


def verdict(run: Run, group: Sequence[Run], *, confidence: float = noise.CONFIDENCE) -> Verdict:
    """Judge one run of a group by its bf16 runs: by its gap, if one of them has its seeds, or else by its loss (E-2 to E-4).

    A run that would itself be part of the noise is judged by the seeds other than its own.
    """
    if run.diverged:
        step = max(run.losses, default=-1) + 1
        seeds, tokens = seeds_of(group, confidence=confidence), (step + 1) * run.tokens_per_step
        return Verdict(kind="outside noise", seeds=seeds, reason=run.diverged, step=step, left_step=step, left_tokens=tokens)
    member = any(run is one for one in seeds_of(group).runs)
    to = None if member else partner(run, group)
    seeds = seeds_of(group, but=run if member else None, among=[run, to] if to else [run], confidence=confidence)
    if len(seeds.runs) < 2:
        return Verdict(kind="cannot tell", seeds=seeds, reason=_too_few(run, seeds))
    if seeds.band is None or seeds.limit is None:
        least = f"it and the bf16 runs have {len(seeds.common)} steps in common, and {noise.BATCHES} are needed"
        return Verdict(kind="cannot tell", seeds=seeds, reason=least)
    losses = runs.at(run.losses, seeds.common) - (runs.at(to.losses, seeds.common) if to else 0)
    curve, high = noise.running_mean(losses, seeds.width), seeds.limit if to else seeds.band.high
    index = noise.left(curve, high)
    left = None if index is None else int(seeds.steps[index])
    return Verdict(
        kind="within noise" if left is None else "outside noise",
        seeds=seeds,
        to=to,
        step=int(seeds.steps[-1]),
        value=float(curve[-1]),
        limit=float(high[-1]),
        left_step=left,
        left_tokens=None if left is None else (left + 1) * run.tokens_per_step,
    )


def partner(run: Run, group: Sequence[Run]) -> Run | None:
    """The bf16 run of a group with this run's seeds; of those, one of its backend and a finished one first."""
    partners = [other for other in group if other is not run and other.bf16 and other.seeds == run.seeds]
    partners.sort(key=lambda other: (other.manifest["backend"] != run.manifest["backend"], not other.finished))
    return partners[0] if partners else None


def paired(run: Run, to: Run, *, confidence: float = noise.CONFIDENCE) -> Paired | None:
    """The gap of two runs, step by step (E-5); None where they have fewer than 5 steps in common."""
    steps = runs.common_steps([run, to])
    width = noise.window(len(steps))
    if len(steps) < width:
        return None
    difference = runs.at(run.losses, steps) - runs.at(to.losses, steps)
    return Paired(run=run, to=to, steps=steps[width - 1 :], gap=noise.gap(difference, width, confidence=confidence))


def _too_few(run: Run, seeds: Seeds) -> str:
    have = f"there is only {seeds.runs[0].name}" if seeds.runs else "there is none"
    weights, order = run.seeds
    return (
        "it takes at least 2 finished bf16 runs of different seeds with its text, model, optimizer, batch and number of steps, and "
        f"{have}. Train more with --recipe bf16 --run.seed {weights + 1} --data.seed {order + 1}, and so on"
    )
