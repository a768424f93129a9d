"""The README's examples do what it says."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", README, re.DOTALL)


@pytest.mark.parametrize(("program", "printed"), BLOCKS)
def test_example(program, printed, capsys):
    names = {}
    exec(compile(program, "<README.md>", "exec"), names)  # no file: hypothesis would read its source there
    for function in (f for f in names.values() if getattr(f, "pytestmark", None)):
        parametrize = function.pytestmark[0]
        for parameter in parametrize.args[1]:
            function(**dict(zip(parametrize.args[0], parameter.values, strict=True)))
    assert capsys.readouterr().out == printed


def test_there_are_examples():
    assert len(BLOCKS) == 15


def test_the_layout_names_every_room():
    layout = re.search(r"## Layout\n\n```\n(.*?)```", README, re.DOTALL)[1]
    root = Path(__file__).parents[1] / "fp8ref"
    named = set(re.findall(r"^  (\w+)/ ", layout, re.MULTILINE))
    assert named == {p.parent.name for p in root.glob("*/__init__.py")}
    modules = set(re.split(r"[\s,;:()]+", re.search(r"fp8ref/\n(.*?)^  sim/", layout, re.MULTILINE | re.DOTALL)[1]))
    assert {p.name for p in root.glob("[!_]*.py")} <= modules
