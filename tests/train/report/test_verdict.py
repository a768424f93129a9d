import numpy as np
import pytest
from helpers.training import made_runs
from helpers.training.made_runs import falling

from fp8ref.train.report import compare, page, verdict
from fp8ref.train.report import gap as gaps
from fp8ref.train.report.gap import student


@pytest.fixture
def seeds(tmp_path, small):
    return made_runs.three_seeds(tmp_path, small)


ABOVE = {0: 0.0, 1: 0.05, 2: -0.05}  # three_seeds' own offsets


@pytest.fixture
def fp8(tmp_path, small):
    """fp8(above, seed): an FP8 run whose loss ends so far above that of the bf16 run of its
    seed.
    """

    def make(above: float, seed: int = 0, **keys):
        losses = falling(above=ABOVE.get(seed, 0.0) + above, wobble=seed)
        return made_runs.make(
            tmp_path / f"fp8-{above}-{seed}", small, losses, recipe="tensorwise", seed=seed, **keys
        )

    return make


def judged(group) -> verdict.Verdict:
    (arm,) = verdict.judged(group)
    return verdict.verdict(arm, group)


@pytest.mark.parametrize(
    ("above", "kind"),
    [
        ((0.1, 0.11, 0.09), "worse"),
        ((-0.1, -0.11, -0.09), "better"),
        ((0.001, 0.0, 0.002), "equivalent"),
    ],
)
def test_matched_seeds_decide(seeds, fp8, above, kind):  # E-3, E-4
    runs = [fp8(gap, seed) for seed, gap in enumerate(above)]
    found = judged([*seeds, *runs])
    assert found.kind == kind
    assert (found.compared.runs, found.compared.to) == (tuple(runs), tuple(seeds))
    assert found.compared.gap.by == "seeds"
    assert found.margin == pytest.approx(
        0.0025 * np.mean([list(run.losses.values())[-5:] for run in seeds])
    )
    assert "by 3 matched seeds" in found.said


def test_seeds_that_disagree_cannot_tell_and_say_how_many_would(seeds, fp8):  # E-4, E-7
    found = judged([*seeds, *(fp8(gap, seed) for seed, gap in enumerate((0.1, -0.02, 0.01)))])
    assert found.kind == "cannot tell"
    needed = gaps.seeds_needed(found.compared.gap.last, found.margin)
    assert f"at this spread {needed} matched seeds would settle it" in found.said


def test_a_matched_gap_that_the_spread_of_seeds_would_hide_is_worse(seeds, fp8):  # E-3
    """0.0157 of seeds that lie 0.1 apart: by unmatched runs, nothing can be said."""
    runs = [fp8(0.0157 + wobble, seed) for seed, wobble in enumerate((-0.001, 0.0, 0.001))]
    found = judged([*seeds, *runs])
    assert found.kind == "worse"
    assert 0.0139 < found.compared.gap.last.mean < 0.0176
    apart = verdict.compare(runs, seeds, matched=False)
    assert gaps.decide(apart.gap.last, found.margin) == "cannot tell"


def test_the_interval_of_one_pair_is_of_its_steps(seeds, fp8):  # E-5
    found = judged([seeds[0], fp8(0.2)])
    difference = np.array([fp8(0.2).losses[step] - seeds[0].losses[step] for step in range(60)])
    np.testing.assert_allclose(found.compared.gap.mean, gaps.running_mean(difference, 5), rtol=1e-9)
    assert found.compared.steps.tolist() == list(range(4, 60))
    assert "(one seed; margin " in found.said


@pytest.mark.parametrize(("above", "kind"), [(0.1, "worse"), (-0.1, "better"), (0.0, "equivalent")])
# E-4, E-6
def test_report_and_compare_say_the_same_of_one_pair(seeds, tmp_path, small, above, kind):
    """And both say that it is no verdict on the recipe."""
    noise = above + np.random.default_rng(0).normal(0, 1e-3, 60)
    losses = np.array([seeds[0].losses[step] for step in range(60)]) + noise
    run = made_runs.make(tmp_path / "noisy", small, losses, recipe="tensorwise")
    compared, found = compare.compare(seeds[0], run), judged([seeds[0], run])
    assert compared.result == found.kind == kind
    assert compared.ok == (kind == "equivalent")
    assert found.of_pair
    assert (
        compared.said == f"{kind}: the loss of {run.name} is {found.said.removeprefix(f'{kind}: ')}"
    )
    assert found.said.endswith(
        " for this pair, of one seed, so not yet for the recipe: train both with more seeds."
    )
    page.write([seeds[0], run], tmp_path / "page.html")
    assert (
        f'<li class="pair"><strong>{run.name}</strong>\n<span class="kind">{kind} for this '
        "pair</span>" in (tmp_path / "page.html").read_text()
    )


