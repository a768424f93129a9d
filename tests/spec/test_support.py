"""What works where: the table, the README's copy of it, and what refuses a choice."""

import dataclasses
import importlib.util
import re
import string
from pathlib import Path

import pytest

from fp8ref import recipe as recipes
from fp8ref.policy import FP4_POLICIES, POLICIES
from fp8ref.recipe import RECIPES, GemmSpec, Recipe
from fp8ref.spec import support
from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.spec.delayed import DELAYED

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    path = ROOT / "docs" / "scripts" / "support.py"
    spec = importlib.util.spec_from_file_location("support_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_has_the_table_of_today(script):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert support.table(RECIPES) in text, "run make support"
    assert script.in_readme(text) == text


def test_every_recipe_is_in_one_row():
    rows = support.table(RECIPES).splitlines()[2:]
    for name in RECIPES:
        assert sum(f"`{name}`" in row.split("|")[1] for row in rows) == 1


def test_the_page_has_a_row_for_each_limit(script):
    lines = script.page().split("## What a backend does not take")[1].splitlines()
    rows = [line for line in lines if re.search(r"\| (JAX|PyTorch) \|", line)]
    limits = [(f, b) for f, by_backend in support.LIMITS.items() for b in by_backend]
    assert len(rows) == len(limits)
    assert not any("{" in row for row in rows)


_ROW = dataclasses.replace(RECIPES["nvfp4"].output.a, policy=FP4_POLICIES["te_nvfp4_row"])
ROWS = Recipe(name="rows", output=GemmSpec(a=_ROW, b=_ROW, accumulate="fast"))
CHOICES = {
    "recipes": (RECIPES["tensorwise"], ROWS),
    "scale policies": (POLICIES["torchao"], POLICIES["msamp"]),
    "scale policies of MX": (POLICIES["mx_floor"], POLICIES["torchao"]),
    "scale policies of e2m1fn": (POLICIES["mx_rceil"], POLICIES["torchao"]),
    "delayed scaling": (DELAYED["delayed"], DELAYED["te_delayed"]),
    "epilogues": ("scale_then_round", "bias_then_round"),
    "gradients of attention": (VARIANTS["cudnn"], VARIANTS["fa3"]),
    "attention over cut tokens": (VARIANTS["cudnn"], VARIANTS["mxfp8"]),
    "devices of simulated hardware": ("cpu", "cuda"),
}


@pytest.mark.parametrize("feature", CHOICES)
@pytest.mark.parametrize("backend", support.BACKENDS)
def test_a_choice_is_taken_or_refused_with_reason_and_remedy(feature, backend):
    taken, refused = CHOICES[feature]
    limit = support.LIMITS[feature][backend]
    texts = limit.needs, limit.received or "", limit.instead
    fields = {name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name}
    details = {
        name: f"<{name}>" for name in fields if name != "backend" and not name.startswith("choice")
    }
    support.require(feature, backend, taken, **details)
    with pytest.raises(ValueError, match=r"^[^{}]+\. [A-Z][^{}]+\.$"):
        support.require(feature, backend, refused, **details)
    assert support.refusal(feature, backend, taken) is None
    assert not support.takes(feature, backend, refused)


def test_a_backend_without_a_limit_takes_every_choice():
    assert support.takes("optimizers of the trainer", "torch", "adamw_fp8")
    fault = support.refusal("optimizers of the trainer", "jax", "adamw_fp8")
    assert fault is not None
    assert fault.endswith("got 'adamw_fp8'. Use one of them, or --backend torch.")


def test_a_recipe_is_held_to_the_epilogues_of_its_backend():
    recipe = recipes.by_name("tensorwise")
    recipes.check_gemms(recipe, "torch")
    with pytest.raises(ValueError, match=r"^recipe 'rows' is for the simulator alone"):
        recipes.check_gemms(ROWS, "jax")
