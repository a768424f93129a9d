"""The programs in examples/ run as their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_fsdp_on_two_processes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLES / "torch_fsdp.py"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True, timeout=300)
    *steps, gathered = done.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in steps]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert eval(gathered) == dict.fromkeys([f"{i}.{j}" for i in range(4) for j in (1, 3)] + ["4"], "u8")
