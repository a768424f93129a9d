import math

import made_runs
import numpy as np
import pytest
from made_runs import falling
from scipy import stats

from fp8ref.train.report import compare, page, seed_noise


@pytest.fixture
def seeds(tmp_path, small):
    return made_runs.three_seeds(tmp_path, small)


@pytest.fixture
def fp8(tmp_path, small):
    """fp8(above, seed): an FP8 run whose loss ends so far above that of three_seeds' first."""

    def make(above: float, seed: int = 0, **keys):
        return made_runs.make(
            tmp_path / f"fp8-{above}-{seed}", small, falling(above=above, wobble=seed), recipe="tensorwise", seed=seed, **keys
        )

    return make


def judged(run, others):
    return seed_noise.verdict(run, [*others, run])


@pytest.mark.parametrize(
    ("seed", "above", "kind"),
    [(0, 0.15, "within noise"), (0, 0.3, "outside noise"), (0, -1.0, "within noise"), (7, 0.1, "within noise"), (7, 0.3, "outside noise")],
)
def test_a_gap_and_a_loss_are_held_to_the_seeds(seeds, fp8, seed, above, kind):  # E-2, E-3, E-4
    found = judged(fp8(above, seed), seeds)
    assert found.kind == kind
    assert found.to is (seeds[0] if seed == 0 else None)
    assert (found.left_step is not None) == (found.left_tokens is not None) == (kind == "outside noise")


def test_the_limits_are_those_of_the_last_window(seeds, fp8):  # E-2, E-3
    last = np.array([[np.mean(list(run.losses.values())[-5:])] for run in seeds])
    paired, alone = (judged(fp8(0.1, seed), seeds) for seed in (0, 7))
    np.testing.assert_allclose(paired.limit, seed_noise.limit(last)[0], rtol=1e-12)
    np.testing.assert_allclose(alone.limit, seed_noise.band(last).high[0], rtol=1e-12)
    assert paired.step == alone.step == 59
    np.testing.assert_allclose(paired.value, 0.1 * (1 - np.exp(-np.arange(55, 60) / 10)).mean(), rtol=1e-9)


def test_where_a_run_left_is_counted_in_tokens(seeds, tmp_path, small):  # E-4
    losses = falling(wobble=0)
    losses[10:15] += 5  # back inside before it leaves for good
    losses[30:] += 5
    found = judged(made_runs.make(tmp_path / "fp8", small, losses, recipe="tensorwise"), seeds)
    assert (found.left_step, found.left_tokens) == (30, 31 * 4 * 16)


def test_less_confidence_is_a_narrower_limit(seeds, fp8):
    run = fp8(0.15)
    assert seed_noise.verdict(run, [*seeds, run], confidence=0.7).kind == "outside noise"


def test_a_bf16_run_is_judged_by_the_other_seeds(seeds):  # E-1
    found = seed_noise.verdict(seeds[1], seeds)
    assert found.kind == "within noise"
    assert found.seeds.runs == (seeds[0], seeds[2])
    assert found.to is None


def test_seeds_count_once_and_the_first_is_taken(seeds, tmp_path, small):  # E-1
    other = made_runs.make(tmp_path / "jax", small, falling(wobble=0), seed=0, backend="jax")
    assert seed_noise.seeds_of([*seeds, other]).runs == tuple(seeds)
    assert seed_noise.seeds_of([other, *seeds]).runs == (other, *seeds[1:])
    assert seed_noise.seeds_of(seeds).varied == "run.seed and data.seed"


def test_an_unfinished_bf16_run_is_no_noise(seeds, tmp_path, small):  # E-1
    short = made_runs.make(tmp_path / "short", small, falling(20), seed=5, status="interrupted")
    assert short not in seed_noise.seeds_of([*seeds, short]).runs


