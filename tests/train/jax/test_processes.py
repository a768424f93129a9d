"""Two processes of four devices each train as one process of eight does, through the command."""

import os
import socket
import subprocess
import sys

import pytest
import tomli_w

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.data import loader
from fp8ref.train.jax import processes
from fp8ref.train.jax.trainer import Trainer
from fp8ref.train.run import log

PARALLEL = {"data": 2, "fsdp": 2, "tensor": 2, "sequence": True}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def train(tmp_path, config, *options):
    """Both processes' (exit code, output)."""
    (tmp_path / "config.toml").write_text(tomli_w.dumps(configs.to_dict(config)))
    devices = "--xla_force_host_platform_device_count=4"
    where = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "XLA_FLAGS": devices,
    }
    command = [
        sys.executable,
        "-m",
        "fp8ref",
        "train",
        str(tmp_path / "config.toml"),
        "--backend",
        "jax",
        "--distributed",
    ]
    started = [
        subprocess.Popen(
            [*command, "--run.out", str(tmp_path / "run"), *more],
            env={**os.environ, **where, "JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, more in enumerate(options or ((), ()))
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.fixture
def config(small):
    return small.replace(
        model={"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64},
        run={"steps": 2, "eval_every": 2},
        parallel=PARALLEL,
    )


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path, config):
    """The order of sums over devices is all that may differ: 2^-9 of a loss, as between meshes
    (test_parallel).
    """
    config = config.replace(numerics={"recipe": "delayed"})
    ended = train(tmp_path, config)
    assert [code for code, _ in ended] == [0, 0], ended
    manifest, metrics = log.read_manifest(tmp_path / "run"), log.read_metrics(tmp_path / "run")
    assert manifest["device"].endswith("8 devices in 2 processes")
    assert (manifest["status"], manifest["proof"]["missing"]) == ("finished", [])
    assert manifest["proof"]["gathers"]["f8e4m3fn"] > 0
    one, batches = Trainer(config), loader.open_batches(config)
    for step, line in enumerate(metrics):
        expected = one.step(batches.step(step))
        assert {key: line[key] for key in expected} == pytest.approx(expected, rel=2.0**-9)
    assert metrics[-1]["val_loss"] == pytest.approx(one.evaluate(batches.held_out(0)), rel=2.0**-9)


@pytest.mark.slow
def test_what_fails_in_one_process_stops_both_and_writes_nothing(tmp_path, config):
    ended = train(tmp_path, config, (), ("--data.source", "/nowhere"))
    assert [code for code, _ in ended] == [2, 2], ended
    assert "process 1: data.source is 'stdlib' or a directory; got '/nowhere'" in ended[0][1]
    assert not (tmp_path / "run").exists()


def test_where_the_others_are_is_told_whole_or_not_at_all(monkeypatch):
    for name in processes.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(ConfigError, match="JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID"):
        processes.join()
