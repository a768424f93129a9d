import numpy as np
import pytest
import torch
from linears import model, run
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from fp8ref.check import bounds
from fp8ref.recipe import RECIPES
from fp8ref.sim import linear as sim
from fp8ref.sim import scaling as sim_scaling
from fp8ref.torch import linear

fp8_recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])


@fp8_recipes
def test_convert_equals_torchao_used_directly(recipe):
    x, g = torch.randn(2, 24, 64).bfloat16(), torch.randn(2, 24, 48).bfloat16()
    ours = run(linear.convert(model(), recipe), x, g)
    theirs = run(convert_to_float8_training(model(), config=Float8LinearConfig.from_recipe_name(recipe)), x, g)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


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


@pytest.mark.parametrize(("recipe", "kind"), [("tensorwise", Float8Linear), ("delayed", linear.Linear)])
def test_a_single_linear_is_replaced(recipe, kind):
    assert isinstance(linear.convert(nn.Linear(32, 16), recipe), kind)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_parameters_and_training_mode_are_kept(recipe):
    original = model().eval()
    original[2].train()
    parameters = list(original.parameters())
    converted = linear.convert(original, recipe)
    assert all(a is b for a, b in zip(parameters, converted.parameters(), strict=True))
    assert [converted[i].training for i in (0, 2)] == [False, True]


def test_a_refused_conversion_changes_nothing():
    built = changed(lambda m: m.register_forward_hook(print))()
    built = nn.Sequential(nn.Linear(16, 16), built)
    with pytest.raises(ValueError, match=r"1\.0 has forward hooks"):
        linear.convert(built, "tensorwise")
    assert type(built[0]) is nn.Linear


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def shared():
    layer = nn.Linear(16, 16)
    return nn.Sequential(layer, layer)


def changed(change):
    """A model whose first linear was changed."""

    def build():
        layer = nn.Linear(16, 16)
        change(layer)
        return nn.Sequential(layer, nn.Linear(16, 16))

    return build


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: nn.Sequential(nn.ReLU()), {}, "converts no linear"),
        (model, {"filter_fqns": ["0", "2"]}, "converts no linear.*filter_fqns"),
        (model, {"filter_fqns": ["lm_head"]}, "names none of: 0, 2"),
        (model, {"filter_fqns": "0"}, r"list of patterns.*\['0'\]"),
        (lambda: model(k=40), {"fp8_fqns": ["0"]}, r"multiples of \[16, 16\]"),
        (lambda: nn.Sequential(Scaled(16, 16)), {}, "Scaled.*forward"),
        (lambda: linear.convert(model(), "tensorwise"), {}, "already FP8"),
        (lambda: linear.convert(model(), "delayed"), {}, "already FP8"),
        (shared, {}, "same module"),
        (changed(lambda m: m.register_forward_hook(print)), {}, "0 has forward hooks.*dropped"),
        (changed(lambda m: m.register_full_backward_hook(print)), {}, "0 has backward hooks.*dropped"),
        (changed(lambda m: m.register_state_dict_pre_hook(print)), {}, "0 has state dict pre hooks.*dropped"),
        (changed(lambda m: setattr(m, "forward", m.forward)), {}, "0 is an nn.Linear whose forward was replaced"),
        (changed(lambda m: m.register_buffer("mask", torch.ones(16))), {}, "0 holds mask"),
        (changed(lambda m: nn.utils.parametrizations.weight_norm(m)), {}, "0 is a ParametrizedLinear"),
        (changed(lambda m: m.double()), {}, "0 has a weight of torch.float64"),
        (lambda: torch.compile(model(), backend="eager"), {}, "the model is compiled"),
        (changed(lambda m: m.compile(backend="eager")), {}, "0 is compiled"),
    ],
)
def test_conversions_that_would_go_wrong_are_refused(build, options, message):
    with pytest.raises(ValueError, match=message):
        linear.convert(build(), "tensorwise", **options)


def test_dims_that_are_not_multiples_of_16_stay_in_high_precision():  # L-5, R-2
    converted = linear.convert(model(k=40), "tensorwise")
    assert [type(converted[i]).__name__ for i in (0, 2)] == ["Linear", "Float8Linear"]
