import pytest
import torch
from linears import run
from torch import nn
from torchao.float8 import Float8LinearConfig, float8_linear

from fp8ref.torch import convert
from fp8ref.torch.torchao_linear import Float8Linear

recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])


def converted(recipe):
    torch.manual_seed(0)
    return convert.convert(nn.Sequential(nn.Linear(64, 32)).bfloat16(), recipe)


def test_it_is_torchaos_with_a_name():
    model = convert.convert(nn.ModuleDict({"a": nn.Sequential(nn.Linear(64, 32))}), "tensorwise")
    assert type(model["a"][0]) is Float8Linear
    assert isinstance(model["a"][0], float8_linear.Float8Linear)
    assert model["a"][0].fqn == "a.0"
    assert Float8Linear.from_float(nn.Linear(64, 32), Float8LinearConfig())(torch.ones(4, 64)).shape == (4, 32)


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
    assert all(torch.equal(a, b) for a, b in zip(run(converted(recipe), x, g), expected, strict=True))


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


def test_no_rows_pass_where_torchao_takes_none():
    model = converted("rowwise_with_gw_hp")
    x = torch.ones(0, 64, dtype=torch.bfloat16)
    assert model(x).shape == (0, 32)
