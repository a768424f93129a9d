"""What a command imports of the code that a config or a run directory names: nothing unless
told.
"""

import json
import os
import subprocess
import sys

import pytest
from helpers.training import made_runs

from fp8ref import cli
from fp8ref.train.config import architecture, user_model
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import ArchitectureConfig


@pytest.fixture
def foreign(tmp_path, monkeypatch, small):
    """A directory with a config of a model of a stranger's, a run of that config, and the module,
    which leaves a file when it is imported.
    """
    (tmp_path / "stranger_model.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nfrom "
        "helpers.models.own_torch_models import Tied\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(user_model, "_TRUSTED", {"stranger_model"})
    monkeypatch.setenv("COLUMNS", "400")
    run = tmp_path / "run"
    keys = ArchitectureConfig(kind="torch", source="stranger_model:Tied")
    config = Config(architecture=keys, data=small.data, run=small.run)
    made_runs.make(run, config, made_runs.falling(6), recipe="tensorwise")
    (run / "checkpoints").mkdir()
    (tmp_path / "mine.toml").write_text((run / "config.toml").read_text())
    (tmp_path / "link.toml").symlink_to(run / "config.toml")
    forget(tmp_path, monkeypatch)
    yield tmp_path
    sys.modules.pop("stranger_model", None)


def forget(folder, monkeypatch):
    sys.modules.pop("stranger_model", None)
    architecture._custom.cache_clear()
    (folder / "ran").unlink(missing_ok=True)
    monkeypatch.setattr(user_model, "_TRUSTED", set())


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "mine.toml", "--backend", "torch", "--run.out", "new"],
        [
            "train",
            "mine.toml",
            "--backend",
            "torch",
            "--run.out",
            "new",
            "--architecture.kind",
            "torch",
        ],
        ["train", "link.toml", "--backend", "torch", "--run.out", "new"],
        ["sweep", "mine.toml", "--backend", "torch", "--out", "new"],
        ["train", "mine.toml", "--backend", "torch", "--dry-run"],
        [
            "train",
            "mine.toml",
            "--backend",
            "torch",
            "--dry-run",
            "--architecture.source",
            "stranger_model:Tied",
        ],
        ["train", "run/config.toml", "--backend", "torch", "--dry-run"],
        ["train", "run/config.toml", "--backend", "torch", "--resume", "--run.out", "run"],
        ["train", "run/config.toml", "--backend", "torch", "--run.out", "new"],
        ["sweep", "run/config.toml", "--backend", "torch", "--out", "new"],
    ],
    ids=" ".join,
)
def test_a_command_says_that_it_needs_trust(foreign, monkeypatch, capsys, arguments):
    monkeypatch.chdir(foreign)
    assert cli.main(arguments) == 2
    assert (
        "architecture.source 'stranger_model:Tied' is code, which would be imported and called. "
        "Read it, then add --trust" in (capsys.readouterr().err)
    )
    assert not (foreign / "ran").exists()
    assert not (foreign / "new").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "run"],
        ["compare", "run", "run"],
        ["replay", "run", "--policy", "torchao"],
        ["export", "run", "--out", "new"],
        ["ablate", "run"],
        ["crosscheck", "--replay", "run"],
        ["crosscheck", "mine.toml", "--backend", "torch"],
        ["estimate", "mine.toml", "--backend", "torch"],
    ],
    ids=" ".join,
)
def test_no_other_command_imports_a_model(foreign, monkeypatch, capsys, arguments):
    monkeypatch.chdir(foreign)
    cli.main(arguments)
    capsys.readouterr()
    assert not (foreign / "ran").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "mine.toml", "--backend", "torch", "--run.out", "new", "--trust"],
        [
            "train",
            "mine.toml",
            "--backend",
            "torch",
            "--run.out",
            "new",
            "--architecture.source",
            "stranger_model:Tied",
        ],
        [
            "train",
            "mine.toml",
            "--backend",
            "torch",
            "--run.out",
            "new",
            "--architecture.source=stranger_model:Tied",
        ],
        [
            "sweep",
            "mine.toml",
            "--backend",
            "torch",
            "--out",
            "new",
            "--architecture.source",
            "stranger_model:Tied",
        ],
        ["train", "mine.toml", "--backend", "torch", "--dry-run", "--trust"],
        ["train", "run/config.toml", "--backend", "torch", "--dry-run", "--trust"],
    ],
    ids=" ".join,
)
def test_what_is_imported_is_said_before(foreign, monkeypatch, capsys, arguments):
    """What the command line names is trusted, and a file with --trust: a path tells nobody whose it
    is.
    """
    monkeypatch.chdir(foreign)
    (foreign / "stranger_model.py").write_text(
        "import sys\nprint('the module runs', file=sys.stderr)\nfrom helpers.models.own_torch_models import "
        "Absent\n"
    )
    assert cli.main(arguments) == 2
    said, *_ = capsys.readouterr().err.splitlines()
    assert (
        said == f"{arguments[1]}: importing architecture.source 'stranger_model:Tied', whose code "
        "runs in this process"
    )


def test_ablate_imports_with_trust(foreign, monkeypatch, capsys):
    monkeypatch.chdir(foreign)
    assert cli.main(["ablate", "run", "--trust"]) == 2  # there is no checkpoint to begin with
    assert (
        "run/config.toml: importing architecture.source 'stranger_model:Tied'"
        in capsys.readouterr().err
    )
    assert {"stranger_model"} == user_model._TRUSTED


def test_the_working_directory_holds_no_modules(tmp_path):
    """Of python -m: else a file there could have the name of any library."""
    for name in ("rich", "pydantic", "numpy"):
        (tmp_path / f"{name}.py").write_text(
            f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        )
    shown = subprocess.run(
        [sys.executable, "-m", "fp8ref", "report", "absent"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 2, shown.stderr
    assert "absent is not a directory" in shown.stderr
    assert not (tmp_path / "ran").exists()


CHILD = """
import sys
from multiprocessing import get_context
from fp8ref import cli
from fp8ref.commands import runs

def start(known):
    child = get_context("spawn").Process(target=print)
    child.start()
    child.join()
    return child.exitcode

if __name__ == "__main__":
    runs._report = start
    sys.argv = ["fp8ref", "report", "run"]
    cli.run()
"""


def test_nor_do_processes_that_a_command_starts_find_modules_there(tmp_path):
    """As of a sweep: multiprocessing starts them with the working directory first."""
    (tmp_path / "cwd").mkdir()
    for name in ("pickle", "struct", "signal"):
        (tmp_path / "cwd" / f"{name}.py").write_text(
            f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        )
    (tmp_path / "script.py").write_text(CHILD)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    started = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        cwd=tmp_path / "cwd",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert started.returncode == 0, started.stderr
    assert not (tmp_path / "ran").exists()


def test_a_forged_backend_is_no_module(foreign, monkeypatch, capsys):
    monkeypatch.chdir(foreign)
    path = foreign / "run" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"backend": "jax..x"}))
    for command in (["export", "run", "--out", "new"], ["ablate", "run"]):
        assert cli.main(command) == 2
        assert "Traceback" not in capsys.readouterr().err
