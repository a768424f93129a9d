"""The programs in examples/ run as their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_fsdp_on_two_processes():
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        EXAMPLES / "torch_fsdp.py",
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    *steps, gathered = done.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in steps]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert eval(gathered) == dict.fromkeys(
        [f"{i}.{j}" for i in range(4) for j in (1, 3)] + ["4"], "u8"
    )


# B-13
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "plan"),
    [("tensorwise", "hopper_fast"), ("rowwise", "hopper_fast"), ("tensorwise", "hopper")],
)
def test_two_frameworks_and_the_simulator_end_with_the_same_weights(recipe, plan):
    command = [sys.executable, EXAMPLES / "identical_mlp.py", "--recipe", recipe, "--plan", plan]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    *lines, last = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["jax", "torch", "sim"]
    assert len({line.split()[-1] for line in lines}) == 1
    assert last == f"50 steps of {recipe} under {plan}: the same weights, bit for bit"


@pytest.mark.slow
def test_two_frameworks_as_they_are_end_with_other_weights():
    command = [sys.executable, EXAMPLES / "identical_mlp.py", "--plan", "native", "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr[-2000:]
    assert done.stdout.endswith("10 steps of tensorwise under native: other weights\n")
