"""Which room imports what: the oracle shares no code with its subject, and no framework is imported unasked."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "fp8ref"
FORBIDDEN = {
    "jax": ("fp8ref.sim", "fp8ref.torch", "fp8ref.check", "torch"),
    "torch": ("fp8ref.sim", "fp8ref.jax", "fp8ref.check", "jax"),
    "sim": ("fp8ref.jax", "fp8ref.torch", "fp8ref.check", "fp8ref.run", "jax", "torch", "ml_dtypes"),
    "plots": ("fp8ref.jax", "fp8ref.torch", "fp8ref.check", "fp8ref.run", "jax", "torch"),
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_keep_apart(room):
    for path in (ROOT / room).rglob("*.py"):
        for name in imported(path):
            assert not any(name == f or name.startswith(f"{f}.") for f in FORBIDDEN[room]), f"{path.name} imports {name}"


@pytest.mark.parametrize("module", ["fp8ref", "fp8ref.formats", "fp8ref.recipe", "fp8ref.llama", "fp8ref.sim", "fp8ref.cli"])
def test_no_framework_is_imported_unasked(module):
    program = f"import {module}, sys; print(sorted({{'jax', 'torch', 'flax', 'pydantic', 'matplotlib'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(("backend", "missing"), [("jax", "flax"), ("torch", "torchao")])
def test_a_missing_framework_names_its_extra(backend, missing):
    program = f"import sys; sys.modules[{missing!r}] = None\ntry:\n import fp8ref.{backend}\nexcept ImportError as e: print(e)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert missing in out
    assert f"fp8ref[{backend}]" in out


def test_importing_the_torch_backend_prints_nothing():
    done = subprocess.run([sys.executable, "-c", "import fp8ref.torch"], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_what_is_no_python_is_installed_too():
    root = Path(__file__).parents[1]
    listed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    found: dict[str, list[str]] = {}
    for path in sorted((root / "fp8ref").rglob("*.*")):
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts:
            found.setdefault(".".join(path.parent.relative_to(root).parts), []).append(path.name)
    assert found == listed
