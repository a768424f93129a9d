"""Observe the FP8 GEMMs of a model that runs eagerly: operands, scales and result of each."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.recipe import OPERANDS, REDUCED_AXES
from fp8ref.torch.experts import grouped
from fp8ref.torch.experts import operands as grouped_operands
from fp8ref.torch.experts.layer import GroupedLinear
from fp8ref.torch.linear import passes
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.tensors.local_part import local_part


class GemmOperand(NamedTuple):
    """An operand of a GEMM, as this rank has it.

    hp           the tensor before the cast. Of a weight gathered in FP8, the values that its codes
                 stand for.
    codes        uint8. hp and codes are in the tensor's own layout, not the GEMM's (spec L-2):
                 input [M, K], weight [N, K], grad_output [M, N].
    scale, scale_inv
                 what multiplied into FP8, and what multiplies out of it.
    axis         the axis that the GEMM reduces.
    """

    hp: Tensor
    codes: Tensor
    scale: Tensor
    scale_inv: Tensor
    axis: int


@contextmanager
def observe_gemms(
    model: nn.Module, observer: Callable, grouped_observer: Callable | None = None
) -> Iterator[None]:
    """In this context, report every FP8 GEMM of the model's linears to an observer.

    observer    called as observer(name, gemm, a, b, out): the linear's name, which GEMM it is, its
                operands as GemmOperand, and its result. A GEMM that checkpointing runs again is
                reported once, and none of a linear without tokens. Of a grouped linear each group
                that has rows is a GEMM; under delayed scaling a group without rows is one row of
                zeros, so that its weight is seen (X-9).
    grouped_observer
                called in place of it for the GEMMs of grouped linears, as grouped_observer(name,
                gemm, tensors, operands, groups, out): those of all groups, as ``grouped.observers``
                have them.
    Raises:     ValueError: a linear that a pass of the model calls more than once, from within that
                pass.
    """
    reporter = _Reporter(observer, grouped_observer)
    handles = [model.register_forward_pre_hook(reporter.begin)]
    for name, module in model.named_modules():
        before: list[Callable] = []
        if isinstance(module, GroupedLinear):
            before = [reporter.enter]
        elif isinstance(module, Float8Linear | Linear):
            before = [reporter.once_a_pass, reporter.keep_weight]
        if reporter.keep_weight in before or getattr(module, "shares_input", False):
            # First of all hooks: tensor parallelism's own may cast the input, in the linear or in
            # the block around it.
            keep_input = functools.partial(reporter.keep_input, name)
            handles.append(module.register_forward_pre_hook(keep_input, prepend=True))
        hooks = [functools.partial(hook, name) for hook in before]
        handles += map(module.register_forward_pre_hook, hooks)
        if before:
            keep_grad_output = functools.partial(reporter.keep_grad_output, name)
            handles.append(module.register_forward_hook(keep_grad_output))
    passes.observers.append(reporter.multiplied)
    grouped.observers.append(reporter.multiplied_groups)
    try:
        with reporter:
            yield
    finally:
        passes.observers.remove(reporter.multiplied)
        grouped.observers.remove(reporter.multiplied_groups)
        for handle in handles:
            handle.remove()


class _Reporter(TorchDispatchMode):
    """Sees products of FP8 tensors before torchao unwraps them; hooks add layer and hp tensors."""

    def __init__(self, observer: Callable, grouped_observer: Callable | None) -> None:
        super().__init__()
        self._observer, self._grouped_observer = observer, grouped_observer
        self._forward = self._backward = ""
        self._hp: dict[str, dict[str, Tensor]] = {}
        self._meshes: dict[str, DeviceMesh] = {}  # of linears that ranks cut
        self._called: set[str] = set()  # by this pass, and not yet by its backward pass

    def begin(self, module, args) -> None:
        """Hook: a pass of the model begins."""
        self._called.clear()

    def once_a_pass(self, name: str, module, args) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputed
            return
        if name in self._called:
            raise ValueError(
                f"observation needs linears that run once in a pass; it calls {name} again. Drop "
                "statistics, or use a linear per call."
            )
        self._called.add(name)

    def keep_input(self, name: str, module, args) -> None:
        x = local_part(args[0].detach())
        if isinstance(x, Float8TrainingTensor):
            x = self._hp[name.rpartition(".")[0]]["input"]
        # setdefault: when a checkpointed block runs again, its grad_output is there already
        self._hp.setdefault(name, {})["input"] = x

    def enter(self, name: str, module, args) -> None:
        self._forward = name

    def keep_weight(self, name: str, module, args) -> None:
        self._forward = name
        weight = module.weight.detach()
        if isinstance(weight, DTensor):
            self._meshes[name] = weight.device_mesh
        weight = local_part(weight)
        if isinstance(weight, Float8TrainingTensor):
            weight = weight.to_original_precision()
        self._hp[name]["weight"] = weight

    def keep_grad_output(self, name: str, module, args, out) -> None:
        if out.requires_grad:
            out.register_hook(functools.partial(self._on_grad_output, name))

    def _on_grad_output(self, name: str, grad_output: Tensor) -> None:
        self._backward = name
        self._called.discard(name)
        self._hp.setdefault(name, {})["grad_output"] = local_part(grad_output.detach())

    def multiplied(self, which, a, b, out) -> None:
        """An observer of ``linear.Linear``, whose operands have their own layout already."""
        codes = [(q.code_bits, q.scale, q.factor) for q in (a, b)]
        self._report(which, OPERANDS[which], codes, out)

    def multiplied_groups(self, which, tensors, operands, groups, out) -> None:
        """An observer of grouped linears: reports the GEMM of each group, or all of them to the
        observer of groups."""
        if which == "output" and torch._C._current_graph_task_id() != -1:  # recomputed
            return
        name = self._forward if which == "output" else self._backward
        with _disable_current_modes():
            if self._grouped_observer is not None:
                self._grouped_observer(name, which, tensors, operands, groups, out)
                return
            for _, parts, group_out in group_gemms(which, tensors, operands, groups, out):
                self._observer(name, which, *parts, group_out)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor dispatches again, on this rank's part
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and isinstance(args[0], Float8TrainingTensor):
            roles = tuple(t._gemm_input_role.value for t in args)
            gemm = next(g for g, operands in OPERANDS.items() if operands == roles)
            quantized = []
            # torchao multiplies input x weight.t() and grad_output.t() x input: transpose back to
            # the own layout
            for tensor, transposed in zip(
                args, (gemm == "grad_weight", gemm == "output"), strict=True
            ):
                codes, scale = tensor._data.view(torch.uint8), tensor._scale
                if transposed:
                    codes, scale = codes.t(), scale.t()
                quantized.append((codes, scale, scale.reciprocal()))
            self._report(gemm, roles, quantized, out)
        return out

    def _report(self, which, roles, quantized, out) -> None:
        """Call the observer; quantized has codes, scale and scale_inv of each role."""
        # An output GEMM within a backward pass is a checkpointed block's, which has been reported
        # already.
        if which == "output" and torch._C._current_graph_task_id() != -1:
            return
        name = self._forward if which == "output" else self._backward
        if not self._hp[name]["input"].numel():  # rows of zeros stand for no tokens (L-9)
            return
        a, b = (
            GemmOperand(self._like_codes(name, role, codes), codes, scale, inverse, axis - 2)
            for role, (codes, scale, inverse), axis in zip(
                roles, quantized, REDUCED_AXES[which], strict=True
            )
        )
        self._observer(name, which, a, b, out)

    def _like_codes(self, name: str, role: str, codes: Tensor) -> Tensor:
        """A role's hp tensor in rows; gathered, as its codes were, under sequence parallelism."""
        hp = self._hp[name][role]
        if role != "weight" and hp.numel() != codes.numel():
            with _disable_current_modes():
                hp = DTensor.from_local(
                    hp, self._meshes[name], [Shard(1)], run_check=False
                ).full_tensor()
        return hp.reshape(-1, hp.shape[-1])