def test_the_partner_is_of_the_same_backend_if_there_is_one(seeds, fp8, tmp_path, small):  # E-3
    other = made_runs.make(tmp_path / "jax", small, falling(wobble=0), seed=0, backend="jax")
    assert seed_noise.partner(fp8(0.0), [*seeds, other]) is seeds[0]
    assert seed_noise.partner(fp8(0.0, backend="jax"), [*seeds, other]) is other
    assert seed_noise.partner(fp8(0.0, seed=7), [*seeds, other]) is None


def test_an_unfinished_run_is_judged_where_it_is(seeds, tmp_path, small):
    run = made_runs.make(tmp_path / "fp8", small, falling(30, above=0.5, wobble=0)[:30], recipe="tensorwise", status="running")
    run = made_runs.runs.read(run.path)
    found = judged(run, seeds)
    assert (found.step, found.seeds.common.size) == (29, 30)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_seeds_tell_nothing(seeds, fp8, count):  # E-1
    found = judged(fp8(0.5), seeds[:count])
    assert found.kind == "cannot tell"
    assert "at least 2 finished bf16 runs" in found.reason
    assert "--run.seed 1 --data.seed 1" in found.reason
    assert (seeds[0].name if count else "there is none") in found.reason


def test_fewer_than_five_common_steps_tell_nothing(seeds, tmp_path, small):  # E-1
    found = judged(made_runs.make(tmp_path / "fp8", small, [5.0] * 4, recipe="tensorwise"), seeds)
    assert (found.kind, "4 steps in common, and 5 are needed" in found.reason) == ("cannot tell", True)


@pytest.mark.parametrize(
    "other",
    [{"model": {"hidden_size": 64}}, {"optimizer": {"learning_rate": 0.5}}, {"data": {"batch_size": 8}}, {"data": {"sequence_length": 8}}],
)
def test_runs_of_another_model_are_another_group(seeds, fp8, tmp_path, small, other):  # E-1
    run, foreign = fp8(0.0), made_runs.make(tmp_path / "foreign", small.replace(**other), falling(), recipe="tensorwise")
    assert seed_noise.groups([*seeds, foreign, run]) == [[*seeds, run], [foreign]]


def test_runs_of_another_text_are_another_group(seeds, tmp_path, small):  # E-1
    foreign = made_runs.make(tmp_path / "foreign", small, falling(), seed=9, data=made_runs.DATA | {"sha256": "cd"})
    elsewhere = made_runs.make(tmp_path / "elsewhere", small, falling(), seed=9, data=made_runs.DATA | {"source": "moved"})
    assert seed_noise.groups([*seeds, foreign, elsewhere]) == [[*seeds, elsewhere], [foreign]]


def test_a_gap_is_step_by_step(seeds, fp8):  # E-5
    found = seed_noise.paired(fp8(0.2), seeds[0])
    difference = np.array(list(found.run.losses.values())) - np.array(list(found.to.losses.values()))
    np.testing.assert_allclose(found.gap.mean, seed_noise.running_mean(difference, 5), rtol=1e-9)
    assert found.steps.tolist() == list(range(4, 60))


def test_a_gap_of_too_few_steps_is_none(seeds, tmp_path, small):
    assert seed_noise.paired(made_runs.make(tmp_path / "fp8", small, [5.0] * 4), seeds[0]) is None


def test_a_run_whose_loss_was_no_number_is_outside(seeds, tmp_path, small):  # E-4
    """However well it did until then; after as many tokens as it had seen with the step that failed."""
    error = {"error": "NonFiniteError: step 20: loss nan."}
    run = made_runs.make(tmp_path / "died", small, falling(20), recipe="tensorwise", status="failed", more=error)
    found = judged(run, seeds)
    assert (found.kind, found.left_step, found.left_tokens) == ("outside noise", 20, 21 * run.tokens_per_step)
    said = page.verdict_text(run, found)
    assert said == f"outside noise: it ended at step 20, after {found.left_tokens:,} tokens, by NonFiniteError: step 20: loss nan."
    page.write([*seeds, run], tmp_path / "page.html")
    assert "NonFiniteError" in (tmp_path / "page.html").read_text()
    assert compare.compare(seeds[0], run, seeds).result == "outside noise"


