"""Several processes train one run through the command, or all end when one of them was told
something else; see also test_failure_reporting.
"""

import os
import subprocess
import sys

import pytest
import torch
from helpers.processes.started import (
    DEADLINE,
    ENDLESS,
    SHARDED,
    Forked,
    command,
    free_port,
    variables,
)

from fp8ref import cli
from fp8ref.shared.errors import ConfigError
from fp8ref.train import loop
from fp8ref.train.data import loader
from fp8ref.train.run import log
from fp8ref.train.torch import processes, trainer
from fp8ref.train.torch.step import Step


def run(n, tmp_path, config):
    """The exit codes and outputs of n processes that the command's user starts."""
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "fp8ref", *command(tmp_path, config)],
            env=os.environ | variables(n, rank, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], outputs


def loses():
    """A loss that is not finite here alone, in the third step; its gradients are.

    Says whether the optimizer went on.
    """
    plain, stepped = Step.loss, torch.optim.AdamW.step
    seen = []

    def loss(self, tokens):
        return plain(self, tokens) + (float("inf") if len(seen) == 2 else 0.0)

    def adamw(self, *args):
        seen.append(0)
        print(f"optimizer step {len(seen)}", flush=True)
        return stepped(self, *args)

    Step.loss, torch.optim.AdamW.step = loss, adamw


@pytest.fixture
def config(small):
    return small.replace(**SHARDED, run={"steps": 3})


@pytest.fixture
def endless(config):
    return config.replace(**ENDLESS)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, "hopper"])
def test_two_processes_train_as_one_does(tmp_path, config, plan):  # G-21
    """Rowwise scales of tokens do not depend on the mesh, those over tokens do: as between meshes
    of JAX, 2^-9 of a loss.
    """
    config = config.replace(numerics={"accumulate": plan})
    codes, outputs = run(2, tmp_path, config)
    assert codes == [0, 0], outputs
    assert f"\n{tmp_path / 'run'}: 3 steps in " in outputs[0]
    assert outputs[1] == ""
    manifest, metrics = log.read_manifest(tmp_path / "run"), log.read_metrics(tmp_path / "run")
    assert (manifest["status"], manifest["device"]) == ("finished", "cpu, 2 processes")
    assert {gemm["plan"] for gemm in manifest["proof"].get("simulated", [])} == (
        {plan} if plan else set()
    )
    one, batches = (
        loop.trainer("torch", config.replace(parallel={"fsdp": 1})),
        loader.open_batches(config),
    )
    for step, line in enumerate(metrics):
        expected = one.step(batches.step(step))
        assert {key: line[key] for key in expected} == pytest.approx(expected, rel=2.0**-9)
    assert metrics[-1]["val_loss"] == pytest.approx(one.evaluate(batches.held_out(0)), rel=2.0**-9)


@pytest.mark.slow
def test_four_processes_end_well(tmp_path, config):
    with Forked(4, tmp_path, config.replace(parallel={"data": 2})) as started:
        assert started.codes(0, 1, 2, 3) == [0, 0, 0, 0], started.outputs()


# T-4
def test_a_loss_that_is_not_finite_in_one_process_stops_all_before_the_optimizer_does(
    tmp_path, endless
):
    with Forked(2, tmp_path, endless, {1: loses}) as started:
        assert started.codes(0, 1) == [cli.NON_FINITE] * 2
        assert all("fp8ref train: step 2: loss inf" in said for said in started.outputs())
        assert started.outputs()[1].startswith("optimizer step 1\noptimizer step 2\nfp8ref train: ")
    assert [line["step"] for line in log.read_metrics(tmp_path / "run")] == [0, 1]


def test_a_process_with_another_config_is_refused_in_all(tmp_path, config):
    with Forked(2, tmp_path, config, options={1: ["--run.seed", "7"]}) as started:
        assert started.codes(0, 1) == [cli.ERROR] * 2
        for said in started.outputs():
            assert (
                "all processes have one config, one text and the same data.evaluation; "
                "config.run.seed is 7 in process 1 and 0 in process 0" in said
            )
    assert not (tmp_path / "run").exists()


def test_a_batch_is_shared_evenly(tmp_path, config):
    with Forked(2, tmp_path, config.replace(data={"batch_size": 3})) as started:
        assert started.codes(0, 1) == [cli.ERROR] * 2
        for said in started.outputs():
            assert said.startswith(
                "fp8ref train: data.batch_size is divisible by data x fsdp = 2 processes; got 3. "
                "Change it, data.microbatches"
            )
    assert not (tmp_path / "run").exists()


def test_as_many_processes_as_the_config_asks_for(tmp_path, config):
    with Forked(1, tmp_path, config) as started:
        assert started.codes(0) == [cli.ERROR]
        assert (
            "data x fsdp x tensor = 1 x 2 x 1 = 2 processes; there are 1. Start as many: "
            "torchrun --nproc-per-node 2" in started.outputs()[0]
        )


@pytest.mark.parametrize(
    ("parallel", "mesh"),
    [
        ({"context": 2}, "data x fsdp x context x tensor = 1 x 1 x 2 x 1 = 2 processes"),
        ({"expert": 2, "fsdp": 2}, "data x fsdp x expert x tensor = 1 x 2 x 2 x 1 = 4 processes"),
    ],
)
def test_processes_are_asked_for_by_the_axes_that_a_mesh_has(parallel, mesh, small):  # P-10
    model = {"num_experts": 4, "num_experts_per_tok": 2} if "expert" in parallel else {}
    numerics = {} if model else {"attention": "bf16"}
    with pytest.raises(ConfigError, match=f"parallel asks for {mesh}; there are 1"):
        processes.mesh_of(small.replace(model=model, numerics=numerics, parallel=parallel))


def test_moments_in_fp8_take_equal_pieces(monkeypatch, small):  # T-6
    monkeypatch.setattr(processes.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes.distributed, "get_world_size", lambda: 3)
    config = small.replace(
        optimizer={"kind": "adamw_fp8"}, parallel={"fsdp": 3}, data={"batch_size": 3}
    )
    with pytest.raises(
        ConfigError, match=r"parallel.fsdp = 3 divides its rows; model.embed_tokens.weight has 256"
    ):
        processes.mesh_of(config)


def test_one_process_is_no_mesh(config):
    with pytest.raises(
        ConfigError, match=r"2 processes; there are 1\. Start as many: torchrun --nproc-per-node 2"
    ):
        trainer.Trainer(config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": None, "MASTER_PORT": None}, "torchrun starts.*not set: RANK, MASTER_PORT"),
        ({"RANK": "2"}, "RANK must be below WORLD_SIZE.*got 2, 2 and"),
        ({"RANK": "first"}, "got first, 2 and"),
        ({"WORLD_SIZE": "-1"}, "got 1, -1 and"),
        ({"MASTER_PORT": "65536"}, "got 1, 2 and 65536"),
        (
            {},
            r"process 0 does not listen at MASTER_ADDR localhost, MASTER_PORT \d+ within 1 s "
            r"\(parallel.timeout_s\)",
        ),
    ],
    ids=str,
)
def test_processes_that_cannot_meet_are_told_why(monkeypatch, changed, message):
    for name, value in (variables(2, 1, free_port()) | changed).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        processes.join(1)
