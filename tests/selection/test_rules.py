"""Rules change casts of single operands, and typing errors in them are found (spec R-8)."""

import dataclasses

import pytest

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import FP4_POLICIES, UNSCALED
from fp8ref.recipe import RECIPES
from fp8ref.selection import linears as linear_selection
from fp8ref.selection import rules as linear_rules
from fp8ref.selection.rules import Rule
from fp8ref.spec.rotation import NVFP4_ROTATION

LINEARS = {
    f"model.layers.{i}.mlp.{name}": (32, 64)
    for i in (0, 1, 10)
    for name in ("up_proj", "down_proj")
} | {"lm_head": (256, 64)}

_E4 = RECIPES["tensorwise"].output.a


def decided(*rules: Rule, recipe: str = "tensorwise") -> dict:
    """The decisions by name, with lm_head filtered."""
    chosen = linear_selection.select(LINEARS, recipe, filter_fqns=["lm_head"])
    return {d.path: d for d in linear_rules.apply(rules, chosen)}


def casts(decision) -> dict:
    return {
        f"{gemm}/{role}": cast
        for (gemm, role), cast in linear_rules.casts_of(decision.recipe).items()
    }


def test_a_rule_changes_the_operands_that_it_names_alone():
    found = decided(
        Rule(layers=("layers.1",), roles=("grad_output",), format="e4m3fn", policy="unscaled")
    )
    changed = {path for path, d in found.items() if d.recipe != RECIPES["tensorwise"] and d.fp8}
    assert changed == {"model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"}
    of = casts(found["model.layers.1.mlp.up_proj"])
    for operand, cast in of.items():
        planted = operand.endswith("grad_output")
        assert (cast.fmt, cast.policy == UNSCALED) == (
            (E4M3FN, True) if planted else (E4M3FN, False)
        )
    assert found["model.layers.1.mlp.up_proj"].reason == "rule 1"
    assert found["lm_head"].recipe == RECIPES["bf16"]


def test_an_operand_whose_partner_is_not_cast_is_not_rotated():  # S-23, E-8
    rule = Rule(layers=("up_proj",), gemms=("grad_weight",), roles=("input",), recipe="bf16")
    of = casts(decided(rule, recipe="nvfp4")["model.layers.1.mlp.up_proj"])
    before = RECIPES["nvfp4"].grad_weight.a
    assert of["grad_weight/input"] is None
    assert of["grad_weight/grad_output"] == dataclasses.replace(before, rotation=None)


def test_what_is_no_rule_is_refused():
    for rules in ([{"layers": ["up_proj"], "recipe": "bf16"}], "nvfp4"):
        with pytest.raises(
            ValueError, match=r"rules are fp8ref.selection.rules.Rule.*got (dict|str)"
        ):
            linear_rules.apply(rules, [])


def test_later_rules_change_what_earlier_ones_left():
    found = decided(
        Rule(layers=("model*",), gemms=("grad_weight",), recipe="bf16"),
        Rule(layers=("layers.0",), gemms=("grad_weight",), roles=("input",), recipe="tensorwise"),
    )
    spec = found["model.layers.0.mlp.up_proj"].recipe.grad_weight
    assert (spec.a, spec.b.fmt, spec.one_sided, spec.accumulate) == (None, E4M3FN, True, None)
    assert found["model.layers.0.mlp.up_proj"].reason == "rule 1, and rule 2"
    assert not found["model.layers.1.mlp.up_proj"].recipe.grad_weight.fp8
    assert found["model.layers.1.mlp.up_proj"].recipe.output == RECIPES["tensorwise"].output


def test_a_rule_changes_the_named_parts_of_a_cast_alone():
    cast = RECIPES["nvfp4"].grad_weight.a
    for part, word, field, value in (
        ("rotation", "none", "rotation", None),
        ("rounding", "stochastic_8", "rounding", "stochastic_8"),
        ("policy", "te_nvfp4_4over6", "policy", FP4_POLICIES["te_nvfp4_4over6"]),
        ("granularity", "nvfp4_16x16", "granularity", "nvfp4_16x16"),
        ("format", "e4m3fn", "fmt", E4M3FN),
    ):
        rule = Rule(layers=("*",), **{part: word})
        after = rule.cast(cast, "grad_weight", "grad_output")
        assert after == dataclasses.replace(cast, **{field: value}) != cast
    rotated = Rule(layers=("*",), rotation="nvfp4").cast(_E4, "output", "input")
    assert rotated == dataclasses.replace(_E4, rotation=NVFP4_ROTATION)


def test_a_recipe_turns_linears_in_high_precision_on():
    found = decided(
        Rule(layers=("lm_head", "layers.10"), gemms=("output",), recipe="rowwise"), recipe="bf16"
    )
    assert {path for path, d in found.items() if d.fp8} == {
        "lm_head",
        "model.layers.10.mlp.up_proj",
        "model.layers.10.mlp.down_proj",
    }
    assert found["lm_head"].recipe.output == RECIPES["rowwise"].output
    assert not found["lm_head"].recipe.grad_weight.fp8


def test_a_gemm_of_two_recipes_scales_then_rounds():
    found = decided(
        Rule(layers=("layers.0",), gemms=("grad_input",), roles=("grad_output",), format="e5m2"),
        recipe="rowwise",
    )
    spec = found["model.layers.0.mlp.up_proj"].recipe.grad_input
    assert (spec.a.fmt, spec.epilogue, spec.accumulate) == (E5M2, "scale_then_round", "slow")