def test_a_run_that_failed_otherwise_is_judged_where_it_is(seeds, tmp_path, small):
    run = made_runs.make(tmp_path / "died", small, falling(20), recipe="tensorwise", status="failed", more={"error": "OSError: disk"})
    assert judged(run, seeds).kind == "within noise"


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 5, 6, 7, 15, 30, 100, 101])
@pytest.mark.parametrize("confidence", [0.1, 0.5, 0.9, 0.95, 0.99, 0.999999])
def test_student_is_scipys(dof, confidence):
    # tan magnifies theta's error of a few ulps by up to t^2 / dof + 1, a million for 1 degree of freedom
    np.testing.assert_allclose(seed_noise.student(confidence, dof), stats.t.ppf((1 + confidence) / 2, dof), rtol=1e-8)


@pytest.mark.parametrize("confidence", [0, 1, -0.5, math.nan])
def test_student_refuses_what_is_no_probability(confidence):
    with pytest.raises(ValueError, match="between 0 and 1"):
        seed_noise.student(confidence, 3)


def test_student_refuses_no_freedom():
    with pytest.raises(ValueError, match="at least 1 degree"):
        seed_noise.student(0.95, 0)


@pytest.mark.parametrize(("steps", "width"), [(0, 5), (5, 5), (60, 5), (99, 5), (100, 10), (150, 15), (1000, 100)])
def test_a_window_is_a_tenth_in_five_batches(steps, width):
    assert seed_noise.window(steps) == width


def test_a_running_mean_is_of_the_steps_up_to_it():
    # sums of four numbers below 8, each rounded to a double: ulps of 8
    np.testing.assert_allclose(seed_noise.running_mean([[1, 2, 3, 6], [0, 0, 4, 4]], 2), [[1.5, 2.5, 4.5], [0, 2, 4]], rtol=0, atol=1e-14)
    assert set(seed_noise.running_mean(np.full(7, 0.1), 3)) == {0.1}


def test_a_band_is_student_s_prediction_interval():  # E-2
    curves = np.array([[1.0, 4.0], [2.0, 4.0], [6.0, 4.0]])
    found = seed_noise.band(curves, confidence=0.975)
    # mean 3, s = sqrt((4 + 1 + 9) / 2) = sqrt(7); t of 2 degrees at 0.975: 4.3027
    half = 4.302652729749464 * math.sqrt(7) * math.sqrt(4 / 3)
    np.testing.assert_allclose(found.mean, [3, 4])
    np.testing.assert_allclose(found.high, [3 + half, 4])
    np.testing.assert_allclose(found.low, [3 - half, 4])


def test_a_limit_is_of_the_difference_of_two():  # E-3
    np.testing.assert_allclose(seed_noise.limit(np.array([[1.0], [2.0], [6.0]]), confidence=0.975), 4.302652729749464 * math.sqrt(14))


@pytest.mark.parametrize("of", [seed_noise.band, seed_noise.limit])
def test_noise_takes_two_runs(of):
    with pytest.raises(ValueError, match="at least 2 runs; got 1"):
        of(np.zeros((1, 4)))


@pytest.mark.parametrize("confidence", [0.5, 1.0, 0.2])
def test_noise_takes_a_one_sided_confidence(confidence):
    with pytest.raises(ValueError, match=r"between 0\.5 and 1"):
        seed_noise.limit(np.zeros((2, 4)), confidence=confidence)


