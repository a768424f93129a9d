"""The gap between two losses: its interval, and what the interval decides (spec E).

A gap is a loss minus the loss that it is compared with, such as FP8 minus bf16. Three intervals
share one form, d +- t s / sqrt(n):

matched    n pairs of runs of equal seeds, data order included. The difference of a pair is free of
           what its seed does to both losses, so few seeds have power.
one_pair   steps of one pair. They correlate, so that the window is cut into 5 batches, and the
           interval is widened by what the correlation that is left hides.
unmatched  runs of different seeds: Student's two-sample interval. The noise of seeds is in it.

``decide`` is an equivalence test, TOST (Schuirmann 1987): equivalent if the interval is within the
margin, which both one-sided tests at (1 - confidence) / 2 then reject to be exceeded.
"""

import bisect
import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp8ref.shared.errors import require

__all__ = ["CONFIDENCE", "MARGIN", "matched", "window"]

BATCHES = 5  # the number of batch means in the interval of one pair (E-5)

CONFIDENCE = 0.95
"""The default confidence of all intervals."""

MARGIN = 0.0025
"""The default margin, as a share of the loss that a run is compared with (E-4).

DeepSeek-V3 calls FP8 within 0.25 % of bf16's loss acceptable (arXiv:2412.19437, section 3.3).
"""

WIDEST = 1.5
"""The most that correlation may widen one pair's interval; beyond, it is too short (E-5)."""

MOST_PHI = 0.9999  # most that neighboring steps are taken to correlate

MOST_SEEDS = 1000  # the most seeds that ``seeds_needed`` looks for

Kind = Literal["equivalent", "worse", "better", "cannot tell"]
"""What an interval decides (E-4)."""

By = Literal["seeds", "steps", "unmatched"]
"""Where an interval comes from: ``matched``, ``one_pair`` or ``unmatched``."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The mean of differences and its confidence interval: float64 arrays of one shape, or numbers.

    n         how many differences: pairs, batches, or runs of both sides.
    phi       the correlation of neighboring steps, of one pair.
    widening  the factor by which it widened the interval.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    by: By
    n: int
    phi: float = 0.0
    widening: float = 1.0

    @property
    def last(self) -> "Gap":
        """The gap at the last place of the last axis."""
        return dataclasses.replace(
            self, mean=self.mean[..., -1], low=self.low[..., -1], high=self.high[..., -1]
        )

    @property
    def too_short(self) -> bool:
        """Whether the steps correlate for so long that the window says little (E-5)."""
        return self.widening > WIDEST


def window(steps: int) -> int:
    """W: a tenth of the steps that runs have in common, cut down to a multiple of 5; at least 5."""
    return BATCHES * max(1, steps // (10 * BATCHES))


def running_mean(losses: np.ndarray, width: int) -> np.ndarray:
    """Means of ``width`` consecutive values on the last axis: [..., S] -> [..., S - width + 1]."""
    losses = np.asarray(losses, np.float64)
    # keeps the sums small, and those of a constant exactly 0
    center = losses.mean(axis=-1, keepdims=True)
    sums = np.cumsum(losses - center, axis=-1)
    sums = np.concatenate([np.zeros_like(center), sums], axis=-1)
    return (sums[..., width:] - sums[..., :-width]) / width + center


def matched(differences: np.ndarray, *, confidence: float = CONFIDENCE) -> Gap:
    """The mean difference of n independent pairs (E-3): [n, ...] -> fields [...].

    Raises:   ValueError: fewer than 2 pairs.
    """
    differences = np.asarray(differences, np.float64)
    n = len(differences)
    require(n >= 2, f"an interval over seeds takes at least 2 pairs; got {n}.")
    error = differences.std(axis=0, ddof=1) / math.sqrt(n)
    return _about(differences.mean(axis=0), error, n - 1, confidence, "seeds", n)


def unmatched(mine: np.ndarray, others: np.ndarray, *, confidence: float = CONFIDENCE) -> Gap:
    """The mean of ``mine`` minus that of ``others``, of equal variance (E-2): [n, ...], [m, ...].

    Raises:   ValueError: fewer than 3 runs in all: no two of one side.
    """
    mine, others = np.asarray(mine, np.float64), np.asarray(others, np.float64)
    n, m = len(mine), len(others)
    if min(n, m) < 1 or n + m < 3:
        raise ValueError(
            "an interval over unmatched runs takes two on one side and one on the other; got "
            f"{n} and {m}."
        )
    squares = sum(((side - side.mean(axis=0)) ** 2).sum(axis=0) for side in (mine, others))
    error = np.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))
    mean = mine.mean(axis=0) - others.mean(axis=0)
    return _about(mean, error, n + m - 2, confidence, "unmatched", n + m)


def one_pair(difference: np.ndarray, width: int, *, confidence: float = CONFIDENCE) -> Gap:
    """The running mean of one pair's difference by step, with an interval by batch means (E-5).

    Shapes:   difference [S]; each field [S - width + 1]. width: a multiple of 5.
    """
    assert width % BATCHES == 0, width
    difference = np.asarray(difference, np.float64)
    size = width // BATCHES
    short = running_mean(difference, size)  # [S - size + 1]
    # [S - width + 1, 5]
    batches = np.lib.stride_tricks.sliding_window_view(short, width - size + 1)[:, ::size]
    phi = correlation(difference[len(difference) // 2 :])
    error = widening(phi, size) * batches.std(axis=1, ddof=1) / math.sqrt(BATCHES)
    gap = _about(batches.mean(axis=1), error, BATCHES - 1, confidence, "steps", BATCHES)
    return dataclasses.replace(gap, phi=phi, widening=widening(phi, size))


def correlation(difference: np.ndarray) -> float:
    """The correlation of neighbors about a line, from 0 to ``MOST_PHI``, corrected for its bias.

    Fewer than 5 values, or values on a line, give 0.
    Source:   Kendall 1954: of n values about their mean, the estimate is low by (1 + 3 phi) / n.
    """
    n = len(difference)
    if n < 5:
        return 0.0
    x = np.arange(n) - (n - 1) / 2
    rest = difference - difference.mean()
    rest = rest - x * (x @ rest) / (x @ x)
    total = float(rest @ rest)
    # what rounding alone leaves of a difference of losses
    if total <= n * (1e-12 * float(np.abs(difference).max())) ** 2:
        return 0.0
    phi = float(rest[1:] @ rest[:-1]) / total
    return float(np.clip(phi + (1 + 3 * phi) / n, 0.0, MOST_PHI))


def widening(phi: float, size: int) -> float:
    """How much batch means of ``size`` steps that correlate by phi understate their mean's error.

    Of AR(1) steps, let r_j be the correlation of batch means j apart, and A = 1 + 2 sum (1 - j / 5)
    r_j. The mean of 5 batches has A times the variance that independent ones would give it, and
    their sample variance is expected to be (5 - A) / 4 of theirs. The factor is the root of the
    ratio. phi is below 1.
    """
    lags = np.arange(1, size)
    # size^2 times the variance of a batch mean
    own = size + 2 * float(((size - lags) * phi**lags).sum())
    first = phi * ((1 - phi**size) / (1 - phi)) ** 2  # size^2 times the covariance of neighbors
    inflation = 1 + 2 * sum(
        (1 - j / BATCHES) * first / own * phi ** (size * (j - 1)) for j in range(1, BATCHES)
    )
    return math.sqrt(inflation / ((BATCHES - inflation) / (BATCHES - 1)))


def decide(gap: Gap, margin: float) -> Kind:
    """What one gap's interval decides (E-4)."""
    low, high = float(gap.low), float(gap.high)
    if gap.too_short:
        return "cannot tell"
    if -margin < low and high < margin:
        return "equivalent"
    if low > 0:
        return "worse"
    return "better" if high < 0 else "cannot tell"