def group_gemms(
    which, tensors, operands, groups, out
) -> Iterator[tuple[int, list[GemmOperand], Tensor]]:
    """(e, operands, result) of each group's GEMM, as those of a linear: of what an observer of
    groups is given, those that ``observe_gemms`` would report."""
    ends = groups.ends.tolist()
    by_operand = [{e: part for e, *_, part in grouped_operands.parts_of(q, ends)} for q in operands]
    for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        rows = slice(begin, end)
        parts = []
        if begin == end and not all(q.scale.ndim == 0 for q in operands):
            continue
        for tensor, q, group_parts in zip(tensors, operands, by_operand, strict=True):
            whole = tensor[e] if q.codes.ndim == 3 else tensor[rows]
            part = group_parts.get(e)
            if part is None:  # no rows: one of zeros
                part = grouped_operands.group_part(q, e, begin, end)
            codes = part.code_bits
            missing = max(len(codes), 1) - len(whole)
            whole = torch.nn.functional.pad(whole, (0, 0, 0, missing))
            codes = torch.nn.functional.pad(codes, (0, 0, 0, max(1 - len(codes), 0)))
            parts.append(GemmOperand(whole, codes, part.scale, part.scale_inv, q.axis))
        group_out = out[e] if which == "grad_weight" else out[rows]
        yield e, parts, group_out if len(group_out) else out.new_zeros(1, out.shape[-1])
