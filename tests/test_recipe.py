import dataclasses

import numpy as np
import pytest

from fp8ref import front, recipe
from fp8ref.formats import E4M3FN, E5M2, E8M0FNU, FLOAT16, FP8_FORMATS
from fp8ref.policy import FP4_POLICIES, POLICIES
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.shared import package_data
from fp8ref.spec.delayed import DELAYED
from fp8ref.spec.epilogue import EPILOGUES
from fp8ref.spec.rotation import NVFP4_ROTATION, Rotation


def as_tuple(spec: GemmSpec):
    """(a's format, a's granularity, b's format, b's granularity, accumulation), or None for high
    precision.
    """
    if not spec.fp8:
        return None
    return spec.a.fmt.name, spec.a.granularity, spec.b.fmt.name, spec.b.granularity, spec.accumulate


E4, E5, ROW, TENSOR = "e4m3fn", "e5m2", "rowwise", "tensorwise"
LINE, SQUARE, MX, MX2 = "blockwise_1x128", "blockwise_128x128", "mx_1x32", "mx_32x32"
F4, NV, NV2 = "e2m1fn", "nvfp4_1x16", "nvfp4_16x16"


@pytest.mark.parametrize(
    ("name", "output", "grad_input", "grad_weight"),
    [
        ("bf16", None, None, None),
        (
            "tensorwise",
            (E4, TENSOR, E4, TENSOR, "fast"),
            (E5, TENSOR, E4, TENSOR, "slow"),
            (E5, TENSOR, E4, TENSOR, "slow"),
        ),
        (
            "rowwise",
            (E4, ROW, E4, ROW, "fast"),
            (E4, ROW, E4, ROW, "slow"),
            (E4, ROW, E4, ROW, "slow"),
        ),
        ("rowwise_with_gw_hp", (E4, ROW, E4, ROW, "fast"), (E4, ROW, E4, TENSOR, "slow"), None),
        (
            "delayed",
            (E4, TENSOR, E4, TENSOR, "fast"),
            (E5, TENSOR, E4, TENSOR, "slow"),
            (E5, TENSOR, E4, TENSOR, "slow"),
        ),
        (
            "blockwise",
            (E4, LINE, E4, SQUARE, "fast"),
            (E4, LINE, E4, SQUARE, "slow"),
            (E4, LINE, E4, LINE, "slow"),
        ),
        ("mxfp8", (E4, MX, E4, MX, "fast"), (E4, MX, E4, MX, "slow"), (E4, MX, E4, MX, "slow")),
        (
            "blockwise_deepgemm",
            (E4, LINE, E4, SQUARE, "fast"),
            (E4, LINE, E4, SQUARE, "slow"),
            (E4, LINE, E4, LINE, "slow"),
        ),
        (
            "blockwise_ue8m0",
            (E4, LINE, E4, SQUARE, "fast"),
            (E4, LINE, E4, SQUARE, "slow"),
            (E4, LINE, E4, LINE, "slow"),
        ),
        (
            "tensorwise_pow2",
            (E4, TENSOR, E4, TENSOR, "fast"),
            (E5, TENSOR, E4, TENSOR, "slow"),
            (E5, TENSOR, E4, TENSOR, "slow"),
        ),
        (
            "rowwise_native",
            (E4, ROW, E4, ROW, "fast"),
            (E4, ROW, E4, ROW, "slow"),
            (E4, ROW, E4, ROW, "slow"),
        ),
        ("nvfp4", (F4, NV, F4, NV2, "fast"), (F4, NV, F4, NV2, "fast"), (F4, NV, F4, NV, "fast")),
        ("mxfp4", (F4, MX, F4, MX, "fast"), (F4, MX, F4, MX, "slow"), (F4, MX, F4, MX, "slow")),
        (
            "mxfp8_32x32",
            (E4, MX, E4, MX2, "fast"),
            (E4, MX, E4, MX2, "slow"),
            (E4, MX, E4, MX, "slow"),
        ),
    ],
)
def test_recipes_are_those_of_the_table(name, output, grad_input, grad_weight):  # R
    spec = RECIPES[name]
    assert (as_tuple(spec.output), as_tuple(spec.grad_input), as_tuple(spec.grad_weight)) == (
        output,
        grad_input,
        grad_weight,
    )


def test_every_recipe_is_in_the_table_above_and_some_are_the_backends():
    table = test_recipes_are_those_of_the_table.pytestmark[0].args[1]
    assert [name for name, *_ in table] == list(RECIPES)
    assert all(key == spec.name for key, spec in RECIPES.items())
    shared = (*tuple(RECIPES)[:4], "tensorwise_pow2", "rowwise_native")
    assert shared == recipe.SHARED_RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_every_cast_of_a_recipe_has_its_policy(name):
    policies = {
        "delayed": "te_delayed",
        "mxfp8": "mx_rceil",
        "rowwise": "torchao_pow2",
        "rowwise_with_gw_hp": "torchao_pow2",
        "tensorwise_pow2": "torchao_pow2",
        "rowwise_native": "torchao_pow2",
    }
    policies |= {"nvfp4": "te_nvfp4", "mxfp4": "mx_rceil", "mxfp8_32x32": "mx_rceil"}
    policies |= {"blockwise_deepgemm": "deepgemm", "blockwise_ue8m0": "deepgemm_ue8m0"}
    casts = [
        cast
        for spec in RECIPES[name].gemms.values()
        for cast in (spec.a, spec.b)
        if cast is not None
    ]
    assert {cast.policy.name for cast in casts} == (
        {policies.get(name, "torchao")} if casts else set()
    )
    assert all((cast.delayed is not None) == (name == "delayed") for cast in casts)
    assert {cast.delayed for cast in casts if cast.delayed} == (
        {DELAYED["delayed"]} if name == "delayed" else set()
    )


