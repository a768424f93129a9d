import numpy as np
import pytest

from fp8ref.crosscheck.divergence.difference import Difference
from fp8ref.crosscheck.divergence.explain import explain
from fp8ref.crosscheck.divergence.reasons import Subjects
from fp8ref.crosscheck.divergence.step_values import Value, maker, unobserved
from fp8ref.recipe import RECIPES
from fp8ref.train.config import Config

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
APART = Difference(element=(0,), a="", b="", differ=1, of=2, worst=1, unit="bfloat16")


def subjects(recipe="tensorwise", other=None, unseen=()) -> Subjects:
    of_linears = ({d.path: RECIPES[r] if d.fp8 else d.recipe for d in Config().decisions()} for r in (recipe, other or recipe))
    return Subjects(names=("a", "b"), recipes=tuple(of_linears), states={}, model=Config().model, outputs={}, unseen=unseen)


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
    assert explain(v, v, APART, subjects()).clauses == clauses


def test_a_gradient_of_a_gemm_in_high_precision_is_a_sum_in_any_order():  # G-9
    v = value("backward", Q, "weight's gradient")
    assert explain(v, v, APART, subjects("rowwise_with_gw_hp")).clauses == ("G-9",)


@pytest.mark.parametrize("layer", [Q, DOWN])
def test_roundings_of_one_result_are_neighbours_or_no_clause_explains_them(layer):  # M-3
    v = value("forward", layer, "input", gemm="output")
    for worst, unit in ((2, "bfloat16"), (1, "float32")):
        far = Difference(element=(0,), a="", b="", differ=1, of=2, worst=worst, unit=unit)
        found = explain(v, v, far, subjects())
        assert found.clauses == ()
        assert f"these lie {worst} numbers of {unit} apart" in found.text
        hidden = explain(v, v, far, subjects(unseen=["a", "b", "c", "d"]))  # what lies between may be anything
        assert hidden.clauses == ("M-3", "G-9")
        assert "not observed (a, b, c and 1 more)" in hidden.text


def test_casts_of_two_recipes_are_told_from_faults():
    a, b = (value("forward", Q, "input", gemm="output", part="scale", cast=RECIPES[r].output.a) for r in ("tensorwise", "rowwise"))
    assert explain(a, b, APART, subjects("tensorwise", "rowwise")).clauses == ("R-1",)


@pytest.mark.parametrize(
    ("linear", "made"),
    [
        ("self_attn.k_proj", ("input_layernorm", "output")),
        ("self_attn.o_proj", ("self_attn", "attention output")),
        ("mlp.up_proj", ("post_attention_layernorm", "output")),
        ("mlp.down_proj", ("mlp", "silu(gate) * up")),
    ],
)
def test_the_maker_of_an_input_is_the_simulators_site(linear, made):
    assert maker(f"model.layers.3.{linear}") == (f"model.layers.3.{made[0]}", made[1])
    assert maker("lm_head") == ("model.norm", "output")


def test_linears_in_high_precision_before_a_layer_are_unobserved():
    config = Config().replace(numerics={"filter_fqns": ("layers.0.mlp",)})
    assert unobserved("model.layers.0.self_attn.o_proj", config) == []
    assert unobserved("model.layers.1.self_attn.q_proj", config) == [f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert unobserved("lm_head", config)[-1] == "model.layers.0.mlp.down_proj"
