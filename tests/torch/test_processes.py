"""Several processes train one run through the command, and end together when one of them ends, stands still, or was told something else."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import ranks
import tomli_w
import torch

from fp8ref import cli
from fp8ref.run import config as configs
from fp8ref.run import data, log
from fp8ref.run.config import ConfigError
from fp8ref.torch import processes, train

DEADLINE = 300  # seconds, on a machine with much else to do; a run that takes them hangs


def variables(n, rank, port):
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    return {name: str(value) for name, value in where.items()}


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def command(tmp_path, config):
    (tmp_path / "config.toml").write_text(tomli_w.dumps(configs.to_dict(config)))
    return ["train", str(tmp_path / "config.toml"), "--backend", "torch", "--distributed", "--run.out", str(tmp_path / "run")]


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


class Forked:
    """n processes of the command, forked where torch was imported already, which saves seconds. happens: what each does before, by rank."""

    def __init__(self, n, tmp_path, config, happens=None, options=None):
        self.folder, port = tmp_path, free_port()
        happens, options, arguments = happens or {}, options or {}, command(tmp_path, config)
        self.processes = [
            ranks.forked(a_rank, variables(n, r, port), [*arguments, *options.get(r, [])], str(tmp_path / f"{r}.txt"), happens.get(r))
            for r in range(n)
        ]

    def __enter__(self):
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()

    def signal(self, rank, sign):
        """Send it once two steps are written."""
        until, metrics = time.monotonic() + DEADLINE, self.folder / "run/metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert all(p.is_alive() for p in self.processes), self.outputs()
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(self.processes[rank].pid, sign)

    def codes(self, *of):
        for rank in of:
            self.processes[rank].join(DEADLINE)
        return [self.processes[rank].exitcode for rank in of]

    def outputs(self):
        return [(self.folder / f"{r}.txt").read_text() for r in range(len(self.processes))]


def a_rank(where, arguments, output, happens):
    os.environ.update(where)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server of forks ignores
    if happens:
        globals()[happens]()
    sys.exit(cli.main(arguments))


def raises():
    """In the third step."""
    plain = train.Trainer.step

    def step(self, tokens):
        if self._count == 2:
            raise RuntimeError("planted")
        return plain(self, tokens)

    train.Trainer.step = step


def loses():
    """A loss that is not finite here alone, in the third step; its gradients are. Says whether the optimizer went on."""
    plain, stepped = train.Trainer._loss, torch.optim.AdamW.step
    seen = []

    def loss(self, tokens):
        return plain(self, tokens) + (float("inf") if self._count == 2 else 0.0)

    def step(self, *args):
        seen.append(0)
        print(f"optimizer step {len(seen)}", flush=True)
        return stepped(self, *args)

    train.Trainer._loss, torch.optim.AdamW.step = loss, step


@pytest.fixture
def config(small):
    return small.replace(numerics={"recipe": "rowwise"}, parallel={"fsdp": 2}, run={"steps": 3})


@pytest.fixture
def endless(config):
    return config.replace(run={"steps": 10**6, "eval_every": 10**6})


def test_two_processes_train_as_one_does(tmp_path, config):
    """Rowwise scales of tokens do not depend on the mesh, those over tokens do: as between meshes of JAX, 2^-9 of a loss."""
    codes, outputs = run(2, tmp_path, config)
    assert codes == [0, 0], outputs
    assert outputs[0].startswith(f"{tmp_path / 'run'}: 3 steps, loss ")
    assert outputs[1] == ""
    manifest, metrics = log.read_manifest(tmp_path / "run"), log.read_metrics(tmp_path / "run")
    assert (manifest["status"], manifest["device"]) == ("finished", "cpu, 2 processes")
    one, batches = train.Trainer(config.replace(parallel={"fsdp": 1})), data.open_batches(config)
    for step, line in enumerate(metrics):
        expected = one.step(batches.step(step))
        assert {key: line[key] for key in expected} == pytest.approx(expected, rel=2.0**-9)
    assert metrics[-1]["val_loss"] == pytest.approx(one.evaluate(batches.held_out(0)), rel=2.0**-9)


@pytest.mark.slow
def test_four_processes_end_well(tmp_path, config):
    with Forked(4, tmp_path, config.replace(parallel={"data": 2})) as started:
        assert started.codes(0, 1, 2, 3) == [0, 0, 0, 0], started.outputs()


def test_a_process_that_is_killed_ends_the_others(tmp_path, endless):
    with Forked(2, tmp_path, endless) as started:
        started.signal(1, signal.SIGKILL)
        assert started.codes(0) == [cli.LOST]
        said = started.outputs()[0].splitlines()[-1]
        assert said.startswith("fp8ref: process 0 stops: process 1 is gone without a word: killed")
        assert "Traceback" not in started.outputs()[0]
    assert log.read_manifest(tmp_path / "run")["status"] == "failed"
    assert "process 1 is gone" in log.read_manifest(tmp_path / "run")["error"]


def test_a_process_that_raises_keeps_its_traceback_and_tells_the_others_why(tmp_path, endless):
    with Forked(2, tmp_path, endless, {1: "raises"}) as started:
        assert started.codes(0, 1) == [cli.LOST, cli.DEFECT]
        mine, theirs = started.outputs()
    assert "process 0 stops: process 1 ended: RuntimeError: planted." in mine
    assert "Traceback" not in mine
    assert theirs.endswith("RuntimeError: planted\n")
    assert "Traceback" in theirs


def test_a_process_that_stands_still_ends_the_others_of_every_axis(tmp_path, endless):
    """Process 2 waits for 3 in the group of their axis, 0 and 1 for both in that of all."""
    with Forked(4, tmp_path, endless.replace(parallel={"data": 2, "timeout_s": 5})) as started:
        started.signal(3, signal.SIGSTOP)
        assert started.codes(0, 1, 2) == [cli.LOST] * 3
        for rank, said in enumerate(started.outputs()[:3]):
            assert f"process {rank} stops: process 3 did not answer within 5 s (parallel.timeout_s)" in said
            assert "Traceback" not in said


def test_ctrl_c_in_one_process_ends_all(tmp_path, endless):
    with Forked(2, tmp_path, endless) as started:
        started.signal(1, signal.SIGINT)
        assert started.codes(0, 1) == [cli.LOST, cli.INTERRUPTED]
        assert "process 1 ended: Ctrl-C" in started.outputs()[0]
        assert "interrupted; what was written" in started.outputs()[1]


def test_a_loss_that_is_not_finite_in_one_process_stops_all_before_the_optimizer_does(tmp_path, endless):  # T-4
    with Forked(2, tmp_path, endless, {1: "loses"}) as started:
        assert started.codes(0, 1) == [cli.NON_FINITE] * 2
        assert all("fp8ref: step 2: loss inf" in said for said in started.outputs())
        assert started.outputs()[1].startswith("optimizer step 1\noptimizer step 2\nfp8ref: ")
    assert [line["step"] for line in log.read_metrics(tmp_path / "run")] == [0, 1]


def test_a_process_with_another_config_is_refused_in_all(tmp_path, config):
    with Forked(2, tmp_path, config, options={1: ["--run.seed", "7"]}) as started:
        assert started.codes(0, 1) == [cli.ERROR] * 2
        for said in started.outputs():
            assert "all processes train alike; config.run.seed is 7 in process 1 and 0 in process 0" in said
    assert not (tmp_path / "run").exists()


def test_a_batch_is_shared_evenly(tmp_path, config):
    with Forked(2, tmp_path, config.replace(data={"batch_size": 3})) as started:
        assert started.codes(0, 1) == [cli.ERROR] * 2
        for said in started.outputs():
            assert said == "fp8ref: data.batch_size is divisible by data x fsdp = 2 processes; got 3.\n"
    assert not (tmp_path / "run").exists()


def test_as_many_processes_as_the_config_asks_for(tmp_path, config):
    with Forked(1, tmp_path, config) as started:
        assert started.codes(0) == [cli.ERROR]
        assert (
            "data x fsdp x tensor = 1 x 2 x 1 = 2 processes; there are 1. Start as many: torchrun --nproc-per-node 2"
            in started.outputs()[0]
        )


def test_one_process_is_no_mesh(config):
    with pytest.raises(ConfigError, match=r"2 processes; there are 1\. Start as many: torchrun --nproc-per-node 2"):
        train.Trainer(config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": None, "MASTER_PORT": None}, "torchrun starts.*not set: RANK, MASTER_PORT"),
        ({"RANK": "2"}, "RANK lies below WORLD_SIZE.*got 2, 2 and"),
        ({"RANK": "first"}, "got first, 2 and"),
        ({"WORLD_SIZE": "-1"}, "got 1, -1 and"),
        ({"MASTER_PORT": "65536"}, "got 1, 2 and 65536"),
        ({}, r"process 0 does not listen at MASTER_ADDR localhost, MASTER_PORT \d+ within 1 s \(parallel.timeout_s\)"),
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
