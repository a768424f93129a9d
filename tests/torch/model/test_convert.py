import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from helpers.models.linears import model, run
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from fp8ref.crosscheck import bounds
from fp8ref.recipe import RECIPES
from fp8ref.selection import linears as linear_selection
from fp8ref.sim import linear as sim
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.torch import delayed
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.model import convert

fp8_recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])


@fp8_recipes
def test_convert_equals_torchao_used_directly(recipe):
    x, g = torch.randn(2, 24, 64).bfloat16(), torch.randn(2, 24, 48).bfloat16()
    ours = run(convert.convert(model(), recipe), x, g)
    theirs = run(
        convert_to_float8_training(model(), config=Float8LinearConfig.from_recipe_name(recipe)),
        x,
        g,
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Operators(TorchDispatchMode):
    """The operators that run, in their order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t is not torch.Tensor and t is not nn.Parameter for t in types):
            return NotImplemented  # a subclass unwraps itself, and what it then runs is seen
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@fp8_recipes
def test_the_same_operators_run_as_with_torchao_used_directly(recipe):
    x, g = torch.randn(2, 24, 64).bfloat16(), torch.randn(2, 24, 48).bfloat16()
    found = []
    for converted in (
        convert.convert(model(), recipe),
        convert_to_float8_training(model(), config=Float8LinearConfig.from_recipe_name(recipe)),
    ):
        with Operators() as seen:
            run(converted, x, g)
        found.append(seen.names)
    assert found[0] == found[1]
    assert found[0].count("aten._scaled_mm.default") == 2 * sum(
        spec.fp8 for spec in RECIPES[recipe].gemms.values()
    )


@fp8_recipes
def test_gemms_are_within_their_bound_of_the_simulator(recipe, rng):  # B-1, L-2, L-3
    x, w, g = (rng.integers(-7, 8, s).astype(np.float32) for s in ((48, 64), (32, 64), (48, 32)))
    module = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    module[0].weight.data = torch.from_numpy(w).bfloat16()
    y, grad_input, grad_weight = run(
        convert.convert(module, recipe),
        torch.from_numpy(x).bfloat16(),
        torch.from_numpy(g).bfloat16(),
    )
    expected = {"output": sim.forward(x, w, recipe)} | dict(
        zip(("grad_input", "grad_weight"), sim.backward(g, x, w, recipe), strict=True)
    )
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
        assert (
            np.abs(out - expected[which]) <= bounds.gemm(*q, spec, out, expected[which])
        ).all(), which


def test_bf16_converts_nothing():
    assert not any(isinstance(m, Float8Linear) for m in convert.convert(model(), "bf16").modules())


def test_parameters_are_kept():
    original = model()
    weight = original[0].weight
    converted = convert.convert(original, "tensorwise", filter_fqns=["2"])
    assert isinstance(converted[0], Float8Linear)
    assert type(converted[2]) is nn.Linear
    assert converted[0].weight is weight


@pytest.mark.parametrize(("recipe", "kind"), [("tensorwise", Float8Linear), ("delayed", Linear)])
def test_a_single_linear_is_replaced(recipe, kind):
    assert isinstance(convert.convert(nn.Linear(32, 16), recipe), kind)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_parameters_and_training_mode_are_kept(recipe):
    original = model().eval()
    original[2].train()
    parameters = list(original.parameters())
    converted = convert.convert(original, recipe)
    assert all(a is b for a, b in zip(parameters, converted.parameters(), strict=True))
    assert [converted[i].training for i in (0, 2)] == [False, True]


def test_a_refused_conversion_changes_nothing():
    built = changed(lambda m: m.register_forward_hook(print))()
    built = nn.Sequential(nn.Linear(16, 16), built)
    with pytest.raises(ValueError, match=r"1\.0 has forward hooks"):
        convert.convert(built, "tensorwise")
    assert type(built[0]) is nn.Linear


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Initialised(nn.Linear):
    """As torchtitan's: nn.Linear's forward, and methods of its own."""

    scale = None

    def init_states(self):
        nn.init.constant_(self.weight, self.scale)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_subclass_with_the_usual_forward_keeps_its_methods(recipe):
    built = nn.Sequential(Initialised(32, 16, bias=False), nn.Linear(16, 16))
    built[0].scale = 0.5
    usual = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 16))
    usual.load_state_dict(built.state_dict())
    x = torch.randn(16, 32)
    converted, expected = (convert.convert(m, recipe) for m in (built, usual))
    assert isinstance(converted[0], Initialised)
    assert isinstance(converted[0], type(expected[0]))
    assert torch.equal(converted(x), expected(x))
    copied, loaded = copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))
    assert torch.equal(loaded(x), expected(x))
    for made in (copied, loaded, converted, convert.deconvert(converted)):
        made[0].init_states()
        assert (made[0].weight == 0.5).all()
    assert [type(m) for m in converted] == [Initialised, nn.Linear]
    assert type(copied[0]) is type(loaded[0])
    assert isinstance(copied[0], type(expected[0]))


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
        (model, {"filter_fqns": ["lm_head"]}, "matches none of: 0, 2"),
        (model, {"filter_fqns": "0"}, r"list of patterns.*\['0'\]"),
        (
            model,
            {"filter_fqns": None},
            "filter_fqns is a list of patterns, each a string; got None",
        ),
        (
            model,
            {"fp8_fqns": [None]},
            r"fp8_fqns is a list of patterns, each a string; got \[None\]",
        ),
        (lambda: "model", {}, r"a model is an nn\.Module; got a str"),
        (lambda: model(k=40), {"fp8_fqns": ["0"]}, r"multiples of \[16, 16\]"),
        (lambda: nn.Sequential(Scaled(16, 16)), {}, "Scaled.*forward"),
        (lambda: convert.convert(model(), "tensorwise"), {}, "already FP8"),
        (lambda: convert.convert(model(), "delayed"), {}, "already FP8"),
        (shared, {}, "same module"),
        (changed(lambda m: m.register_forward_hook(print)), {}, "0 has forward hooks.*dropped"),
        (
            changed(lambda m: m.register_full_backward_hook(print)),
            {},
            "0 has backward hooks.*dropped",
        ),
        (
            changed(lambda m: m.register_state_dict_pre_hook(print)),
            {},
            "0 has state dict pre hooks.*dropped",
        ),
        (
            changed(lambda m: setattr(m, "forward", m.forward)),
            {},
            "0 is a Linear whose forward was replaced",
        ),
        (changed(lambda m: m.register_buffer("mask", torch.ones(16))), {}, "0 holds mask"),
        (
            changed(lambda m: nn.utils.parametrizations.weight_norm(m)),
            {},
            "0 has a parametrized weight, which would be lost",
        ),
        (changed(lambda m: m.double()), {}, "0 is torch.float64"),
        (lambda: torch.compile(model(), backend="eager"), {}, "the model is compiled"),
        (changed(lambda m: m.compile(backend="eager")), {}, "0 is compiled"),
    ],
)
def test_conversions_that_would_go_wrong_are_refused(build, options, message):
    with pytest.raises(ValueError, match=message):
        convert.convert(build(), "tensorwise", **options)


def test_dims_that_are_not_multiples_of_16_stay_in_high_precision():  # L-5, R-2
    converted = convert.convert(model(k=40), "tensorwise")
    assert [type(converted[i]).__name__ for i in (0, 2)] == ["Linear", "Float8Linear"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_auto_filter_is_torchaos(recipe):
    lengths = [n + d for n in (1024, 2048, 4096, 8192) for d in (-16, -8, 0, 16)]
    theirs = _auto_filter_for_recipe(recipe, [])
    shapes = {f"{n}_{k}": (n, k) for n, k in itertools.product(lengths, lengths)}
    for decision in linear_selection.select(shapes, recipe, filter_fqns=["auto_filter_small_kn"]):
        n, k = decision.shape
        assert decision.fp8 == theirs(nn.Linear(k, n, device="meta"), decision.path), decision


def test_small_linears_stay_as_they_are():
    converted = convert.convert(
        nn.Sequential(nn.Linear(16, 1040), nn.Linear(1040, 1024)),
        "delayed",
        filter_fqns=["auto_filter_small_kn"],
    )
    assert [type(m) for m in converted] == [Linear, nn.Linear]


ways = pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])


@ways
def test_the_way_back_gives_the_model_that_was_converted(recipe):
    original = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Sequential(nn.Linear(32, 48, bias=False))
    ).bfloat16()
    original[2].eval()
    expected, x = copy.deepcopy(original), torch.randn(4, 64).bfloat16()
    parameters = list(original.parameters())
    back = convert.deconvert(convert.convert(original, recipe))
    assert back is original
    assert repr(back) == repr(expected)
    assert all(a is b for a, b in zip(parameters, back.parameters(), strict=True))
    assert [m.training for m in back.modules()] == [m.training for m in expected.modules()]
    assert back.state_dict().keys() == expected.state_dict().keys()
    assert torch.equal(back(x), expected(x))
    assert isinstance(convert.convert(back, "rowwise")[0], Float8Linear)  # and another recipe


@ways
def test_a_single_linear_comes_back(recipe):
    original = nn.Linear(32, 16)
    back = convert.deconvert(convert.convert(original, recipe))
    assert type(back) is nn.Linear
    assert back.weight is original.weight
    assert back.bias is original.bias


def test_what_has_no_fp8_linear_is_left_alone():
    original = torch.compile(model(), backend="eager")
    assert convert.deconvert(original) is original


def test_a_layer_used_in_two_places_comes_back_as_one():
    converted = convert.convert(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), "delayed")
    converted.append(converted[0])
    back = convert.deconvert(converted)
    assert type(back[0]) is nn.Linear
    assert back[2] is back[0]


def gathering():
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    return convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=config)


def converted_and(change):
    """Two linears in FP8, the second one changed."""

    def build():
        built = convert.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "delayed")
        change(built[1])
        return built

    return build


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (converted_and(lambda m: m.register_forward_hook(print)), "1 has forward hooks.*Undo"),
        (
            converted_and(lambda m: setattr(m, "forward", m.forward)),
            "1 is a Linear whose forward was replaced",
        ),
        (
            converted_and(lambda m: m.register_buffer("mask", torch.ones(16))),
            "1 holds mask next to weight and bias",
        ),
        (
            converted_and(lambda m: m.compile(backend="eager")),
            r"1 is compiled.*before you compile it.*weights\(model\)",
        ),
        (
            converted_and(lambda m: nn.utils.parametrizations.weight_norm(m)),
            "1 has a parametrized weight, which would be lost",
        ),
        (gathering, "0 has a weight that is a WeightWithDynamicFloat8CastTensor.*before you shard"),
    ],
)
def test_ways_back_that_would_lose_something_are_refused(build, message):
    built = build()
    kinds = [type(m) for m in built]
    with pytest.raises(ValueError, match=message):
        convert.deconvert(built)
    assert [type(m) for m in built] == kinds


@pytest.mark.parametrize("function", [convert.deconvert, convert.weights])
def test_what_is_no_module_is_refused(function):
    with pytest.raises(ValueError, match=r"a model is an nn\.Module; got a dict"):
        function({})


@ways
def test_weights_are_the_state_dict_of_the_model_that_was_converted(recipe):
    original = model()
    expected = {key: value.clone() for key, value in original.state_dict().items()}
    converted = convert.convert(original, recipe)
    run(converted, torch.randn(4, 64).bfloat16(), torch.randn(4, 48).bfloat16())
    delayed.update(converted)
    found = convert.weights(converted)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert not any(value.requires_grad for value in found.values())
    assert convert.weights(torch.compile(converted, backend="eager")).keys() == {
        f"_orig_mod.{key}" for key in expected
    }


@pytest.mark.parametrize(
    ("recipe", "accelerator", "emulated"),
    [
        ("rowwise", "cuda", True),
        ("rowwise", None, False),
        ("tensorwise", "cuda", False),
        ("nvfp4", None, True),
    ],
)
# P-12
def test_compiled_casts_round_where_eager_ones_do(recipe, accelerator, emulated, monkeypatch):
    """A model on the meta device will lie on the accelerator, if there is one."""
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available: accelerator and torch.device(accelerator),
    )
    with torch._inductor.config.patch(emulate_precision_casts=False, inductor_choices_class=None):
        convert.convert(nn.Sequential(nn.Linear(32, 32, device="meta")), recipe)
        assert torch._inductor.config.emulate_precision_casts is emulated


def test_a_model_on_the_meta_device_multiplies_as_others_will(monkeypatch):  # G-7
    """It will lie on a CPU here, whose GEMM is torch's own then; a build of torch for CUDA names
    its accelerator also where there is none.
    """
    calls = []
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    monkeypatch.setattr(convert.gemm, "use_native_scaled_mm", lambda: calls.append("native"))
    convert.convert(nn.Sequential(nn.Linear(32, 32, device="meta")), "tensorwise")
    assert calls == ["native"]
