"""Group bf16 seed runs, and judge FP8 runs against their spread (SEMANTICS E).

The sample is n bf16 runs that differ only in their seeds. At each step, a run's loss is its mean
over the last W steps, and s is the sample standard deviation over the n runs. t is Student's
quantile at n - 1 degrees of freedom. Both tests are one-sided, because FP8 is suspected of a higher
loss. If losses of seeds are normal, at most 5 % of sound runs fail (at the default confidence).

*A run with seeds of its own* is compared with the mean m of the sample. One more bf16 run lies
below m + t s sqrt(1 + 1/n): the prediction interval of one more observation, exact for any n >= 2.

*A run with the seeds of a bf16 run* had the same batches and initial weights, so that their gap is
free of both. The limit is t s sqrt(2), by which two bf16 runs of different seeds differ. This is
conservative: equal seeds correlate the losses by some rho >= 0, and without any effect of FP8 the
gap's variance is 2 sigma^2 (1 - rho). A gap above the limit is more than another seed causes. A gap
below it may still be real; its confidence interval shows that.

Steps of one run are *not* observations: a seed's loss stays high or low for long, and more steps
add little. Hence two seeds prove little: t is 6.3 for two, 2.9 for three, 2.1 for five.

*The interval of a gap* uses batch means, because gaps of neighboring steps are correlated. The W
steps are cut into 5 batches, whose means are more nearly independent. It shows how well this pair's
gap is known, not what another pair would show.

The verdict is one test, at the last common step. ``left_step``, from which a run stayed outside,
only describes it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fp8ref.train import config as configs
from fp8ref.train.report import runs
from fp8ref.train.report.runs import Run

BATCHES = 5
"""The number of batch means in the interval of a gap (E-5)."""

CONFIDENCE = 0.95
"""The default confidence of all limits and intervals."""

Kind = Literal["within noise", "outside noise", "cannot tell"]
"""The verdicts on a run; ``cannot tell`` has a reason."""


class Band(NamedTuple):
    """high: the limit of one more run.

    low: as far below the mean, for figures. float64 arrays of one length.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Gap(NamedTuple):
    """Mean difference of two runs over the last W steps, with its confidence interval, from the
    W-th step on."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """The bf16 sample of a group: finished runs, one for each pair of seeds.

    band, limit: None if there is too little.
    """

    runs: tuple[Run, ...]
    common: np.ndarray  # steps that all runs have
    width: int
    band: Band | None = None
    limit: np.ndarray | None = None

    @property
    def steps(self) -> np.ndarray:
        """The steps of band and limit: the last step of each window."""
        return self.common[self.width - 1 :]

    @property
    def varied(self) -> str:
        """Which seeds differ: run.seed, data.seed or both."""
        return " and ".join(key for key in ("run.seed", "data.seed") if len({run.key(key) for run in self.runs}) > 1)


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The gap between two runs of equal seeds, at ``steps``, the last step of each window."""

    run: Run
    to: Run
    steps: np.ndarray
    gap: Gap


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a run's loss is higher than another bf16 seed's.

    reason: of "cannot tell", or the non-finite loss.
    """

    kind: Kind
    seeds: Seeds
    reason: str = ""
    to: Run | None = None  # the bf16 run of equal seeds; without it the loss itself is judged
    step: int | None = None  # the one that is judged
    value: float | None = None  # gap or loss: the mean over the window that ends there
    limit: float | None = None  # what value stays below
    left_step: int | None = None
    left_tokens: int | None = None


def student(confidence: float, dof: int) -> float:
    """t with P(|T| <= t) = confidence, T of Student's distribution with dof degrees of freedom.

    Raises:   ValueError: confidence outside (0, 1), dof below 1.
    Source:   Abramowitz and Stegun, 26.7.3 and 26.7.4: closed forms in theta = atan(t / sqrt(dof)),
              increasing in theta.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1; got {confidence}.")
    if dof < 1:
        raise ValueError(f"Student's distribution has at least 1 degree of freedom; got {dof}.")
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # bisection: 2^-100 of the interval is below a double's spacing
        theta = (low + high) / 2
        low, high = (theta, high) if _inside(theta, dof) < confidence else (low, theta)
    return math.sqrt(dof) * math.tan(low)


