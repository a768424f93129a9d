import math

import numpy as np
import pytest
from scipy import stats

from fp8ref.train.report import noise


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 5, 6, 7, 15, 30, 100, 101])
@pytest.mark.parametrize("confidence", [0.1, 0.5, 0.9, 0.95, 0.99, 0.999999])
def test_student_is_scipys(dof, confidence):
    # tan magnifies theta's error of a few ulps by up to t^2 / dof + 1, a million for 1 degree of freedom
    np.testing.assert_allclose(noise.student(confidence, dof), stats.t.ppf((1 + confidence) / 2, dof), rtol=1e-8)


@pytest.mark.parametrize("confidence", [0, 1, -0.5, math.nan])
def test_student_refuses_what_is_no_probability(confidence):
    with pytest.raises(ValueError, match="between 0 and 1"):
        noise.student(confidence, 3)


def test_student_refuses_no_freedom():
    with pytest.raises(ValueError, match="at least 1 degree"):
        noise.student(0.95, 0)


@pytest.mark.parametrize(("steps", "width"), [(0, 5), (5, 5), (60, 5), (99, 5), (100, 10), (150, 15), (1000, 100)])
def test_a_window_is_a_tenth_in_five_batches(steps, width):
    assert noise.window(steps) == width


def test_a_running_mean_is_of_the_steps_up_to_it():
    # sums of four numbers below 8, each rounded to a double: ulps of 8
    np.testing.assert_allclose(noise.running_mean([[1, 2, 3, 6], [0, 0, 4, 4]], 2), [[1.5, 2.5, 4.5], [0, 2, 4]], rtol=0, atol=1e-14)
    assert set(noise.running_mean(np.full(7, 0.1), 3)) == {0.1}


def test_a_band_is_student_s_prediction_interval():  # E-2
    curves = np.array([[1.0, 4.0], [2.0, 4.0], [6.0, 4.0]])
    found = noise.band(curves, confidence=0.975)
    # mean 3, s = sqrt((4 + 1 + 9) / 2) = sqrt(7); t of 2 degrees at 0.975: 4.3027
    half = 4.302652729749464 * math.sqrt(7) * math.sqrt(4 / 3)
    np.testing.assert_allclose(found.mean, [3, 4])
    np.testing.assert_allclose(found.high, [3 + half, 4])
    np.testing.assert_allclose(found.low, [3 - half, 4])


def test_a_limit_is_of_the_difference_of_two():  # E-3
    np.testing.assert_allclose(noise.limit(np.array([[1.0], [2.0], [6.0]]), confidence=0.975), 4.302652729749464 * math.sqrt(14))


@pytest.mark.parametrize("of", [noise.band, noise.limit])
def test_noise_takes_two_runs(of):
    with pytest.raises(ValueError, match="at least 2 runs; got 1"):
        of(np.zeros((1, 4)))


@pytest.mark.parametrize("confidence", [0.5, 1.0, 0.2])
def test_noise_takes_a_one_sided_confidence(confidence):
    with pytest.raises(ValueError, match=r"between 0\.5 and 1"):
        noise.limit(np.zeros((2, 4)), confidence=confidence)


REPEATS = 20_000
# Five standard deviations of a count of REPEATS trials of probability 0.05: exceeded with probability below 1e-6.
SLACK = 5 * math.sqrt(0.05 * 0.95 / REPEATS)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_another_seed_lies_above_the_band_once_in_twenty(rng, n):  # E-2
    above = rng.standard_normal(REPEATS) > noise.band(rng.standard_normal((n, REPEATS))).high
    assert abs(above.mean() - 0.05) < SLACK


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(("rho", "most"), [(0.0, 0.05), (0.9, 0.02)])
def test_a_gap_without_effect_lies_above_its_limit_less_often(rng, n, rho, most):  # E-3
    seeds = rng.standard_normal((n, REPEATS))
    same = rho * seeds[0] + math.sqrt(1 - rho**2) * rng.standard_normal(REPEATS)
    assert (same - seeds[0] > noise.limit(seeds)).mean() < most + SLACK


