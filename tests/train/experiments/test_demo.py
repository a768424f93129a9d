"""The runs of a demo: which there are, what their configs are, and how far they are."""

import json
import os

import pytest

from fp8ref.train.experiments import demo
from fp8ref.train.run import log

BOTH = {"jax": 1, "torch": 2}


@pytest.fixture
def jobs(small, tmp_path):
    return demo.plan(small, tmp_path, recipes=("rowwise",), seeds=BOTH, planted="torch")


def test_each_backend_trains_bf16_and_fp8_and_one_a_fault(jobs):
    assert [job.directory.name for job in jobs] == [
        "jax-bf16",
        "jax-rowwise",
        "torch-bf16",
        "torch-rowwise",
        "torch-planted-fault",
        "torch-bf16-seed1",
        "torch-rowwise-seed1",
        "torch-planted-fault-seed1",
    ]
    assert jobs[-1].title == "torch planted-fault, seed 1"


def test_runs_of_one_seed_are_matched(jobs):
    for job in jobs:
        seed = int(job.directory.name.endswith("-seed1"))
        assert (job.config.run.seed, job.config.data.seed) == (seed, seed)


def test_the_fault_is_gradients_without_a_scale(small):
    linears = [d for d in demo.configured(small, demo.PLANTED).decisions() if d.fp8]
    assert linears
    for linear in linears:
        grad_output = linear.recipe.grad_input.a
        assert (grad_output.fmt.name, grad_output.policy.name) == ("e4m3fn", "unscaled")
        assert not linear.recipe.output.a.policy.unscaled


def test_bf16_has_neither_rules_nor_simulated_hardware(small):
    faulty = demo.configured(small, demo.PLANTED).replace(numerics={"accumulate": "exact"})
    plain = demo.configured(faulty, "bf16").numerics
    assert (plain.recipe, plain.rules, plain.accumulate) == ("bf16", None, None)


@pytest.mark.parametrize("observed", [False, True])
def test_one_run_of_the_long_form_is_recorded(small, tmp_path, observed):
    jobs = demo.plan(
        small, tmp_path, recipes=("tensorwise",), seeds={"jax": 2, "torch": 2}, observed=observed
    )
    recorded = [job.directory.name for job in jobs if job.config.statistics.every == 1]
    assert recorded == ["torch-tensorwise"] * observed


def test_progress_is_the_last_whole_line_of_this_time(jobs):
    job = jobs[0]
    assert job.last(0) == {}
    job.directory.mkdir()
    path = job.directory / log.METRICS
    path.write_text(json.dumps({"step": 3, "loss": 2.5}) + "\n")
    assert job.last(0) == {"step": 3, "loss": 2.5}
    os.utime(path, (100, 100))
    assert job.last(101) == {}
    path.write_text('{"step": 4, "lo')
    assert job.last(0) == {}


@pytest.mark.slow
def test_processes_train_and_print_to_a_file(small, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    demo.set_up(tmp_path)
    config = small.replace(run={"steps": 5, "eval_every": 5})
    jobs = demo.plan(config, tmp_path, recipes=("tensorwise",), seeds={"torch": 1})
    ended, advanced = [], []
    with demo.training(jobs, tmp_path) as wait:
        wait(
            lambda job, first, last: ended.append((job, first["step"], last["step"])),
            lambda note, by: advanced.append(by),
        )
    assert ended == [(job, 0, 4) for job in jobs]
    assert sum(advanced) == 2
    assert "linears in FP8" in (tmp_path / demo.LOG).read_text()
    assert (tmp_path / "torch-tensorwise" / "manifest.json").is_file()


@pytest.mark.slow
def test_an_error_of_a_run_ends_the_demo(small, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = small.replace(data={"source": str(tmp_path / "absent.txt")})
    jobs = demo.plan(config, tmp_path, recipes=("tensorwise",), seeds={"torch": 1})
    with pytest.raises(ValueError, match="absent"), demo.training(jobs, tmp_path) as wait:
        wait(lambda *of: None, lambda note, by: None)