def test_all_recipes_train_and_those_of_4_bits_are_emulated():
    assert not any(spec.simulated for spec in RECIPES.values())
    nvfp4 = RECIPES["nvfp4"]
    assert [cast.rounding for cast in nvfp4.casts] == [
        "nearest_even",
        "nearest_even",
        "stochastic",
        "nearest_even",
        "stochastic",
        "nearest_even",
    ]
    assert [cast.rotation for cast in nvfp4.casts] == [None] * 4 + [NVFP4_ROTATION] * 2
    assert nvfp4.stochastic
    assert not RECIPES["mxfp4"].stochastic
    assert [n for n, spec in RECIPES.items() if spec.emulated] == ["nvfp4", "mxfp4"]
    assert recipe.emulated_gemms({"a": "mxfp8", "b": "mxfp4"}) == [
        "b/output",
        "b/grad_input",
        "b/grad_weight",
    ]
    row = CastSpec(fmt=E4M3FN, granularity="rowwise", rounding="stochastic_8")
    mine = Recipe(name="mine", output=GemmSpec(a=row, b=CastSpec(fmt=E4M3FN), accumulate="fast"))
    assert mine.stochastic
    assert not mine.simulated
    assert not mine.shared
    rows = dataclasses.replace(nvfp4.output.a, policy=FP4_POLICIES["te_nvfp4_row"])
    assert rows.simulated  # backends have no scale of each row
    assert CastSpec(fmt=E4M3FN, policy=FP4_POLICIES["te_nvfp4"]).simulated


def test_codes_that_a_seed_or_a_rotation_changes_serve_no_second_gemm():  # L-3, S-23, S-24
    whole = RECIPES["tensorwise"].output.a
    for changed in ({"rounding": "stochastic"}, {"rotation": NVFP4_ROTATION}):
        cast = dataclasses.replace(whole, **changed)
        gemm = GemmSpec(a=cast, b=cast, accumulate="fast")
        assert not Recipe(name="mine", output=gemm, grad_weight=gemm).serves_both("input"), changed
    plain = GemmSpec(a=whole, b=whole, accumulate="fast")
    assert Recipe(name="mine", output=plain, grad_weight=plain).serves_both("input")


def test_a_recipe_under_simulation_is_refused_by_name_and_told_what_trains():
    cast = dataclasses.replace(RECIPES["nvfp4"].output.a, policy=FP4_POLICIES["te_nvfp4_row"])
    rows = Recipe(name="rows", output=GemmSpec(a=cast, b=cast, accumulate="fast"))
    with pytest.raises(
        ValueError,
        match=r"recipe 'rows' is for the simulator alone.*fp8ref.sim.linear.*one that trains: "
        r"bf16, tensorwise",
    ):
        recipe.check_trained(rows)
    with pytest.raises(ValueError, match=r"recipe is one of bf16, .*; got 'fp4'"):
        recipe.check_trained("fp4")
    assert recipe.check_trained("nvfp4") is RECIPES["nvfp4"]


def test_both_operands_of_a_gemm_are_rotated_alike():  # S-23
    rotated = CastSpec(fmt=E4M3FN, rotation=Rotation(signs=(1, -1)))
    for other in (
        CastSpec(fmt=E4M3FN),
        dataclasses.replace(rotated, rotation=Rotation(signs=(1, 1))),
    ):
        with pytest.raises(ValueError, match="both operands of a GEMM have one rotation"):
            GemmSpec(a=rotated, b=other, accumulate="fast")
    for signs in ((1,), (1, 1, 1), (1, 0)):
        with pytest.raises(ValueError, match="signs, each 1 or -1"):
            Rotation(signs=signs)
    with pytest.raises(ValueError, match="one of nearest_even, stochastic, stochastic_8; got 'up'"):
        CastSpec(fmt=E4M3FN, rounding="up")