def test_one_pair_that_cannot_be_told_is_so_in_both(seeds, tmp_path, small):  # E-4, E-6
    run = made_runs.make(tmp_path / "other", small, falling(wobble=9), recipe="tensorwise")
    compared, found = compare.compare(seeds[0], run), judged([seeds[0], run])
    assert compared.result == found.kind == "cannot tell"
    assert all(one.said.endswith("train both with more seeds.") for one in (compared, found))


@pytest.mark.parametrize("count", [1, 3])
def test_the_confidence_is_that_of_the_interval(seeds, fp8, count):  # E-3, E-5
    mine = [fp8(0.01 * (seed + 1), seed) for seed in range(count)]
    widths = []
    for confidence in (0.5, 0.95, 0.99):
        gap = verdict.between(mine, seeds[:count], confidence=confidence).compared.gap.last
        widths.append(
            (gap.high - gap.low)
            / student(confidence, gaps.BATCHES - 1 if count == 1 else count - 1)
        )
    assert widths[0] > 0
    assert widths == pytest.approx([widths[0]] * 3, rel=1e-9)


def test_the_confidence_is_that_of_unmatched_runs(seeds, fp8):  # E-2
    mine = [fp8(0.01, 7), fp8(0.03, 8)]
    narrow, wide = (
        verdict.between(mine, seeds, confidence=confidence).compared.gap.last
        for confidence in (0.5, 0.99)
    )
    assert (wide.high - wide.low) / (narrow.high - narrow.low) == pytest.approx(
        student(0.99, 3) / student(0.5, 3), rel=1e-9
    )


def test_runs_of_other_seeds_are_unmatched(seeds, fp8):  # E-2
    found = judged([*seeds, fp8(0.5, 7), fp8(0.5, 8)])
    assert found.compared.gap.by == "unmatched"
    assert found.kind == "worse"
    assert "2 and 3 runs of different seeds" in found.said


def test_two_runs_of_two_seeds_tell_nothing(seeds, fp8):  # E-2
    found = judged([seeds[0], fp8(0.5, 7)])
    assert (found.kind, found.compared) == ("cannot tell", None)
    assert "Train both with the same seeds" in found.said


def test_without_bf16_nothing_can_be_told(fp8):  # E-1
    found = judged([fp8(0.5, 3)])
    assert found.kind == "cannot tell"
    assert "--recipe bf16 --run.seed 3 --data.seed 3" in found.said


def test_fewer_than_five_common_steps_tell_nothing(seeds, tmp_path, small):
    found = judged(
        [*seeds, made_runs.make(tmp_path / "fp8", small, [5.0] * 4, recipe="tensorwise")]
    )
    assert (found.kind, "4 steps in common, and 5 are needed" in found.reason) == (
        "cannot tell",
        True,
    )


def test_an_arm_is_what_changes_no_bit_but_by_its_seeds(seeds, fp8, tmp_path, small):  # E-1
    runs = [fp8(0.0, 0), fp8(0.0, 1)]
    rowwise = made_runs.make(tmp_path / "rowwise", small, falling(), recipe="rowwise")
    other = made_runs.make(tmp_path / "jax", small, falling(), recipe="tensorwise", backend="jax")
    recorded = made_runs.make(
        tmp_path / "stats",
        small.replace(statistics={"every": 1}),
        falling(),
        recipe="tensorwise",
        seed=2,
    )
    again = made_runs.make(tmp_path / "again", small, falling(), recipe="tensorwise", seed=1)
    found = verdict.arms([*seeds, *runs, rowwise, other, recorded, again])
    assert [arm.runs for arm in found] == [tuple(seeds), (*runs, recorded), (rowwise,), (other,)]
    assert found[1].name == f"{runs[0].name} and 2 more"


def test_the_baseline_is_of_the_same_backend_if_there_is_one(seeds, fp8, tmp_path, small):  # E-1
    jax = made_runs.make(tmp_path / "jax", small, falling(wobble=0), seed=0, backend="jax")
    group = [*seeds, jax, fp8(0.0), fp8(0.01, backend="jax")]
    first, of_jax, mine, theirs = verdict.arms(group)
    assert verdict.baseline(first, group) is None
    assert verdict.baseline(of_jax, group) == first
    assert verdict.baseline(mine, group) == first
    assert verdict.baseline(theirs, group) == of_jax
    assert [arm.runs for arm in verdict.judged(group)] == [of_jax.runs, mine.runs, theirs.runs]
    alone = [*seeds, fp8(0.02, backend="jax")]
    assert "no bf16 run is of backend jax" in judged(alone).said


