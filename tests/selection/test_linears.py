"""Which linears a recipe converts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8ref.formats import E5M2
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.selection import linears as linear_selection
from fp8ref.selection.linears import AUTO_FILTER
from fp8ref.spec import llama
from fp8ref.spec.llama import LlamaConfig

LINEARS = {
    "model.layers.0.q": (32, 32),
    "model.layers.0.v": (8, 32),
    "model.layers.10.q": (32, 32),
    "lm_head": (256, 32),
}

names = st.lists(
    st.sampled_from(["layers", "mlp", "1", "10", "up_proj", "a"]), min_size=1, max_size=5
)


def converted(decisions) -> set[str]:
    return {d.path for d in decisions if d.fp8}


@given(names, names)
def test_a_plain_pattern_matches_exactly_the_runs_of_whole_components(pattern, name):
    runs = [name[i : i + len(pattern)] for i in range(len(name))]
    assert linear_selection.matches(".".join(pattern), ".".join(name)) == (pattern in runs)


@given(names, st.data())
def test_every_run_of_components_matches(name, data):
    start = data.draw(st.integers(0, len(name) - 1))
    stop = data.draw(st.integers(start + 1, len(name)))
    assert linear_selection.matches(".".join(name[start:stop]), ".".join(name))


@given(names)
def test_a_star_in_place_of_a_component_matches(name):
    assert linear_selection.matches(".".join(["*", *name[1:]]), ".".join(name))


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
#
def test_matches_whole_components_or_shell_patterns_for_all_of_the_name(pattern, name, expected):
    assert linear_selection.matches(pattern, name) == expected


def test_a_plan_converts_every_linear_with_dims_that_are_multiples_of_16():
    assert converted(linear_selection.select(LINEARS, "rowwise")) == {
        "model.layers.0.q",
        "model.layers.10.q",
        "lm_head",
    }


def test_a_plan_has_one_decision_a_linear_in_the_order_given():
    decisions = linear_selection.select(LINEARS, "rowwise")
    assert [(d.path, d.shape) for d in decisions] == list(LINEARS.items())


def test_what_is_not_converted_is_bf16_with_its_reason():
    by_path = {
        d.path: d for d in linear_selection.select(LINEARS, "rowwise", filter_fqns=["lm_head"])
    }
    assert by_path["lm_head"].recipe == by_path["model.layers.0.v"].recipe == RECIPES["bf16"]
    assert "'lm_head'" in by_path["lm_head"].reason
    assert "multiples of [16, 16]" in by_path["model.layers.0.v"].reason
    assert "[8, 32]" in by_path["model.layers.0.v"].reason
    assert by_path["model.layers.0.q"].recipe == RECIPES["rowwise"]


@pytest.mark.parametrize("shape", [(24, 32), (32, 24), (8, 8)])
def test_either_dim_keeps_a_linear_in_high_precision(shape):  # L-5
    assert converted(linear_selection.select({"a": (16, 16), "b": shape}, "tensorwise")) == {"a"}


@pytest.mark.parametrize(("name", "multiple"), [("blockwise", 128), ("mxfp8", 32)])
# S-6
def test_a_dim_that_a_recipes_blocks_do_not_divide_keeps_a_linear_in_high_precision(name, multiple):
    shapes = {
        "fits": (multiple, 3 * multiple),
        "n": (multiple + 16, multiple),
        "k": (multiple, multiple + 16),
    }
    decisions = {d.path: d for d in linear_selection.select(shapes, name)}
    assert [path for path, d in decisions.items() if d.fp8] == ["fits"]
    assert f"multiples of [{multiple}, {multiple}]" in decisions["k"].reason


def test_filters_keep_what_they_name_in_high_precision():
    assert converted(
        linear_selection.select(LINEARS, "rowwise", filter_fqns=["layers.0", "lm_head"])
    ) == {"model.layers.10.q"}


def test_naming_a_linear_overrides_a_filter():
    decisions = linear_selection.select(
        LINEARS, "rowwise", filter_fqns=["layers.10", "lm_head"], fp8_fqns=["lm_head"]
    )
    assert converted(decisions) == {"model.layers.0.q", "lm_head"}


def test_naming_a_linear_converts_no_fewer_of_the_others():
    assert converted(linear_selection.select(LINEARS, "rowwise", fp8_fqns=["lm_head"])) == {
        "model.layers.0.q",
        "model.layers.10.q",
        "lm_head",
    }


def test_naming_a_linear_whose_dims_do_not_allow_it_is_an_error():
    with pytest.raises(
        ValueError, match=r"multiples of \[16, 16\].*model\.layers\.0\.v is \[8, 32\].*'layers\.0'"
    ):
        linear_selection.select(LINEARS, "rowwise", fp8_fqns=["layers.0"])


@pytest.mark.parametrize("key", ["filter_fqns", "fp8_fqns"])
@pytest.mark.parametrize("name", ["bf16", "rowwise"])
def test_a_pattern_that_names_no_linear_is_an_error(key, name):
    with pytest.raises(
        ValueError, match=rf"{key}.*'layers\.1' matches none of: model\.layers\.0\.q"
    ):
        linear_selection.select(LINEARS, name, **{key: ["lm_head", "layers.1"]})


def test_the_linears_of_a_large_model_are_not_all_listed():
    many = {f"model.layers.{i}.q": (32, 32) for i in range(500)} | {"lm_head": (32, 32)}
    with pytest.raises(ValueError, match=r"layers\.13\.q, 486 more, lm_head\.") as raised:
        linear_selection.select(many, "rowwise", filter_fqns=["layers.0."])
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("key", ["filter_fqns", "fp8_fqns"])
def test_a_string_in_place_of_a_list_is_an_error(key):
    with pytest.raises(ValueError, match=rf"{key} is a list.*\['lm_head'\]"):
        linear_selection.select(LINEARS, "rowwise", **{key: "lm_head"})


def test_converting_nothing_is_an_error():
    with pytest.raises(ValueError, match="'rowwise' converts no linear") as error:
        linear_selection.select({"a": (8, 8), "b": (16, 16)}, "rowwise", filter_fqns=["b"])
    assert "a: recipe 'rowwise' needs" in str(error.value)
    assert "b: named by filter_fqns 'b'" in str(error.value)


def test_an_fp8_recipe_of_a_model_without_linears_is_an_error():
    with pytest.raises(ValueError, match="no linears"):
        linear_selection.select({}, "rowwise")


def test_bf16_converts_nothing_and_says_so():
    decisions = linear_selection.select(LINEARS, "bf16", filter_fqns=["lm_head"])
    assert not converted(decisions)
    assert {d.reason for d in decisions} == {"recipe 'bf16' has no FP8 GEMM"}


def test_a_plan_takes_a_recipe_of_ones_own():
    cast = CastSpec(fmt=E5M2)
    mine = Recipe(name="mine", output=GemmSpec(a=cast, b=cast, accumulate="slow"))
    assert [d.recipe for d in linear_selection.select({"a": (16, 16)}, mine)] == [mine]


@pytest.mark.parametrize(
    ("name", "shape", "failed"),
    [
        ("tensorwise", (1024, 4096), "N <= 1024 and K <= 4096 from"),
        ("tensorwise", (1040, 4096), None),
        ("tensorwise", (1024, 4112), None),
        ("delayed", (1024, 4096), "N <= 1024 and K <= 4096 from"),
        ("delayed", (1040, 16), None),
        ("rowwise", (2048, 8192), "keeps N <= 2048 from"),
        ("rowwise", (8192, 1024), "keeps K <= 1024 from"),
        ("rowwise", (4096, 2048), "N <= 4096 and K <= 2048 from"),
        ("rowwise", (4112, 2048), None),
        ("rowwise", (4096, 2064), None),
    ],
)
def test_the_auto_filter_keeps_small_linears_and_names_the_threshold(name, shape, failed):
    small, _ = linear_selection.select(
        {"a": shape, "large": (8192, 8192)}, name, filter_fqns=[AUTO_FILTER]
    )
    assert small.fp8 == (failed is None)
    assert failed is None or f"{failed} recipe {name!r} (R-4); a is {list(shape)}" in small.reason


def test_the_auto_filter_joins_patterns_and_dims_that_do_not_fit():
    shapes = {"small": (32, 32), "odd": (8, 32), "up": (2048, 32), "lm_head": (2048, 32)}
    reasons = {
        d.path: d.reason
        for d in linear_selection.select(shapes, "tensorwise", filter_fqns=["lm_head", AUTO_FILTER])
    }
    assert [reasons[path].split()[0] for path in shapes] == [
        repr(AUTO_FILTER),
        "recipe",
        "every",
        "named",
    ]


def test_naming_a_small_linear_overrides_the_auto_filter():
    decisions = linear_selection.select(
        {"a": (32, 32), "b": (32, 32)}, "tensorwise", filter_fqns=[AUTO_FILTER], fp8_fqns=["b"]
    )
    assert converted(decisions) == {"b"}


def test_the_auto_filter_of_llama_8b_keeps_keys_and_values():
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    for name in ("tensorwise", "rowwise", "delayed", "tensorwise_pow2", "rowwise_native"):
        kept = [
            d.path
            for d in linear_selection.select(
                llama.linear_shapes(config), name, filter_fqns=[AUTO_FILTER]
            )
            if not d.fp8
        ]
        assert [path.split(".")[-1] for path in kept if path != "lm_head"] == ["k_proj", "v_proj"]


@pytest.mark.parametrize("name", ["rowwise_with_gw_hp", "blockwise", "mxfp8"])
def test_a_recipe_without_thresholds_refuses_the_auto_filter(name):
    with pytest.raises(
        ValueError,
        match=rf"tensorwise, rowwise, delayed, tensorwise_pow2, rowwise_native; got '{name}', .*no data.*filter_fqns instead",
    ):
        linear_selection.select({"a": (128, 128)}, name, filter_fqns=[AUTO_FILTER])


def test_a_recipe_of_ones_own_has_no_thresholds_whatever_its_name():
    mine = Recipe(name="tensorwise", output=RECIPES["rowwise"].output)
    with pytest.raises(ValueError, match="no data"):
        linear_selection.select({"a": (2048, 128)}, mine, filter_fqns=[AUTO_FILTER])


def test_bf16_ignores_the_auto_filter():
    assert not converted(linear_selection.select(LINEARS, "bf16", filter_fqns=[AUTO_FILTER]))


def test_the_auto_filters_word_is_no_pattern():
    with pytest.raises(ValueError, match=rf"fp8_fqns .*'{AUTO_FILTER}' matches none of"):
        linear_selection.select(LINEARS, "rowwise", fp8_fqns=[AUTO_FILTER])
    with pytest.raises(ValueError, match=rf"converts no linear.*{AUTO_FILTER}.*Change filter_fqns"):
        linear_selection.select(LINEARS, "tensorwise", filter_fqns=[AUTO_FILTER])
