"""What each FP8 GEMM of a model computes, while it runs eagerly: operands, scales and result, for the cross-check."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.recipe import OPERANDS, REDUCED_AXES
from fp8ref.torch import linear
from fp8ref.torch.linear import Linear


class Observed(NamedTuple):
    """An operand of a GEMM as the GEMM had it, this rank's part, in the tensor's own layout; axis is the one that the GEMM reduces."""

    hp: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor
    axis: int


@contextmanager
def observing(model: nn.Module, observer: Callable) -> Iterator[None]:
    """In this context, every FP8 GEMM of the model's linears reports the operands and the result it had.

    observer(name, gemm, a, b, out) gets tensors: a and b as (hp, codes uint8, scale), hp and codes in the tensors' own
    layout (SEMANTICS L-2's input [M, K], weight [N, K], grad_output [M, N]). hp of a weight that was gathered in FP8 is what its codes stand for.
    """
    with observed(model, lambda name, gemm, a, b, out: observer(name, gemm, a[:3], b[:3], out)):
        yield


@contextmanager
def observed(model: nn.Module, observer: Callable) -> Iterator[None]:
    """``observing``, whose observer gets a and b as Observed."""
    watch = _Watch(observer)
    handles = []
    for name, module in model.named_modules():
        is_linear = isinstance(module, Float8Linear | Linear)
        if is_linear or getattr(module, "shares_input", False):
            # before tensor parallelism's own hook, which may cast what comes, for several linears at once where it comes to their block
            handles.append(module.register_forward_pre_hook(watch.taking(name), prepend=True))
        if is_linear:
            handles.append(module.register_forward_pre_hook(watch.entering(name)))
            handles.append(module.register_forward_hook(watch.giving(name)))
    linear.observers.append(watch.multiplied)
    try:
        with watch:
            yield
    finally:
        linear.observers.remove(watch.multiplied)
        for handle in handles:
            handle.remove()


class _Watch(TorchDispatchMode):
    """Sees each matrix product of FP8 tensors before torchao unwraps it, while hooks tell in which layer it happens."""

    def __init__(self, observer: Callable) -> None:
        super().__init__()
        self._observer = observer
        self._forward = self._backward = ""
        self._hp: dict[str, dict[str, torch.Tensor]] = {}
        self._meshes: dict[str, DeviceMesh] = {}  # of linears that ranks cut

    def taking(self, name: str):
        def hook(module, args):
            x = _local(args[0].detach())
            if isinstance(x, Float8TrainingTensor):
                x = self._hp[name.rpartition(".")[0]]["input"]
            # where a checkpointed block runs again, its grad_output is there already
            self._hp.setdefault(name, {})["input"] = x

        return hook

    def entering(self, name: str):
        def hook(module, args):
            self._forward = name
            weight = module.weight.detach()
            if isinstance(weight, DTensor):
                self._meshes[name] = weight.device_mesh
            weight = _local(weight)
            if isinstance(weight, Float8TrainingTensor):
                weight = weight.to_original_precision()
            self._hp[name]["weight"] = weight

        return hook

    def giving(self, name: str):
        def hook(module, args, out):
            if out.requires_grad:
                out.register_hook(functools.partial(self._returning, name))

        return hook

    def _returning(self, name: str, grad_output: torch.Tensor) -> None:
        self._backward = name
        self._hp[name]["grad_output"] = _local(grad_output.detach())

    def multiplied(self, which, a, b, out) -> None:
        """What ``layer.Linear`` reports, its operands in their own layout already."""
        codes = [(q.codes.view(torch.uint8), q.scale, q.scale_inv) for q in (a, b)]
        self._tell(which, OPERANDS[which], codes, out)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # once more, of this rank's part
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and isinstance(args[0], Float8TrainingTensor):
            roles = tuple(t._gemm_input_role.value for t in args)
            gemm = next(g for g, operands in OPERANDS.items() if operands == roles)
            found = []
            # torchao multiplies input x weight.t() and grad_output.t() x input: back to the tensors' own layout
            for tensor, transposed in zip(args, (gemm == "grad_weight", gemm == "output"), strict=True):
                codes, scale = tensor._data.view(torch.uint8), tensor._scale
                if transposed:
                    codes, scale = codes.t(), scale.t()
                found.append((codes, scale, scale.reciprocal()))
            self._tell(gemm, roles, found, out)
        return out

    def _tell(self, which, roles, found, out) -> None:
        """found: codes, scale and scale_inv of each role. What a checkpointed block multiplies again has been told."""
        if which == "output" and torch._C._current_graph_task_id() != -1:
            return
        name = self._forward if which == "output" else self._backward
        a, b = (
            Observed(self._as_codes_lie(name, role, codes), codes, scale, inverse, axis - 2)
            for role, (codes, scale, inverse), axis in zip(roles, found, REDUCED_AXES[which], strict=True)
        )
        self._observer(name, which, a, b, out)

    def _as_codes_lie(self, name: str, role: str, codes: torch.Tensor) -> torch.Tensor:
        """A role's tensor in rows; gathered, as its codes were, where sequence parallelism had cut its tokens."""
        hp = self._hp[name][role]
        if role != "weight" and hp.numel() != codes.numel():
            with _disable_current_modes():
                hp = DTensor.from_local(hp, self._meshes[name], [Shard(1)], run_check=False).full_tensor()
        return hp.reshape(-1, hp.shape[-1])


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
