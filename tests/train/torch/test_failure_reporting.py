"""Processes say why they end, and the others which is gone: by itself, and through the command."""

import signal
import threading

import pytest
from helpers.processes.started import ENDLESS, SHARDED, Forked
from torch import distributed

from fp8ref import cli
from fp8ref.train.config import config as configs
from fp8ref.train.data import loader
from fp8ref.train.run import checkpoint, log
from fp8ref.train.torch import failure_reporting, trainer
from fp8ref.train.torch.failure_reporting import FailureStore


def raises():
    """In the third step."""
    plain = trainer.Trainer.step

    def step(self, tokens):
        if self._step.count == 2:
            raise RuntimeError("planted")
        return plain(self, tokens)

    trainer.Trainer.step = step


@pytest.fixture
def endless(small):
    return small.replace(**SHARDED, **ENDLESS)


def test_a_process_that_is_killed_ends_the_others(tmp_path, endless):
    with Forked(2, tmp_path, endless) as started:
        started.signal(1, signal.SIGKILL)
        assert started.codes(0) == [cli.LOST]
        said = started.outputs()[0].splitlines()[-1]
        assert said.startswith(
            "fp8ref train: process 0 stops: process 1 ended without a message: killed"
        )
        assert "Traceback" not in started.outputs()[0]
    assert log.read_manifest(tmp_path / "run")["status"] == "failed"
    assert "process 1 ended without a message" in log.read_manifest(tmp_path / "run")["error"]


def test_a_process_that_raises_keeps_its_traceback_and_tells_the_others_why(tmp_path, endless):
    with Forked(2, tmp_path, endless, {1: raises}) as started:
        assert started.codes(0, 1) == [cli.LOST, cli.DEFECT]
        mine, theirs = started.outputs()
    assert "process 0 stops: process 1 ended: RuntimeError: planted." in mine
    assert "Traceback" not in mine
    assert theirs.endswith("RuntimeError: planted\n")
    assert "Traceback" in theirs


@pytest.mark.slow
def test_a_process_that_stands_still_ends_the_others_of_every_axis(tmp_path, endless):
    """Process 2 waits for 3 in the group of their axis, 0 and 1 for both in that of all."""
    with Forked(4, tmp_path, endless.replace(parallel={"data": 2, "timeout_s": 5})) as started:
        started.signal(3, signal.SIGSTOP)
        assert started.codes(0, 1, 2) == [cli.LOST] * 3
        for rank, said in enumerate(started.outputs()[:3]):
            assert (
                f"process {rank} stops: process 3 did not answer within 5 s (parallel.timeout_s)"
                in said
            )
            assert "Traceback" not in said


def test_ctrl_c_in_one_process_saves_on_all_after_the_same_step(tmp_path, endless):  # K-8
    with Forked(2, tmp_path, endless) as started:
        started.signal(1, signal.SIGINT)
        assert started.codes(0, 1) == [cli.INTERRUPTED] * 2
        for said in started.outputs():
            assert "fp8ref train: interrupted after" in said
        assert "The run stops after this step" in started.outputs()[1]
    steps = len(log.read_metrics(tmp_path / "run"))
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step-{steps:08d}"


# ---- without processes: several ranks' stores in one store, asked one after the other ----


@pytest.fixture
def signals():
    """Whoever listens ignores SIGTERM from then on."""
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


def test_sigterm_to_one_process_saves_on_all_after_the_same_step(tmp_path, endless):  # K-8
    """A process by itself then goes on from there."""
    with Forked(2, tmp_path, endless.replace(numerics={"recipe": "delayed"})) as started:
        started.signal(1, signal.SIGTERM)
        assert started.codes(0, 1) == [cli.STOPPED] * 2
        for said in started.outputs():
            assert "stopped by SIGTERM after" in said
    steps = len(log.read_metrics(tmp_path / "run"))
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step-{steps:08d}"
    assert checkpoint.verify(saved)["config"]["parallel"]["fsdp"] == 2
    assert log.read_manifest(tmp_path / "run")["status"] == "stopped"
    config = configs.load(tmp_path / "run" / "config.toml").replace(parallel={"fsdp": 1})
    alone = trainer.Trainer(config)
    alone.load(saved / "state", steps)
    batches = loader.open_batches(config)
    assert alone.step(batches.step(steps))["loss"] == pytest.approx(
        log.read_metrics(tmp_path / "run")[-1]["loss"], rel=0.2
    )


