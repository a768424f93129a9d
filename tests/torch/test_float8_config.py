import dataclasses

import pytest
from torchao.float8 import Float8LinearConfig

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.torch import float8_config


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_config_is_torchaos_own(recipe):
    ours, theirs = float8_config.torchao_config(RECIPES[recipe]), Float8LinearConfig.from_recipe_name(recipe)
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        # a disabled cast has no granularity or format to speak of
        if not (getattr(a, "scaling_type", None) == getattr(b, "scaling_type", 0) and a.scaling_type.name == "DISABLED"):
            assert a == b, field.name


E4, E5 = CastSpec(fmt=E4M3FN), CastSpec(fmt=E5M2)
ROW = CastSpec(fmt=E4M3FN, granularity="rowwise")


def gemm(a, b=None, **options):
    return GemmSpec(a=a, b=b or a, **{"accumulate": "slow", **options})


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(name="mixed", output=gemm(E4), grad_weight=gemm(E4, E5)), "one format.*input"),
        (Recipe(name="mask", output=gemm(CastSpec(fmt=E4M3FN, policy=POLICIES["torchao_mask"]))), "mask"),
        (Recipe(name="pow2", output=gemm(E4, CastSpec(fmt=E4M3FN, policy=POLICIES["torchao_pow2"]))), "same for every cast"),
        (Recipe(name="eps", output=gemm(CastSpec(fmt=E4M3FN, policy=ScalePolicy(name="e", eps=1e-9)))), "eps"),
        (Recipe(name="block", output=gemm(CastSpec(fmt=E4M3FN, granularity="blockwise_1x128"))), "blockwise_1x128"),
        (Recipe(name="epilogue", output=gemm(ROW)), "unit_round_scale_round"),
    ],
)
def test_what_torchao_cannot_express_is_refused_by_name(recipe, message):
    with pytest.raises(ValueError, match=f"recipe '{recipe.name}'.*{message}"):
        float8_config.torchao_config(recipe)
    assert not float8_config.expresses(recipe)