def test_unfinished_runs_are_left_out_where_others_are_finished(seeds, fp8, tmp_path, small):  # E-1
    short = made_runs.make(
        tmp_path / "short",
        small,
        falling(20, above=0.3),
        recipe="tensorwise",
        seed=2,
        status="interrupted",
    )
    found = judged([*seeds, fp8(0.1, 0), fp8(0.11, 1), short])
    assert short not in found.compared.runs
    found = judged([*seeds, short])
    assert (found.compared.count, found.compared.steps[-1]) == (20, 19)
    assert found.said.endswith("short is not finished, but interrupted.")


# E-1
def test_a_finished_run_counts_before_an_unfinished_one_of_its_seeds(seeds, fp8, tmp_path, small):
    short = made_runs.make(
        tmp_path / "a-short",
        small,
        falling(20, above=0.3),
        recipe="tensorwise",
        seed=0,
        status="interrupted",
    )
    runs = [fp8(0.1, 0), fp8(0.11, 1)]
    (_, mine) = verdict.arms([*seeds, short, *runs])
    assert (mine.runs, mine.others) == (tuple(runs), ((short, runs[0]),))
    assert judged([*seeds, short, *runs]).said == judged([*seeds, *runs]).said


# E-4
def test_a_run_that_diverged_counts_before_a_finished_one_that_follows(seeds, fp8, tmp_path, small):
    error = {"error": "NonFiniteError: step 20"}
    ended = made_runs.make(
        tmp_path / "a", small, falling(20), recipe="tensorwise", seed=0, status="failed", more=error
    )
    assert judged([*seeds, ended, fp8(0.0, 0), fp8(0.0, 1)]).kind == "worse"


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"hidden_size": 64}},
        {"optimizer": {"learning_rate": 0.5}},
        {"data": {"batch_size": 8}},
        {"data": {"sequence_length": 8}},
    ],
)
def test_runs_of_another_model_are_another_group(seeds, fp8, tmp_path, small, other):  # E-1
    run, foreign = (
        fp8(0.0),
        made_runs.make(
            tmp_path / "foreign", small.replace(**other), falling(), recipe="tensorwise"
        ),
    )
    assert verdict.groups([*seeds, foreign, run]) == [[*seeds, run], [foreign]]


def test_runs_of_another_text_are_another_group(seeds, tmp_path, small):  # E-1
    foreign = made_runs.make(
        tmp_path / "foreign", small, falling(), seed=9, data=made_runs.DATA | {"sha256": "cd"}
    )
    elsewhere = made_runs.make(
        tmp_path / "elsewhere", small, falling(), seed=9, data=made_runs.DATA | {"source": "moved"}
    )
    assert verdict.groups([*seeds, foreign, elsewhere]) == [[*seeds, elsewhere], [foreign]]
    assert verdict.arms([*seeds, elsewhere])[0].runs == (*seeds, elsewhere)


def test_a_run_whose_loss_was_no_number_is_worse(seeds, tmp_path, small):  # E-4
    """However well it did until then; after as many tokens as it had seen with the step that
    failed.
    """
    error = {"error": "NonFiniteError: step 20: loss nan."}
    run = made_runs.make(
        tmp_path / "died", small, falling(20), recipe="tensorwise", status="failed", more=error
    )
    found = judged([*seeds, run])
    assert (
        found.said
        == f"worse: {run.name} ended at step 20, after {21 * run.tokens_per_step:,} tokens, "
        "by NonFiniteError: step 20: loss nan."
    )
    page.write([*seeds, run], tmp_path / "page.html")
    assert "NonFiniteError" in (tmp_path / "page.html").read_text()
    assert compare.compare(seeds[0], run, seeds).result == "worse"
    dead = made_runs.make(tmp_path / "bf16", small, falling(20), status="failed", more=error)
    fine = made_runs.make(tmp_path / "fine", small, falling(), recipe="tensorwise")
    assert judged([dead, fine]).said.startswith("cannot tell: ")


def test_a_run_that_failed_otherwise_is_judged_where_it_is(seeds, tmp_path, small):
    run = made_runs.make(
        tmp_path / "died",
        small,
        falling(20),
        recipe="tensorwise",
        status="failed",
        more={"error": "OSError: disk"},
    )
    assert judged([*seeds, run]).compared.count == 20


def test_the_range_of_bf16_is_of_finished_seeds_each_once(seeds, tmp_path, small):
    other = made_runs.make(tmp_path / "jax", small, falling(wobble=0), seed=0, backend="jax")
    short = made_runs.make(tmp_path / "short", small, falling(20), seed=5, status="interrupted")
    found = verdict.seeds_of([*seeds, other, short])
    assert found.runs == tuple(seeds)
    assert found.varied == "run.seed and data.seed"
    last = [np.mean(list(run.losses.values())[-5:]) for run in seeds]
    np.testing.assert_allclose([edge[-1] for edge in found.band], [min(last), max(last)])
    assert verdict.seeds_of(seeds[:1]).band is None
