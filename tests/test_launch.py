"""The Slurm scripts, with srun and scontrol replaced by stand-ins that run two tasks here."""

import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tomli_w
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fp8ref.train.config import config as configs
from fp8ref.train.run import log

LAUNCH = Path(__file__).parents[1] / "launch"
# Like Slurm's: the options, then a command, which each task runs; the highest exit code of them.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2
for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & tasks[i]=$!; done
code=0
for task in "${tasks[@]}"; do wait "$task"; ended=$?; (( ended > code )) && code=$ended; done
exit "$code"
"""
SCONTROL = """#!/bin/bash
if [[ $1 == requeue ]]; then echo "$2" > requeued; else echo localhost; fi
"""


def port(low: int) -> int:
    """A free one among the 4096 from low on."""
    for candidate in range(low + os.getpid() % 3000, low + 4096):
        with socket.socket() as s:
            if s.connect_ex(("localhost", candidate)):
                return candidate
    raise AssertionError


@pytest.fixture
def launch(tmp_path, small):
    """launch("torch", ...) -> the finished script, in tmp_path, with a config of two devices."""
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    config = small.replace(
        model={"num_hidden_layers": 1}, parallel={"fsdp": 2}, run={"steps": 2, "eval_every": 2}
    )
    (tmp_path / "config.toml").write_text(tomli_w.dumps(configs.to_dict(config)))

    def call(backend, *options, python=sys.executable, **variables):
        # jax makes its port of the job's number
        where = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(port(65535 - 4095)),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "MASTER_PORT": str(port(20000)),
            "FP8REF_PYTHON": str(python),
            "XLA_FLAGS": "",
            "OMP_NUM_THREADS": "1",
        }
        command = ["bash", LAUNCH / f"{backend}.slurm", "config.toml", "run", *options]
        return subprocess.run(
            command, env=os.environ | where | variables, capture_output=True, text=True, timeout=300
        )

    return call


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_scripts_are_bash_and_ask_slurm_for_a_signal_and_a_second_try(backend):
    script = LAUNCH / f"{backend}.slurm"
    subprocess.run(["bash", "-n", script], check=True)
    asked = [
        line.split()[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH")
    ]
    assert {"--signal=TERM@120", "--requeue"} <= set(asked)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_two_tasks_train_one_run(backend, launch, tmp_path):
    done = launch(backend)
    assert done.returncode == 0, done.stderr
    assert "run: 2 steps in " in done.stdout
    assert "2 processes" in log.read_manifest(tmp_path / "run")["device"]
    assert len(log.read_metrics(tmp_path / "run")) == 2
    assert not (tmp_path / "requeued").exists()


@pytest.fixture
def python(tmp_path):
    """Stands for Python: writes what it was told, and ends with the exit code in CODE."""
    path = tmp_path / "python"
    path.write_text(
        '#!/bin/bash\necho "${RANK-} ${WORLD_SIZE-} ${MASTER_ADDR-} $*"\nexit "$CODE"\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize(
    ("code", "again"), [(5, True), (143, True), (0, False), (1, False), (4, False)]
)
def test_only_a_run_that_was_told_to_stop_is_queued_again(
    backend, code, again, launch, python, tmp_path
):
    done = launch(backend, "--run.steps", "3", python=python, CODE=str(code), SLURM_JOB_ID="17")
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == again
    if again:
        assert (tmp_path / "requeued").read_text() == "17\n"
    told = (
        f"-m fp8ref train config.toml --backend {backend} --distributed --run.out run --run.steps 3"
    )
    ranks = [f"{rank} 2 localhost " if backend == "torch" else "   " for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == [rank + told for rank in ranks]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_job_that_was_queued_again_resumes(backend, launch, python):
    done = launch(backend, python=python, CODE="0", SLURM_RESTART_COUNT="1")
    assert all(line.endswith("--run.out run --resume") for line in done.stdout.splitlines())
    assert (
        launch(backend, python=python, CODE="0", SLURM_RESTART_COUNT="0").stdout.count("--resume")
        == 0
    )


def needed(names, extras=()) -> set[str]:
    """The packages that these need on a GPU's machine, themselves and by way of others."""
    on_gpu = {
        "python_version": "3.12",
        "python_full_version": "3.12.3",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    todo, found = [(name, tuple(extras)) for name in names], set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in found:
            continue
        found.add((name, extras))
        try:
            requirements = map(Requirement, metadata.requires(name) or ())
        except metadata.PackageNotFoundError:  # of another platform or machine
            continue
        for_gpu = [
            one
            for one in requirements
            if one.marker is None
            or any(one.marker.evaluate(on_gpu | {"extra": e}) for e in ("", *extras))
        ]
        todo += [(canonicalize_name(one.name), tuple(one.extras)) for one in for_gpu]
    return {name for name, _ in found}


def test_wheels_are_all_that_a_gpus_machine_lacks():
    lines = (LAUNCH / "gpu-wheels.txt").read_text(encoding="utf-8").splitlines()
    there = next(line for line in lines if line.startswith("# torch ")).removeprefix("# ").split()
    wheels = {canonicalize_name(line) for line in lines if not line.startswith("#")}
    wanted = (
        needed(["fp8ref"], ["jax", "torch", "train"])
        | needed(wheels)
        | needed(["gfloat", "mmaemu"])
    )
    assert wanted - wheels - needed(there) == {"fp8ref"}