@pytest.mark.parametrize(("rho", "rate"), [(0.0, 0.04), (0.9, 0.005)])
def test_how_often_the_specification_says(rng, rho, rate):  # E-3
    seeds = rng.standard_normal((3, 200_000))
    same = rho * seeds[0] + math.sqrt(1 - rho**2) * rng.standard_normal(200_000)
    # rounded to one digit: within half a unit of it, 0.005 and 0.0005, and 5 deviations
    assert abs((same - seeds[0] > noise.limit(seeds)).mean() - rate) < rate / 8 + 5 * math.sqrt(rate / 200_000)


def ar1(rng, shape, phi: float) -> np.ndarray:
    """Stationary noise of variance 1 that correlates by phi from step to step."""
    noise = rng.standard_normal(shape)
    for step in range(1, shape[-1]):
        noise[..., step] = phi * noise[..., step - 1] + math.sqrt(1 - phi**2) * noise[..., step]
    return noise


def curves(rng, seeds: int, *, steps: int = 100, offset: float = 0.05) -> np.ndarray:
    """Losses as training has them: they fall, seeds lie apart for good, and steps correlate."""
    step = np.arange(steps)
    return 2 + 3 * np.exp(-step / 20) + offset * rng.standard_normal((seeds, 1)) + 0.1 * ar1(rng, (seeds, steps), 0.5)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_bf16_of_another_seed_is_seldom_outside(rng, n):  # E-2, E-4
    outside = 0
    for _ in range(1000):
        means = noise.running_mean(curves(rng, n + 1), 10)
        outside += noise.left(means[-1], noise.band(means[:-1]).high) is not None
    # of 1000 trials of probability 0.05: 50, and 5 standard deviations of 6.9
    assert abs(outside - 50) < 35


def test_a_planted_gap_is_outside(rng):  # E-3, E-4
    # Ten-step means of a seed have standard deviation sigma = sqrt(0.05^2 + 0.1^2 * 3 / 10) = 0.074; a gap of 1 is missed where
    # s > 1 / (2.92 sqrt(2)) = 3.26 sigma. s^2 / sigma^2 of 3 seeds is above x with probability exp(-x): 2e-5, and 0.5 % in 200 trials.
    for _ in range(200):
        seeds = curves(rng, 3)
        same = seeds[0] + 1 + 0.01 * ar1(rng, (100,), 0.5)
        limit = noise.limit(noise.running_mean(seeds, 10))
        assert noise.left(noise.running_mean(same - seeds[0], 10), limit) is not None


@pytest.mark.parametrize(
    ("curve", "index"),
    [([0, 0, 0], None), ([2, 2, 0], None), ([0, 2, 2], 1), ([2, 0, 2], 2), ([2, 2, 2], 0), ([0, 1, 1], None), ([-9, -9, -9], None)],
)
def test_a_curve_left_where_it_stays_above(curve, index):  # E-4
    assert noise.left(np.array(curve), np.ones(3)) == index


def test_a_gap_s_interval_is_of_five_batches():  # E-5
    difference = np.array([9.0, 1, 3, 2, 4, 3, 5, 0, 2, 1, 3])
    found = noise.gap(difference, 10)
    assert found.mean.shape == (2,)
    batches = np.array([2.0, 3, 4, 1, 2])
    half = stats.t.ppf(0.975, 4) * batches.std(ddof=1) / math.sqrt(5)
    np.testing.assert_allclose([found.mean[1], found.low[1], found.high[1]], [2.4, 2.4 - half, 2.4 + half])


@pytest.mark.parametrize(("phi", "rate"), [(0.0, 0.95), (0.5, 0.94), (0.9, 0.89)])
def test_how_often_a_gap_s_interval_holds_the_truth(rng, phi, rate):  # E-5
    differences = ar1(rng, (4000, 100), phi)
    held = sum(bool(g.low[0] <= 0 <= g.high[0]) for g in (noise.gap(d, 100) for d in differences))
    # half a percent of rounding, and 4 standard deviations of 4000 trials
    assert abs(held / 4000 - rate) < 0.005 + 4 * math.sqrt(rate * (1 - rate) / 4000)
