import dataclasses
import os

import numpy as np
import pytest
from helpers.training import made_runs

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.report import runs
from fp8ref.train.run import run_dir


@pytest.fixture
def made(tmp_path, small):
    return made_runs.make(tmp_path / "run", small, [5.0, 4.0, 3.0], recipe="tensorwise", seed=3)


def test_a_run_is_what_was_written(made, tmp_path):
    assert (made.path, made.name) == (tmp_path / "run", str(tmp_path / "run"))
    assert made.losses == {0: 5.0, 1: 4.0, 2: 3.0}
    assert (made.seeds, made.tokens_per_step, made.bf16, made.finished, made.statistics) == (
        (3, 3),
        64,
        False,
        True,
        [],
    )


def test_bf16_is_a_run_without_a_linear_in_fp8(tmp_path, small):
    assert made_runs.make(tmp_path / "run", small, [1.0]).bf16


def test_a_torn_last_line_is_left_out(made):
    with (made.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert runs.read(made.path).losses == made.losses


def test_a_run_without_steps_is_refused_with_its_status(tmp_path, small):
    with pytest.raises(ConfigError, match=r"no step yet .*'running'"):
        made_runs.make(tmp_path / "run", small, [], status="running")


def test_a_run_whose_process_was_killed_is_interrupted(tmp_path, small):
    """Its manifest says running, and nobody holds the lock.

    On another machine's lock nothing is known.
    """
    path = made_runs.make(tmp_path / "run", small, [5.0], status="running").path
    assert runs.read(path).manifest["status"] == "running"  # no lock file: copied from elsewhere
    held = run_dir.Lock()
    held.take(path)
    assert runs.read(path).manifest["status"] == "running"
    held.close()
    assert runs.read(path).manifest["status"] == "interrupted"
    (path / run_dir.LOCK).write_text("process 1 on another machine\n")
    assert runs.read(path).manifest["status"] == "running"


def test_why_there_is_no_step_is_said(tmp_path, small):
    with pytest.raises(ConfigError, match=r"no step yet \(its status is 'failed': OSError: disk\)"):
        made_runs.make(
            tmp_path / "run", small, [], status="failed", more={"error": "OSError: disk"}
        )


def test_a_run_whose_first_step_was_not_finite_is_one(tmp_path, small):
    run = made_runs.make(
        tmp_path / "run", small, [], status="failed", more={"error": "NonFiniteError: step 0"}
    )
    assert (run.losses, run.diverged) == ({}, "NonFiniteError: step 0")


@pytest.mark.parametrize("name", ["manifest.json", "metrics.jsonl", "statistics.jsonl"])
def test_every_file_is_checked(made, name):
    (made.path / name).write_text("[]\n")
    with pytest.raises(ConfigError, match=name):
        runs.read(made.path)


def test_a_name_that_is_no_text_is_made_one(tmp_path, small):
    path = tmp_path / os.fsdecode(b"caf\xe9")
    assert made_runs.make(path, small, [1.0]).name == str(tmp_path / "caf?")


def test_a_run_is_named_once(made):
    with pytest.raises(ConfigError, match="named once"):
        runs.read_all([made.path, made.path / ".." / "run"])


def test_a_directory_gives_its_runs_at_any_depth(tmp_path, small, capsys):
    """Checkpoints have a manifest.json too, and are within runs; a run without a step is left
    out.
    """
    for name in ("sweep/b", "sweep/a", "alone"):
        made_runs.make(tmp_path / "runs" / name, small, [1.0])
    (tmp_path / "runs" / "alone" / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "runs" / "alone" / "checkpoints" / "step-1" / "manifest.json").write_text("{}")
    new = tmp_path / "runs" / "new"
    with pytest.raises(ConfigError, match="no step yet"):
        made_runs.make(new, small, [], status="running")
    names = [str(tmp_path / "runs" / name) for name in ("alone", "sweep/a", "sweep/b")]
    assert [run.name for run in runs.read_all([tmp_path / "runs"])] == names
    assert f"{new} has no step yet, and is left out" in "".join(capsys.readouterr())
    with pytest.raises(ConfigError, match="has no step yet"):
        runs.read_all([new])
    with pytest.raises(ConfigError, match="is not a directory"):
        runs.read_all([tmp_path / "absent"])


def test_common_steps_are_those_of_all(tmp_path, small):
    long, short = (made_runs.make(tmp_path / str(n), small, np.arange(n)) for n in (6, 4))
    assert runs.common_steps([long, short]).tolist() == [0, 1, 2, 3]
    assert runs.at(long.losses, np.array([3, 1])).tolist() == [3.0, 1.0]


def test_a_run_from_before_there_were_new_keys_is_a_reference(made):  # E-1
    config = {key: value for key, value in made.manifest["config"].items() if key != "architecture"}
    model = {
        key: value
        for key, value in config["model"].items()
        if key not in ("qk_norm", "num_experts")
    }
    old = dataclasses.replace(made, manifest=made.manifest | {"config": config | {"model": model}})
    assert (old.reference, old.settings) == (made.reference, made.settings)
    assert old.key("model.qk_norm") is False


def test_another_content_of_the_architecture_s_source_is_another_model(made):  # E-1
    one, other = (
        dataclasses.replace(made, manifest=made.manifest | {"model": {"sha256": key, "config": {}}})
        for key in "ab"
    )
    assert configs.differences(one.reference, other.reference) == {
        "architecture.sha256": ("a", "b")
    }