def test_a_delayed_cast_is_tensorwise_and_by_its_own_policy():  # H-1
    config = DELAYED["delayed"]
    spec = CastSpec(fmt=E4M3FN, policy=config.policy, delayed=config)
    assert spec.delayed is config
    with pytest.raises(
        ValueError,
        match=r"tensorwise and uses its own policy \('te_delayed'\), without a rotation; got "
        r"'rowwise' and policy 'te_delayed'",
    ):
        dataclasses.replace(spec, granularity="rowwise")
    with pytest.raises(ValueError, match="got 'tensorwise' and policy 'torchao'"):
        CastSpec(fmt=E4M3FN, delayed=config)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes_are_those_of_torchao(name):
    from torchao.float8.config import Float8LinearConfig, ScalingType

    theirs = Float8LinearConfig.from_recipe_name(name)
    gemms = {
        "output": (theirs.gemm_config_output, theirs.cast_config_input, theirs.cast_config_weight),
        "grad_input": (
            theirs.gemm_config_grad_input,
            theirs.cast_config_grad_output,
            theirs.cast_config_weight_for_grad_input,
        ),
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
            assert (
                cast.scaling_granularity.value
                == {"tensorwise": "tensorwise", "rowwise": "axiswise"}[spec.granularity]
            )
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
    assert rounded == {
        ("rowwise", "grad_input"),
        ("rowwise", "grad_weight"),
        ("rowwise_with_gw_hp", "grad_input"),
    }


@pytest.mark.parametrize("gemm", ["output", "grad_input", "grad_weight"])
def test_operands_reduced_along_their_axes_give_the_result(gemm):  # L-2
    m, n, k = 3, 5, 7
    shapes = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}
    results = {"output": (m, n), "grad_input": (m, k), "grad_weight": (n, k)}
    a, b = (np.ones(shapes[role]) for role in recipe.OPERANDS[gemm])
    assert np.tensordot(a, b, axes=recipe.REDUCED_AXES[gemm]).shape == results[gemm]


def test_a_gemm_of_one_cast_is_in_high_precision():  # L-4
    cast = CastSpec(fmt=E4M3FN)
    for spec in (GemmSpec(a=cast), GemmSpec(b=cast)):
        assert (spec.fp8, spec.one_sided) == (False, True)
        assert Recipe(name="one", output=spec).fp8
    with pytest.raises(ValueError, match="accumulate of a high-precision GEMM"):
        GemmSpec(a=cast, accumulate="fast")
    with pytest.raises(ValueError, match="no epilogue"):
        GemmSpec(b=cast, epilogue="unit_round_scale_round")


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


@pytest.mark.parametrize("name", EPILOGUES)
def test_a_gemm_takes_the_epilogues_without_a_bias(name):  # G-4, G-5, G-14, G-15
    cast = CastSpec(fmt=E4M3FN)
    if EPILOGUES[name].bias is None:
        assert GemmSpec(a=cast, b=cast, accumulate="slow", epilogue=name).epilogue == name
    else:
        with pytest.raises(
            ValueError, match=f"have no bias; epilogue '{name}' has. Use 'scale_then_round'"
        ):
            GemmSpec(a=cast, b=cast, accumulate="slow", epilogue=name)


@pytest.mark.parametrize("name", ["unit_round_scale_round", "product_then_round"])
def test_a_high_precision_gemm_has_no_scales_to_apply(name):
    with pytest.raises(ValueError, match=f"no scales, so no epilogue '{name}'. Leave it out"):
        GemmSpec(epilogue=name)


@pytest.mark.parametrize("fmt", [E8M0FNU, FLOAT16], ids=str)
def test_an_operand_is_an_fp8_tensor_format(fmt):  # F-4
    with pytest.raises(ValueError, match=f"got '{fmt}'") as error:
        CastSpec(fmt=fmt)
    assert all(name in str(error.value) for name in FP8_FORMATS)


def test_an_operand_of_unknown_granularity_is_refused():
    with pytest.raises(ValueError, match="'axiswise'"):
        CastSpec(fmt=E4M3FN, granularity="axiswise")


@pytest.mark.parametrize(
    ("a", "b", "rowwise"),
    [
        ("rowwise", "rowwise", True),
        ("rowwise", "tensorwise", True),
        ("tensorwise", "rowwise", True),
        ("tensorwise", "tensorwise", False),
    ],
)
def test_one_rowwise_operand_makes_a_gemm_rowwise(a, b, rowwise):  # G-8
    spec = GemmSpec(
        a=CastSpec(fmt=E4M3FN, granularity=a),
        b=CastSpec(fmt=E5M2, granularity=b),
        accumulate="slow",
    )
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


def test_casts_that_saturate_or_have_other_scales_move_by_themselves():  # P-6
    row = RECIPES["rowwise"].grad_input.a
    assert row.pairs
    for other in (
        dataclasses.replace(row, policy=POLICIES["torchao"]),
        dataclasses.replace(row, policy=POLICIES["te_block"]),  # scale 1 of an infinite amax
        dataclasses.replace(row, policy=POLICIES["mx_floor"], granularity="mx_1x32"),
        dataclasses.replace(row, granularity="tensorwise"),
        dataclasses.replace(row, rounding="stochastic"),
    ):
        assert not other.pairs
    pairs = {name for name, recipe in RECIPES.items() if recipe.pairs_gradients}
    # rowwise_with_gw_hp has one cast; the others have no lines, or no powers of two
    assert pairs == {"rowwise", "rowwise_native"}


def test_each_recipe_has_a_line():
    lines = package_data.tables(front.__file__, "recipes")
    assert list(lines) == list(RECIPES)
    assert all(len(line) <= 80 for line in lines.values())
