"""Which room imports what: layers are held by import-linter; here, what an import brings, and what
is missing.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fp8ref
import fp8ref.recipe

ROOT = Path(__file__).parents[1]


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


def imported(module: str, names: set[str]) -> str:
    return run(f"import {module}, sys; print(sorted({names!r} & set(sys.modules)))")


@pytest.mark.parametrize(
    "module",
    [
        "fp8ref",
        "fp8ref.front",
        "fp8ref.formats",
        "fp8ref.recipe",
        "fp8ref.spec.llama",
        "fp8ref.sim",
        "fp8ref.cli",
    ],
)
def test_no_framework_is_imported_unasked(module):
    assert imported(module, {"jax", "torch", "flax", "pydantic", "matplotlib", "rich"}) == "[]"


def test_the_front_lists_its_names_and_loads_numpy_when_one_is_used():
    program = "import fp8ref as f8, sys; print(f8.__all__, dir(f8) == [*f8.__all__[:2], "
    program += "'__version__', *f8.__all__[2:]])"
    program += "; repr(f8.formats); print('numpy' in sys.modules); f8.quantize"
    program += "; print('numpy' in sys.modules, f8.formats is sys.modules['fp8ref.formats'])"
    program += "; [getattr(f8, name) for name in f8.__all__]"
    names = "Distribution Quantized compare dequantize formats policies quantize recipes sweep"
    assert run(program).splitlines() == [f"{names.split()} True", "False", "True True"]


def test_the_front_refuses_other_names():
    with pytest.raises(AttributeError, match="'fp8ref' has no attribute 'quantise'"):
        fp8ref.quantise  # noqa: B018


def test_formats_are_a_module_that_shows_its_formats():
    lines = repr(fp8ref.formats).splitlines()
    assert [line.split()[0] for line in lines] == ["name", *fp8ref.formats.FORMATS]
    assert fp8ref.formats.E4M3FN.summary() in fp8ref.formats._repr_html_()
    assert list(fp8ref.recipes) == list(fp8ref.recipe.RECIPES)
    assert fp8ref.policies["te_nvfp4"].name == "te_nvfp4"


TORCH = """
import json, sys
import fp8ref.torch
print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def torch_process() -> tuple[list[str], str]:
    """What one process has after importing the torch backend: modules; and what it printed besides.

    One process, as each import of torch takes seconds.
    """
    done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, check=True)
    *said, found = done.stdout.splitlines()
    return json.loads(found), "\n".join(said) + done.stderr


ROOMS = {"fp8ref.train", "fp8ref.sim", "fp8ref.conformance", "fp8ref.crosscheck"}


def test_the_jax_library_imports_no_trainer():
    assert imported("fp8ref.jax", {"pydantic", "grain", "fp8ref.torch", *ROOMS}) == "[]"


def test_the_torch_library_imports_no_trainer(torch_process):
    modules, _ = torch_process
    assert "fp8ref.torch" in modules
    assert not {"pydantic", "grain", "fp8ref.jax", *ROOMS} & set(modules)


def test_conformance_imports_no_framework():
    assert (
        imported("fp8ref.conformance.require", {"jax", "torch", "rich", "pydantic", "fp8ref.train"})
        == "[]"
    )


MISSING = [
    ("fp8ref.jax", "flax", "jax"),
    ("fp8ref.torch", "torchao", "torch"),
    ("fp8ref.train.config.config", "pydantic", "train"),
    ("fp8ref.estimate.report", "pydantic", "train"),
    ("fp8ref.plots", "matplotlib", "train"),
    ("fp8ref.conformance.strategies", "hypothesis", "conformance"),
]


@pytest.mark.parametrize(("module", "missing", "extra"), MISSING)
def test_a_missing_package_names_its_extra(module, missing, extra):
    out = run(
        f"import sys; sys.modules[{missing!r}] = None\ntry:\n import {module}\nexcept "
        "ImportError as e: print(e)"
    )
    assert missing in out
    assert f"fp8ref[{extra}]" in out


def test_importing_the_torch_backend_prints_nothing(torch_process):
    _, said = torch_process
    assert said == ""


def test_what_is_no_python_is_installed_too():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]["package-data"]
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "fp8ref").rglob("*.*")):
        if (
            path.is_file()
            and path.suffix not in (".py", ".pyc")
            and "__pycache__" not in path.parts
        ):
            package = ".".join(path.parent.relative_to(ROOT).parts)
            found.setdefault(package, set()).update(
                {f"*{path.suffix}", path.name} & set(listed.get(package, [])) or {path.name}
            )
    assert found == {package: set(patterns) for package, patterns in listed.items()}
