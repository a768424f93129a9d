"""Linears whose operands are cast by Triton kernels, interpreted, or by plain operations."""

import contextlib

import torch
from torch import nn

from fp8ref.torch import delayed
from fp8ref.torch.linear.cast_once import cast_once
from fp8ref.torch.linear.linear import Linear


def steps(
    recipe, kernels: str, *, keeps: bool = False, compiles: bool = False
) -> list[torch.Tensor]:
    """Outputs, gradients and delayed scales of two steps of two microbatches [2, 40, 256], whose
    tiles are ragged, through a linear [128, 256]."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 256, generator=rng).bfloat16()
    linear = Linear.of(nn.Linear(256, 128, dtype=torch.bfloat16), recipe, kernels=kernels)
    linear.weight.data, linear.bias.data = weight, torch.zeros(128).bfloat16()
    torch._dynamo.reset()
    run = torch.compile(linear, backend="aot_eager", fullgraph=True) if compiles else linear
    results = []
    for _ in range(2):
        with cast_once(linear) if keeps else contextlib.nullcontext():
            for _ in range(2):
                x = torch.randn(2, 40, 256, generator=rng).bfloat16().requires_grad_()
                y = run(x)
                y.backward(torch.randn(y.shape, generator=rng).bfloat16())
                results += [y.detach(), x.grad]
        results.append(linear.weight.grad)
        linear.weight.grad = None
        if linear.recipe.delayed:
            delayed.update(linear)
            results += [state.scale.clone() for _, state in delayed.states(linear)]
        with torch.no_grad():
            linear.weight.mul_(0.9)
    return results
