import json

import numpy as np
import pytest
from helpers.training.fakes import FakeTrainer

from fp8ref.shared.errors import ConfigError, NonFiniteError
from fp8ref.train import loop
from fp8ref.train.run import failed_step
from fp8ref.train.run.processes import Alone


@pytest.fixture
def kept(tmp_path, small):
    model = FakeTrainer(small)
    model.count = 7
    tokens = np.arange(68).reshape(4, 17)
    return failed_step.write(
        tmp_path, model, small, tokens, {"step": 7, "loss": float("nan"), "grad_norm": 0.5}, Alone()
    )


def test_what_is_kept_is_read_again(kept, small):  # K-6
    for path in (kept, kept / "manifest.json"):
        found = failed_step.read(path)
        assert found.config == small
        assert (found.backend, found.metrics) == (
            "jax",
            {"step": "7", "loss": "nan", "grad_norm": "0.5"},
        )
        np.testing.assert_array_equal(found.tokens, np.arange(68).reshape(4, 17))
        assert json.loads((found.state / "count.json").read_text()) == 7


def test_a_damaged_one_is_refused(kept):
    (kept / "batch.npy").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"batch.npy has 0 bytes"):
        failed_step.read(kept)


@pytest.fixture
def run(tmp_path, small, monkeypatch):
    monkeypatch.setattr(loop, "trainer", lambda *_: FakeTrainer(small))
    loop.train(small, "jax", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("path", "what"),
    [
        (".", "is a run"),
        ("manifest.json", "is a file"),
        ("metrics.jsonl", "is a file"),
        ("failures", "is not one"),
        ("failures/step-00000009", "does not exist"),
        ("failures/step-00000007/batch.npy", "is a file"),
        ("checkpoints", "is not one"),
        ("checkpoints/step-00000006", "is a checkpoint"),
    ],
)
def test_what_is_none_is_told_and_those_near_it_are_named(run, small, path, what):
    for step in (7, 12):
        failed_step.write(
            run, FakeTrainer(small), small, np.zeros((4, 17)), {"step": step}, Alone()
        )
    (run / "failures" / "step-00000013.unfinished").mkdir()
    with pytest.raises(
        ConfigError,
        match=rf"takes the directory of a step that failed, RUN/failures/step-\.\.\.; .* {what}\. ",
    ) as error:
        failed_step.read(run / path)
    assert str(error.value).endswith(
        f"{run} kept {run}/failures/step-00000007, {run}/failures/step-00000012."
    )


def test_a_run_without_failures_is_told_so(run):
    with pytest.raises(
        ConfigError, match=r"run is a run\. .*run kept none: none of its steps failed\."
    ):
        failed_step.read(run)


def test_a_plain_file_or_directory_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    for name, what in (
        ("file", "is a file"),
        (".", "is not one"),
        ("absent", "does not exist"),
        ("absent/manifest.json", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=rf"{what}\.$"):
            failed_step.read(tmp_path / name)


def test_a_run_keeps_the_step_that_it_did_not_take(tmp_path, small, monkeypatch):  # T-4, K-6
    monkeypatch.setattr(
        loop, "trainer", lambda *_: FakeTrainer(small, {2: {"grad_norm": float("inf")}})
    )
    config = small.replace(checkpoint={"every": 1})
    with pytest.raises(
        NonFiniteError, match=r"fp8ref crosscheck --replay .*failures/step-00000002"
    ):
        loop.train(config, "jax", tmp_path / "run")
    found = failed_step.read(tmp_path / "run" / "failures" / "step-00000002")
    assert found.metrics["grad_norm"] == "inf"
    # the fake counts it; a backend does not
    assert json.loads((found.state / "count.json").read_text()) == 3
    assert [p.name for p in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step-00000001",
        "step-00000002",
    ]
