"""Notebooks hold the outputs of an execution, and say the same when they are executed again."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from fp8ref import configs
from fp8ref.commands import demo
from fp8ref.recipe import ROLES
from fp8ref.train import tensors

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def text(output) -> str:
    return (
        output.text
        if output.output_type == "stream"
        else output.get("data", {}).get("text/plain", "")
    )


def shows(source: str) -> bool:
    """Whether a cell prints or shows something itself, outside of the functions that it defines."""
    statements = [node for node in ast.parse(source).body if not isinstance(node, ast.FunctionDef)]
    calls = [
        node.func
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
    ]
    return any(isinstance(f, ast.Name) and f.id in ("print", "show", "Image") for f in calls)


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "01_formats",
        "02_scaling",
        "03_accumulation",
        "04_training",
        "05_conformance",
        "06_states",
        "07_attention",
        "08_findings",
        "09_outliers",
        "10_your_tensors",
        "11_four_bits",
        "12_trainer_and_rollout",
    ]


def test_the_tensors_beside_them_are_a_demos_and_small():
    path = configs.find("tiny", ".npz")
    kept = tensors.read(path)
    assert path.stat().st_size <= 10**6
    assert (kept.about["backend"], kept.about["recipe"]) == demo.OBSERVED
    assert {name.rsplit(".", 1)[1] for name in kept.operands} == {
        f"{kind}/{role}" for kind in demo.KEPT for role in ROLES
    }
    assert {trace.shape for trace in kept.amaxes.values()} == {(kept.about["step"],)}


@every_notebook
def test_no_figure_is_far_larger_than_a_screen_needs(path):
    for cell in code_cells(path):
        for output in cell.outputs:
            if picture := output.get("data", {}).get("image/png"):
                assert len(picture) < 300_000
    assert path.stat().st_size < 1_500_000


@every_notebook
def test_it_was_executed_from_its_first_cell_to_its_last(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert bool(cell.outputs) or not shows(cell.source), cell.source
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text  # a warning, and where it comes from


@every_notebook
def test_its_outputs_name_no_directory_of_the_machine_that_executed_it(path):
    for cell in code_cells(path):
        for output in cell.outputs:
            assert not re.search(r"(?<![\w.~])/[\w.-]+/[\w.-]+", text(output)), text(output)


def said(path: Path) -> list[list[str]]:
    """What each cell's outputs are: pictures by their kind, text without its numbers, which hang on
    the machine's own text and on its sums' order, and without its line ends, which hang on how wide
    those numbers are. Nothing of cells about the machine's own CPU, tagged ``this-cpu``. Of cells
    whose rows are in the order of such numbers, tagged ``ranked``, the words without their order,
    and without the name of the layer that is worst.
    """
    found = []
    for cell in code_cells(path):
        if "this-cpu" in cell.metadata.get("tags", ()):
            continue
        texts = [re.sub(r"[-+]?\d[\d,.]*", "#", text(output)) for output in cell.outputs]
        kinds = [",".join(sorted(output.get("data", {}))) for output in cell.outputs]
        words = [t.split() for t in texts]
        if "ranked" in cell.metadata.get("tags", ()):
            words = [sorted(re.sub(r"(?<=worst )\S+", "#", t).split()) for t in texts]
        found.append([" ".join([kind, *each]) for kind, each in zip(kinds, words, strict=True)])
    return found


@pytest.mark.slow
@every_notebook
def test_executed_again_it_says_the_same(path, tmp_path):
    """Verdicts, which bits are equal and what ran: everything but numbers."""
    (tmp_path / "notebooks").mkdir()
    again = Path(shutil.copy(path, tmp_path / "notebooks"))
    variables = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, ROOT / "notebooks" / "execute.py", again]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert said(again) == said(path)
