import made_runs
import numpy as np
import pytest
from made_runs import falling

from fp8ref.train.report import compare, noise, page, seed_noise


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
    np.testing.assert_allclose(paired.limit, noise.limit(last)[0], rtol=1e-12)
    np.testing.assert_allclose(alone.limit, noise.band(last).high[0], rtol=1e-12)
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
    np.testing.assert_allclose(found.gap.mean, noise.running_mean(difference, 5), rtol=1e-9)
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
