"""Intervals of a gap cover what they say, and their verdicts err as seldom as they may (spec E)."""

import math

import numpy as np
import pytest
from scipy import stats

from fp8ref.train.report import gap as gaps
from fp8ref.train.report.gap import Gap


def ar1(rng, shape, phi: float) -> np.ndarray:
    """Stationary noise of variance 1 that correlates by phi from step to step."""
    noise = rng.standard_normal(shape)
    for step in range(1, shape[-1]):
        noise[..., step] = phi * noise[..., step - 1] + math.sqrt(1 - phi**2) * noise[..., step]
    return noise


def sweep(rng, seeds: int, planted: float, *, steps: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """Losses [seeds, steps] of a recipe and of bf16, as training has them: they fall, and a seed
    moves both alike, by ten times what the recipe does to it; steps correlate."""
    step = np.arange(steps)
    common = (
        2.3
        + 3 * np.exp(-step / 20)
        + 0.05 * rng.standard_normal((seeds, 1))
        + 0.1 * ar1(rng, (seeds, steps), 0.5)
    )
    effect = (
        planted + 0.005 * rng.standard_normal((seeds, 1)) + 0.003 * ar1(rng, (seeds, steps), 0.5)
    )
    return common + effect, common


SWEEPS = 200
# Of 200 intervals of 95 % some 190 hold the truth, with a standard deviation of sqrt(200 * 0.95 *
# 0.05) = 3.08. Four of them, 12.3, leave 178 and more: a binomial count is below with probability
# 2e-4. All 200 may hold it, at 3.2 deviations.
LEAST = SWEEPS * 0.95 - 4 * math.sqrt(SWEEPS * 0.95 * 0.05)


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("planted", [0.0, 0.0157, -0.05])
def test_coverage_over_200_sweeps_is_what_it_says(rng, seeds, planted):  # E-3
    held = 0
    for _ in range(SWEEPS):
        fp8, bf16 = sweep(rng, seeds, planted)
        found = gaps.matched(gaps.running_mean(fp8 - bf16, gaps.window(150))).last
        held += found.low <= planted <= found.high
    assert held >= LEAST


@pytest.mark.parametrize("planted", [0.0, 0.0157])
def test_coverage_without_matching_is_what_it_says(rng, planted):  # E-2
    held = 0
    for _ in range(SWEEPS):
        (fp8, _), (_, bf16) = sweep(rng, 2, planted), sweep(rng, 3, 0.0)
        found = gaps.unmatched(gaps.running_mean(fp8, 15), gaps.running_mean(bf16, 15)).last
        held += found.low <= planted <= found.high
    assert held >= LEAST


@pytest.mark.parametrize(
    ("planted", "kind"), [(0.0157, "worse"), (-0.0157, "better"), (0.0, "equivalent")]
)
def test_verdicts_have_power_where_seeds_alone_have_none(rng, planted, kind):  # E-4
    """Eight matched seeds settle gaps that are a third of the spread of seeds."""
    found = []
    for _ in range(SWEEPS):
        fp8, bf16 = sweep(rng, 8, planted)
        found.append(gaps.decide(gaps.matched(gaps.running_mean(fp8 - bf16, 15)).last, 0.0115))
    # A difference has standard deviation sqrt(0.005^2 + 0.003^2 * 3 / 15) = 0.0052 at most, an
    # interval of 8 half-width 2.36 * 0.0052 / sqrt(8) = 0.0043, and the mean an error of 0.0018: 0
    # leaves the margin, and 0.0157 loses 0, at 4 errors and more.
    assert found.count(kind) >= 0.97 * SWEEPS


@pytest.mark.parametrize("planted", [0.0115, -0.0115])
def test_a_gap_of_the_margin_is_seldom_equivalent(rng, planted):  # E-4
    """The most that an equivalence test may err: 2.5 %, one-sided."""
    wrong = 0
    for _ in range(SWEEPS):
        fp8, bf16 = sweep(rng, 5, planted)
        wrong += (
            gaps.decide(gaps.matched(gaps.running_mean(fp8 - bf16, 15)).last, 0.0115)
            == "equivalent"
        )
    # 5 expected of 200, and 4 standard deviations of 2.2
    assert wrong <= 14


@pytest.mark.parametrize("steps", [60, 150, 300, 1000])
@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9, 0.99])
def test_one_pair_decides_wrongly_as_seldom_as_it_says(rng, steps, phi):  # E-5
    """However steps correlate: an interval that leaves out the truth is used in 5 % of pairs, or
    fewer.
    """
    wrong = used = 0
    for difference in ar1(rng, (400, steps), phi):
        found = gaps.one_pair(difference, gaps.window(steps)).last
        used += not found.too_short
        wrong += not found.too_short and not found.low <= 0 <= found.high
    # One point for the approximations (AR(1) as estimated, 5 batches), and 4 standard deviations of
    # 400 trials.
    assert wrong / 400 <= 0.06 + 4 * math.sqrt(0.06 * 0.94 / 400)
    if phi == 0.0:
        assert used >= 0.9 * 400
    if phi == 0.99:
        assert used <= 0.1 * 400


