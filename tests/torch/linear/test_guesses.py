"""Scales in powers of two that a linear guesses by those of its last pass (spec R-1)."""

import copy

import pytest
import torch
from helpers.kernels.linears import steps
from torch import nn

pytest.importorskip("triton")

from fp8ref.torch.kernels import casts
from fp8ref.torch.linear.cast_once import cast_once
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.model import convert


def linear(recipe="tensorwise_pow2", **options):
    torch.manual_seed(0)
    return Linear.of(nn.Linear(64, 32).bfloat16(), recipe, kernels="triton", **options)


def run(module, x):
    x = x.clone().requires_grad_()
    module.weight.grad = None
    y = module(x)
    y.sum().backward()
    return y.detach(), x.grad, module.weight.grad


def scale(guess):
    return guess.view(torch.float32).item()


def test_the_scale_of_a_pass_is_the_guess_of_the_next():
    module, x = linear(), torch.full((16, 64), 1.5).bfloat16()
    module.weight.data.fill_(-3.0)
    run(module, x)
    assert (scale(module.input_guess), scale(module.weight_guess)) == (256, 128)
    run(module, x * 8)
    assert (scale(module.input_guess), scale(module.weight_guess)) == (32, 128)


@pytest.mark.parametrize("bits", [0, -1, 0x7F800000, 0x3F800000, 0x43800001])
def test_no_bit_depends_on_a_guess(bits):
    module, x = linear(), torch.randn(16, 64).bfloat16()
    expected = run(module, x)
    for guess in (module.input_guess, module.weight_guess):
        guess.fill_(bits)
    assert all(torch.equal(a, b) for a, b in zip(run(module, x), expected, strict=True))


def test_inputs_and_weights_are_read_once_gradients_twice(monkeypatch):
    read, amax = [], casts.amax
    monkeypatch.setattr(casts, "amax", lambda x: (read.append(tuple(x.shape)), amax(x))[1])
    run(linear(), torch.randn(16, 64).bfloat16())
    assert read == [(16, 32)]


def test_weights_that_are_cast_once_a_step_are_guessed_too():
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            steps("tensorwise_pow2", "plain"),
            steps("tensorwise_pow2", "triton", keeps=True),
            strict=True,
        )
    )
    module = linear()
    with cast_once(module):
        assert scale(module.weight_guess) == module.kept.tensors[1].item()


def test_guesses_are_no_part_of_checkpoints_and_keep_their_bits():
    module = linear()
    assert set(module.state_dict()) == {"weight", "bias"}
    assert set(convert.weights(nn.Sequential(module))) == {"0.weight", "0.bias"}
    moved = copy.deepcopy(module).to(torch.float16)
    assert {moved.input_guess.dtype, moved.weight_guess.dtype} == {torch.int32}
    assert type(convert.deconvert(nn.Sequential(module))[0]) is nn.Linear


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise_native", "blockwise"])
def test_other_recipes_guess_nothing(recipe):
    module = Linear(128, 128, recipe)
    assert (module.input_guess, module.weight_guess) == (None, None)
    assert not list(module.named_buffers(recurse=False))


def test_ranks_that_share_amaxes_guess_their_weight_alone():
    module = Linear(64, 32, "tensorwise_pow2", group="0")
    assert (module.input_guess is None, module.weight_guess is None) == (True, False)
