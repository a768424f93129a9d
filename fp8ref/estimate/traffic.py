"""Bytes that a device receives in a step, by what they are for: in the types of this config, and if all of it were bfloat16 or float32.

Counted as rings move them: a gather or reduce-scatter over n devices gives each (n - 1) / n of the whole, an all-reduce twice that.
Amaxes, scales and norms, some bytes a tensor, are left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fp8ref import llama
from fp8ref.recipe import GemmSpec
from fp8ref.train.config import Config
from fp8ref.train.device_shapes import at_rest, in_fp8, tokens, used


@dataclass
class Flow:
    """elements of one purpose, and their bytes."""

    elements: float = 0.0
    bytes: float = 0.0

    def add(self, elements: float, size: int) -> None:
        """So many elements of size bytes each."""
        self.elements += elements
        self.bytes += elements * size


def flows(config: Config, backend: str) -> dict[str, Flow]:
    """Purpose -> what a device receives for it in one optimizer step."""
    found: dict[str, Flow] = {}
    for purpose, elements, size in _moves(config, backend):
        found.setdefault(purpose, Flow()).add(elements * config.data.microbatches, size)
    return {purpose: flow for purpose, flow in found.items() if flow.elements}


def _moves(config: Config, backend: str) -> Iterator[tuple[str, float, int]]:
    """(purpose, elements, bytes each) of one part of a batch."""
    keys = config.parallel
    decisions = {d.path: d for d in config.decisions()}
    gathered, copies = (keys.fsdp - 1) / keys.fsdp, (keys.data - 1) / keys.data
    for name, shape in llama.parameter_shapes(config.model).items():
        linear = name.removesuffix(".weight")
        piece = math.prod(at_rest(name, shape, config, backend))
        whole = math.prod(used(linear, shape, config) if len(shape) == 2 else shape)
        if len(shape) == 2 or backend == "torch":
            # forward and backward pass; the table, which FSDP2 keeps, and JAX's, once
            table = name == llama.EMBEDDING
            size = 4 if table else 1 if linear in decisions and in_fp8(decisions[linear].recipe, config, backend) else 2
            yield "weights, gathered over fsdp", (1 if table else 2) * gathered * whole, size
            yield "gradients, reduced over fsdp", gathered * whole, 4
            yield "gradients, summed over data", 2 * copies * piece, 4
        else:  # JAX's norms are whole everywhere
            parts = keys.fsdp * keys.data * (keys.tensor if keys.sequence else 1)
            yield "gradients, summed over data", 2 * (parts - 1) / parts * whole, 4
    if keys.tensor > 1:
        yield from _tensor(config, backend)


def _tensor(config: Config, backend: str) -> Iterator[tuple[str, float, int]]:
    """Of attention and MLP: what enters q, k, v or gate, up is gathered, what o or down gives is summed; backward the other way round."""
    keys = config.parallel
    parts = tokens(config) * config.model.hidden_size * (keys.tensor - 1) / keys.tensor
    outputs = 4 if backend == "jax" else 2  # P-9: float32 accumulators; P-16: rounded parts
    for decision in config.decisions():
        last = decision.path.split(".")[-1]
        if last in ("q_proj", "gate_proj") or (backend == "jax" and last in llama.COLUMN):
            if keys.sequence and last in ("q_proj", "gate_proj"):
                yield "inputs, gathered over tensor", 2 * parts, _gathered(decision.recipe.output, backend)  # both passes
            yield "grad_inputs, summed over tensor", (1 if keys.sequence else 2) * parts, outputs
        if last in ("o_proj", "down_proj"):
            yield "outputs, summed over tensor", (1 if keys.sequence else 2) * parts, outputs
            if keys.sequence:
                # codes of its own for each GEMM, where one scale does not serve both
                times = 1 if backend == "torch" or decision.recipe.serves_both("grad_output") else 2
                yield "grad_outputs, gathered over tensor", times * parts, _gathered(decision.recipe.grad_input, backend)


def _gathered(spec: GemmSpec, backend: str) -> int:
    """Bytes an element of a token: codes where the cast comes before the gather (P-10, P-15)."""
    before = spec.a is not None and (backend == "jax" or (spec.a.granularity == "tensorwise" and spec.a.policy.name == "torchao"))
    return 1 if before else 2
