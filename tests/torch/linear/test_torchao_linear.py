import copy
import dataclasses

import pytest
import torch
from helpers.models.linears import run
from torch import nn
from torchao.float8 import Float8LinearConfig, float8_linear, float8_ops

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.torch import delayed
from fp8ref.torch.linear import torchao_linear
from fp8ref.torch.linear.torchao_linear import Float8Linear
from fp8ref.torch.model import convert
from fp8ref.torch.quantize import float_values

recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])


def converted(recipe):
    torch.manual_seed(0)
    return convert.convert(nn.Sequential(nn.Linear(64, 32)).bfloat16(), recipe)


def test_it_is_torchaos_with_a_name():
    model = convert.convert(nn.ModuleDict({"a": nn.Sequential(nn.Linear(64, 32))}), "tensorwise")
    assert type(model["a"][0]) is Float8Linear
    assert isinstance(model["a"][0], float8_linear.Float8Linear)
    assert model["a"][0].fqn == "a.0"
    assert Float8Linear.from_float(nn.Linear(64, 32), Float8LinearConfig())(
        torch.ones(4, 64)
    ).shape == (4, 32)


@recipes
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x.unflatten(0, (2, 2)).permute(2, 0, 1, 3),
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(3, -1, -1),
    ],
)
def test_any_layout_of_input_and_gradient_is_taken(recipe, view):
    x, g = torch.randn(4, 6, 64).bfloat16(), view(torch.randn(4, 6, 32).bfloat16())
    found = []
    for laid_out in (lambda t: t, torch.Tensor.contiguous):
        model, leaf = converted(recipe), x.clone().requires_grad_()
        y = model(laid_out(view(leaf)))
        y.backward(laid_out(g))
        found.append([y, leaf.grad, *(p.grad for p in model.parameters())])
    assert not g.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@recipes
def test_a_matrix_is_taken_transposed(recipe):
    x, g = torch.randn(64, 16).bfloat16().t(), torch.randn(32, 16).bfloat16().t()
    expected = run(converted(recipe), x.contiguous(), g.contiguous())
    assert all(
        torch.equal(a, b) for a, b in zip(run(converted(recipe), x, g), expected, strict=True)
    )


@recipes
def test_inference_mode_gives_what_training_gives(recipe):
    model, x = converted(recipe), torch.randn(2, 8, 64).bfloat16()
    with torch.inference_mode():
        inside = [model(x), model(x.clone()), model(x[0])]
    assert torch.equal(inside[0], model(x))
    assert torch.equal(inside[1], model(x))
    assert torch.equal(inside[2], model(x[0]))
    assert not inside[0].requires_grad


@recipes
def test_compiled_in_inference_mode_it_is_itself(recipe):
    torch._dynamo.reset()
    model, x = converted(recipe), torch.randn(2, 8, 64).bfloat16()
    with torch.inference_mode():
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_config_is_torchaos_own(recipe):
    ours, theirs = (
        torchao_linear.torchao_config(RECIPES[recipe]),
        Float8LinearConfig.from_recipe_name(recipe),
    )
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        # a disabled cast has no granularity or format to speak of
        if not (
            getattr(a, "scaling_type", None) == getattr(b, "scaling_type", 0)
            and a.scaling_type.name == "DISABLED"
        ):
            assert a == b, field.name


E4, E5 = CastSpec(fmt=E4M3FN), CastSpec(fmt=E5M2)
ROW = CastSpec(fmt=E4M3FN, granularity="rowwise")


def gemm(a, b=None, **options):
    return GemmSpec(a=a, b=b or a, **{"accumulate": "slow", **options})


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(name="mixed", output=gemm(E4), grad_weight=gemm(E4, E5)), "one format.*input"),
        (
            Recipe(name="mask", output=gemm(CastSpec(fmt=E4M3FN, policy=POLICIES["torchao_mask"]))),
            "mask",
        ),
        (
            Recipe(
                name="pow2", output=gemm(E4, CastSpec(fmt=E4M3FN, policy=POLICIES["torchao_pow2"]))
            ),
            "in every cast",
        ),
        (
            Recipe(
                name="eps",
                output=gemm(CastSpec(fmt=E4M3FN, policy=ScalePolicy(name="e", eps=1e-9))),
            ),
            "eps",
        ),
        (
            Recipe(name="block", output=gemm(CastSpec(fmt=E4M3FN, granularity="blockwise_1x128"))),
            "blockwise_1x128",
        ),
        (Recipe(name="epilogue", output=gemm(ROW)), "unit_round_scale_round"),
    ],
)
def test_what_torchao_cannot_express_is_refused_by_name(recipe, message):
    with pytest.raises(ValueError, match=f"recipe '{recipe.name}'.*{message}"):
        torchao_linear.torchao_config(recipe)
    assert not torchao_linear.expresses(recipe)