def test_all_in_high_precision_is_bf16():
    assert {d.recipe.name for d in decided(Rule(layers=("model*",), recipe="bf16")).values()} == {
        "bf16"
    }


def test_another_policy_ends_delayed_scaling():
    found = decided(
        Rule(layers=("layers.0",), roles=("grad_output",), policy="torchao"), recipe="delayed"
    )
    of = casts(found["model.layers.0.mlp.up_proj"])
    assert {operand: cast.delayed is None for operand, cast in of.items()} == {
        operand: "grad_output" in operand for operand in of
    }


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"layers": ("layers.2",), "recipe": "bf16"},
            r"rule 1's pattern 'layers\.2' names no linear\. Did you mean 'layers\.\d",
        ),
        (
            {"layers": ("down_prj",), "recipe": "bf16"},
            r"rule 1's pattern 'down_prj' names no linear\. Did you mean 'down_proj'",
        ),
        (
            {"layers": ("layers.0",), "recipe": "tensorwise"},
            r"rule 1 of numerics\.rules changes nothing",
        ),
        ({"layers": ("lm_head",), "format": "e5m2"}, r"rule 1 of numerics\.rules changes nothing"),
        ({"layers": ("layers.0",), "granularity": "blockwise_128x128"}, r"multiples of"),
    ],
)
def test_a_rule_that_does_not_fit_the_model_is_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        decided(Rule(**rule))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"a rule has a recipe, or a format, .*, or an epilogue; got none"),
        ({"recipe": "bf16", "format": "e5m2"}, r"got format, recipe\. Split it"),
        (
            {"recipe": "tensorwize"},
            r"recipe of a rule is one of bf16, .*; got 'tensorwize'\. Did you mean 'tensorwise'",
        ),
        (
            {"format": "e4m3", "roles": ("weight",)},
            r"format of a rule .* got 'e4m3'\. Did you mean 'e4m3fn",
        ),
        ({"policy": "torchaoo"}, r"Did you mean 'torchao'"),
        ({"granularity": "tensor"}, r"granularity of a rule"),
        ({"recipe": "bf16", "roles": ("grad_outputs",)}, r"Did you mean 'grad_output'"),
        ({"recipe": "bf16", "gemms": ("outputs",)}, r"Did you mean 'output'"),
        (
            {"recipe": "bf16", "gemms": ("output",), "roles": ("grad_output",)},
            r"output of a rule has no operand grad_output",
        ),
        ({"epilogue": "product_then_round", "policy": "flax"}, r"got policy, epilogue\. Split it"),
        (
            {"epilogue": "product_then_rounds"},
            r"epilogue of a rule .*Did you mean 'product_then_round'",
        ),
        (
            {"epilogue": "product_then_round", "roles": ("weight",)},
            r"an epilogue takes no roles; got weight",
        ),
        ({"recipe": "bf16", "layers": ()}, r"needs layers; got none"),
        ({"recipe": "bf16", "layers": "12"}, r"layers of a rule is several names; got '12'"),
        ({"recipe": "bf16", "gemms": "output"}, r"gemms of a rule is several names"),
    ],
)
def test_a_rule_is_checked_where_it_is_built(keys, message):
    with pytest.raises(ValueError, match=message):
        Rule(**({"layers": ("layers.0",)} | keys))


def test_a_manifest_names_each_operand():
    found = decided(Rule(layers=("layers.0",), gemms=("output",), roles=("weight",), recipe="bf16"))
    written = linear_rules.to_manifest(found["model.layers.0.mlp.up_proj"])
    assert written["output/weight"] == "high precision"
    assert written["output/input"] == "e4m3fn tensorwise torchao"
    epilogues = {name: what for name, what in written.items() if name.endswith("/epilogue")}
    assert epilogues == {
        "grad_input/epilogue": "scale_then_round",
        "grad_weight/epilogue": "scale_then_round",
    }
    assert len(written) == 6 + len(epilogues)


def test_a_rule_gives_an_epilogue_to_gemms_in_fp8_alone():
    ruled = Rule(layers=("*",), gemms=("output", "grad_input"), epilogue="product_then_round")
    found = decided(Rule(layers=("layers.0",), gemms=("grad_input",), recipe="bf16"), ruled)
    after = {
        name: spec.epilogue
        for name, spec in found["model.layers.0.mlp.up_proj"].recipe.gemms.items()
    }
    assert after == {
        "output": "product_then_round",
        "grad_input": "scale_then_round",
        "grad_weight": "scale_then_round",
    }
    assert found["model.layers.0.mlp.up_proj"].reason == "rule 1, and rule 2"
    assert found["model.layers.1.mlp.up_proj"].recipe.grad_input.epilogue == "product_then_round"
    assert casts(found["model.layers.1.mlp.up_proj"]) == {
        f"{gemm}/{role}": cast
        for (gemm, role), cast in linear_rules.casts_of(RECIPES["tensorwise"]).items()
    }
    assert found["lm_head"].recipe == RECIPES["bf16"]
    with pytest.raises(ValueError, match=r"rule 2 of numerics\.rules changes nothing"):
        decided(ruled, ruled)
