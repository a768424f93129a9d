"""Run the commands of .github/workflows/conformance.yml as a project of its own would: python
tests/install/ci_example.py

In an empty folder, with a copy of examples/ci and a new environment: fp8ref's wheel, torch, jax and
ml_dtypes, in the versions of constraints.txt. Then a fault is planted in the example's cast, which
its test must find. Packages come from the index that pip is set up for.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import yaml
from extras import ROOT, built

WORKFLOW = ROOT / ".github" / "workflows" / "conformance.yml"
EXAMPLE = ROOT / "examples" / "ci"
INPUTS = {"PACKAGES": "torch jax", "TESTS": ".", "TABLE": "libraries.json"}
FAULT = ("x.to(dtype)", "x.to(torch.bfloat16).to(dtype)")
"""(cast of the example, one that rounds twice)."""


def commands() -> dict[str, str]:
    """{name of a step: its command} of the workflow."""
    jobs = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return {step["name"]: step["run"] for step in jobs["conformance"]["steps"] if "run" in step}


def main() -> int:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        project = folder / "project"
        shutil.copytree(EXAMPLE, project)
        venv.create(folder / "venv", with_pip=True)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= INPUTS | {
            "FP8REF": f"{built(folder)}[conformance]",
            "PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_QUIET": "1",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        print(f"ci-example: wheel and environment, {time.monotonic() - begun:.0f} s", flush=True)
        for name, command in commands().items():
            if step(name, command, project, environment).returncode:
                print(f"ci-example: {name} FAILED")
                return 1
        seconds = time.monotonic() - begun
        tests = project / "test_casts.py"
        tests.write_text(tests.read_text(encoding="utf-8").replace(*FAULT), encoding="utf-8")
        planted = environment | {"TESTS": "test_casts.py::test_torch"}
        done = step("test", commands()["test"], project, planted, capture_output=True, text=True)
        if done.returncode != 1 or "got 0x38 = 1, expected 0x39 = 1.125 (C-1)" not in done.stdout:
            print(f"ci-example: the planted fault was NOT found\n{done.stdout}")
            return 1
    print(f"ci-example: all steps passed in {seconds:.0f} s; the planted fault was found (C-1)")
    return 0


def step(name: str, command: str, folder: Path, environment: dict[str, str], **how):
    """Run one step as GitHub's runners do."""
    begun = time.monotonic()
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command]
    done = subprocess.run(shell, cwd=folder, env=environment, check=False, **how)
    print(f"ci-example: {name}: {command}, {time.monotonic() - begun:.0f} s", flush=True)
    return done


if __name__ == "__main__":
    sys.exit(main())
