"""What several processes agree on before a run, with the others' answers made up."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
from helpers.training.fakes import FakeTrainer

from fp8ref.shared.errors import ConfigError
from fp8ref.train import loop
from fp8ref.train.data import loader
from fp8ref.train.run.processes import Alone, together


class Second:
    """Process 1 of two; process 0 answers as ``replies`` says, or as this one does."""

    first = False

    def __init__(self, *replies):
        self.replies = list(replies)

    def naming_lost_processes(self):
        return contextlib.nullcontext()

    def gather(self, value):
        return [self.replies.pop(0) if self.replies else value, value]


def fail():
    raise ValueError("no disk")


def test_one_fails_all_fail():
    assert together(Alone(), lambda: 3) == 3
    assert together(Second(), lambda: 3) == 3
    with pytest.raises(ValueError, match=r"^no disk$"):
        together(Second(None), fail)
    with pytest.raises(ConfigError, match=r"^process 0: no disk$"):
        together(Second("no disk"), lambda: 3)


def test_a_checkpoint_that_one_could_not_write_ends_all():
    """After the next step: no process waits in a step for one that has ended."""
    heard = {"stop_requested": lambda: False, "interrupted": lambda: False}
    training = SimpleNamespace(
        **heard,
        checkpoints=SimpleNamespace(error=lambda: None),
        processes=Second([False, False, "no disk"]),
    )
    with pytest.raises(ConfigError, match=r"^process 0: no disk$"):
        loop._Training.stop(training)
    training.processes = Second()
    assert loop._Training.stop(training) is None
    training.checkpoints.error = lambda: OSError("no disk")
    with pytest.raises(OSError, match=r"^no disk$"):
        loop._Training.stop(training)


def test_only_the_first_process_writes(small, tmp_path, monkeypatch):
    trainer = FakeTrainer(small)
    trainer.save = lambda directory: lambda: None  # a backend's own processes share that out
    monkeypatch.setattr(loop, "trainer", lambda *_: trainer)
    lines = loop.train(
        small.replace(run={"steps": 1, "eval_every": 1}),
        "jax",
        tmp_path / "run",
        processes=Second(None, True),
    )
    assert len(lines) == 1
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_finished_is_left_alone_by_all(small, tmp_path):
    assert loop.train(small, "jax", tmp_path / "run", processes=Second(None, False)) is None


def test_processes_train_alike(small):
    text = loader.open_batches(small).description["sha256"]
    batches = loader.open_batches(small)
    loop._check_alike(Second(), small, batches)
    loop._check_alike(Second(), small.replace(data={"source": "stdlib"}), batches)
    mine = loop.configs.to_dict(small.replace(data={"source": "stdlib"}))
    held = dataclasses.replace(
        batches,
        description=batches.description
        | {"evaluation": {"a": {"sha256": "0"}, "b": {"sha256": "1"}}},
    )
    with pytest.raises(
        ConfigError, match=r"evaluation\.b is '1' in process 1 and None in process 0"
    ):
        loop._check_alike(
            Second({"config": mine, "text": text, "evaluation": {"a": "0"}}), small, held
        )
    other = {**mine, "optimizer": {**mine["optimizer"], "learning_rate": 0.5}}
    with pytest.raises(
        ConfigError,
        match=r"config.optimizer.learning_rate is 0.001 in process 1 and 0.5 in process 0",
    ):
        loop._check_alike(Second({"config": other, "text": text, "evaluation": {}}), small, batches)
    with pytest.raises(
        ConfigError, match=r"text is '[0-9a-f]{64}' in process 1 and 'another' in process 0"
    ):
        loop._check_alike(
            Second({"config": mine, "text": "another", "evaluation": {}}), small, batches
        )
