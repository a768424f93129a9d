"""Run a slice of the tests with the newest releases: python tests/install/newest.py [--torch
REQUIREMENT]

Under the newest Python that is here and that pyproject.toml names, later than the one of
constraints.txt: the newest jax, flax, optax and what the trainer needs, without constraints.txt, in
.venv-newest. The slice has what releases of JAX have broken: vmap, scan, Flax and optimizers.
PyTorch and torchao join where PyTorch has a CPU build for that Python; its other builds bring
gigabytes of CUDA.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from release import runs

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-newest"
PINNED = (3, 11)
"""The Python that constraints.txt and the other tests are for."""
TORCH = "torch==2.13.0+cpu"
TOOLS = ("pytest", "hypothesis", "gfloat", "scipy")  # none that brings PyTorch
SHOWN = ("jax", "jaxlib", "flax", "optax", "numpy", "numba", "orbax-checkpoint", "torch", "torchao")
JAX_TESTS = (
    "tests/jax/test_delayed.py",
    "tests/jax/states/test_state.py",
    "tests/jax/linear/test_contraction.py",
    "tests/jax/flax/test_amax_observations.py",
    "tests/jax/flax/test_convert.py",
    "tests/jax/flax/test_report.py",
    "tests/jax/flax/test_training.py",
    "tests/jax/flax/test_nnx.py",
    "tests/jax/flax/test_linen.py::test_a_loss_without_collections_observes_the_same",
    "tests/jax/flax/test_meshes.py::test_linears_that_read_one_input_save_it_once",
    "tests/train/jax/custom/test_probe.py",
)
TORCH_TESTS = (
    "tests/torch/linear/test_linear.py",
    "tests/torch/delayed/test_delayed.py",
    "tests/torch/model/test_convert.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch",
        metavar="REQUIREMENT",
        help=f"PyTorch's build, whatever it brings; without, {TORCH} if it is there",
    )
    options = parser.parse_args()
    python = newest_python()
    if python is None:
        names = " nor ".join(f"python{name}" for name in versions())
        print(
            "newest: NOTHING WAS TRIED, and exit code 0 says nothing of the newest releases: "
            f"neither {names} is on the path or in pyenv."
        )
        print("newest: install one of them, and run this again.")
        return 0
    if not (VENV / "bin" / "python").exists() or not runs(str(VENV / "bin" / "python")):
        shutil.rmtree(VENV, ignore_errors=True)
        subprocess.run([python, "-m", "venv", VENV], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    begun = time.monotonic()
    subprocess.run(
        install(
            *project["dependencies"],
            *extras["jax"],
            *extras["train"],
            *extras["conformance"],
            *TOOLS,
        ),
        check=True,
    )
    tests = [*JAX_TESTS, *(TORCH_TESTS if with_torch(options.torch, extras["torch"]) else ())]
    print(
        f"newest: {python}, {installed()}, installed in {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    code = subprocess.run(
        pytest(*tests), cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ).returncode
    print(f"newest: the tests {'passed' if code == 0 else 'FAILED'} with {installed()}", flush=True)
    return code


def versions() -> list[str]:
    """The Pythons that pyproject.toml names beside the pinned one, newest first."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    later = {
        (3, int(minor))
        for minor in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)
    }
    return [
        f"{major}.{minor}"
        for major, minor in sorted(later, reverse=True)
        if (major, minor) > PINNED
    ]


def newest_python() -> str | None:
    """The newest of ``versions`` that starts, on the path or among pyenv's; None if none is
    here.
    """
    for version in versions():
        found = [
            shutil.which(f"python{version}"),
            *(str(root / "bin" / f"python{version}") for root in of_pyenv(version)),
        ]
        if python := next(
            (path for path in found if path and Path(path).exists() and runs(path)), None
        ):
            return python
    return None


def of_pyenv(version: str) -> list[Path]:
    """The folders of pyenv's interpreters of a version, newest first: its shims start only what is
    chosen.
    """
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return sorted(
        root.glob(f"versions/{version}.*"),
        key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)],
        reverse=True,
    )


def install(*requirements: str) -> list[str | Path]:
    """Without a GPU there is nothing to compile, and what is old is replaced."""
    pip: list[str | Path] = [
        VENV / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    return [*pip, "--upgrade", "--upgrade-strategy", "eager", *requirements]


def with_torch(requirement: str | None, extra: list[str]) -> bool:
    """Whether PyTorch could be installed; where it was asked for it has to be."""
    others = [one for one in extra if not one.startswith("torch>")]
    done = subprocess.run(
        install(requirement or TORCH, *others),
        check=requirement is not None,
        stderr=None if requirement else subprocess.DEVNULL,
    )
    if done.returncode:
        print(
            f"newest: {TORCH}, a build for CPUs, is not to be had here for this Python: without "
            "PyTorch. TORCH=torch takes any build."
        )
    return done.returncode == 0


def installed() -> str:
    """The versions that are tried."""
    code = (
        "import importlib.metadata as m, sys; names = {d.name: d.version for d in "
        "m.distributions()}\n"
    )
    code += f"print(', '.join(f'{{n}} {{names[n]}}' for n in {SHOWN} if n in names))"
    return subprocess.run(
        [VENV / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def pytest(*tests: str) -> list[str | Path]:
    """Fast tests of the slice; warnings are errors, as in all tests."""
    return [
        VENV / "bin" / "python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not exhaustive",
        *tests,
    ]


if __name__ == "__main__":
    sys.exit(main())
