"""Trace the GEMMs of a compiled model: read them off the graphs that inductor generates code from.

Two graphs are read. The joint graph of a forward and a backward pass tells the GEMMs apart: an
operand is followed back to the layer's weight or to its input. The post-grad graphs, one for each
pass, tell how each GEMM runs in the end.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from fp8ref.recipe import Gemm
from fp8ref.torch.attention.observer import LABEL
from fp8ref.torch.linear.model_checks import is_compiled
from fp8ref.torch.proof import records
from fp8ref.torch.proof.records import OPERANDS_AT, PRODUCTS_AT, SCALED_MM, GemmRecord, GemmTrace

_aten = torch.ops.aten
# the key in a node's metadata of (layer, which), set on the joint graph
_LABEL = "fp8ref.torch.proof.compiled"


@contextmanager
def trace_compiled(
    model: nn.Module, attention: Mapping[str, nn.Module] | None = None
) -> Iterator[GemmTrace]:
    """Record the GEMMs of the graphs that inductor compiles in this context.

    attention   as of ``trace_eager``.

    Run the first step in it: later ones compile nothing.

    Inductor's caches are neither read, which would hide the graphs, nor written. Modules of one
    class that are compiled one by one share a graph. It counts for those that were called in this
    context and whose linears and attention have equal recipes: others have a graph of their own, or
    none. A linear compiled by itself has no name in its graph.
    """
    trace = GemmTrace("inductor post-grad graphs")
    reader = _Reader(model, trace, attention or {})
    config = inductor_config
    with (
        inductor_config.patch(
            joint_custom_pre_pass=_Pass(reader.label, config.joint_custom_pre_pass),
            post_grad_custom_post_pass=_Pass(reader.read, config.post_grad_custom_post_pass),
        ),
        reader.noting_calls(),
    ):
        yield trace
    reader.drop_uncalled()


class _Pass(CustomGraphPass):
    """Reads a graph after earlier passes; without a uuid, so inductor skips its caches."""

    def __init__(self, read: Callable[[Graph], None], earlier) -> None:
        self._read = read
        self._earlier: Sequence = (
            earlier if isinstance(earlier, list | tuple) else [earlier] if earlier else []
        )

    def __call__(self, graph: Graph) -> None:
        for earlier in self._earlier:
            earlier(graph)
        self._read(graph)

    def uuid(self) -> None:
        return None


class _Reader:
    """Labels the GEMMs of joint graphs, and records them from post-grad graphs."""

    def __init__(
        self, model: nn.Module, trace: GemmTrace, attention: Mapping[str, nn.Module]
    ) -> None:
        self._trace = trace
        self._attention = {
            str(id(module)): records.unwrapped(name) for name, module in attention.items()
        }
        # dynamo's keys of modules are their ids
        self._names = {str(id(module)): name for name, module in records.linears(model)}
        self._regions = {
            records.unwrapped(name): module
            for name, module in model.named_modules()
            if name and is_compiled(module)
        }
        self._plans = {region: self._plan(region) for region in self._regions}
        self._called: set[str] = set()

    def _plan(self, region: str) -> tuple:
        """What decides a region's graph: class, kinds and recipes of layers by name."""
        module, begin = self._regions[region], len(region)
        inside = {str(id(m)): m for m in module.modules()}
        recipes = {
            name[begin:]: (type(m), getattr(m, "recipe", None), getattr(m, "config", None))
            for key, m in inside.items()
            if (name := self._names.get(key)) is not None
        }
        attention = {name[begin:] for key, name in self._attention.items() if key in inside}
        return type(getattr(module, "_orig_mod", module)), recipes, attention

    @contextmanager
    def noting_calls(self) -> Iterator[None]:
        """In this context each region's compiled callable notes that it was called."""
        places = [
            (region, module, key)
            for region, module in self._regions.items()
            if self._region(region) is None  # dynamo would trace it inside of another
            for key in ("_compiled_call_impl", "forward")
            if module.__dict__.get(key) is not None
        ]
        kept = [(module, key, module.__dict__[key]) for _, module, key in places]

        def noting(region: str, call: Callable) -> Callable:
            @functools.wraps(call)
            def noted(*args, **kwargs):
                self._called.add(region)
                return call(*args, **kwargs)

            return noted

        try:
            for (region, module, key), (_, _, call) in zip(places, kept, strict=True):
                module.__dict__[key] = noting(region, call)
            yield
        finally:
            for module, key, call in kept:
                module.__dict__[key] = call

    def drop_uncalled(self) -> None:
        """Leave out of the trace what it has of regions that were not called."""

        def ran(name: str) -> bool:
            region = self._region(name)
            return region is None or region in self._called

        trace = self._trace
        trace.gemms = [gemm for gemm in trace.gemms if ran(gemm.layer)]
        trace.products = [product for product in trace.products if ran(product.layer)]
        trace.wanted, trace.unwanted = (
            {name for name in names if ran(name)} for names in (trace.wanted, trace.unwanted)
        )

    def _region(self, name: str) -> str | None:
        """The compiled module that a layer, or its product, is in."""
        return next((region for region in self._regions if name.startswith(f"{region}.")), None)

    def label(self, graph: Graph) -> None:
        """Label each GEMM of a joint graph; record the gradients that no GEMM computes."""
        gemms = [(self._layer(node), node) for node in graph.nodes if node.target in OPERANDS_AT]
        weights: dict[str, set[Node]] = {}
        for layer, node in gemms:
            if layer is not None and not _backward(node):
                node.meta[_LABEL] = layer, "output"
                weights.setdefault(layer, set()).update(self._roots(_operands(node)[1], layer))
        computed: dict[str, set[Gemm]] = {}
        for layer, node in gemms:
            if layer is not None and _backward(node):
                roots = {
                    root for operand in _operands(node) for root in self._roots(operand, layer)
                }
                which: Gemm = "grad_input" if roots & weights.get(layer, set()) else "grad_weight"
                node.meta[_LABEL] = layer, which
                computed.setdefault(layer, set()).add(which)
        for layer, gradients in computed.items():
            for which in ("grad_input", "grad_weight"):
                # a backward pass without a product for a gradient does not compute it
                (self._trace.wanted if which in gradients else self._trace.unwanted).update(
                    f"{name}/{which}" for name in self._shared(layer)
                )

    def read(self, graph: Graph) -> None:
        """Record the labeled GEMMs of a post-grad graph."""
        for node in graph.nodes:
            if node.target in OPERANDS_AT and _LABEL in node.meta:
                layer, which = node.meta[_LABEL]
                a, b = (records.type_name(operand.meta["val"].dtype) for operand in _operands(node))
                self._trace.gemms += [
                    GemmRecord(name, which, a, b, *_numerics(node)) for name in self._shared(layer)
                ]
            elif node.target in PRODUCTS_AT and (product := node.meta.get("custom", {}).get(LABEL)):
                first, second = (
                    _node(node.args[i]).meta["val"].dtype for i in PRODUCTS_AT[node.target]
                )
                types = records.type_name(first), records.type_name(second)
                for name in self._shared(self._layer(node, self._attention) or ""):
                    self._trace.products.append(
                        records.product_record(
                            name, product, node.target, types, node.args, node.kwargs
                        )
                    )

    def _layer(self, node: Node, names: Mapping[str, str] | None = None) -> str | None:
        """The innermost linear, or named module, of a node or its forward node."""
        names = self._names if names is None else names
        stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack") or {}
        keys = (key.partition("@")[0] for key in reversed(stack))  # of a module's second call: id@1
        return next((names[key] for key in keys if key in names), None)

    def _roots(self, operand: Node, layer: str) -> set[Node]:
        """What an operand comes from: nodes of other layers, graph inputs, GEMMs."""
        roots, visited, nodes = set(), set(), [operand]
        while nodes:
            node = nodes.pop()
            if node.target in OPERANDS_AT or self._layer(node) != layer:
                roots.add(node)
            elif node not in visited:
                visited.add(node)
                nodes += node.all_input_nodes
        return roots

    def _shared(self, layer: str) -> list[str]:
        """The layer and its counterparts in modules that share its graph."""
        region = self._region(layer)
        if region is None:
            return [layer]
        within, plan = layer[len(region) :], self._plans[region]
        alike = [other + within for other, theirs in self._plans.items() if theirs == plan]
        layers = {*self._names.values(), *self._attention.values()}
        return [name for name in alike if name in layers]


def _backward(node: Node) -> bool:
    return "fwd_nn_module_stack" in node.meta


def _operands(node: Node) -> list[Node]:
    first, second = OPERANDS_AT[node.target]
    return [_node(node.args[first]), _node(node.args[second])]


def _numerics(node: Node) -> tuple[str | None, ...]:
    """Accumulation and granularity of a product, and its simulated hardware if any."""
    if node.target is not SCALED_MM:
        values = [arg.meta.get("val") if isinstance(arg, Node) else arg for arg in node.args]
        return records.numerics(node.target, values)
    arguments = records.arguments(node.target, node.args, node.kwargs)
    accumulate = "fast" if arguments.get("use_fast_accum") else "slow"
    scales = _node(arguments["scale_a"]), _node(arguments["scale_b"])
    if not all(scale.target is _aten.full.default and scale.args[1] == 1 for scale in scales):
        return accumulate, records.granularity(*(scale.meta["val"] for scale in scales))
    factors = [
        _node(user.args[1]).meta["val"]
        for user in node.users
        if user.target is _aten.mul.Tensor and user.args[0] is node
    ]
    return accumulate, records.granularity(*factors) if factors else "unit"


def _node(argument: Any) -> Node:
    assert isinstance(argument, Node)
    return argument
