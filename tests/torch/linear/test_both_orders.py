"""A linear whose operands kernels cast once for both GEMMs has the bits of one that casts for
each."""

import pytest
import torch
from helpers.kernels.launches import of_linear
from helpers.kernels.linears import steps

pytest.importorskip("triton")

from fp8ref.formats import E4M3FN
from fp8ref.policy import POLICIES
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.torch.gemm import gemm
from fp8ref.torch.kernels import casts
from fp8ref.torch.linear import both_orders
from fp8ref.torch.linear.both_orders import Use
from fp8ref.torch.linear.spec import casts_by_kernels
from fp8ref.torch.quantize import scaling

POWERS = CastSpec(fmt=E4M3FN, policy=POLICIES["torchao_pow2"])
_GEMM = GemmSpec(a=POWERS, b=POWERS, accumulate="slow")
IN_POWERS = Recipe(name="in powers", output=_GEMM, grad_input=_GEMM, grad_weight=_GEMM)

CAST = ["tensorwise", "delayed", "rowwise", "blockwise", "tensorwise_pow2", IN_POWERS]
"""Recipes of which kernels cast every operand."""


@pytest.mark.parametrize(
    "recipe", [*CAST, "rowwise_with_gw_hp"], ids=lambda recipe: getattr(recipe, "name", recipe)
)
def test_steps_have_the_bits_of_plain_operations(recipe):
    plain, by_kernels = steps(recipe, "plain"), steps(recipe, "triton")
    assert all(torch.equal(a, b) for a, b in zip(plain, by_kernels, strict=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "tensorwise_pow2"])
def test_compiled_steps_have_the_bits_of_plain_operations(recipe):
    plain, by_kernels = steps(recipe, "plain"), steps(recipe, "triton", compiles=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, by_kernels, strict=True))


LAUNCHES = {
    "tensorwise": (46, 9, 7),
    "tensorwise_pow2": (55, 11, 8),
    "delayed": (73, 12, 10),
    "rowwise": (100, 11, 9),
    "rowwise_native": (96, 9, 7),
    "blockwise": (89, 12, 11),
}
"""{recipe: launches of a linear by plain operations, by kernels, by kernels that cast its weight
before}."""


@pytest.mark.parametrize("recipe", LAUNCHES)
def test_a_linear_launches_at_most_twelve(recipe):
    assert max(LAUNCHES[recipe][1:]) <= 12
    plain, by_kernels = (len(of_linear(recipe, kernels)) for kernels in ("plain", "triton"))
    kept = len(of_linear(recipe, "triton", keeps=True))
    assert (plain, by_kernels, kept) == LAUNCHES[recipe]


def test_which_recipes_kernels_cast():
    named = {name for name, recipe in RECIPES.items() if casts_by_kernels(recipe)}
    assert named >= {"tensorwise", "delayed", "rowwise", "blockwise"}
    assert not named & {"bf16", "rowwise_with_gw_hp", "mxfp8", "blockwise_deepgemm"}


def test_delayed_scaling_reads_a_tensor_once(monkeypatch):
    monkeypatch.setattr(scaling, "amax", None)
    monkeypatch.setattr(casts, "amax", None)
    steps("delayed", "triton")


def test_gemms_take_transposed_codes_as_they_are():
    """A GEMM along the first axis reads ``transposed``, and copies nothing."""
    x = torch.randn(48, 32).bfloat16()
    use = Use(CastSpec(fmt=E4M3FN), -1, None, False)
    pair = both_orders.quantize(x, (use, use._replace(axis=-2)))
    assert gemm._codes(pair.columns) is pair.columns.transposed
    assert gemm._codes(pair.rows._replace(axis=-2)) is pair.rows.transposed
    assert gemm._codes(pair.columns).is_contiguous()


def test_errors_are_those_of_plain_casts():
    spec = CastSpec(fmt=E4M3FN, granularity="blockwise_1x128")
    uses = Use(spec, -1, None, False), Use(spec, -2, None, True)
    with pytest.raises(ValueError, match="needs K, the reduced axis, divisible by 128"):
        both_orders.quantize(torch.randn(8, 100), uses)
    with pytest.raises(ValueError, match="casts take float32"):
        both_orders.quantize(torch.randn(8, 128).double(), uses)
