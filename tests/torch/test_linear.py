import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from fp8ref.check import bounds
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.sim import linear as sim
from fp8ref.sim import scaling as sim_scaling
from fp8ref.torch import linear

fp8_recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])


def model(k=64, n=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, n, bias=False), nn.ReLU(), nn.Linear(n, 48, bias=False)).bfloat16()


def run(module, x, g):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(g)
    return [y.detach(), x.grad, *[p.grad for p in module.parameters()]]


@fp8_recipes
def test_convert_equals_torchao_used_directly(recipe):
    x, g = torch.randn(2, 24, 64).bfloat16(), torch.randn(2, 24, 48).bfloat16()
    ours = run(linear.convert(model(), recipe), x, g)
    theirs = run(convert_to_float8_training(model(), config=Float8LinearConfig.from_recipe_name(recipe)), x, g)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@fp8_recipes
def test_the_config_is_torchaos_own(recipe):
    ours, theirs = linear.torchao_config(RECIPES[recipe]), Float8LinearConfig.from_recipe_name(recipe)
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        # a disabled cast has no granularity or format to speak of
        if not (getattr(a, "scaling_type", None) == getattr(b, "scaling_type", 0) and a.scaling_type.name == "DISABLED"):
            assert a == b, field.name


@fp8_recipes
def test_gemms_are_within_their_bound_of_the_simulator(recipe, rng):  # B-1, L-2, L-3
    x, w, g = (rng.integers(-7, 8, s).astype(np.float32) for s in ((48, 64), (32, 64), (48, 32)))
    module = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    module[0].weight.data = torch.from_numpy(w).bfloat16()
    y, grad_input, grad_weight = run(linear.convert(module, recipe), torch.from_numpy(x).bfloat16(), torch.from_numpy(g).bfloat16())
    expected = {"output": sim.forward(x, w, recipe)} | dict(zip(("grad_input", "grad_weight"), sim.backward(g, x, w, recipe), strict=True))
    found = {"output": y, "grad_input": grad_input, "grad_weight": grad_weight}
    hp = {"output": (x, w), "grad_input": (g, w.T), "grad_weight": (g.T, x.T)}
    for which, spec in RECIPES[recipe].gemms.items():
        out = found[which].float().numpy()
        if not spec.fp8:
            np.testing.assert_array_equal(out, expected[which])  # integers: exact in any order
            continue
        q = [
            sim_scaling.quantize(v, c.fmt, granularity=c.granularity, policy=c.policy)
            for v, c in zip(hp[which], (spec.a, spec.b), strict=True)
        ]
        assert (np.abs(out - expected[which]) <= bounds.gemm(*q, spec, out, expected[which])).all(), which


def test_bf16_converts_nothing():
    assert not any(isinstance(m, Float8Linear) for m in linear.convert(model(), "bf16").modules())


def test_parameters_are_kept():
    original = model()
    weight = original[0].weight
    converted = linear.convert(original, "tensorwise", filter_fqns=["2"])
    assert isinstance(converted[0], Float8Linear)
    assert type(converted[2]) is nn.Linear
    assert converted[0].weight is weight


def test_a_single_linear_is_replaced():
    assert isinstance(linear.convert(nn.Linear(32, 16), "tensorwise"), Float8Linear)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def shared():
    layer = nn.Linear(16, 16)
    return nn.Sequential(layer, layer)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: nn.Sequential(nn.ReLU()), {}, "converts no linear"),
        (model, {"filter_fqns": ["0", "2"]}, "converts no linear.*filter_fqns"),
        (model, {"filter_fqns": ["lm_head"]}, "names none of: 0, 2"),
        (model, {"filter_fqns": "0"}, r"list of patterns.*\['0'\]"),
        (lambda: model(k=40), {"fp8_fqns": ["0"]}, "multiples of 16"),
        (lambda: nn.Sequential(Scaled(16, 16)), {}, "Scaled.*forward"),
        (lambda: linear.convert(model(), "tensorwise"), {}, "already FP8"),
        (shared, {}, "same module"),
    ],
)
def test_conversions_that_would_go_wrong_are_refused(build, options, message):
    with pytest.raises(ValueError, match=message):
        linear.convert(build(), "tensorwise", **options)


def test_dims_that_are_not_multiples_of_16_stay_in_high_precision():  # L-5, R-2
    converted = linear.convert(model(k=40), "tensorwise")
    assert [type(converted[i]).__name__ for i in (0, 2)] == ["Linear", "Float8Linear"]


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
        linear.convert(model(), recipe)


@fp8_recipes
def test_observing_reports_operands_in_their_own_layout(recipe):
    converted, seen = linear.convert(model(), recipe), {}
    x, g = torch.randn(2, 24, 64).bfloat16(), torch.randn(2, 24, 48).bfloat16()
    plain = run(linear.convert(model(), recipe), x, g)
    with linear.observing(converted, lambda name, which, a, b, out: seen.__setitem__((name, which), (a, b, out))):
        watched = run(converted, x, g)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert set(seen) == {(name, which) for name in "02" for which, spec in RECIPES[recipe].gemms.items() if spec.fp8}
    shapes = {"input": (48, 64), "weight": (32, 64), "grad_output": (48, 32)}
    for which, roles in linear.OPERANDS.items():
        if ("0", which) in seen:
            for role, (hp, codes, scale) in zip(roles, seen["0", which][:2], strict=True):
                assert hp.shape == codes.shape == shapes[role]
                assert scale.ndim == 0 or (scale * hp).shape == hp.shape
    assert torch.equal(seen["2", "output"][2].reshape(2, 24, 48), watched[0])