@recipes
@pytest.mark.parametrize("compiled", [False, True])
# L-5
def test_rows_are_padded_for_kernels_that_take_multiples_of_16(recipe, compiled, monkeypatch):
    """As if this CPU were a GPU; of integers, so that every order of a sum gives the same bits."""
    torch.manual_seed(0)
    x, g = (torch.randint(-3, 4, (17, size)).bfloat16() for size in (64, 32))
    plain = run(converted(recipe), x, g)
    monkeypatch.setattr(torchao_linear, "KERNELS_TAKE_ANY_M", ())
    pad, shapes = float8_ops.pad_tensor_for_matmul, []
    monkeypatch.setattr(
        float8_ops,
        "pad_tensor_for_matmul",
        lambda x, dims: shapes.append((tuple(x.shape), dims)) or pad(x, dims),
    )
    model = converted(recipe)
    padded = run(
        torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
        if compiled
        else model,
        x,
        g,
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, padded, strict=True))
    # of grad_weight alone
    assert set(shapes) == (
        set() if recipe == "rowwise_with_gw_hp" else {((32, 17), 1), ((17, 64), 0)}
    )


def test_rows_that_need_no_padding_are_not_copied(monkeypatch):  # L-5
    monkeypatch.setattr(torchao_linear, "KERNELS_TAKE_ANY_M", ())
    monkeypatch.setattr(float8_ops, "pad_tensor_for_matmul", None)
    run(converted("tensorwise"), torch.ones(32, 64).bfloat16(), torch.ones(32, 32).bfloat16())


def test_export_is_refused_by_name_and_runs_elsewhere():
    model, x = converted("tensorwise").eval(), torch.randn(4, 64).bfloat16()
    with pytest.raises(
        ValueError,
        match=r"torch\.export does not trace .* in linear 0, recipe 'tensorwise'\. Export the deconverted",
    ):
        torch.export.export(model, (x,), strict=False)
    delayed_model = convert.convert(nn.Sequential(nn.Linear(64, 32)).bfloat16().eval(), "delayed")
    delayed.calibrate(delayed_model, [x])
    for other in (convert.deconvert(model), delayed_model):
        with torch.no_grad():
            assert torch.equal(torch.export.export(other, (x,), strict=False).module()(x), other(x))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_casts_in_pieces_are_torchaos(monkeypatch, recipe):
    """Outputs and gradients of a linear whose tensors are larger than a piece."""
    monkeypatch.setattr(float_values, "_PIECE", 1000)
    pieces = []
    in_pieces = float_values.in_pieces
    monkeypatch.setattr(
        float_values, "in_pieces", lambda *a, **k: pieces.append(1) or in_pieces(*a, **k)
    )
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, bias=False).bfloat16()
    theirs = float8_linear.Float8Linear.from_float(
        copy.deepcopy(linear), Float8LinearConfig.from_recipe_name(recipe)
    )
    ours = convert.convert(nn.Sequential(linear), recipe)[0]
    x, grad_output = torch.randn(80, 64).bfloat16(), torch.randn(80, 96).bfloat16()
    results = []
    for module in (theirs, ours):
        hp = x.clone().requires_grad_()
        output = module(hp)
        output.backward(grad_output)
        results.append((output, hp.grad, module.weight.grad))
    assert len(pieces) > 6
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gradients_are_not_differentiated_again(recipe):  # L-8
    model = convert.convert(nn.Sequential(nn.Linear(64, 64)), recipe)
    x = torch.randn(32, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(AssertionError, match="both Float8TrainingTensor for mm inputs"):
        torch.autograd.grad(gradient.square().sum() + x.sum(), x)
