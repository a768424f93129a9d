import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.training import made_runs

from fp8ref.shared.errors import ConfigError, NonFiniteError
from fp8ref.train import loop
from fp8ref.train.experiments import sweep
from fp8ref.train.report import runs


@pytest.fixture
def tiny(small):
    return small.replace(run={"steps": 6, "eval_every": 6, "eval_batches": 1})


def test_runs_of_a_seed_are_matched_and_follow_each_other(tiny, tmp_path):
    planned = sweep.plan(tiny, ["jax", "torch"], ["bf16", "tensorwise"], seeds=2, out=tmp_path)
    assert [run.out.name for run in planned[:4]] == [
        "jax-bf16-seed0",
        "jax-tensorwise-seed0",
        "torch-bf16-seed0",
        "torch-tensorwise-seed0",
    ]
    assert [(run.config.run.seed, run.config.data.seed) for run in planned] == [(0, 0)] * 4 + [
        (1, 1)
    ] * 4


@pytest.mark.parametrize(
    ("recipes", "seeds", "message"),
    [
        (["bf16", "tensorwize"], 2, "each once; got bf16, tensorwize"),
        (["bf16", "bf16"], 2, "each once; got bf16, bf16"),
        ([], 2, "got none"),
        (["bf16"], 0, "--seeds is at least 1; got 0"),
    ],
)
def test_a_sweep_refuses_what_it_cannot_train(tiny, tmp_path, recipes, seeds, message):
    with pytest.raises(ConfigError, match=message):
        sweep.plan(tiny, ["jax"], recipes, seeds=seeds, out=tmp_path)


def test_what_has_ended_is_left_alone_and_the_rest_resumed(tiny, tmp_path, monkeypatch):
    planned = sweep.plan(tiny, ["torch"], ["bf16", "tensorwise"], seeds=2, out=tmp_path)
    states = ["finished", "failed", "stopped"]
    for run, status in zip(planned, states, strict=False):
        run.out.mkdir(parents=True)
        error = {"error": "NonFiniteError: step 3"} if status == "failed" else {}
        (run.out / "manifest.json").write_text(
            json.dumps({"fp8ref": "0", "status": status} | error)
        )
    assert [run.ended for run in planned] == [True, True, False, False]


@pytest.mark.parametrize(
    ("status", "error"),
    [("finished", ""), ("failed", "NonFiniteError: step 3"), ("interrupted", "")],
)
def test_a_directory_of_other_settings_is_refused(tiny, tmp_path, status, error, monkeypatch):
    """Its runs have other losses than the sweep that is asked for."""
    monkeypatch.setattr(sweep, "_one", None)  # no run may begin
    (old,) = sweep.plan(
        tiny.replace(run={"steps": 60}, optimizer={"learning_rate": 0.5}),
        ["torch"],
        ["bf16"],
        seeds=1,
        out=tmp_path,
    )
    made_runs.make(old.out, old.config, [5.0] * 6, status=status, more={"error": error})
    planned = sweep.plan(
        tiny.replace(run={"steps": 60}), ["torch"], ["bf16"], seeds=1, out=tmp_path
    )
    match = (
        r"holds a run with another config\.optimizer\.learning_rate: 0\.5; .*\. Repeat the "
        r"sweep's own settings, or name another directory with --out\."
    )
    with pytest.raises(ConfigError, match=match):
        sweep.train(planned)
    shorter = sweep.plan(
        old.config.replace(run={"steps": 30}), ["torch"], ["bf16"], seeds=1, out=tmp_path
    )
    with pytest.raises(ConfigError, match=r"another config\.run\.steps: 60; got 30"):
        sweep.train(shorter)


def test_a_run_with_fewer_steps_has_not_ended(tiny, tmp_path):
    (old,) = sweep.plan(tiny.replace(run={"steps": 60}), ["torch"], ["bf16"], seeds=1, out=tmp_path)
    made_runs.make(old.out, old.config, [5.0] * 6)
    assert old.ended
    (longer,) = sweep.plan(
        tiny.replace(run={"steps": 120}), ["torch"], ["bf16"], seeds=1, out=tmp_path
    )
    assert not longer.ended


POOL = """
import concurrent.futures, multiprocessing, os, time
from fp8ref.train.experiments import sweep

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=context, initializer=sweep.follow_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


def test_a_process_of_the_pool_ends_with_the_sweep(tmp_path):
    """A sweep that SIGTERM or SIGKILL ends cannot end them itself."""
    (tmp_path / "pool.py").write_text(POOL)
    with subprocess.Popen(
        [sys.executable, tmp_path / "pool.py"], stdout=subprocess.PIPE, text=True
    ) as parent:
        child = int(parent.stdout.readline())
        parent.terminate()
    for _ in range(100):
        if (
            not Path(f"/proc/{child}").exists()
            or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text()
        ):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the process of the pool is still there")


def test_a_run_that_diverges_is_said_and_resumed_runs_are_finished(tiny, tmp_path, monkeypatch):
    def diverges(config, backend, out, resume):
        assert resume
        raise NonFiniteError("step 3: loss nan")

    text = json.dumps(sweep.configs.to_dict(tiny))
    monkeypatch.setattr(loop, "train", diverges)
    assert sweep._one(text, "torch", str(tmp_path / "a")) == "step 3: loss nan"
    monkeypatch.setattr(loop, "train", lambda *_, **__: None)
    assert sweep._one(text, "torch", str(tmp_path / "a")) == "finished"


@pytest.mark.slow
def test_a_sweep_trains_resumes_and_reports(tiny, tmp_path, capsys):
    planned = sweep.plan(tiny, ["torch"], ["bf16", "tensorwise"], seeds=1, out=tmp_path)
    sweep.train(planned, jobs=2)
    more = sweep.plan(tiny, ["torch"], ["bf16", "tensorwise"], seeds=2, out=tmp_path)
    sweep.train(more)
    assert "2 of 4 runs have ended before; 2 are left" in capsys.readouterr().err
    sweep.train(more)
    said = sweep.report(more, tmp_path / "report.html", confidence=0.95, margin=1.0)
    assert "equivalent" in said
    assert "by 2 matched seeds" in said
    assert len({runs.read(run.out).text for run in more}) == 1
