"""What figures were measured on: the device, its driver and clocks, versions, and flags that change
kernels.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

FLAGS = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "XLA_FLAGS",
)


def describe(device: str, packages: tuple[str, ...], *, dry: bool) -> dict:
    """device: its name as the framework has it; of a dry run "cpu"."""
    return {
        "dry": dry,
        "device": "cpu" if dry else device,
        "driver": None if dry else query("driver_version"),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in packages},
        "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def revision() -> str:
    """What code was measured: of the sources' SHA-256, twelve digits."""
    root, found = Path(__file__).parents[3], hashlib.sha256()
    for path in sorted([*root.glob("fp8ref/**/*.py"), *root.glob("benchmarks/gpu/**/*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def clocks() -> str | None:
    """The device's clocks, power and temperature now, as nvidia-smi reads them."""
    return query("clocks.sm,clocks.mem,power.draw,temperature.gpu")


def query(what: str) -> str | None:
    """Of the first device nvidia-smi lists; None where there is no nvidia-smi."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
