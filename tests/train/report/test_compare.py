import json
import re
import shutil

import made_runs
import numpy as np
import pytest
from made_runs import falling
from rich.console import Console

from fp8ref.errors import ConfigError
from fp8ref.train.report import compare, runs, seed_noise


@pytest.fixture
def seeds(tmp_path, small):
    return made_runs.three_seeds(tmp_path, small)


@pytest.fixture
def other(tmp_path, small):
    """other(losses): an FP8 run with the seeds of the first bf16 run, or as told."""

    def make(losses, **keys):
        return made_runs.make(tmp_path / "other", small, losses, **{"recipe": "tensorwise", **keys})

    return make


def test_a_copy_is_identical_whatever_its_times(seeds, tmp_path):  # E-6
    shutil.copytree(seeds[0].path, tmp_path / "copy")
    lines = (tmp_path / "copy" / "metrics.jsonl").read_text()
    (tmp_path / "copy" / "metrics.jsonl").write_text(re.sub(r'"(tokens_per_second|seconds)": [\d.]+', r'"\1": 7.5', lines))
    found = compare.compare(seeds[0], runs.read(tmp_path / "copy"))
    assert (found.result, found.noise, found.ok, found.steps) == ("identical", "bits", True, 60)
    assert (found.settings, found.versions) == ({}, {})


