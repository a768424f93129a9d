import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = [
    ["-m", "ruff", "check", "."],
    ["-m", "ruff", "format", "--check", "."],
    ["-m", "mypy"],
    ["-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
]


@pytest.mark.parametrize(
    "command", COMMANDS, ids=["ruff check", "ruff format", "mypy", "lint-imports"]
)
def test_lint(command):
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


BY_NAME = """
from dataclasses import replace
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask, Variant
call = replace(Call(variant="cudnn", mask=Mask(causal=True)), variant="fa3")
variant: Variant = call.variant
call.variant.unknown  # type: ignore[union-attr]
call.mask = Mask()  # type: ignore[misc]
"""


def test_a_call_of_attention_takes_a_name_under_mypy(tmp_path):
    """In a user's program; and what is wrong there is still seen, or an ignore would be unused."""
    program = tmp_path / "by_name.py"
    program.write_text(BY_NAME)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", program],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
