"""Processes that train one run through the command, for the tests of what they are told and how
they end.
"""

import os
import signal
import socket
import sys
import time

import tomli_w
import torch
from helpers.processes.ranks import call, named

from fp8ref import cli
from fp8ref.crosscheck.process_group import CONTEXT
from fp8ref.train.config import config as configs

DEADLINE = 300  # seconds, on a machine with much else to do; a run that takes them hangs
SHARDED = {"numerics": {"recipe": "rowwise"}, "parallel": {"fsdp": 2}}
ENDLESS = {"run": {"steps": 10**6, "eval_every": 10**6}}


def variables(n, rank, port):
    where = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": n,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in where.items()}


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def command(tmp_path, config):
    (tmp_path / "config.toml").write_text(tomli_w.dumps(configs.to_dict(config)))
    return [
        "train",
        str(tmp_path / "config.toml"),
        "--backend",
        "torch",
        "--distributed",
        "--run.out",
        str(tmp_path / "run"),
    ]


class Forked:
    """n processes of the command, forked where torch was imported already, which saves seconds.

    happens  what is called in a process before the command, by rank: a function at the top level of
             a test file.
    options  of the command, of each process's own, by rank.
    """

    def __init__(self, n, tmp_path, config, happens=None, options=None):
        self.folder, port = tmp_path, free_port()
        happens, options, arguments = happens or {}, options or {}, command(tmp_path, config)
        where = {rank: named(function) for rank, function in happens.items()}
        self.processes = [
            CONTEXT.Process(
                target=_rank,
                args=(
                    variables(n, r, port),
                    [*arguments, *options.get(r, [])],
                    str(tmp_path / f"{r}.txt"),
                    where.get(r),
                ),
                daemon=True,
            )
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


def _rank(variables, arguments, output, happens):
    os.environ.update(variables)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server of forks ignores
    if happens:
        call(happens)
    sys.exit(cli.main(arguments))