def seeds_needed(gap: Gap, margin: float, *, confidence: float = CONFIDENCE) -> int | None:
    """How many matched seeds would settle it, as mean and spread are (E-7); None: > MOST_SEEDS."""
    half, target = float(gap.high - gap.mean), _target(gap, margin)
    spread = half * math.sqrt(gap.n) / student(confidence, gap.n - 1)
    counts = range(gap.n + 1, MOST_SEEDS + 1)  # the half-width falls as there are more
    first = bisect.bisect_left(
        counts, True, key=lambda n: student(confidence, n - 1) * spread / math.sqrt(n) < target
    )
    return counts[first] if first < len(counts) else None


def steps_needed(gap: Gap, margin: float, steps: int) -> int:
    """How many steps would settle it, if mean and spread stay as they are (E-7).

    The half-width falls as 1 / sqrt(steps), and batches have to outlast the correlation.
    """
    sizes = (max(1, steps // (10 * BATCHES)) * 2**i for i in range(64))  # steps of a batch
    size = next(size for size in sizes if widening(gap.phi, size) <= WIDEST)
    half = float(gap.high - gap.mean) / gap.widening
    by_spread = steps * (half * min(gap.widening, WIDEST) / _target(gap, margin)) ** 2
    return math.ceil(max(by_spread, 10 * BATCHES * size if gap.too_short else 0))


def _target(gap: Gap, margin: float) -> float:
    """The half-width below which the interval is within the margin, or leaves out 0."""
    return max(abs(float(gap.mean)), margin - abs(float(gap.mean)))


def _about(mean, error, dof: int, confidence: float, by: By, n: int) -> Gap:
    half = student(confidence, dof) * np.asarray(error)
    return Gap(mean=np.asarray(mean), low=mean - half, high=mean + half, by=by, n=n)


def student(confidence: float, dof: int) -> float:
    """t with P(|T| <= t) = confidence, T of Student's distribution with dof degrees of freedom.

    Raises:   ValueError: confidence outside (0, 1), dof below 1.
    Source:   Abramowitz and Stegun, 26.7.3 and 26.7.4: closed forms in theta = atan(t / sqrt(dof)),
              increasing in theta.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1; got {confidence}.")
    text = f"Student's distribution has at least 1 degree of freedom; got {dof}."
    require(dof >= 1, text)
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # bisection: 2^-100 of the interval is below a double's spacing
        theta = (low + high) / 2
        low, high = (theta, high) if _inside(theta, dof) < confidence else (low, theta)
    return math.sqrt(dof) * math.tan(low)


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
