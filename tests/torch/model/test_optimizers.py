"""Optimizers of converted models: torch's and torchao's, built before or after the conversion, with
gradients accumulated.
"""

import io
import itertools

import pytest
import torch
from helpers.models.linears import model
from torch import nn
from torchao.optim import AdamWFp8
from torchao.optim.subclass_fp8 import OptimStateFp8

from fp8ref.torch import delayed
from fp8ref.torch.model import convert

OPTIMIZERS = {
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "torchao_fp8": lambda params: AdamWFp8(params, lr=1e-2),
}
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS)
fp8_recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "blockwise"])


@pytest.fixture(autouse=True)
def eager():
    """torchao's optimizers compile their step; as plain torch it computes the same, up to
    inductor's fused roundings.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


def wide():
    return model(k=128, n=128)  # whole blocks


def batch(step):
    return torch.randn(128, 128, generator=torch.Generator().manual_seed(step)).bfloat16()


def train(module, optimizer, steps=3):
    for step in range(steps):
        module(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        delayed.update(module)
    return [p.detach().clone() for p in module.parameters()]


@optimizers
@fp8_recipes
def test_an_optimizer_built_before_conversion_trains_as_one_built_after(recipe, optimizer):
    original, build = wide(), OPTIMIZERS[optimizer]
    before = build(original.parameters())
    early = train(convert.convert(original, recipe), before)
    converted = convert.convert(wide(), recipe)
    late = train(converted, build(converted.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))
    assert all((a != b).any() for a, b in zip(early, wide().parameters(), strict=True))


@optimizers
def test_states_of_delayed_scaling_are_no_part_of_an_optimizers(optimizer):
    converted = convert.convert(wide(), "delayed")
    built = OPTIMIZERS[optimizer](converted.parameters())
    converted(batch(0)).square().mean().backward()
    held = {key: value.clone() for key, value in converted.named_buffers()}
    assert held["0.states.grad_output.seen"][2] == 1
    built.step()
    assert all(torch.equal(value, held[key]) for key, value in converted.named_buffers())
    assert list(built.state) == list(converted.parameters())
    assert all(
        v.shape in ((), p.shape)
        for p, state in built.state.items()
        for v in state.values()
        if v is not None
    )


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_accumulated_microbatches_leave_the_delayed_state_of_one_batch(parts):  # H-4, H-11
    """Small integers at scale 1: every sum is exact, so that a row's values do not depend on the
    rows computed with it.
    """
    generator = torch.Generator().manual_seed(0)

    def integers(*shape):
        return torch.randint(-2, 3, shape, generator=generator).bfloat16()

    drawn = [integers(128, 128).sign(), integers(48, 128).sign()]
    x, g = integers(24, 128), integers(24, 48)
    x[:8], g[:8] = 2 * x[:8], 3 * g[:8]  # the first microbatch has the largest amaxes

    def states(*rows):
        converted = convert.convert(wide(), "delayed")
        optimizer = torch.optim.AdamW(converted.parameters())
        for p, w in zip(converted.parameters(), drawn, strict=True):
            p.data = w.clone()
        for part in rows:
            converted(x[part]).backward(g[part])
        optimizer.step()
        delayed.update(converted)
        return {key: value for key, value in converted.named_buffers() if "seen" not in key}

    whole = states(slice(None))
    ends = [24 * i // parts for i in range(parts + 1)]
    accumulated = states(*(slice(*pair) for pair in itertools.pairwise(ends)))
    assert all(torch.equal(accumulated[key], value) for key, value in whole.items())
    last = states(slice(16, 24))
    assert not torch.equal(
        last["0.states.input.amax_history"], whole["0.states.input.amax_history"]
    )
    assert not torch.equal(last["2.states.grad_output.scale"], whole["2.states.grad_output.scale"])
    assert whole["2.states.grad_output.step"] == 1


def test_torchaos_fp8_states_depend_on_the_size_of_a_parameters_piece():
    """Sharding a weight in two turns FP8 states into float32 ones: a checkpoint of one layout is
    not one of the other.
    """
    whole, half, odd = (nn.Parameter(torch.ones(shape)) for shape in ((64, 64), (32, 64), (65, 65)))
    optimizer = AdamWFp8([whole, half, odd])
    for p in (whole, half, odd):
        p.grad = torch.ones_like(p)
    optimizer.step()
    kinds = [
        {type(optimizer.state[p][key]) for key in ("exp_avg", "exp_avg_sq")}
        for p in (whole, half, odd)
    ]
    assert kinds == [{OptimStateFp8}, {torch.Tensor}, {torch.Tensor}]
    assert optimizer.state[whole]["exp_avg"].codes.dtype == torch.float8_e4m3fn
    assert optimizer.state[whole]["exp_avg"].scale.shape == (64 * 64 // 256,)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_torchaos_fp8_states_are_saved_and_go_on_bit_for_bit(recipe):
    first = convert.convert(wide(), recipe)
    optimizer = OPTIMIZERS["torchao_fp8"](first.parameters())
    train(first, optimizer)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = convert.convert(wide(), recipe)
    again.load_state_dict(saved["model"])
    resumed = OPTIMIZERS["torchao_fp8"](again.parameters())
    resumed.load_state_dict(saved["optimizer"])
    assert all(isinstance(state["exp_avg"], OptimStateFp8) for state in resumed.state.values())
    assert all(
        torch.equal(a, b)
        for a, b in zip(train(first, optimizer), train(again, resumed), strict=True)
    )
