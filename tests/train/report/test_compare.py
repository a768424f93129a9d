import json
import re
import shutil

import numpy as np
import pytest
from helpers.training import made_runs
from helpers.training.made_runs import falling
from rich.console import Console

from fp8ref.shared.errors import ConfigError
from fp8ref.train.report import compare, runs


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
    (tmp_path / "copy" / "metrics.jsonl").write_text(
        re.sub(r'"(tokens_per_second|seconds)": [\d.]+', r'"\1": 7.5', lines)
    )
    found = compare.compare(seeds[0], runs.read(tmp_path / "copy"))
    assert (found.result, found.by, found.ok, found.steps) == ("identical", "bits", True, 60)
    assert (found.settings, found.versions) == ({}, {})


@pytest.mark.parametrize("key", compare.METRICS)
def test_one_bit_is_not_identical(seeds, tmp_path, key):  # E-6
    shutil.copytree(seeds[0].path, tmp_path / "copy")
    lines = [
        json.loads(line) for line in (tmp_path / "copy" / "metrics.jsonl").read_text().splitlines()
    ]
    lines[39][key] = float(np.nextafter(lines[39][key], 9))
    (tmp_path / "copy" / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert compare.compare(seeds[0], runs.read(tmp_path / "copy")).result != "identical"


def test_a_run_that_is_shorter_is_not_identical(seeds, other):
    found = compare.compare(seeds[0], other(falling(wobble=0)[:30], recipe="bf16"))
    assert (found.result, found.steps) == ("equivalent", 30)


def test_by_steps_alone_a_gap_that_stays_is_worse(seeds, other):  # E-5, E-6
    found = compare.compare(seeds[0], other(falling(wobble=0) + 0.01))
    assert (found.result, found.by, found.ok, found.pairs) == ("worse", "steps", False, 1)
    assert 0 < found.low <= found.difference <= found.high
    assert found.said.startswith(
        f"worse: the loss of {found.b} is +0.0100 nats [+0.0100, +0.0100] from {found.a} over "
        "the last 5 of 60 steps"
    )
    turned = compare.compare(other(falling(wobble=0) + 0.01), seeds[0])
    assert (turned.result, turned.difference) == ("better", -found.difference)


def test_a_margin_of_ones_own_makes_it_equivalent(seeds, other):  # E-4
    found = compare.compare(seeds[0], other(falling(wobble=0) + 0.01), margin=0.02)
    assert (found.result, found.ok, found.margin) == ("equivalent", True, 0.02)


def test_by_steps_alone_a_gap_that_changes_sign_cannot_be_told(seeds, other):  # E-5, E-6
    found = compare.compare(seeds[0], other(falling(wobble=9)))
    assert (found.result, found.by, found.ok) == ("cannot tell", "steps", False)
    assert found.low <= 0 <= found.high
    assert "steps would settle it" in found.said


@pytest.mark.parametrize(
    ("above", "result"), [(0.1, "worse"), (-0.1, "better"), (0.0, "equivalent")]
)
# E-3, E-6
def test_more_seeds_are_matched_whichever_side_they_are_of(seeds, tmp_path, small, above, result):
    offsets = (0.0, 0.05, -0.05)
    b = [
        made_runs.make(
            tmp_path / f"b{i}",
            small,
            falling(above=offset + above + (i + 1) / 1000, wobble=i),
            recipe="rowwise",
            seed=i,
        )
        for i, offset in enumerate(offsets)
    ]
    found = compare.compare(seeds[0], b[0], [b[2], seeds[1], b[1], seeds[2]])
    assert (found.result, found.by, found.pairs) == (result, "seeds", 3)
    assert found.low < found.difference < found.high


def test_other_seeds_cannot_be_told_apart(seeds):  # E-2, E-6
    with pytest.raises(
        ConfigError,
        match=r"two runs of different seeds show no effect .* Train both with the same seeds",
    ):
        compare.compare(*seeds[:2])


def test_seeds_are_of_one_of_the_two_configs(seeds, other, tmp_path, small):
    fp8 = other(falling())
    foreign = made_runs.make(
        tmp_path / "foreign", small.replace(optimizer={"beta1": 0.5}), falling(), seed=8
    )
    with pytest.raises(
        ConfigError, match=r"foreign differs from both, from the nearer in optimizer\.beta1"
    ):
        compare.compare(seeds[0], fp8, [foreign])


def test_a_run_that_is_not_finished_is_told(seeds, other):
    assert compare.compare(seeds[0], other(falling()[:30], status="running")).said.endswith(
        "other is not finished, but running."
    )


def test_a_run_that_diverged_after_equal_steps_is_not_identical(seeds, other):  # E-6
    """Every number that both recorded is equal; one of them ended by a loss of NaN."""
    ended = other(
        falling(wobble=0),
        recipe="bf16",
        status="failed",
        more={"error": "NonFiniteError: step 60: loss nan."},
    )
    assert all(seeds[0].curve(key) == ended.curve(key) for key in compare.METRICS)
    assert compare.compare(seeds[0], ended).result == "worse"
    assert compare.compare(ended, seeds[0]).result == "better"
    assert compare.compare(ended, ended).result == "identical"


@pytest.mark.parametrize("steps", [0, 2, 30])
def test_a_run_that_diverged_is_worse_but_like_its_copy(seeds, other, steps, tmp_path):  # E-6
    died = other(
        falling(wobble=0)[:steps],
        status="failed",
        more={"error": "NonFiniteError: step 9: loss nan."},
    )
    for pair, result in (((seeds[0], died), "worse"), ((died, seeds[0]), "better")):
        found = compare.compare(*pair)
        assert (found.result, found.by, found.difference) == (result, "end", None)
        assert found.said == f"{result}: {died.name} ended by NonFiniteError: step 9: loss nan"
    shutil.copytree(died.path, tmp_path / "copy")
    found = compare.compare(died, runs.read(tmp_path / "copy"))
    assert (found.result, found.by, found.steps) == ("identical", "bits", steps)
    assert found.said.endswith("bit for bit; both ended with NonFiniteError: step 9: loss nan")


def test_a_few_steps_can_be_identical_and_all_are_counted(seeds, other, tmp_path):
    few = other(falling()[:3], recipe="bf16")
    shutil.copytree(few.path, tmp_path / "copy")
    copy = runs.read(tmp_path / "copy")
    assert compare.compare(few, copy).said.startswith(
        "identical: loss, grad_norm, val_loss of all 3 steps"
    )
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
    assert found.settings == {
        "numerics.recipe": ("bf16", "tensorwise"),
        "backend": ("torch", "jax"),
    }
    assert found.versions["numpy"] == (np.__version__, "0.1")


def test_a_comparison_is_printed_and_written(seeds, other, tmp_path):
    found = compare.compare(seeds[0], other(falling(wobble=0) + 0.4), margin=0.01)
    console = Console(width=300, record=True, file=(tmp_path / "shown").open("w"))
    with console.file:
        found.render(console)
    shown = (tmp_path / "shown").read_text()
    assert "numerics.recipe" in shown
    assert '"tensorwise"' in shown
    assert shown.splitlines()[-1].startswith("worse: the loss of ")
    found.write(tmp_path / "compare.json")
    written = json.loads((tmp_path / "compare.json").read_text())
    assert (written["ok"], written["result"], written["settings"]["numerics.recipe"]) == (
        False,
        "worse",
        ["bf16", "tensorwise"],
    )
    assert written["difference"] == found.difference


def test_logs_of_others_are_compared_in_pairs(tmp_path):  # E-3, E-6
    def log(name: str, above: float, seed: int):
        path = tmp_path / f"{name}.csv"
        rows = [f"{step},{loss}" for step, loss in enumerate(falling(wobble=seed) + above)]
        path.write_text("\n".join(["step,loss", *rows]))
        return compare.read(path)

    a, b, *more = (
        log(name, above, seed)
        for name, above, seed in (("a0", 0, 0), ("b0", 0.1, 0), ("a1", 0.5, 1), ("b1", 0.601, 1))
    )
    found = compare.compare(a, b, more)
    assert (found.result, found.by, found.pairs, found.settings) == ("worse", "seeds", 2, {})
    assert found.difference == pytest.approx(0.1005)
    with pytest.raises(ConfigError, match="takes logs in pairs, one like A and one like B; got 1"):
        compare.compare(a, b, more[:1])
    assert compare.compare(a, a).said == "identical: loss of all 60 steps, bit for bit"


def test_a_log_is_compared_with_a_run(seeds, tmp_path):
    path = tmp_path / "theirs.jsonl"
    path.write_text(
        "".join(
            json.dumps({"step": step, "loss": loss + 0.2}) + "\n"
            for step, loss in seeds[0].losses.items()
        )
    )
    found = compare.compare(seeds[0], compare.read(path))
    assert (found.result, round(found.difference, 6)) == ("worse", 0.2)
    console = Console(width=300, record=True, file=(tmp_path / "shown").open("w"))
    with console.file:
        found.render(console)
    assert (tmp_path / "shown").read_text().splitlines()[:2] == [
        "config: not known of a log",
        "versions: not known of a log",
    ]
