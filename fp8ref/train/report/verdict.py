"""Group runs, and judge those in FP8 by bf16 runs of equal seeds (spec E).

    (group,) = groups(runs)             # runs of one text, model, optimizer, batch and number of
                                        steps
    for arm in judged(group): verdict(arm, group).said

An arm is the runs that differ in their seeds alone. Its gap is the loss minus that of bf16, over
the last steps; ``gap`` has the intervals, and what they decide.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.train.config import config as configs
from fp8ref.train.report import gap as gaps
from fp8ref.train.report import runs
from fp8ref.train.report.foreign_logs import Log
from fp8ref.train.report.gap import CONFIDENCE, Gap, Kind
from fp8ref.train.report.runs import Run

__all__ = ["Arm", "Verdict", "arms", "compare", "groups", "judged", "seeds_of", "verdict"]

NO_BITS = ("statistics", "checkpoint", "log")
"""Sections of the config that change no bit of training, in which runs of an arm may differ."""


ONE_PAIR = " for this pair, of one seed, so not yet for the recipe: train both with more seeds"
"""What is added to the verdict on one pair (E-4)."""

TINY = 1e-6  # nats: losses closer to 0 count as this for the margin


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Runs that differ in their seeds alone: for each pair the first that ended, or first (E-1).

    others: (run, the one of its seeds that counts in its place).
    """

    runs: tuple[Run, ...]
    others: tuple[tuple[Run, Run], ...] = ()

    @property
    def name(self) -> str:
        """The first run's name, and how many more there are."""
        return self.runs[0].name + (f" and {len(self.runs) - 1} more" if len(self.runs) > 1 else "")

    @property
    def bf16(self) -> bool:
        """Whether no linear runs in FP8."""
        return self.runs[0].bf16


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """The bf16 runs of a group, for figures: finished, one for each pair of seeds.

    band: the lowest and highest losses at ``steps``; None of fewer than 2 runs, or 5 steps.
    """

    runs: tuple[Run, ...]
    common: np.ndarray  # steps that all runs have
    width: int
    band: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def steps(self) -> np.ndarray:
        """The steps of the band: the last step of each window."""
        return self.common[self.width - 1 :]

    @property
    def varied(self) -> str:
        """Which seeds differ: run.seed, data.seed or both."""
        return " and ".join(
            key for key in ("run.seed", "data.seed") if len({run.key(key) for run in self.runs}) > 1
        )


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Two lists of runs, and the gap between them.

    runs, to  matched in order, unless gap.by is "unmatched".
    steps     the last step of each window; gap: at each of them.
    level     the mean loss of ``to`` over the last window.
    count     the number of steps in common, and width: those of a window.
    """

    runs: tuple[Run | Log, ...]
    to: tuple[Run | Log, ...]
    steps: np.ndarray
    gap: Gap
    level: float
    count: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of the gap between an arm and the runs that it is judged by.

    reason: why nothing is, or how a run ended. compared, margin: None without a gap.
    """

    kind: Kind = "cannot tell"
    reason: str = ""
    compared: Compared | None = None
    margin: float | None = None
    confidence: float = CONFIDENCE

    @property
    def of_pair(self) -> bool:
        """Whether it is of two runs alone, and so not of their recipes (E-4)."""
        return self.compared is not None and self.compared.gap.by == "steps"

    @property
    def said(self) -> str:
        """The verdict as a sentence."""
        if self.compared is None or self.margin is None:
            return f"{self.kind}: {self.reason.rstrip('.')}."
        return (
            f"{self.kind}: "
            f"{sentence(self.compared, self.kind, self.margin, self.confidence)}{self.reason}."
        )


