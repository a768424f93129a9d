import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8ref import recipe
from fp8ref.formats import E4M3FN, E5M2, E8M0FNU, FLOAT16, FP8_FORMATS
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe

LINEARS = {"model.layers.0.q": (32, 32), "model.layers.0.v": (8, 32), "model.layers.10.q": (32, 32), "lm_head": (256, 32)}

names = st.lists(st.sampled_from(["layers", "mlp", "1", "10", "up_proj", "a"]), min_size=1, max_size=5)


def as_tuple(spec: GemmSpec):
    """(a's format, a's granularity, b's format, b's granularity, accumulation), or None for high precision."""
    if not spec.fp8:
        return None
    return spec.a.fmt.name, spec.a.granularity, spec.b.fmt.name, spec.b.granularity, spec.accumulate


def converted(decisions) -> set[str]:
    return {d.path for d in decisions if d.fp8}


E4, E5, ROW, TENSOR = "e4m3fn", "e5m2", "rowwise", "tensorwise"


@pytest.mark.parametrize(
    ("name", "output", "grad_input", "grad_weight"),
    [
        ("bf16", None, None, None),
        ("tensorwise", (E4, TENSOR, E4, TENSOR, "fast"), (E5, TENSOR, E4, TENSOR, "slow"), (E5, TENSOR, E4, TENSOR, "slow")),
        ("rowwise", (E4, ROW, E4, ROW, "fast"), (E4, ROW, E4, ROW, "slow"), (E4, ROW, E4, ROW, "slow")),
        ("rowwise_with_gw_hp", (E4, ROW, E4, ROW, "fast"), (E4, ROW, E4, TENSOR, "slow"), None),
    ],
)
def test_recipes_are_those_of_the_table(name, output, grad_input, grad_weight):  # R
    spec = RECIPES[name]
    assert (as_tuple(spec.output), as_tuple(spec.grad_input), as_tuple(spec.grad_weight)) == (output, grad_input, grad_weight)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes_are_those_of_torchao(name):
    from torchao.float8.config import Float8LinearConfig, ScalingType

    theirs = Float8LinearConfig.from_recipe_name(name)
    gemms = {
        "output": (theirs.gemm_config_output, theirs.cast_config_input, theirs.cast_config_weight),
        "grad_input": (theirs.gemm_config_grad_input, theirs.cast_config_grad_output, theirs.cast_config_weight_for_grad_input),
        "grad_weight": (
            theirs.gemm_config_grad_weight,
            theirs.cast_config_grad_output_for_grad_weight,
            theirs.cast_config_input_for_grad_weight,
        ),
    }
    for gemm, (config, *casts) in gemms.items():
        mine = RECIPES[name].gemms[gemm]
        assert mine.fp8 == all(cast.scaling_type is ScalingType.DYNAMIC for cast in casts)
        for cast, spec in zip(casts, (mine.a, mine.b) if mine.fp8 else (), strict=mine.fp8):
            assert str(cast.target_dtype) == f"torch.float8_{spec.fmt.name}"
            assert cast.scaling_granularity.value == {"tensorwise": "tensorwise", "rowwise": "axiswise"}[spec.granularity]
            assert (spec.policy.power_of_two == "exp2_log2") == theirs.round_scales_to_power_of_2
        if mine.fp8:
            assert (mine.accumulate == "fast") == config.use_fast_accum


def test_only_slow_gemms_with_a_rowwise_operand_round_before_their_scales():  # R-1, G-5
    rounded = {
        (name, gemm)
        for name, spec in RECIPES.items()
        for gemm, gemm_spec in spec.gemms.items()
        if gemm_spec.epilogue == "unit_round_scale_round"
    }
    assert rounded == {("rowwise", "grad_input"), ("rowwise", "grad_weight"), ("rowwise_with_gw_hp", "grad_input")}


@pytest.mark.parametrize("gemm", ["output", "grad_input", "grad_weight"])
def test_operands_reduced_along_their_axes_give_the_result(gemm):  # L-2
    m, n, k = 3, 5, 7
    shapes = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}
    results = {"output": (m, n), "grad_input": (m, k), "grad_weight": (n, k)}
    a, b = (np.ones(shapes[role]) for role in recipe.OPERANDS[gemm])
    assert np.tensordot(a, b, axes=recipe.REDUCED_AXES[gemm]).shape == results[gemm]


def test_a_gemm_is_fp8_on_both_operands_or_neither():  # L-4
    with pytest.raises(ValueError, match="both operands or on neither"):
        GemmSpec(a=CastSpec(fmt=E4M3FN), accumulate="fast")
    with pytest.raises(ValueError, match="both operands or on neither"):
        GemmSpec(b=CastSpec(fmt=E4M3FN), accumulate="fast")


