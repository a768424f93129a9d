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
