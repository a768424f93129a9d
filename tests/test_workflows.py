"""The workflows of .github: their YAML, the inputs of the one that other projects call, and that its
commands exist.
"""

import re
import shlex
import tomllib
from pathlib import Path

import ci_example
import pytest
import yaml

from fp8ref import cli

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ON = True
"""What YAML 1.1 makes of the key "on"."""


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_workflow_is_yaml_with_jobs_of_steps(path):
    workflow = read(path)
    assert workflow[ON]
    for job in workflow["jobs"].values():
        assert ("uses" in job) != ("steps" in job)
        for step in job.get("steps", []):
            assert ("uses" in step) != ("run" in step)


def test_the_reusable_workflow_uses_each_input_and_none_in_a_command():
    text = ci_example.WORKFLOW.read_text(encoding="utf-8")
    inputs = read(ci_example.WORKFLOW)[ON]["workflow_call"]["inputs"]
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(inputs)
    assert all(kind["type"] == "string" and "default" in kind for kind in inputs.values())
    # a value in a command's text would be parsed as shell: variables hold them
    assert not any("${{" in command for command in ci_example.commands().values())
    variables = read(ci_example.WORKFLOW)["jobs"]["conformance"]["env"]
    used = {
        name for text in ci_example.commands().values() for name in re.findall(r"\$(\w+)", text)
    }
    assert used == set(variables) - {"PIP_EXTRA_INDEX_URL"}
    assert {*ci_example.INPUTS, "FP8REF"} == used


def test_its_commands_exist():
    for command in ci_example.commands().values():
        python, flag, module, *arguments = shlex.split(command)
        assert (python, flag) == ("python", "-m")
        assert module in ("pip", "pytest", "fp8ref")
        if module == "fp8ref":
            _, rest = cli._parser().parse_known_args(arguments)
            assert not rest


def test_the_example_of_ci_names_inputs_extras_and_files_that_exist():
    inputs = read(ci_example.WORKFLOW)[ON]["workflow_call"]["inputs"]
    (call,) = (job for path in WORKFLOWS for job in read(path)["jobs"].values() if "uses" in job)
    assert (ROOT / call["uses"]).resolve() == ci_example.WORKFLOW
    assert set(call["with"]) <= set(inputs)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in (call["with"]["fp8ref"], inputs["fp8ref"]["default"]):
        assert re.search(r"\[(.*)\]", requirement)[1] in project["optional-dependencies"]
    assert (ROOT / call["with"]["tests"].split()[-1]).is_dir()
    assert (ROOT / call["with"]["table"]).is_file()


def test_the_planted_fault_of_the_example_is_of_its_test():
    text = (ci_example.EXAMPLE / "test_casts.py").read_text(encoding="utf-8")
    assert text.count(ci_example.FAULT[0]) == 1
    assert not list(ci_example.EXAMPLE.glob("conftest.py"))
