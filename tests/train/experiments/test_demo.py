"""The runs of a demo: which there are, what their configs are, and how far they are."""

import json
import os

import pytest

from fp8ref.train.experiments import demo
from fp8ref.train.run import log


@pytest.fixture
def runs(small, tmp_path):
    return demo.plan(small, tmp_path, ["rowwise"], {"jax": 1, "torch": 2}, "torch")


def test_each_backend_trains_bf16_and_fp8_and_one_a_fault(runs):
    assert [run.out.name for run in runs] == [
        "jax-bf16-seed0",
        "jax-rowwise-seed0",
        "torch-bf16-seed0",
        "torch-rowwise-seed0",
        "torch-planted-fault-seed0",
        "torch-bf16-seed1",
        "torch-rowwise-seed1",
        "torch-planted-fault-seed1",
    ]
    assert [demo.name_of(run) for run in runs[2:5]] == [
        ("torch", "bf16"),
        ("torch", "rowwise"),
        ("torch", demo.PLANTED),
    ]


def test_runs_of_one_seed_are_matched(runs):
    for run in runs:
        seed = int(run.out.name.endswith("-seed1"))
        assert (run.config.run.seed, run.config.data.seed) == (seed, seed)


def test_the_fault_is_gradients_without_a_scale(runs):
    linears = [d for d in runs[4].config.decisions() if d.fp8]
    assert linears
    for linear in linears:
        grad_output = linear.recipe.grad_input.a
        assert (grad_output.fmt.name, grad_output.policy.name) == ("e4m3fn", "unscaled")
        assert not linear.recipe.output.a.policy.unscaled


def test_progress_is_the_last_whole_line_of_this_time(runs):
    run = runs[0]
    assert demo.progress(run, 0) == ""
    run.out.mkdir()
    path = run.out / log.METRICS
    path.write_text(json.dumps({"step": 3, "loss": 2.5}) + "\n")
    assert demo.progress(run, 0) == "jax bf16 step 4, loss 2.500"
    os.utime(path, (100, 100))
    assert demo.progress(run, 101) == ""
    path.write_text('{"step": 4, "lo')
    assert demo.progress(run, 0) == ""


@pytest.mark.slow
def test_processes_train_and_print_to_a_file(small, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    demo.set_up(tmp_path)
    config = small.replace(run={"steps": 5, "eval_every": 5})
    runs = demo.plan(config, tmp_path, ["tensorwise"], {"torch": 1}, None)
    ended, advanced = [], []
    with demo.training(runs, tmp_path) as wait:
        wait(
            lambda run, first, last: ended.append((run, first["step"], last["step"])),
            lambda note, by: advanced.append(by),
        )
    assert ended == [(run, 0, 4) for run in runs]
    assert sum(advanced) == 2
    assert "linears in FP8" in (tmp_path / demo.LOG).read_text()
    assert (tmp_path / "torch-tensorwise-seed0" / "manifest.json").is_file()


@pytest.mark.slow
def test_an_error_of_a_run_ends_the_demo(small, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = small.replace(data={"source": str(tmp_path / "absent.txt")})
    runs = demo.plan(config, tmp_path, ["tensorwise"], {"torch": 1}, None)
    with pytest.raises(ValueError, match="absent"), demo.training(runs, tmp_path) as wait:
        wait(lambda *of: None, lambda note, by: None)