@pytest.mark.parametrize("accumulate", [None, "exact", "FAST"])
def test_an_fp8_gemm_names_its_accumulation(accumulate):  # G-7
    cast = CastSpec(fmt=E4M3FN)
    with pytest.raises(ValueError, match="accumulate of an FP8 GEMM"):
        GemmSpec(a=cast, b=cast, accumulate=accumulate)


@pytest.mark.parametrize("accumulate", ["fast", "slow"])
def test_a_high_precision_gemm_takes_no_accumulation(accumulate):
    with pytest.raises(ValueError, match="accumulate of a high-precision GEMM"):
        GemmSpec(accumulate=accumulate)


def test_an_unknown_epilogue_is_refused():
    with pytest.raises(ValueError, match="'round_then_scale'"):
        GemmSpec(epilogue="round_then_scale")


def test_a_high_precision_gemm_has_no_scales_to_apply():
    with pytest.raises(ValueError, match="no scales"):
        GemmSpec(epilogue="unit_round_scale_round")


@pytest.mark.parametrize("fmt", [E8M0FNU, FLOAT16], ids=str)
def test_an_operand_is_an_fp8_tensor_format(fmt):  # F-4
    with pytest.raises(ValueError, match=f"got {fmt}") as error:
        CastSpec(fmt=fmt)
    assert all(name in str(error.value) for name in FP8_FORMATS)


def test_an_operand_of_unknown_granularity_is_refused():
    with pytest.raises(ValueError, match="'axiswise'"):
        CastSpec(fmt=E4M3FN, granularity="axiswise")


@pytest.mark.parametrize(
    ("a", "b", "rowwise"),
    [("rowwise", "rowwise", True), ("rowwise", "tensorwise", True), ("tensorwise", "rowwise", True), ("tensorwise", "tensorwise", False)],
)
def test_one_rowwise_operand_makes_a_gemm_rowwise(a, b, rowwise):  # G-8
    spec = GemmSpec(a=CastSpec(fmt=E4M3FN, granularity=a), b=CastSpec(fmt=E5M2, granularity=b), accumulate="slow")
    assert spec.rowwise == rowwise


def test_a_high_precision_gemm_is_not_rowwise():
    assert not GemmSpec().rowwise


def test_one_fp8_gemm_makes_a_recipe_fp8():
    cast = CastSpec(fmt=E4M3FN)
    assert Recipe(name="mine", grad_weight=GemmSpec(a=cast, b=cast, accumulate="slow")).fp8
    assert not Recipe(name="hp").fp8


def test_recipes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["rowwise"].output = GemmSpec()


def test_by_name_finds_names_and_returns_recipes_themselves():
    mine = Recipe(name="mine")
    assert recipe.by_name("rowwise").name == "rowwise"
    assert recipe.by_name(mine) is mine


def test_an_unknown_recipe_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'rowwize'") as error:
        recipe.by_name("rowwize")
    assert all(name in str(error.value) for name in RECIPES)


@given(names, names)
def test_a_plain_pattern_matches_exactly_the_runs_of_whole_components(pattern, name):
    runs = [name[i : i + len(pattern)] for i in range(len(name))]
    assert recipe.matches(".".join(pattern), ".".join(name)) == (pattern in runs)


@given(names, st.data())
def test_every_run_of_components_matches(name, data):
    start = data.draw(st.integers(0, len(name) - 1))
    stop = data.draw(st.integers(start + 1, len(name)))
    assert recipe.matches(".".join(name[start:stop]), ".".join(name))


@given(names)
def test_a_star_in_place_of_a_component_matches(name):
    assert recipe.matches(".".join(["*", *name[1:]]), ".".join(name))


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.1", "model.layers.1.mlp", True),
        ("layers.1", "model.layers.10.mlp", False),
        ("layers.1", "model.layers.1", True),
        ("ayers.1", "model.layers.1", False),
        ("mlp", "model.layers.1.mlp", True),
        ("mlp*", "model.layers.1.mlp", False),
        ("*mlp", "model.layers.1.mlp", True),
        ("model.layers.?.mlp", "model.layers.1.mlp", True),
        ("model.layers.?.mlp", "model.layers.10.mlp", False),
        ("*.layers.[0-3].*", "model.layers.2.mlp", True),
        ("*.layers.[0-3].*", "model.layers.4.mlp", False),
        ("*.MLP", "model.mlp", False),
        ("", "model.mlp", False),
        (".", "model.mlp", False),
        ("*", "lm_head", True),
    ],
)
def test_matches_whole_components_or_shell_patterns_for_all_of_the_name(pattern, name, expected):
    assert recipe.matches(pattern, name) == expected