def window(steps: int) -> int:
    """W: a tenth of the steps that runs have in common, cut down to a multiple of 5; at least 5."""
    return BATCHES * max(1, steps // (10 * BATCHES))


def running_mean(losses: np.ndarray, width: int) -> np.ndarray:
    """Means of ``width`` consecutive values on the last axis: [..., S] -> [..., S - width + 1]."""
    losses = np.asarray(losses, np.float64)
    center = losses.mean(axis=-1, keepdims=True)  # keeps the sums small, and those of a constant exactly 0
    sums = np.cumsum(losses - center, axis=-1)
    sums = np.concatenate([np.zeros_like(center), sums], axis=-1)
    return (sums[..., width:] - sums[..., :-width]) / width + center


def band(curves: np.ndarray, *, confidence: float = CONFIDENCE) -> Band:
    """The prediction limits of one more curve, pointwise (E-2).

    Shapes:   curves [n, S], n independent runs; each field [S].
    Raises:   ValueError: fewer than two curves.
    """
    half = _spread(curves, confidence) * math.sqrt(1 + 1 / len(curves))
    mean = np.asarray(np.mean(curves, axis=0, dtype=np.float64))
    return Band(mean, mean - half, mean + half)


def limit(curves: np.ndarray, *, confidence: float = CONFIDENCE) -> np.ndarray:
    """The pointwise limit of the difference of two runs of different seeds (E-3): [n, S] -> [S]."""
    return _spread(curves, confidence) * math.sqrt(2)


def first_outside(curve: np.ndarray, high: np.ndarray) -> int | None:
    """The index from which a curve stays above the limit to its end.

    None if it ends below (E-4).
    """
    above = curve > high
    if not above[-1]:
        return None
    below = np.flatnonzero(~above)
    return int(below[-1]) + 1 if len(below) else 0


def gap(difference: np.ndarray, width: int, *, confidence: float = CONFIDENCE) -> Gap:
    """The running mean of a step-by-step difference, and its confidence interval by batch means
    (E-5).

    Shapes:   difference [S]; each field [S - width + 1]. width: a multiple of 5.
    """
    assert width % BATCHES == 0, width
    size = width // BATCHES
    short = running_mean(difference, size)  # [S - size + 1]
    batches = np.lib.stride_tricks.sliding_window_view(short, width - size + 1)[:, ::size]  # [S - width + 1, 5]
    mean = batches.mean(axis=1)
    half = student(confidence, BATCHES - 1) * batches.std(axis=1, ddof=1) / math.sqrt(BATCHES)
    return Gap(mean, mean - half, mean + half)


def groups(given: Sequence[Run]) -> list[list[Run]]:
    """Group runs that are comparable (E-1), in the order given."""
    found: list[list[Run]] = []
    for run in given:
        mine = next((group for group in found if not configs.differences(group[0].reference, run.reference)), None)
        found.append([run]) if mine is None else mine.append(run)
    return found


def seeds_of(group: Sequence[Run], *, but: Run | None = None, among: Sequence[Run] = (), confidence: float = CONFIDENCE) -> Seeds:
    """The bf16 sample of a group (E-1, E-2).

    It has the finished bf16 runs, the first for each pair of seeds.

    but       a run whose seeds are left out.
    among     more runs, which must have the common steps too.
    """
    chosen: dict[tuple[int, int], Run] = {}
    for run in group:
        if run.bf16 and run.finished and (but is None or run.seeds != but.seeds):
            chosen.setdefault(run.seeds, run)
    members = tuple(chosen.values())
    steps = runs.common_steps([*members, *among]) if members else np.array([], np.int64)
    width = window(len(steps))
    if len(members) < 2 or len(steps) < width:
        return Seeds(runs=members, common=steps, width=width)
    curves = running_mean(np.stack([runs.at(run.losses, steps) for run in members]), width)
    return Seeds(
        runs=members,
        common=steps,
        width=width,
        band=band(curves, confidence=confidence),
        limit=limit(curves, confidence=confidence),
    )


def verdict(run: Run, group: Sequence[Run], *, confidence: float = CONFIDENCE) -> Verdict:
    """Judge one run of a group by its bf16 runs (E-2 to E-4).

    Its gap is judged if a bf16 run has its seeds, and else its loss.

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
        least = f"it and the bf16 runs have {len(seeds.common)} steps in common, and {BATCHES} are needed"
        return Verdict(kind="cannot tell", seeds=seeds, reason=least)
    losses = runs.at(run.losses, seeds.common) - (runs.at(to.losses, seeds.common) if to else 0)
    curve, high = running_mean(losses, seeds.width), seeds.limit if to else seeds.band.high
    index = first_outside(curve, high)
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
    """The bf16 run of equal seeds.

    If there are several, one of the same backend, and then a finished one.
    """
    partners = [other for other in group if other is not run and other.bf16 and other.seeds == run.seeds]
    partners.sort(key=lambda other: (other.manifest["backend"] != run.manifest["backend"], not other.finished))
    return partners[0] if partners else None


def paired(run: Run, to: Run, *, confidence: float = CONFIDENCE) -> Paired | None:
    """The gap between two runs, step by step (E-5); None if they have fewer than 5 common steps."""
    steps = runs.common_steps([run, to])
    width = window(len(steps))
    if len(steps) < width:
        return None
    difference = runs.at(run.losses, steps) - runs.at(to.losses, steps)
    return Paired(run=run, to=to, steps=steps[width - 1 :], gap=gap(difference, width, confidence=confidence))


def _too_few(run: Run, seeds: Seeds) -> str:
    have = f"there is only {seeds.runs[0].name}" if seeds.runs else "there is none"
    weights, order = run.seeds
    return (
        "it needs at least 2 finished bf16 runs of different seeds with its text, model, "
        f"optimizer, batch and number of steps, but {have}. Train more with --recipe bf16 "
        f"--run.seed {weights + 1} --data.seed {order + 1}, and so on"
    )


def _spread(curves: np.ndarray, confidence: float) -> np.ndarray:
    """t s, with one-sided t: P(T <= t) = confidence."""
    curves = np.asarray(curves, np.float64)
    if len(curves) < 2:
        raise ValueError(f"the noise of seeds takes at least 2 runs; got {len(curves)}.")
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence must be between 0.5 and 1; got {confidence}.")
    return student(2 * confidence - 1, len(curves) - 1) * curves.std(axis=0, ddof=1)


def _inside(theta: float, dof: int) -> float:
    """P(|T| <= sqrt(dof) tan(theta))."""
    cos2, term, total = math.cos(theta) ** 2, 1.0, 0.0
    if dof % 2 == 0:
        for i in range(dof // 2):
            total += term
            term *= cos2 * (2 * i + 1) / (2 * i + 2)
        return math.sin(theta) * total
    term = math.cos(theta)
    for i in range(dof // 2):
        total += term
        term *= cos2 * (2 * i + 2) / (2 * i + 3)
    return (theta + math.sin(theta) * total) * 2 / math.pi
