"""Linears that read one input in an eager pass share one cast of it."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

pytest.importorskip("triton")

from fp8ref.torch import delayed
from fp8ref.torch.delayed import shared_inputs
from fp8ref.torch.linear import both_orders, recent_cast
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.model import checkpointing
from fp8ref.torch.quantize import scaling


def linear(recipe: str = "tensorwise", seed: int = 0, kernels: str = "triton") -> Linear:
    torch.manual_seed(seed)
    return Linear.of(nn.Linear(64, 48, dtype=torch.bfloat16), recipe, kernels=kernels)


@pytest.fixture
def shapes(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the tensors that are cast."""
    found: list[tuple[int, ...]] = []
    quantize = both_orders.quantize

    def counted(x, *rest, **options):
        found.append(tuple(x.shape))
        return quantize(x, *rest, **options)

    monkeypatch.setattr(both_orders, "quantize", counted)
    return found


def x() -> torch.Tensor:
    """A leaf."""
    return torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2)).bfloat16()


def hidden() -> torch.Tensor:
    """What another layer made."""
    return x().requires_grad_().clone()


def inputs(shapes: list[tuple[int, ...]]) -> int:
    return shapes.count((32, 64))


def test_the_input_is_cast_once_with_the_same_bits(shapes):
    q, k, h = linear(), linear(seed=1), hidden()
    outputs = q(h), k(h)
    assert inputs(shapes) == 1
    plain = [linear(seed=seed, kernels="plain")(h) for seed in (0, 1)]
    assert all(map(torch.equal, outputs, plain))


def test_a_changed_input_is_cast_again(shapes):
    q, k, h = linear(), linear(seed=1), hidden()
    q(h)
    h.mul_(2)
    assert torch.equal(k(h), linear(seed=1, kernels="plain")(h))
    assert inputs(shapes) == 2


def test_another_tensor_or_recipe_is_cast_by_itself(shapes):
    h = hidden()
    linear()(h)
    linear()(h.clone())
    linear("rowwise")(h)
    assert inputs(shapes) == 3


def test_delayed_states_share_a_cast_only_with_one_scale(shapes):
    layers, h = nn.ModuleDict({"q": linear("delayed"), "k": linear("delayed", 1)}), hidden()
    for layer in layers.values():
        layer(h)
    assert inputs(shapes) == 2
    shared_inputs.share(layers, {"k": "q"})
    delayed.forget(layers)
    h = h.clone()
    for layer in layers.values():
        layer(h)
    assert inputs(shapes) == 3
    seen = layers["q"].states["input"].seen.clone()
    delayed.forget(layers)
    layers["k"](h)  # the cast of before, observed again
    assert inputs(shapes) == 3
    assert torch.equal(layers["q"].states["input"].seen, seen)
    delayed.update(layers)  # another scale
    layers["k"](h)
    assert inputs(shapes) == 4


def test_nothing_outlives_the_input():
    h = hidden()
    linear()(h)
    assert recent_cast._recent.entry is not None
    del h
    assert recent_cast._recent.entry is None


def test_a_buffer_that_others_may_fill_is_cast_by_each_linear(shapes):
    """A collective, or NumPy, counts no change of it."""
    q, k, h = linear(), linear(seed=1), x().float()
    q, k = q.float(), k.float()
    q(h)
    h.numpy()[:] = 2
    assert torch.equal(k(h), linear(seed=1, kernels="plain").float()(h))
    assert inputs(shapes) == 2


def test_a_cast_of_inference_serves_no_training():
    q, h = linear(), hidden()
    with torch.inference_mode():
        q(h)
    q(h).sum().backward()
    assert q.weight.grad is not None


def test_ranks_merge_amaxes_once_for_each_linear(shapes, monkeypatch):
    """One without tokens has no cast to reuse."""
    monkeypatch.setattr(scaling, "merge_amax", lambda amax, group: amax)
    h = hidden()
    for _ in "qk":
        layer = nn.Linear(64, 48, dtype=torch.bfloat16)
        Linear.of(layer, "tensorwise", group="ranks", kernels="triton")(h)
    assert inputs(shapes) == 2


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_selective_checkpointing_has_the_bits_of_plain_operations(recipe):
    results = []
    for kernels in ("plain", "triton"):
        layers = nn.ModuleList([linear(recipe, seed, kernels) for seed in (0, 1)])
        context_fn = functools.partial(create_selective_checkpoint_contexts, checkpointing.policy())

        def block(h, layers=layers):
            return layers[0](h) * layers[1](h)

        h = x().requires_grad_()
        checkpoint(block, h, use_reentrant=False, context_fn=context_fn).sum().backward()
        results.append([h.grad, *(p.grad for p in layers.parameters())])
    assert all(map(torch.equal, *results))