REPEATS = 20_000
# Five standard deviations of a count of REPEATS trials of probability 0.05: exceeded with probability below 1e-6.
SLACK = 5 * math.sqrt(0.05 * 0.95 / REPEATS)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_another_seed_lies_above_the_band_once_in_twenty(rng, n):  # E-2
    above = rng.standard_normal(REPEATS) > seed_noise.band(rng.standard_normal((n, REPEATS))).high
    assert abs(above.mean() - 0.05) < SLACK


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(("rho", "most"), [(0.0, 0.05), (0.9, 0.02)])
def test_a_gap_without_effect_lies_above_its_limit_less_often(rng, n, rho, most):  # E-3
    seeds = rng.standard_normal((n, REPEATS))
    same = rho * seeds[0] + math.sqrt(1 - rho**2) * rng.standard_normal(REPEATS)
    assert (same - seeds[0] > seed_noise.limit(seeds)).mean() < most + SLACK


@pytest.mark.parametrize(("rho", "rate"), [(0.0, 0.04), (0.9, 0.005)])
def test_how_often_the_specification_says(rng, rho, rate):  # E-3
    seeds = rng.standard_normal((3, 200_000))
    same = rho * seeds[0] + math.sqrt(1 - rho**2) * rng.standard_normal(200_000)
    # rounded to one digit: within half a unit of it, 0.005 and 0.0005, and 5 deviations
    assert abs((same - seeds[0] > seed_noise.limit(seeds)).mean() - rate) < rate / 8 + 5 * math.sqrt(rate / 200_000)


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
        means = seed_noise.running_mean(curves(rng, n + 1), 10)
        outside += seed_noise.first_outside(means[-1], seed_noise.band(means[:-1]).high) is not None
    # of 1000 trials of probability 0.05: 50, and 5 standard deviations of 6.9
    assert abs(outside - 50) < 35


def test_a_planted_gap_is_outside(rng):  # E-3, E-4
    # Ten-step means of a seed have standard deviation sigma = sqrt(0.05^2 + 0.1^2 * 3 / 10) = 0.074; a gap of 1 is missed where
    # s > 1 / (2.92 sqrt(2)) = 3.26 sigma. s^2 / sigma^2 of 3 seeds is above x with probability exp(-x): 2e-5, and 0.5 % in 200 trials.
    for _ in range(200):
        seeds = curves(rng, 3)
        same = seeds[0] + 1 + 0.01 * ar1(rng, (100,), 0.5)
        limit = seed_noise.limit(seed_noise.running_mean(seeds, 10))
        assert seed_noise.first_outside(seed_noise.running_mean(same - seeds[0], 10), limit) is not None


@pytest.mark.parametrize(
    ("curve", "index"),
    [([0, 0, 0], None), ([2, 2, 0], None), ([0, 2, 2], 1), ([2, 0, 2], 2), ([2, 2, 2], 0), ([0, 1, 1], None), ([-9, -9, -9], None)],
)
def test_a_curve_left_where_it_stays_above(curve, index):  # E-4
    assert seed_noise.first_outside(np.array(curve), np.ones(3)) == index


def test_a_gap_s_interval_is_of_five_batches():  # E-5
    difference = np.array([9.0, 1, 3, 2, 4, 3, 5, 0, 2, 1, 3])
    found = seed_noise.gap(difference, 10)
    assert found.mean.shape == (2,)
    batches = np.array([2.0, 3, 4, 1, 2])
    half = stats.t.ppf(0.975, 4) * batches.std(ddof=1) / math.sqrt(5)
    np.testing.assert_allclose([found.mean[1], found.low[1], found.high[1]], [2.4, 2.4 - half, 2.4 + half])


@pytest.mark.parametrize(("phi", "rate"), [(0.0, 0.95), (0.5, 0.94), (0.9, 0.89)])
def test_how_often_a_gap_s_interval_holds_the_truth(rng, phi, rate):  # E-5
    differences = ar1(rng, (4000, 100), phi)
    held = sum(bool(g.low[0] <= 0 <= g.high[0]) for g in (seed_noise.gap(d, 100) for d in differences))
    # half a percent of rounding, and 4 standard deviations of 4000 trials
    assert abs(held / 4000 - rate) < 0.005 + 4 * math.sqrt(rate * (1 - rate) / 4000)