def groups(all_runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs that are comparable (E-1), in the order given."""
    return _partition(all_runs, lambda run: run.reference)


def arms(group: Sequence[Run]) -> list[Arm]:
    """The arms of a group, in the order given."""
    return [_arm(members) for members in _partition(group, arm_settings)]


def _partition(runs: Sequence[Run], key: Callable[[Run], dict]) -> list[list[Run]]:
    """The runs by their equal keys, in the order given."""
    parts: list[list[Run]] = []
    for run in runs:
        for part in parts:
            if not configs.differences(key(part[0]), key(run)):
                part.append(run)
                break
        else:
            parts.append([run])
    return parts


def _arm(members: Sequence[Run]) -> Arm:
    counted: dict[tuple[int, int], Run] = {}
    for run in members:
        first = counted.setdefault(run.seeds, run)
        if (run.finished or run.diverged) and not (first.finished or first.diverged):
            counted[run.seeds] = run
    others = [(run, one) for seeds, one in counted.items() for run in members]
    return Arm(
        runs=tuple(counted.values()),
        others=tuple(
            (run, one) for run, one in others if run.seeds == one.seeds and run is not one
        ),
    )


def baseline(arm: Arm, group: Sequence[Run]) -> Arm | None:
    """The bf16 runs that judge an arm: the first arm of its backend, or else the first (E-1).

    A bf16 arm is judged by an earlier one; the first by none.
    """
    candidates: list[Arm] = []
    for other in arms(group):
        if other.runs[0] is arm.runs[0]:
            if arm.bf16:
                break
        elif other.bf16:
            candidates.append(other)
    backend = arm.runs[0].manifest["backend"]
    like = [other for other in candidates if other.runs[0].manifest["backend"] == backend]
    return next(iter(like + candidates), None)


def judged(group: Sequence[Run]) -> list[Arm]:
    """The arms that have a verdict: all but the first of bf16."""
    return [arm for arm in arms(group) if not arm.bf16 or baseline(arm, group)]


def verdict(
    arm: Arm, group: Sequence[Run], *, confidence: float = CONFIDENCE, margin: float | None = None
) -> Verdict:
    """Judge an arm by its group's bf16 runs (E-2 to E-4); an arm of one pair by that pair.

    margin: in nats; None: ``gap.MARGIN`` of bf16's loss.
    """
    if ended := [run for run in arm.runs if run.diverged]:
        run = ended[0]
        step = max(run.losses, default=-1) + 1
        tokens = (step + 1) * run.tokens_per_step
        return Verdict(
            kind="worse",
            reason=f"{run.name} ended at step {step}, after {tokens:,} tokens, by {run.diverged}",
        )
    reference = baseline(arm, group)
    if reference is None:
        weights, order = arm.runs[0].seeds
        return Verdict(
            reason="there is no bf16 run with its text, model, optimizer, batch and number of "
            f"steps. Train one with --recipe bf16 --run.seed {weights} --data.seed {order}"
        )
    others = [run for run in reference.runs if not run.diverged]
    if not others:
        first = reference.runs[0]
        return Verdict(reason=f"{first.name}, which it is judged by, ended by {first.diverged}")
    answer = between(arm.runs, others, confidence=confidence, margin=margin)
    backends = [side[0].manifest["backend"] for side in (arm.runs, others)]
    if backends[0] == backends[1] or arm.bf16:
        return answer
    foreign = (
        f"; no bf16 run is of backend {backends[0]}, and those of {backends[1]} differ in more "
        "than FP8"
    )
    return dataclasses.replace(answer, reason=answer.reason + foreign)


def between(
    mine: Sequence[Run | Log],
    others: Sequence[Run | Log],
    *,
    confidence: float = CONFIDENCE,
    margin: float | None = None,
) -> Verdict:
    """Judge runs that differ in seeds alone by others that do (E-2 to E-5); none of them diverged.

    Logs are matched in order, runs by their seeds. The verdict on one pair is of these two runs.
    """
    mine, others = _kept(mine), _kept(others)
    pairs = [(run, other) for run in mine for other in others if run.seeds == other.seeds]
    if any(isinstance(run, Log) for run in (*mine, *others)):
        pairs = list(zip(mine, others, strict=True))
    # E-2: seeds that differ tell more than the steps of a pair
    if len(pairs) == 1 and len(mine) + len(others) > 2:
        pairs = []
    if not pairs and len(mine) + len(others) < 3:
        return Verdict(
            reason=f"{mine[0].name} has seeds {mine[0].seeds} and {others[0].name} "
            f"{others[0].seeds}: two runs of different seeds show no effect of anything else. "
            "Train both with the same seeds"
        )
    sides = [list(side) for side in zip(*pairs, strict=True)] if pairs else [mine, others]
    compared = compare(*sides, matched=bool(pairs), confidence=confidence)
    if compared is None:
        every = [*sides[0], *sides[1]]
        names = ", ".join(run.name for run in every)
        return Verdict(
            reason=f"{names} have {len(runs.common_steps(every))} steps in common, and "
            f"{gaps.BATCHES} are needed"
        )
    margin = gaps.MARGIN * max(abs(compared.level), TINY) if margin is None else margin
    kind = gaps.decide(compared.gap.last, margin)
    short = "".join(
        f"; {run.name} is not finished, but {run.manifest['status']}"
        for run in (*sides[0], *sides[1])
        if isinstance(run, Run) and not run.finished
    )
    return Verdict(kind=kind, compared=compared, margin=margin, reason=short, confidence=confidence)


def compare(
    mine: Sequence[Run | Log],
    others: Sequence[Run | Log],
    *,
    matched: bool,
    confidence: float = CONFIDENCE,
) -> Compared | None:
    """The gap of runs to others at each step; None: fewer than 5 in common. matched: in order."""
    steps = runs.common_steps([*mine, *others])
    width = gaps.window(len(steps))
    if len(steps) < width:
        return None
    losses, to = (np.stack([runs.at(run.losses, steps) for run in side]) for side in (mine, others))
    if matched and len(losses) == 1:
        gap = gaps.one_pair(losses[0] - to[0], width, confidence=confidence)
    elif matched:
        gap = gaps.matched(gaps.running_mean(losses - to, width), confidence=confidence)
    else:
        means = (gaps.running_mean(side, width) for side in (losses, to))
        gap = gaps.unmatched(*means, confidence=confidence)
    return Compared(
        runs=tuple(mine),
        to=tuple(others),
        steps=steps[width - 1 :],
        gap=gap,
        level=float(to[:, -width:].mean()),
        count=len(steps),
        width=width,
    )


def sentence(compared: Compared, kind: Kind, margin: float, confidence: float = CONFIDENCE) -> str:
    """The gap of the last steps, its interval, where it comes from, and what would settle it."""
    gap, n = compared.gap.last, len(compared.runs)
    text = (
        f"{gap.mean:+.4f} nats [{gap.low:+.4f}, {gap.high:+.4f}] from {compared.to[0].name}"
        f" over the last {compared.width} of {compared.count} steps"
    )
    if gap.by == "seeds":
        text += f", by {n} matched seeds"
    elif gap.by == "unmatched":
        text += (
            f", by {n} and {len(compared.to)} runs of different seeds; the interval includes "
            "seed noise, which matched seeds avoid"
        )
    alone = "one seed; " * (gap.by == "steps")
    text += f" ({alone}margin {margin:.4f})" if alone else f"; margin {margin:.4f}"
    if gap.too_short:
        text += f"; neighboring steps correlate by {gap.phi:.2f}, too much for so few"
    if kind != "cannot tell":
        return f"{text};{ONE_PAIR}" if gap.by == "steps" else text
    if gap.by == "seeds":
        needed = gaps.seeds_needed(gap, margin, confidence=confidence)
        shown = needed if needed else f"more than {gaps.MOST_SEEDS:,}"
        return f"{text}; at this spread {shown} matched seeds would settle it"
    if gap.by == "unmatched":
        return text
    return (
        f"{text}; about {gaps.steps_needed(gap, margin, compared.count):,} steps would settle "
        f"it{ONE_PAIR}"
    )


def seeds_of(group: Sequence[Run]) -> Seeds:
    """The finished bf16 runs of a group, the first for each pair of seeds."""
    chosen: dict[tuple[int, int], Run] = {}
    for run in group:
        if run.bf16 and run.finished:
            chosen.setdefault(run.seeds, run)
    members = tuple(chosen.values())
    steps = runs.common_steps(members) if members else np.array([], np.int64)
    seeds = Seeds(runs=members, common=steps, width=gaps.window(len(steps)))
    if len(members) < 2 or len(steps) < seeds.width:
        return seeds
    losses = np.stack([runs.at(run.losses, steps) for run in members])
    curves = gaps.running_mean(losses, seeds.width)
    return dataclasses.replace(seeds, band=(curves.min(axis=0), curves.max(axis=0)))


def arm_settings(run: Run) -> dict:
    """What the runs of an arm have in common: everything that changes bits, but the seeds."""
    settings = {key: value for key, value in run.settings.items() if key not in NO_BITS}
    apart = ("seed", "source", "mixture", "evaluation")
    data = {key: value for key, value in settings["data"].items() if key not in apart}
    own = {
        key: value
        for key, value in settings["run"].items()
        if key != "seed" and not key.startswith("eval_")
    }
    return {**settings, "data": data, "run": own}


def _kept(side: Sequence[Run | Log]) -> list[Run | Log]:
    """The finished runs; all, if none is."""
    return [run for run in side if run.finished] or list(side)
