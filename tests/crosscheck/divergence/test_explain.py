import re
from pathlib import Path

import numpy as np
import pytest

from fp8ref.crosscheck.divergence.compare_to_sim import Context
from fp8ref.crosscheck.divergence.difference import Difference
from fp8ref.crosscheck.divergence.explain import REASONS, explain
from fp8ref.crosscheck.divergence.step_values import Value
from fp8ref.recipe import RECIPES
from fp8ref.train.config import Config

ROOT = Path(__file__).parents[3]
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
APART = Difference(element=(0,), a="", b="", differ=1, of=2, worst=1, unit="bfloat16")


def context(recipe="tensorwise", other=None, unobserved=()) -> Context:
    of_linears = ({d.path: RECIPES[r] if d.fp8 else d.recipe for d in Config().decisions()} for r in (recipe, other or recipe))
    model = Config().model
    return Context(names=("a", "b"), recipes=tuple(of_linears), states={}, model=model, outputs={}, unobserved=unobserved)


def value(phase, layer, role, **of_gemm) -> Value:
    return Value(phase=phase, layer=layer, role=role, value=np.zeros(2, np.float32), **of_gemm)


@pytest.mark.parametrize(
    ("v", "clauses"),
    [
        (value("state before", "lm_head", "master weight"), ("M-6", "K-7")),
        (value("state before", "lm_head", "exp_avg"), ("K-2",)),
        (value("state before", Q, "input amax history"), ("K-2",)),
        (value("batch", "batch", "tokens"), ("D-2", "D-3")),
        (value("forward", Q, "weight", gemm="output"), ("M-2",)),
        (value("forward", Q.replace("q_", "o_"), "input", gemm="output"), ("M-3", "G-9")),
        (value("forward", Q, "input", gemm="output"), ("M-3",)),
        (value("forward", DOWN, "input", gemm="output"), ("M-3",)),
        (value("forward", "lm_head", "logits"), ("G-9", "M-3")),
        (value("loss", "loss", "mean"), ("M-5",)),
        (value("backward", DOWN, "grad_output", gemm="grad_input"), ()),
        (value("backward", DOWN, "weight's gradient"), ()),
        (value("backward", "lm_head", "weight's gradient"), ("G-9",)),
        (value("backward", "model.norm", "weight's gradient"), ()),
        (value("backward", "model.embed_tokens", "weight's gradient"), ("M-2",)),
        (value("backward", "gradient", "norm"), ("T-2",)),
        (value("optimizer", "optimizer", "learning rate"), ("T-3",)),
        (value("optimizer", Q, "exp_avg_sq"), ("T-1", "T-2", "T-6")),
        (value("optimizer", Q, "master weight"), ("T-1",)),
        (value("optimizer", Q, "input stored scale"), ("H-3", "H-4")),
    ],
    ids=lambda x: "-".join(x.key) if isinstance(x, Value) else "",
)
def test_a_kind_of_difference_has_its_clause(v, clauses):  # B-10
    assert explain(v, v, APART, context()).clauses == clauses


def test_a_gradient_of_a_gemm_in_high_precision_is_a_sum_in_any_order():  # G-9
    v = value("backward", Q, "weight's gradient")
    assert explain(v, v, APART, context("rowwise_with_gw_hp")).clauses == ("G-9",)


@pytest.mark.parametrize("layer", [Q, DOWN])
def test_roundings_of_one_result_are_neighbors_or_no_clause_explains_them(layer):  # M-3
    v = value("forward", layer, "input", gemm="output")
    for worst, unit in ((2, "bfloat16"), (1, "float32")):
        far = Difference(element=(0,), a="", b="", differ=1, of=2, worst=worst, unit=unit)
        found = explain(v, v, far, context())
        assert found.clauses == ()
        assert f"these are {worst} numbers of {unit} apart" in found.text
        hidden = explain(v, v, far, context(unobserved=["a", "b", "c", "d"]))  # what is between may be anything
        assert hidden.clauses == ("M-3", "G-9")
        assert "not observed (a, b, c and 1 more)" in hidden.text


def test_casts_of_two_recipes_are_no_fault():
    a, b = (value("forward", Q, "input", gemm="output", part="scale", cast=RECIPES[r].output.a) for r in ("tensorwise", "rowwise"))
    assert explain(a, b, APART, context("tensorwise", "rowwise")).clauses == ("R-1",)


def test_every_clause_of_the_table_is_there():
    known = {
        clause for page in (ROOT / "docs/spec").glob("?.md") for clause in re.findall(r"^### ([A-Z]-\d+) ", page.read_text(), re.MULTILINE)
    }
    for reason in REASONS.values():
        assert set(reason.clauses) <= known
        assert set(re.findall(r"\b[A-Z]-\d+\b", reason.text)) <= known
        assert reason.text.startswith("no clause explains it") == (not reason.clauses)
