"""Which GEMMs a compiled model runs, read off the graphs that inductor generates code from.

The joint graph of a forward and a backward pass tells which GEMM is which: there an operand can be followed back to the layer's
weight or to its input. The graphs of inductor's last pass over them, forward and backward apart, tell what became of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from fp8ref.recipe import Gemm as Which
from fp8ref.torch.model_checks import is_compiled
from fp8ref.torch.proof import records
from fp8ref.torch.proof.records import BLOCK_GEMM, OPERANDS_AT, SCALED_MM, SIMULATED, Gemm, Seen

aten = torch.ops.aten
_LABEL = "fp8ref.torch.proof.compiled"  # under which a node keeps (layer, which) from the joint graph on


@contextmanager
def trace_compiled(model: nn.Module) -> Iterator[Seen]:
    """What inductor compiles of a model while in this context, which is to hold the first step: what is compiled already is not seen.

    Inductor's caches are left alone meanwhile: not read, as they would hide the graphs, and not written. Modules of one class that are
    compiled on their own share a graph, which then counts for all of them; a linear whose forward is a graph of its own has no name in it.
    """
    found = Seen("inductor post-grad graphs")
    reader = _Reader(model, found)
    config = inductor_config
    with inductor_config.patch(
        joint_custom_pre_pass=_Pass(reader.label, config.joint_custom_pre_pass),
        post_grad_custom_post_pass=_Pass(reader.read, config.post_grad_custom_post_pass),
    ):
        yield found


class _Pass(CustomGraphPass):
    """Reads a graph after the passes that were there before. Without a uuid, which makes inductor leave its caches alone."""

    def __init__(self, read: Callable[[Graph], None], earlier) -> None:
        self._read = read
        self._earlier: Sequence = earlier if isinstance(earlier, list | tuple) else [earlier] if earlier else []

    def __call__(self, graph: Graph) -> None:
        for earlier in self._earlier:
            earlier(graph)
        self._read(graph)

    def uuid(self) -> None:
        return None


class _Reader:
    def __init__(self, model: nn.Module, found: Seen) -> None:
        self._found = found
        self._names = {str(id(module)): name for name, module in records.linears(model)}  # dynamo's keys of modules are their ids
        self._regions = {
            records.unwrapped(name): type(getattr(module, "_orig_mod", module))
            for name, module in model.named_modules()
            if name and is_compiled(module)
        }

    def label(self, graph: Graph) -> None:
        """On a joint graph: say on each GEMM of a layer which it is, and note the gradients that no GEMM makes."""
        gemms = [(self._layer(node), node) for node in graph.nodes if node.target in OPERANDS_AT]
        weights: dict[str, set[Node]] = {}
        for layer, node in gemms:
            if layer is not None and not _backward(node):
                node.meta[_LABEL] = layer, "output"
                weights.setdefault(layer, set()).update(self._roots(_operands(node)[1], layer))
        made: dict[str, set[Which]] = {}
        for layer, node in gemms:
            if layer is not None and _backward(node):
                roots = {root for operand in _operands(node) for root in self._roots(operand, layer)}
                which: Which = "grad_input" if roots & weights.get(layer, set()) else "grad_weight"
                node.meta[_LABEL] = layer, which
                made.setdefault(layer, set()).add(which)
        for layer, there in made.items():
            for which in ("grad_input", "grad_weight"):
                # a backward pass without any product for a gradient does not make it
                (self._found.wanted if which in there else self._found.unwanted).update(f"{name}/{which}" for name in self._shared(layer))

    def read(self, graph: Graph) -> None:
        """On a post-grad graph: note its GEMMs."""
        for node in graph.nodes:
            if node.target in OPERANDS_AT and _LABEL in node.meta:
                layer, which = node.meta[_LABEL]
                a, b = (records.type_name(operand.meta["val"].dtype) for operand in _operands(node))
                self._found.gemms += [Gemm(name, which, a, b, *_how(node)) for name in self._shared(layer)]

    def _layer(self, node: Node) -> str | None:
        """The innermost linear that a node belongs to, or whose forward pass it differentiates."""
        stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack") or {}
        keys = (key.partition("@")[0] for key in reversed(stack))  # of a module's second call: id@1
        return next((self._names[key] for key in keys if key in self._names), None)

    def _roots(self, operand: Node, layer: str) -> set[Node]:
        """What an operand is computed from inside its layer: nodes of other layers, inputs of the graph, results of GEMMs."""
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
        """The layer, and those at its place in modules that share its graph."""
        region = next((name for name in self._regions if layer.startswith(f"{name}.")), None)
        if region is None:
            return [layer]
        alike = [name + layer[len(region) :] for name, kind in self._regions.items() if kind is self._regions[region]]
        return [name for name in alike if name in self._names.values()]


def _backward(node: Node) -> bool:
    return "fwd_nn_module_stack" in node.meta


def _operands(node: Node) -> list[Node]:
    first, second = OPERANDS_AT[node.target]
    return [_node(node.args[first]), _node(node.args[second])]


def _how(node: Node) -> tuple[str | None, ...]:
    """A product's accumulation and granularity, and the simulated hardware that it runs under."""
    if node.target is SIMULATED:
        return records.of_simulated(node.args)
    if node.target is BLOCK_GEMM:
        return records.of_blocks(*(_node(argument).meta["val"] for argument in node.args[:4]))
    return _scaled(node) if node.target is SCALED_MM else (None, None)


def _scaled(node: Node) -> tuple[str, str]:
    """A scaled product's accumulation and granularity."""
    given = records.arguments(node.target, node.args, node.kwargs)
    accumulate = "fast" if given.get("use_fast_accum") else "slow"
    scales = _node(given["scale_a"]), _node(given["scale_b"])
    if not all(scale.target is aten.full.default and scale.args[1] == 1 for scale in scales):
        return accumulate, records.granularity(*(scale.meta["val"] for scale in scales))
    factors = [_node(user.args[1]) for user in node.users if user.target is aten.mul.Tensor and user.args[0] is node]
    return accumulate, records.granularity(*(factor.meta["val"] for factor in factors)) if factors else "unit"


def _node(argument: Any) -> Node:
    assert isinstance(argument, Node)
    return argument