@pytest.mark.parametrize("key", compare.METRICS)
def test_one_bit_is_not_identical(seeds, tmp_path, key):  # E-6
    shutil.copytree(seeds[0].path, tmp_path / "copy")
    lines = [json.loads(line) for line in (tmp_path / "copy" / "metrics.jsonl").read_text().splitlines()]
    lines[39][key] = float(np.nextafter(lines[39][key], 9))
    (tmp_path / "copy" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare.compare(seeds[0], runs.read(tmp_path / "copy")).result != "identical"


def test_a_run_that_is_shorter_is_not_identical(seeds, other):
    found = compare.compare(seeds[0], other(falling(wobble=0)[:30], recipe="bf16"))
    assert (found.result, found.steps) == ("within noise", 30)


def test_by_steps_alone_a_gap_that_stays_is_outside(seeds, other):  # E-6
    found = compare.compare(seeds[0], other(falling(above=0.01, wobble=0)))
    assert (found.result, found.noise, found.ok) == ("outside noise", "steps", False)
    assert 0 < found.low < found.difference < found.high
    assert "--seeds RUN... shows" in found.said


def test_by_steps_alone_a_gap_that_changes_sign_is_within(seeds, other):  # E-6
    found = compare.compare(seeds[0], other(falling(wobble=9)))
    assert (found.result, found.noise, found.ok) == ("within noise", "steps", True)
    assert found.low <= 0 <= found.high


@pytest.mark.parametrize(
    ("above", "result"), [(0.1, "within noise"), (-0.1, "within noise"), (0.4, "outside noise"), (-0.4, "outside noise")]
)
def test_by_seeds_a_gap_is_held_to_theirs_either_way(seeds, other, above, result):  # E-6
    found = compare.compare(seeds[0], other(falling(above=above, wobble=0)), seeds)
    assert (found.result, found.noise) == (result, "seeds")
    limit = seed_noise.limit(np.array([[np.mean(list(run.losses.values())[-5:])] for run in seeds]))[0]
    np.testing.assert_allclose([found.low, found.high], [-limit, limit], rtol=1e-12)


def test_bf16_of_other_seeds_is_within_their_noise(seeds):  # E-6
    for run in seeds[1:]:
        assert compare.compare(seeds[0], run, seeds).result == "within noise"


def test_other_seeds_need_seeds(seeds):  # E-6
    with pytest.raises(ConfigError, match=r"two runs do not show .* with its seeds\. Give --seeds"):
        compare.compare(*seeds[:2])


def test_seeds_are_two_or_more_bf16_runs_of_the_same_model(seeds, other, tmp_path, small):
    fp8 = other(falling())
    with pytest.raises(ConfigError, match="2 or more bf16 runs of different seeds; got 1"):
        compare.compare(seeds[0], fp8, seeds[:1])
    with pytest.raises(ConfigError, match=r"other differs in numerics\.recipe"):
        compare.compare(*seeds[:2], [*seeds, fp8])
    foreign = made_runs.make(tmp_path / "foreign", small.replace(optimizer={"beta1": 0.5}), falling(), seed=8)
    with pytest.raises(ConfigError, match=r"foreign differs in optimizer"):
        compare.compare(seeds[0], fp8, [*seeds, foreign])


def test_seeds_are_finished_runs(seeds, other):  # E-1, E-6
    running = other(falling()[:30], recipe="bf16", seed=8, status="running")
    with pytest.raises(ConfigError, match=r"takes runs that are finished \(E-1\); .*other is running"):
        compare.compare(*seeds[:2], [*seeds, running])


def test_a_run_that_is_not_finished_is_told(seeds, other):
    assert compare.compare(seeds[0], other(falling()[:30], status="running")).said.endswith("other is not finished, but running")


@pytest.mark.parametrize("steps", [0, 2, 30])
def test_a_run_that_diverged_is_outside_but_like_its_copy(seeds, other, steps, tmp_path):  # E-6
    died = other(falling(wobble=0)[:steps], status="failed", more={"error": "NonFiniteError: step 9: loss nan."})
    for pair in ((seeds[0], died), (died, seeds[0])):
        found = compare.compare(*pair)
        assert (found.result, found.noise, found.difference) == ("outside noise", "end", None)
        assert found.said == f"outside noise: {died.name} ended by NonFiniteError: step 9: loss nan"
    shutil.copytree(died.path, tmp_path / "copy")
    found = compare.compare(died, runs.read(tmp_path / "copy"))
    assert (found.result, found.noise, found.steps) == ("identical", "bits", steps)
    assert found.said.endswith("bit for bit; both ended with NonFiniteError: step 9: loss nan")


def test_a_few_steps_can_be_identical_and_all_are_counted(seeds, other, tmp_path):
    few = other(falling()[:3], recipe="bf16")
    shutil.copytree(few.path, tmp_path / "copy")
    copy = runs.read(tmp_path / "copy")
    assert compare.compare(few, copy).said.startswith("identical: loss, grad_norm, val_loss of all 3 steps")
    assert compare.compare(seeds[0], seeds[0], seeds).steps == 60


def test_too_few_common_steps_are_refused(seeds, other):
    with pytest.raises(ConfigError, match="4 steps in common, and 5 are needed"):
        compare.compare(seeds[0], other([5.0] * 4))


def test_another_text_is_refused(seeds, other):
    with pytest.raises(ConfigError, match=r"on one text; text is 'abab.* and 'cd'"):
        compare.compare(seeds[0], other(falling(), data=made_runs.DATA | {"sha256": "cd"}))


def test_every_setting_and_version_that_differs_is_named(seeds, other):
    fp8 = other(falling(), backend="jax", more={"versions": {"numpy": "0.1"}})
    found = compare.compare(seeds[0], fp8)
    assert found.settings == {"numerics.recipe": ("bf16", "tensorwise"), "backend": ("torch", "jax")}
    assert found.versions["numpy"] == (np.__version__, "0.1")


def test_a_comparison_is_printed_and_written(seeds, other, tmp_path):
    found = compare.compare(seeds[0], other(falling(above=0.4, wobble=0)), seeds)
    console = Console(width=300, record=True, file=(tmp_path / "shown").open("w"))
    with console.file:
        found.render(console)
    shown = (tmp_path / "shown").read_text()
    assert "numerics.recipe" in shown
    assert '"tensorwise"' in shown
    assert shown.splitlines()[-1].startswith("outside noise: the loss of ")
    found.write(tmp_path / "compare.json")
    written = json.loads((tmp_path / "compare.json").read_text())
    assert (written["ok"], written["result"], written["settings"]["numerics.recipe"]) == (False, "outside noise", ["bf16", "tensorwise"])
    assert written["difference"] == found.difference
