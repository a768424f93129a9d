"""What one step of an eager linear launches on a Hopper GPU, counted on a CPU."""

import contextlib
from unittest import mock

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.torch.gemm import blocks
from fp8ref.torch.kernels import launch
from fp8ref.torch.linear.cast_once import cast_once
from fp8ref.torch.linear.linear import Linear

FREE = {"empty", "empty_like", "new_empty", "detach", "_unsafe_view", "lift_fresh"}
"""Operators that compute nothing."""

SIZE = 256


class _Operators(TorchDispatchMode):
    """Counts operators that are not views, also those within fp8ref's own operators."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith("fp8ref::"):
            with self:
                return OPDEFS[name]._init_fn(*args, **(kwargs or {}))
        if name.removeprefix("aten::") not in FREE and not func.is_view:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted():
    """Names of what operations in this context launch; cuBLASLt multiplies operands in blocks."""
    names: list[str] = []
    run = launch.run

    def run_and_count(each, *tensors):
        names.append(each.kernel.fn.__name__)
        run(each, *tensors)

    def scaled_mm(a, b, *_, output_dtype, **options):
        names.append("scaled_mm")
        return a.new_empty(len(a), b.shape[1], dtype=output_dtype)

    with (
        mock.patch.object(launch, "run", run_and_count),
        mock.patch.object(blocks, "kernel", return_value="scaled_mm"),
        mock.patch.object(functional, "scaled_mm", scaled_mm),
        _Operators(names),
    ):
        yield names


def of_linear(recipe: str, kernels: str, *, keeps: bool = False) -> list[str]:
    """What a linear's forward and backward pass launch, without bias; with ``keeps``, of a weight
    that ``cast_once`` cast before."""
    linear = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
    linear = Linear.of(linear, recipe, kernels=kernels)
    g = torch.randn(SIZE, SIZE).bfloat16()
    with cast_once(linear) if keeps else contextlib.nullcontext():
        for _ in range(2):  # the first pass makes what later ones keep
            x = torch.randn(SIZE, SIZE).bfloat16().requires_grad_()
            linear.weight.grad = None
            with counted() as names:
                linear(x).backward(g)
    return names
