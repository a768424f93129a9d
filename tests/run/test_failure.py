import json

import numpy as np
import pytest
from fakes import FakeTrainer

from fp8ref.run import failure, loop
from fp8ref.run.config import ConfigError
from fp8ref.run.loop import NonFiniteError
from fp8ref.run.processes import Alone


@pytest.fixture
def kept(tmp_path, small):
    model = FakeTrainer(small)
    model.count = 7
    tokens = np.arange(68).reshape(4, 17)
    return failure.write(tmp_path, model, small, tokens, {"step": 7, "loss": float("nan"), "grad_norm": 0.5}, Alone())


def test_what_is_kept_is_read_again(kept, small):  # K-6
    for path in (kept, kept / "manifest.json"):
        found = failure.read(path)
        assert found.config == small
        assert (found.backend, found.metrics) == ("jax", {"step": "7", "loss": "nan", "grad_norm": "0.5"})
        np.testing.assert_array_equal(found.tokens, np.arange(68).reshape(4, 17))
        assert json.loads((found.state / "count.json").read_text()) == 7


def test_a_damaged_one_is_refused(kept):
    (kept / "batch.npy").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"batch.npy has 0 bytes"):
        failure.read(kept)


def test_a_checkpoint_is_none(tmp_path, small, monkeypatch):
    monkeypatch.setattr(loop, "trainer", lambda *_: FakeTrainer(small))
    loop.train(small, "jax", tmp_path / "run")
    with pytest.raises(ConfigError, match="is a checkpoint, not a step that failed"):
        failure.read(tmp_path / "run" / "checkpoints" / "step-00000006")


def test_a_run_keeps_the_step_that_it_did_not_take(tmp_path, small, monkeypatch):  # T-4, K-6
    monkeypatch.setattr(loop, "trainer", lambda *_: FakeTrainer(small, {2: {"grad_norm": float("inf")}}))
    config = small.replace(checkpoint={"every": 1})
    with pytest.raises(NonFiniteError, match=r"fp8ref crosscheck --replay .*failures/step-00000002"):
        loop.train(config, "jax", tmp_path / "run")
    found = failure.read(tmp_path / "run" / "failures" / "step-00000002")
    assert found.metrics["grad_norm"] == "inf"
    assert json.loads((found.state / "count.json").read_text()) == 3  # the fake counts it; a backend does not
    assert [p.name for p in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["step-00000001", "step-00000002"]
