import json

import made_runs
import numpy as np
import pytest

from fp8ref.run.config import ConfigError
from fp8ref.run.report import runs


@pytest.fixture
def made(tmp_path, small):
    return made_runs.make(tmp_path / "run", small, [5.0, 4.0, 3.0], recipe="tensorwise", seed=3)


def test_a_run_is_what_was_written(made, tmp_path):
    assert (made.path, made.name) == (tmp_path / "run", str(tmp_path / "run"))
    assert made.losses == {0: 5.0, 1: 4.0, 2: 3.0}
    assert (made.seeds, made.tokens_per_step, made.bf16, made.finished, made.statistics) == ((3, 3), 64, False, True, [])


def test_bf16_is_a_run_without_a_linear_in_fp8(tmp_path, small):
    assert made_runs.make(tmp_path / "run", small, [1.0]).bf16


def test_a_torn_last_line_is_left_out(made):
    with (made.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert runs.read(made.path).losses == made.losses


@pytest.mark.parametrize("name", ["metrics.jsonl", "statistics.jsonl"])
@pytest.mark.parametrize("line", ["{", "[1]", "3"])
def test_a_broken_line_is_named(made, name, line):
    with (made.path / name).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=rf"{name}, line \d, is not a JSON object"):
        runs.read(made.path)


def test_a_line_without_a_loss_is_named(made):
    (made.path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match="a step and a loss"):
        runs.read(made.path)


@pytest.mark.parametrize("line", ['{"step": 0}', '{"statistics": {}}', '{"step": 0, "statistics": []}'])
def test_a_line_without_statistics_is_named(made, line):
    (made.path / "statistics.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match="a step and statistics"):
        runs.read(made.path)


def test_a_run_without_steps_is_refused_with_its_status(tmp_path, small):
    with pytest.raises(ConfigError, match=r"no step yet .*'running'"):
        made_runs.make(tmp_path / "run", small, [], status="running")


def test_no_directory_and_no_run_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no directory"):
        runs.read(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no intact run"):
        runs.read(tmp_path)


def test_a_manifest_that_lacks_a_key_is_named(made):
    manifest = json.loads((made.path / "manifest.json").read_text())
    del manifest["config"]["data"]["seed"]
    (made.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"no config\.data\.seed"):
        runs.read(made.path)


def test_a_run_is_named_once(made):
    with pytest.raises(ConfigError, match="named once"):
        runs.read_all([made.path, made.path / ".." / "run"])


def test_common_steps_are_those_of_all(tmp_path, small):
    long, short = (made_runs.make(tmp_path / str(n), small, np.arange(n)) for n in (6, 4))
    assert runs.common_steps([long, short]).tolist() == [0, 1, 2, 3]
    assert runs.at(long.losses, np.array([3, 1])).tolist() == [3.0, 1.0]
