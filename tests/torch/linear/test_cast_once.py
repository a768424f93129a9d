"""Weights that are cast once for the passes of a step, and never used once they have changed."""

import itertools
from contextlib import ExitStack

import pytest
import torch
from helpers.kernels.launches import counted
from helpers.kernels.linears import steps
from torch import nn

pytest.importorskip("triton")

from fp8ref.torch import delayed
from fp8ref.torch.linear.cast_once import cast_once
from fp8ref.torch.linear.linear import Linear

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def model(recipe: str = "tensorwise", kernels: str = "triton") -> nn.Sequential:
    return nn.Sequential(
        Linear.of(nn.Linear(64, 48, dtype=torch.bfloat16), recipe, kernels=kernels)
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_microbatches_have_the_bits_of_weights_cast_by_each(recipe):
    plain, kept = steps(recipe, "plain"), steps(recipe, "triton", keeps=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


def test_compiled_microbatches_take_codes_as_inputs():
    plain, kept = steps("delayed", "plain"), steps("delayed", "triton", keeps=True, compiles=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


def listed(names) -> list[str]:
    """The launches that cast lists of weights."""
    return [name for name in names if name.endswith("_list")]


def test_the_weight_is_cast_once():
    layers = model()
    with counted() as names:
        with cast_once(layers):
            for _ in range(3):
                layers(X)
        inside = len(names)
        layers(X)
    # an amax and a cast of the weight, and then of three inputs
    assert listed(names[:2]) == names[:2] == ["_amax_list", "_cast_list"]
    assert listed(names[2:]) == []
    assert sum(name == "_cast_by_amax" for name in names[:inside]) == 3
    assert sum(name == "_cast_by_amax" for name in names[inside:]) == 2


@pytest.mark.parametrize(
    ("recipe", "launches"),
    [
        ("tensorwise", ["_amax_list", "_cast_list"]),
        ("tensorwise_pow2", ["_cast_list", "_cast_list"]),
        ("delayed", ["_cast_list"]),
    ],
)
def test_all_weights_of_a_model_are_cast_by_the_launches_of_one(recipe, launches):
    widths = (64, 48, 112, 80, 64)
    layers = nn.Sequential(
        *(
            Linear.of(nn.Linear(k, n, dtype=torch.bfloat16), recipe, kernels="triton")
            for k, n in itertools.pairwise(widths)
        )
    )
    with counted() as names, cast_once(layers):
        kernels = [name for name in names if not name.startswith("aten::")]
        assert kernels == launches
        plain = {"aten::_foreach_copy_"} if recipe == "tensorwise_pow2" else set()
        assert {name for name in names if name.startswith("aten::")} <= plain
    alone = [Linear.of(layer, recipe, kernels="triton") for layer in layers]
    for layer, one in zip(layers, alone, strict=True):
        with cast_once(layers), cast_once(one):
            for x, y in zip(layer.kept.tensors[:-1], one.kept.tensors[:-1], strict=True):
                assert torch.equal(x.float(), y.float())


@torch._dynamo.config.patch(error_on_recompile=True)
def test_steps_recompile_nothing():
    torch._dynamo.reset()
    layers = model()
    run = torch.compile(layers, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with cast_once(layers):
            run(X)
            run(X).sum().backward()


def double(layers: nn.Sequential) -> None:
    with torch.no_grad():
        layers[0].weight.mul_(2)


def test_a_changed_weight_is_refused_by_the_next_pass():
    layers, context = model(), ExitStack()
    context.enter_context(cast_once(layers))
    double(layers)
    with pytest.raises(ValueError, match="Leave the context"):
        layers(X)
    with pytest.raises(ValueError, match="Leave the context"):
        context.close()


def test_a_changed_weight_of_compiled_graphs_is_refused_at_the_end():
    layers = model()
    with pytest.raises(ValueError, match="Leave the context"), cast_once(layers):
        double(layers)
    assert layers[0].kept is None


def test_a_changed_delayed_scale_is_refused():
    layers = model("delayed")
    layers(X).sum().backward()
    with pytest.raises(ValueError, match="or its scale, has changed"), cast_once(layers):
        delayed.update(layers)


def test_a_replaced_weight_is_cast_by_the_pass():
    layers, other = model(), model()
    with cast_once(layers):
        layers[0].weight = other[0].weight
        layers[0].bias = other[0].bias
        assert torch.equal(layers(X), other(X))


def test_plain_operations_keep_nothing():
    layers = model(kernels="plain")
    with cast_once(layers):
        assert layers[0].kept is None


def test_compiled_passes_by_another_weight_take_no_codes_of_the_first():
    layers, other = model(), model()
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    with cast_once(layers):
        compiled(X)
        layers[0].weight, layers[0].bias = other[0].weight, other[0].bias
        assert torch.equal(compiled(X), other(X))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_weight_without_elements_is_refused(recipe):  # S-7
    empty = Linear.of(nn.Linear(16, 16, dtype=torch.bfloat16), recipe, kernels="triton")
    empty.weight = nn.Parameter(empty.weight[:0])
    with pytest.raises(ValueError, match="at least one element"), cast_once(empty):
        pass