def test_a_plan_converts_every_linear_with_dims_that_are_multiples_of_16():
    assert converted(recipe.plan(LINEARS, "rowwise")) == {"model.layers.0.q", "model.layers.10.q", "lm_head"}


def test_a_plan_has_one_decision_a_linear_in_the_order_given():
    decisions = recipe.plan(LINEARS, "rowwise")
    assert [(d.path, d.shape) for d in decisions] == list(LINEARS.items())


def test_what_is_not_converted_is_bf16_with_its_reason():
    by_path = {d.path: d for d in recipe.plan(LINEARS, "rowwise", filter_fqns=["lm_head"])}
    assert by_path["lm_head"].recipe == by_path["model.layers.0.v"].recipe == RECIPES["bf16"]
    assert "'lm_head'" in by_path["lm_head"].reason
    assert "multiples of 16" in by_path["model.layers.0.v"].reason
    assert "[8, 32]" in by_path["model.layers.0.v"].reason
    assert by_path["model.layers.0.q"].recipe == RECIPES["rowwise"]


@pytest.mark.parametrize("shape", [(24, 32), (32, 24), (8, 8)])
def test_either_dim_keeps_a_linear_in_high_precision(shape):  # L-5
    assert converted(recipe.plan({"a": (16, 16), "b": shape}, "tensorwise")) == {"a"}


def test_filters_keep_what_they_name_in_high_precision():
    assert converted(recipe.plan(LINEARS, "rowwise", filter_fqns=["layers.0", "lm_head"])) == {"model.layers.10.q"}


def test_naming_a_linear_overrides_a_filter():
    decisions = recipe.plan(LINEARS, "rowwise", filter_fqns=["layers.10", "lm_head"], fp8_fqns=["lm_head"])
    assert converted(decisions) == {"model.layers.0.q", "lm_head"}


def test_naming_a_linear_converts_no_fewer_of_the_others():
    assert converted(recipe.plan(LINEARS, "rowwise", fp8_fqns=["lm_head"])) == {"model.layers.0.q", "model.layers.10.q", "lm_head"}


def test_naming_a_linear_whose_dims_do_not_allow_it_is_an_error():
    with pytest.raises(ValueError, match=r"multiples of 16.*model\.layers\.0\.v is \[8, 32\].*'layers\.0'"):
        recipe.plan(LINEARS, "rowwise", fp8_fqns=["layers.0"])


@pytest.mark.parametrize("key", ["filter_fqns", "fp8_fqns"])
@pytest.mark.parametrize("name", ["bf16", "rowwise"])
def test_a_pattern_that_names_no_linear_is_an_error(key, name):
    with pytest.raises(ValueError, match=rf"{key}.*'layers\.1' names none of: model\.layers\.0\.q"):
        recipe.plan(LINEARS, name, **{key: ["lm_head", "layers.1"]})


@pytest.mark.parametrize("key", ["filter_fqns", "fp8_fqns"])
def test_a_string_in_place_of_a_list_is_an_error(key):
    with pytest.raises(ValueError, match=rf"{key} is a list.*\['lm_head'\]"):
        recipe.plan(LINEARS, "rowwise", **{key: "lm_head"})


def test_converting_nothing_is_an_error():
    with pytest.raises(ValueError, match="'rowwise' converts no linear") as error:
        recipe.plan({"a": (8, 8), "b": (16, 16)}, "rowwise", filter_fqns=["b"])
    assert "a: FP8 needs" in str(error.value)
    assert "b: named by filter_fqns 'b'" in str(error.value)


def test_an_fp8_recipe_of_a_model_without_linears_is_an_error():
    with pytest.raises(ValueError, match="no linears"):
        recipe.plan({}, "rowwise")


def test_bf16_converts_nothing_and_says_so():
    decisions = recipe.plan(LINEARS, "bf16", filter_fqns=["lm_head"])
    assert not converted(decisions)
    assert {d.reason for d in decisions} == {"recipe 'bf16' has no FP8 GEMM"}


def test_a_plan_takes_a_recipe_of_ones_own():
    cast = CastSpec(fmt=E5M2)
    mine = Recipe(name="mine", output=GemmSpec(a=cast, b=cast, accumulate="slow"))
    assert [d.recipe for d in recipe.plan({"a": (16, 16)}, mine)] == [mine]