def test_a_matched_interval_is_students():  # E-3
    found = gaps.matched(np.array([[0.01], [0.03], [0.02]]))
    half = stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3)
    np.testing.assert_allclose(
        [found.mean[0], found.low[0], found.high[0]], [0.02, 0.02 - half, 0.02 + half]
    )
    assert (found.by, found.n) == ("seeds", 3)


def test_an_unmatched_interval_is_scipys():  # E-2
    mine, others = np.array([2.1, 2.3]), np.array([2.0, 2.05, 2.2])
    found = gaps.unmatched(mine, others)
    theirs = stats.ttest_ind(mine, others).confidence_interval(0.95)
    np.testing.assert_allclose([found.low, found.high], [theirs.low, theirs.high], rtol=1e-9)
    one = gaps.unmatched(np.array([2.1]), others)
    # s of the three, by sqrt(1 + 1/3): the prediction interval of one more
    half = stats.t.ppf(0.975, 2) * others.std(ddof=1) * math.sqrt(4 / 3)
    np.testing.assert_allclose(one.high - one.mean, half)


def test_intervals_take_two_runs():
    with pytest.raises(ValueError, match="at least 2 pairs; got 1"):
        gaps.matched(np.zeros((1, 4)))
    with pytest.raises(ValueError, match="two on one side and one on the other; got 1 and 1"):
        gaps.unmatched(np.zeros(1), np.zeros(1))


def test_the_interval_of_one_pair_is_of_five_batches():  # E-5
    difference = np.sin(np.arange(41) / 2)
    found = gaps.one_pair(difference, 10)
    assert found.mean.shape == (32,)
    batches = difference[31:].reshape(5, 2).mean(axis=1)
    phi = gaps.correlation(difference[20:])
    assert gaps.widening(phi, 2) > 1.1
    half = gaps.widening(phi, 2) * stats.t.ppf(0.975, 4) * batches.std(ddof=1) / math.sqrt(5)
    mean = batches.mean()
    np.testing.assert_allclose(
        [found.mean[-1], found.low[-1], found.high[-1]], [mean, mean - half, mean + half]
    )


def test_a_constant_gap_has_no_width():  # E-5
    found = gaps.one_pair(np.full(60, 0.25), 5).last
    assert (found.mean, found.low, found.high, found.phi) == (0.25, 0.25, 0.25, 0.0)
    assert gaps.decide(found, 0.1) == "worse"


@pytest.mark.parametrize("phi", [0.0, 0.3, 0.9])
def test_the_correlation_is_that_of_the_steps(rng, phi):  # E-5
    found = [gaps.correlation(row + 0.01 * np.arange(200)) for row in ar1(rng, (200, 200), phi)]
    # The mean of 200 estimates, each of standard deviation sqrt((1 - phi^2) / 200) <= 0.07 and
    # clipped at 0, which for phi = 0 adds 0.4 deviations: 0.03.
    assert abs(np.mean(found) - phi) < 0.03 + 4 * 0.07 / math.sqrt(200)


