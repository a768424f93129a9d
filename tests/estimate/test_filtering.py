"""What FP8 makes slower: judged with what shares an input, and left out by patterns that leave out
nothing else.
"""

import pytest

from fp8ref.estimate import filtering, report, roofline
from fp8ref.estimate.gpu_rates import PUBLISHED
from fp8ref.recipe import RECIPES
from fp8ref.selection.rules import Rule
from fp8ref.train.config import config as configs

H100 = PUBLISHED["h100"]
SMALL = configs.load("llama-125m").replace(model={"num_hidden_layers": 3})
EXPERTS = configs.load("qwen3-30b-a3b").replace(
    model={"num_hidden_layers": 2, "shared_expert_intermediate_size": 2048},
    data={"batch_size": 64, "microbatches": 8, "sequence_length": 512},
)


PLAIN = {"kernels": "plain"}
COMPILED = SMALL.replace(parallel={"compile": "block"}, numerics=PLAIN)


@pytest.mark.parametrize(
    ("config", "backend"), [(COMPILED, "torch"), (EXPERTS, "jax"), (EXPERTS, "torch")]
)
def test_a_config_with_the_advice_takes_what_the_estimate_says_and_has_no_other(config, backend):
    found = report.of(config, backend, H100)
    assert found.to_filter
    assert found.step.filtered_ratio > found.step.ratio
    after = filtering.without(
        config, roofline.losing(config, backend, H100), roofline.linears(config, backend, H100)
    )
    again = report.of(after, backend, H100)
    assert again.to_filter == []
    assert again.step.configured == found.step.filtered
    assert again.step.ratio == pytest.approx(found.step.filtered_ratio)


def test_under_rules_a_linear_is_left_out_by_another():
    rule = Rule(layers=("layers.0",), gemms=("grad_weight",), recipe="bf16")
    config = COMPILED.replace(numerics={"rules": (rule,)})
    found = roofline.linears(config, "torch", H100)
    without = filtering.without(config, {filtering.kind(found[-2][0])}, found)
    assert [
        decision.recipe.fp8
        for decision in without.decisions()
        if decision.path.endswith("down_proj")
    ] == [False] * 3
    assert (
        report.of(config, "torch", H100).step.filtered_ratio
        >= report.of(config, "torch", H100).step.ratio
    )


def test_what_costs_a_linear_and_spares_others_more_is_not_filtered():
    """q's casts are also k's and v's, which gain by them."""
    found = report.of(configs.load("llama-125m").replace(numerics=PLAIN), "jax", H100)
    by_name = {row.linear: row for row in found.rows}
    assert by_name["q_proj"].ledger.ratio < 1
    assert not by_name["q_proj"].loses
    assert found.step.filtered_ratio >= found.step.ratio


def test_linears_that_share_an_input_are_judged_together():
    """q_proj quantizes the input of all three and loses alone; with k_proj and v_proj it gains. By
    themselves all four lose in PyTorch.
    """
    config = configs.load("llama-125m").replace(numerics=PLAIN)
    found = roofline.linears(config, "jax", H100)
    ratios = {decision.path.split(".")[-1]: one.ratio for decision, one in found}
    assert ratios["q_proj"] < 1 < min(ratios["k_proj"], ratios["v_proj"], ratios["up_proj"])
    groups = filtering.slower(found, cast_once=True)
    assert groups == [{(path, RECIPES["tensorwise"])} for path in ["self_attn.o_proj"]]
    rowwise = config.replace(numerics={"recipe": "rowwise"})
    groups = filtering.slower(roofline.linears(rowwise, "jax", H100), cast_once=True)
    names = [sorted(path for path, _ in group) for group in groups]
    assert ["self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"] in names
    alone = filtering.slower(roofline.linears(COMPILED, "torch", H100), cast_once=False)
    assert [[path for path, _ in group] for group in alone] == [
        [f"self_attn.{name}_proj"] for name in "qkvo"
    ]


def test_a_pattern_names_no_linear_that_gains():
    config = EXPERTS.replace(model={"shared_expert_intermediate_size": 256})
    found = report.of(config, "jax", H100)
    assert "shared_expert.down_proj" in found.to_filter
    assert not {"gate_proj", "up_proj", "down_proj"} & set(found.to_filter)


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_step_in_bfloat16_is_that_of_recipe_bf16(backend, recipe):
    """Its norms have the kernels of bfloat16, also in JAX, where those under FP8 leave a result to
    the casts.
    """
    step = roofline.predict_step(SMALL.replace(numerics={"recipe": recipe}), backend, H100)
    plain = roofline.predict_step(filtering.in_bf16(SMALL), backend, H100)
    assert step.bf16 + sum(step.in_bf16.values()) == pytest.approx(
        plain.configured + sum(plain.rest.values())
    )
