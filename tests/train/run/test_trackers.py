import struct
import subprocess
import sys
import types

import numpy as np
import pytest
from helpers.training.fakes import FakeTrainer

from fp8ref.shared.errors import ConfigError
from fp8ref.train import loop
from fp8ref.train.config.sections import LogConfig
from fp8ref.train.run import log, trackers
from fp8ref.train.run.processes import Alone


class FakeRun:
    def __init__(self, **keys):
        self.keys, self.lines, self.code = keys, [], None

    def log(self, metrics, step):
        self.lines.append((step, metrics))

    def finish(self, exit_code):
        self.code = exit_code


class Other(Alone):
    """A process that is not the one that writes; the first has claimed the run's directory."""

    first = False
    claims = iter((None, True))  # no fault of the first, then what it claimed

    def gather(self, value):
        return [next(self.claims, value)]


@pytest.fixture
def wandb(monkeypatch):
    """A module in place of wandb; its runs."""
    runs = []

    def init(**keys):
        runs.append(FakeRun(**keys))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return runs


@pytest.fixture
def train(small, monkeypatch, tmp_path):
    def call(stop=None, out=tmp_path / "run", processes=None, **keys):
        monkeypatch.setattr(
            loop,
            "trainer",
            lambda _, config, __: FakeTrainer(
                config, {stop - 1: KeyboardInterrupt()} if stop else {}
            ),
        )
        how = {key: keys.pop(key) for key in ("resume", "overwrite") if key in keys}
        return loop.train(small.replace(log=keys), "jax", out, processes=processes, **how)

    return call


def events(folder) -> list[tuple[int, str, float]]:
    """(step, tag, value) of TensorBoard's files, and (step, "purged", -1) where an earlier
    session's events end.
    """
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = []
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):  # length, its checksum, an event, its checksum
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            if event.session_log.status == SessionLog.START:
                found.append((event.step, "purged", -1))
    return found


def test_tensorboard_has_the_lines_of_the_metrics(train, tmp_path):
    lines = train(tensorboard=True)
    found = events(tmp_path / "run" / "tensorboard")
    expected = [
        (line["step"], key, float(np.float32(value)))
        for line in lines
        for key, value in line.items()
        if key != "step"
    ]
    assert [event for event in found if event[1] != "purged"] == expected
    assert {key for _, key, _ in found} >= {"loss", "grad_norm", "tokens_per_second", "val_loss"}


def test_a_run_that_starts_over_hides_what_was_written_and_one_that_replaces_drops_it(
    train, tmp_path, small
):
    with pytest.raises(KeyboardInterrupt):
        train(stop=4, tensorboard=True)
    first = events(tmp_path / "run" / "tensorboard")
    assert [step for step, key, _ in first if key == "loss"] == [0, 1, 2]
    train(overwrite=True, tensorboard=True)
    second = events(tmp_path / "run" / "tensorboard")
    assert [step for step, key, _ in second if key == "loss"] == [0, 1, 2, 3, 4, 5]
    went_on = trackers.TensorBoard(tmp_path / "run" / "tensorboard")
    went_on.step({"step": 4, "loss": 1.0})
    went_on.close(False)
    assert (4, "purged", -1) in events(tmp_path / "run" / "tensorboard")


def test_wandb_has_the_lines_and_the_config(train, wandb, tmp_path, small):
    lines = train(wandb="fp8")
    (run,) = wandb
    assert run.lines == [
        (line["step"], {k: v for k, v in line.items() if k != "step"}) for line in lines
    ]
    assert (run.keys["project"], run.keys["name"], run.keys["dir"]) == (
        "fp8",
        "run",
        str(tmp_path / "run"),
    )
    assert run.keys["config"]["run"]["steps"] == small.run.steps
    assert run.code == 0


def test_an_interrupted_run_is_no_finished_one(train, wandb):
    with pytest.raises(KeyboardInterrupt):
        train(stop=3, wandb="fp8")
    assert wandb[0].code == 1
    assert len(wandb[0].lines) == 2


def test_only_the_process_that_writes_tracks(train, wandb, tmp_path):
    train(processes=Other(), tensorboard=True, wandb="fp8")
    assert wandb == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("key", "package"), trackers.PACKAGES.items())
def test_a_missing_package_is_named_before_anything_is_written(
    key, package, train, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf"log.{key} needs the package {package}.*pip install {package}"
    ):
        train(**{key: "fp8" if key == "wandb" else True})
    assert not (tmp_path / "run").exists()


def test_wandb_that_cannot_begin_stops_the_run_and_leaves_it_marked(train, monkeypatch, tmp_path):
    def init(**_):
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(ConfigError, match=r"log.wandb 'fp8' could not start: no network"):
        train(wandb="fp8")
    assert log.read_manifest(tmp_path / "run")["status"] == "failed"


def test_a_project_has_a_name():
    with pytest.raises(ValueError, match=r"log.wandb is the name of a project"):
        LogConfig(wandb="")


def test_nothing_is_imported_unasked():
    program = (
        "import fp8ref.train.run.trackers as t, sys; t.check(t.LogConfig()); "
        "print({'tensorboardX', 'wandb'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )


def test_a_run_is_resumed_with_other_trackers(train, wandb, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(stop=4)
    train(resume=True, tensorboard=True, wandb="fp8")
    assert wandb[0].code == 0
    assert (tmp_path / "run" / "tensorboard").is_dir()