@pytest.fixture
def store(signals, monkeypatch):
    # at most: who hears all that there is to hear asks no longer
    monkeypatch.setattr(failure_reporting, "SECONDS", 60.0)
    monkeypatch.setattr(failure_reporting, "LINGER", 0.0)
    return distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def of(store, ranks, *, kept_by_first=False):
    return [FailureStore(store, rank, ranks, kept_by_first=kept_by_first) for rank in range(ranks)]


def test_causes_are_told_by_rank(store):
    stores = of(store, 4)
    stores[3].report(ValueError("of the third"))
    stores[1].report(KeyboardInterrupt())
    said = "process 1 ended: Ctrl-C; process 3 ended: ValueError: of the third"
    assert stores[0].diagnose(waited=False, timeout_s=7) == said
    assert stores[2].diagnose(waited=True, timeout_s=7) == said
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


STILL = "process 1 did not answer within 7 s (parallel.timeout_s): it hangs, or is slower than that"


@pytest.mark.parametrize("kept_by_first", [False, True])
@pytest.mark.parametrize(
    ("waited", "said"),
    [
        (False, "process 1 ended without a message: killed, perhaps because memory ran out"),
        (True, STILL),
    ],
    ids=str,
)
def test_the_last_silent_one_is_gone_or_stands_still(store, kept_by_first, waited, said):
    assert of(store, 2, kept_by_first=kept_by_first)[0].diagnose(waited=waited, timeout_s=7) == said


def test_what_another_waited_for_counts(store):
    stores = of(store, 3)
    stores[2]._post(waited=True)
    assert stores[0].diagnose(waited=False, timeout_s=7) == STILL


def test_all_that_are_silent_are_named(store, monkeypatch):
    # two that are silent may both still speak
    monkeypatch.setattr(failure_reporting, "SECONDS", 1.0)
    stores = of(store, 4)
    stores[2]._post(waited=True)
    assert (
        stores[0]
        .diagnose(waited=False, timeout_s=7)
        .startswith("process 1 and 3 did not answer within 7 s")
    )
    stores[1].report(ValueError())  # so that nobody asks any more


def test_where_all_speak_and_none_ended_it_was_the_connection(store):
    stores = of(store, 2)
    stores[1]._post(waited=False)
    assert (
        stores[0].diagnose(waited=False, timeout_s=7)
        == "no process ended, but their connection broke"
    )


def test_without_a_store_its_keeper_is_gone(signals):
    kept = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = distributed.TCPStore("localhost", kept.port, is_master=False, wait_for_workers=False)
    one = FailureStore(client, 1, 3, kept_by_first=True)
    del kept
    assert (
        one.diagnose(waited=False, timeout_s=7)
        == "process 0 is gone; its output, if any, shows why"
    )


class Still:
    """A store whose keeper stands still."""

    def __init__(self):
        self.ended = threading.Event()

    def clone(self):
        return self

    def set(self, key, value):
        pass

    def check(self, keys):
        self.ended.wait()
        raise distributed.DistStoreError


@pytest.mark.parametrize(("kept_by_first", "who"), [(True, "0"), (False, "0 and 2")])
def test_a_store_that_stands_still_is_left(signals, monkeypatch, kept_by_first, who):
    monkeypatch.setattr(failure_reporting, "SECONDS", 0.1)
    store = Still()
    said = FailureStore(store, 1, 3, kept_by_first=kept_by_first).diagnose(
        waited=False, timeout_s=7
    )
    store.ended.set()
    assert (
        said == f"process {who} did not answer within 7 s (parallel.timeout_s): it hangs, or is "
        "slower than that"
    )
