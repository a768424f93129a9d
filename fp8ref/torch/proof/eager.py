"""Trace the GEMMs of a model that runs eagerly: every matrix product in its linears."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.recipe import OPERANDS, Gemm
from fp8ref.torch.attention import observer as attention_observer
from fp8ref.torch.attention.observer import observe_attention
from fp8ref.torch.gemm import gemm
from fp8ref.torch.kernels import casts
from fp8ref.torch.linear.model_checks import is_compiled
from fp8ref.torch.proof import records
from fp8ref.torch.proof.records import SCALED_MM, GemmRecord, GemmTrace

_aten = torch.ops.aten
_ONES = (_aten.ones.default, _aten.new_ones.default)
_TIMES = (_aten.mul_.Tensor, _aten.mul.Tensor, _aten.mul.out)
# the key in an autograd node's metadata that names its layer
_LAYER_KEY = "fp8ref.torch.proof.eager"


@contextmanager
def trace_eager(
    model: nn.Module, attention: Mapping[str, nn.Module] | None = None
) -> Iterator[GemmTrace]:
    """Record a model's GEMMs in this context, forward and backward, also under checkpointing.

    attention   modules that compute ``fp8ref.torch.attention``, by their names: their products are
                recorded too.

    No bit of them changes.

    The backward pass may run in a context of its own: each node of the autograd graph remembers its
    layer.
    Raises:   ValueError: the model is compiled, and would run eagerly here (use
              ``trace_compiled``).
    """
    for name, module in model.named_modules():
        if is_compiled(module):
            raise ValueError(
                f"{name or 'the model'} is compiled, not eager. Use proof.trace_compiled."
            )
    trace = GemmTrace("eager dispatch")
    tracer = _Tracer(trace)
    with ExitStack() as hooks:
        for name, module in records.linears(model):
            enter, leave = (functools.partial(f, name) for f in (tracer.on_enter, tracer.on_leave))
            left = module.register_forward_hook(leave, with_kwargs=True, always_call=True)
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(left.remove)
        with observe_attention(attention or {}, None), tracer:
            yield trace


class _Tracer(TorchDispatchMode):
    """Names a GEMM by the linear whose forward pass or autograd node runs it. A recomputed forward
    pass runs in a node too: then the linear names its GEMMs, others get no name."""

    def __init__(self, trace: GemmTrace) -> None:
        super().__init__()
        self._trace = trace
        self._inside: list[str] = []
        self._announced: Gemm | None = None  # the next GEMM, from the roles of torchao's operands
        self._ones = WeakTensorKeyDictionary()
        # results under unit scales, to their index among the GEMMs
        self._unscaled = WeakTensorKeyDictionary()

    def on_enter(self, name: str, module, args) -> None:
        self._inside.append(name)

    def on_leave(self, name: str, module, args, kwargs, output) -> None:
        self._inside.pop()
        # None: an exception, or early stopping of a checkpoint
        if not isinstance(output, Tensor) or output.grad_fn is None:
            return
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        needed = {"grad_input": x.requires_grad, "grad_weight": module.weight.requires_grad}
        for which, is_needed in needed.items():
            (self._trace.wanted if is_needed else self._trace.unwanted).add(f"{name}/{which}")
        # torchao multiplies for both gradients, and leaves to autograd which of them is dropped
        makes_both = isinstance(module, Float8Linear)
        order = [which for which, is_needed in needed.items() if is_needed or makes_both]
        for node in _between((x, module.weight, module.bias), output):
            _memory(node)[_LAYER_KEY] = {"layer": name, "order": order}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if FakeTensor in types:  # DTensor asks for shapes; nothing is computed
            return func(*args, **(kwargs or {}))
        # a subclass unwraps itself, and dispatches again
        if any(t is not Tensor for t in types):
            if func is _aten.mm.default and all(isinstance(t, Float8TrainingTensor) for t in args):
                roles = tuple(t._gemm_input_role.value for t in args)
                self._announced = next(
                    which for which, operands in OPERANDS.items() if operands == roles
                )
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        product, attends = attention_observer.product(), attention_observer.layer()
        if product is not None:
            if attends is not None and func in records.PRODUCTS_AT:
                a, b = (records.type_name(args[i].dtype) for i in records.PRODUCTS_AT[func])
                self._trace.products.append(
                    records.product_record(attends, product, func, (a, b), args, kwargs or {})
                )
        elif attends is not None and func._schema.name in records.KERNELS:
            self._trace.kernels.append(f"{attends}: {func._schema.name}")
        elif func in _ONES:
            self._ones[out] = True
        elif func in _TIMES and args[0] in self._unscaled and isinstance(args[1], Tensor):
            self._record_scale(self._unscaled.pop(args[0]), args[1])
        elif func is casts.SCALED and args[0][0] in self._unscaled:
            self._record_scale(self._unscaled.pop(args[0][0]), *args[0][1:])
        elif func in records.OPERANDS_AT:
            self._record(func, args, kwargs or {}, out)
        return out

    def _record(self, func, args, kwargs, out: Tensor) -> None:
        announced, self._announced = self._announced, None
        layer, which = self._where()
        if layer is None:
            return
        a, b = (records.type_name(args[i].dtype) for i in records.OPERANDS_AT[func])
        accumulate = granularity = plan = None
        if func is SCALED_MM:
            arguments = records.arguments(func, args, kwargs)
            scales = arguments["scale_a"], arguments["scale_b"]
            accumulate = "fast" if arguments.get("use_fast_accum") else "slow"
            granularity = records.granularity(*scales)
            if all(scale in self._ones or gemm.is_kept_unit(scale) for scale in scales):
                granularity, self._unscaled[out] = "unit", len(self._trace.gemms)
        else:
            accumulate, granularity, plan = records.numerics(func, args)
        self._trace.gemms.append(
            GemmRecord(layer, announced or which, a, b, accumulate, granularity, plan)
        )

    def _record_scale(self, index: int, *factors: Tensor) -> None:
        gemms = self._trace.gemms
        gemms[index] = dataclasses.replace(gemms[index], granularity=records.granularity(*factors))

    def _where(self) -> tuple[str | None, Gemm]:
        """The layer that runs and its next GEMM, or None."""
        if self._inside:
            return self._inside[-1], "output"
        node = torch._C._current_autograd_node()
        # checkpointed, it runs again in whatever node comes first
        if node is not None and torch.is_grad_enabled():
            return None, "output"
        place = _memory(node).get(_LAYER_KEY) if node is not None else None
        if not place or not place["order"]:
            return None, "output"
        # A linear's backward pass is one node, which makes the gradients that are needed in this
        # order. One may run twice (retain_graph).
        task = torch._C._current_graph_task_id()
        place["count"] = place["count"] + 1 if place.get("task") == task else 0
        place["task"] = task
        return place["layer"], place["order"][min(place["count"], len(place["order"]) - 1)]


def _memory(node: Node) -> dict:
    """A node's metadata, a dict in spite of torch's annotation."""
    return node.metadata  # type: ignore[return-value]


def _between(inputs: Iterable[Tensor | None], output: Tensor) -> Iterator[Node]:
    """The autograd nodes from an output back to its inputs, excluding the inputs'."""
    visited = {x.grad_fn for x in inputs if x is not None}
    nodes = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        # a leaf's node outlives the step
        if node is not None and node not in visited and node.next_functions:
            visited.add(node)
            yield node
            nodes += [upstream for upstream, _ in node.next_functions]
