"""Is a run's loss worse than what another seed of bf16 would have shown? (SEMANTICS E)

n bf16 runs that differ in their seeds alone are a sample of what training gives without FP8. At each step, each run's loss is its mean over
the last W steps, and s is the sample standard deviation of the n runs. Two comparisons are made with it, one-sided: FP8 is suspected of a
higher loss, and errs in being suspected in at most 5 % of runs (at the default confidence), if losses of seeds are normal. t is
Student's quantile at n - 1 degrees of freedom.

*A run of a seed of its own* is held to the mean m of the n: one more bf16 run lies below m + t s sqrt(1 + 1/n), the prediction interval of one
more observation, which is exact for any n >= 2.

*A run with the seeds of a bf16 run* saw its batches and its initial weights. Their gap, step by step, is free of what batches and
initial weights do, and is held to t s sqrt(2), by which two bf16 runs of different seeds differ. That is conservative: equal seeds correlate
losses by some rho >= 0, and the gap's variance without any effect of FP8 is 2 sigma^2 (1 - rho). A gap beyond it is more than choosing
another seed does; a gap within it may be real all the same, and its interval says so.

Steps of one run are *not* observations: a seed's loss stays high or low for long, so nothing is gained by counting them. That is why two
seeds allow little to be said: t is 6.3, of three 2.9, of five 2.1.

*The interval of a gap.* Neighbouring steps' gaps resemble each other, so it comes of batch means: the W steps are cut into 5 batches, whose means
are more nearly independent than steps are. It says how well the gap of these two runs is known, not what another pair would show.

The verdict is one test, of the last step in common. Where a run left, the first step from which it stayed outside, describes it and
tests nothing more.
"""

import math
from typing import NamedTuple

import numpy as np

BATCHES = 5
CONFIDENCE = 0.95


class Band(NamedTuple):
    """What one more run stays below; and, for figures, as far below the mean. float64 arrays of one length."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Gap(NamedTuple):
    """The mean difference of two runs over the last W steps, and its confidence interval; at each step from the W-th on."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def student(confidence: float, dof: int) -> float:
    """t with P(|T| <= t) = confidence, T of Student's distribution with dof degrees of freedom.

    Raises:   ValueError: confidence outside (0, 1), dof below 1.
    Source:   Abramowitz and Stegun, 26.7.3 and 26.7.4: closed forms in theta = atan(t / sqrt(dof)), increasing in theta.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence lies between 0 and 1; got {confidence}.")
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
    """Means of every ``width`` consecutive values along the last axis: [..., S] -> [..., S - width + 1]."""
    losses = np.asarray(losses, np.float64)
    centre = losses.mean(axis=-1, keepdims=True)  # so that sums stay small, and those of a constant zero
    sums = np.cumsum(losses - centre, axis=-1)
    sums = np.concatenate([np.zeros_like(centre), sums], axis=-1)
    return (sums[..., width:] - sums[..., :-width]) / width + centre


def band(curves: np.ndarray, *, confidence: float = CONFIDENCE) -> Band:
    """The limits of one more curve, at each point by itself (E-2).

    Shapes:   curves [n, S], n independent runs; each field [S].
    Raises:   ValueError: fewer than two curves.
    """
    half = _spread(curves, confidence) * math.sqrt(1 + 1 / len(curves))
    mean = np.asarray(np.mean(curves, axis=0, dtype=np.float64))
    return Band(mean, mean - half, mean + half)


def limit(curves: np.ndarray, *, confidence: float = CONFIDENCE) -> np.ndarray:
    """What the difference of two runs of different seeds stays below, at each point by itself (E-3): [n, S] -> [S]."""
    return _spread(curves, confidence) * math.sqrt(2)


def left(curve: np.ndarray, high: np.ndarray) -> int | None:
    """The index from which a curve stays above a limit to the end; None where it does not end above (E-4)."""
    above = curve > high
    if not above[-1]:
        return None
    below = np.flatnonzero(~above)
    return int(below[-1]) + 1 if len(below) else 0


def gap(difference: np.ndarray, width: int, *, confidence: float = CONFIDENCE) -> Gap:
    """The running mean of a step-by-step difference and its interval by batch means (E-5).

    Shapes:   difference [S]; each field [S - width + 1]. width: a multiple of 5.
    """
    assert width % BATCHES == 0, width
    size = width // BATCHES
    short = running_mean(difference, size)  # [S - size + 1]
    batches = np.lib.stride_tricks.sliding_window_view(short, width - size + 1)[:, ::size]  # [S - width + 1, 5]
    mean = batches.mean(axis=1)
    half = student(confidence, BATCHES - 1) * batches.std(axis=1, ddof=1) / math.sqrt(BATCHES)
    return Gap(mean, mean - half, mean + half)


def _spread(curves: np.ndarray, confidence: float) -> np.ndarray:
    """t s, t one-sided: P(T <= t) = confidence."""
    curves = np.asarray(curves, np.float64)
    if len(curves) < 2:
        raise ValueError(f"the noise of seeds takes at least 2 runs; got {len(curves)}.")
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence lies between 0.5 and 1; got {confidence}.")
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