@pytest.mark.parametrize(("phi", "size"), [(0.0, 7), (0.5, 1), (0.5, 4), (0.9, 20)])
def test_the_widening_is_what_five_batches_understate(rng, phi, size):  # E-5
    batches = ar1(rng, (20000, 5 * size), phi).reshape(20000, 5, size).mean(axis=2)
    true, said = batches.mean(axis=1).var(), batches.var(axis=1, ddof=1).mean() / 5
    # Each variance is known to sqrt(2 / 20000) = 1 %, their ratio to 1.5 % and its root to 0.8 %; 4
    # deviations.
    np.testing.assert_allclose(gaps.widening(phi, size), math.sqrt(true / said), rtol=0.032)


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [
        (0.001, 0.005, "equivalent"),
        (-0.005, -0.001, "equivalent"),
        (0.001, 0.02, "worse"),
        (-0.02, -0.001, "better"),
        (-0.001, 0.02, "cannot tell"),
        (-0.02, 0.02, "cannot tell"),
        (-0.01, 0.0, "cannot tell"),
    ],
)
def test_three_answers(low, high, kind):  # E-4
    found = Gap(
        mean=np.array((low + high) / 2), low=np.array(low), high=np.array(high), by="seeds", n=3
    )
    assert gaps.decide(found, 0.01) == kind


def test_steps_that_correlate_too_long_tell_nothing(rng):  # E-5
    found = gaps.one_pair(0.5 + 0.001 * ar1(rng, (60,), 0.99), 5).last
    assert found.low > 0
    assert found.too_short
    assert gaps.decide(found, 0.01) == "cannot tell"


def test_as_many_seeds_as_are_said_settle_it():  # E-7
    spread, margin = 0.02, 0.006
    found = gaps.matched(np.array([0.0, 2.0, 1.0]) * spread + 0.015 - spread)
    assert gaps.decide(found, margin) == "cannot tell"
    n = gaps.seeds_needed(found, margin)
    half = [stats.t.ppf(0.975, k - 1) * spread / math.sqrt(k) for k in (n - 1, n)]
    assert half[1] < 0.015 <= half[0]  # the larger of |mean| and margin - |mean|
    assert gaps.seeds_needed(gaps.matched(np.array([-1.0, 1.0, 0.003])), 0.002) is None


def test_as_many_steps_as_are_said_settle_it(rng):  # E-7
    found = gaps.one_pair(0.01 + 0.05 * rng.standard_normal(150), 15).last
    steps = gaps.steps_needed(found, 0.003, 150)
    half = float(found.high - found.mean)
    target = max(abs(found.mean), 0.003 - abs(found.mean))
    assert half * math.sqrt(150 / steps) <= target < half * math.sqrt(150 / (steps - 1))
    short = gaps.one_pair(0.5 + 0.001 * ar1(rng, (60,), 0.99), 5).last
    size = gaps.steps_needed(short, 0.01, 60) // 50
    assert gaps.widening(short.phi, size) <= gaps.WIDEST < gaps.widening(short.phi, size // 2)


@pytest.mark.parametrize(
    ("steps", "width"), [(0, 5), (5, 5), (60, 5), (99, 5), (100, 10), (150, 15), (1000, 100)]
)
def test_a_window_is_a_tenth_in_five_batches(steps, width):
    assert gaps.window(steps) == width


def test_a_running_mean_is_of_the_steps_up_to_it():
    # sums of four numbers below 8, each rounded to a double: ulps of 8
    np.testing.assert_allclose(
        gaps.running_mean([[1, 2, 3, 6], [0, 0, 4, 4]], 2),
        [[1.5, 2.5, 4.5], [0, 2, 4]],
        rtol=0,
        atol=1e-14,
    )
    assert set(gaps.running_mean(np.full(7, 0.1), 3)) == {0.1}
