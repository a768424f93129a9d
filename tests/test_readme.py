"""The README's examples do what it says."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", README, re.DOTALL)


@pytest.mark.parametrize(("program", "printed"), BLOCKS)
def test_example(program, printed, capsys):
    exec(compile(program, "<README.md>", "exec"), {})  # no file: hypothesis would read its source there
    assert capsys.readouterr().out == printed


def test_there_are_examples():
    assert len(BLOCKS) == 14


def test_the_layout_names_every_module():
    layout = re.search(r"## Layout\n\n```\n(.*?)```", README, re.DOTALL)[1]
    root = Path(__file__).parents[1]
    for room in ("sim", "jax", "torch", "check", "run", "plots"):
        lines = re.search(rf"^  {room}/ .*?(?=^ ? ?\w)", layout, re.MULTILINE | re.DOTALL)[0]  # and those indented further
        present = {p.stem for p in (root / "fp8ref" / room).rglob("[!_]*.py")}
        assert present <= set(re.split(r"[\s,;:]+", lines)), room
