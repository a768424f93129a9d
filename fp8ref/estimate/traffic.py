"""Communication of a step: bytes that a device receives, by purpose.

As configured, and for comparison as if all tensors were bfloat16 or float32.

Ring algorithms are assumed: in a gather or reduce-scatter over n devices each receives (n - 1) / n
of the whole, in an all-reduce twice that. Amaxes, scales and norms are not counted: a few bytes a
tensor.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fp8ref import llama
from fp8ref.recipe import GemmSpec
from fp8ref.train.config import Config
from fp8ref.train.device_shapes import at_rest, in_fp8, ranks_share_amaxes, tokens, used


@dataclass
class Flow:
    """Elements that are received for one purpose, and their bytes."""

    elements: float = 0.0
    bytes: float = 0.0

    def add(self, elements: float, size: float) -> None:
        """Add elements of ``size`` bytes each."""
        self.elements += elements
        self.bytes += elements * size


def flows(config: Config, backend: str) -> dict[str, Flow]:
    """{purpose: what a device receives for it in one optimizer step}."""
    found: dict[str, Flow] = {}
    for purpose, elements, size in _moves(config, backend):
        found.setdefault(purpose, Flow()).add(elements * config.data.microbatches, size)
    return {purpose: flow for purpose, flow in found.items() if flow.elements}


def _moves(config: Config, backend: str) -> Iterator[tuple[str, float, float]]:
    """(purpose, elements, bytes of each) of one microbatch."""
    keys = config.parallel
    decisions = {d.path: d for d in config.decisions()}
    in_codes = keys.reduce_dtype == "float8_e4m3fn"  # of linears' weights, all else in float32 (P-25)
    wide = 2 if keys.reduce_dtype == "bfloat16" else 4
    copies = (keys.data - 1) / keys.data
    for name, shape in llama.parameter_shapes(config.model).items():
        linear = name.removesuffix(".weight")
        piece = math.prod(at_rest(name, shape, config, backend))
        whole = math.prod(used(linear, shape, config) if len(shape) == 2 else shape)
        shards = keys.shards
        if len(shape) == 3:  # of experts a device has its own
            whole, shards = whole // keys.expert, keys.fsdp
        gathered = (shards - 1) / shards
        if (len(shape) > 1 and not llama.is_router(name)) or backend == "torch":
            # gathered in the forward and in the backward pass; the embedding table once in both
            # backends
            table = name == llama.EMBEDDING
            # bytes an element: float32 of a table that is not rounded first, FP8 codes, or bfloat16
            as_it_is = table and (backend == "torch" or keys.through == "jit")
            codes = linear in decisions and decisions[linear].experts is None and in_fp8(decisions[linear].recipe, config, backend)
            size = 4 if as_it_is else 1 if codes else 2
            times = 1 if table else 3 if _runs_again(linear, config, backend) else 2
            yield "weights, gathered over fsdp", times * gathered * whole, size
            # JAX reduces the table's gradient in the table's own dtype.
            summed = 4 if table and backend == "jax" else wide
            if in_codes and len(shape) == 2 and not table:
                yield from _exchanged(linear, whole, piece, config, backend)
                continue
            yield "gradients, reduced over fsdp", gathered * whole, summed
            if backend == "jax" and keys.sequence and (table or linear == "lm_head"):  # a device has other tokens along tensor
                others = 1 - 1 / (keys.data * keys.tensor)
                yield "gradients, summed over data and tensor", 2 * others * piece, summed
            else:
                yield "gradients, summed over data", 2 * copies * piece, summed
        else:  # JAX replicates norms and routers
            parts = keys.sharing * (keys.tensor if keys.sequence else 1)
            yield "gradients, summed over data", 2 * (parts - 1) / parts * whole, 4
    if keys.context > 1:
        yield from _context(config)
    if keys.tensor > 1:
        yield from _tensor(config, backend)
    if keys.expert > 1:
        yield from _rows(config, backend)


def _rows(config: Config, backend: str) -> Iterator[tuple[str, float, int]]:
    """Rows of tokens that are sent to their experts and back (X-13), in bfloat16 or as codes (X-14), and their gradients: in PyTorch those
    rows alone, as if experts took equally many; in JAX a buffer of all of a device's rows to every other."""
    keys, model = config.parallel, config.model
    others = (keys.expert - 1) / keys.expert if backend == "torch" else keys.expert - 1
    rows = tokens(config) * model.num_experts_per_tok * model.hidden_size * others
    forward = 2 if keys.checkpointing == "full" else 1  # and again in the backward pass
    recipes = {d.path: d.recipe for d in config.decisions() if d.experts is not None}
    for layer in range(model.num_hidden_layers):
        gate, up, down = (recipes[f"model.layers.{layer}.mlp.experts.{name}_proj"] for name in ("gate", "up", "down"))
        codes = keys.expert_dispatch == "fp8"
        inputs = codes and gate == up and gate.fp8 and gate.serves_both("input")
        yield "rows, sent to their experts", forward * rows, 1 if inputs else 2
        yield "rows, sent to their experts", rows, 1 if codes and down.fp8 and down.serves_both("grad_output") else 2
        yield "rows, sent back", (forward + 1) * rows, 2


def _exchanged(linear: str, whole: float, piece: float, config: Config, backend: str) -> Iterator[tuple[str, float, float]]:
    """A weight's gradient in FP8: codes by one all-to-all of all devices that sum it, and float32 sums
    gathered along the axes that do not cut the weight (P-25)."""
    keys = config.parallel
    copies = keys.data * (keys.tensor if backend == "jax" and keys.sequence and linear == "lm_head" else 1)
    yield "gradients in FP8, exchanged", (1 - 1 / (copies * keys.shards)) * whole, 1
    yield "sums of gradients, gathered", (1 - 1 / copies) * piece, 4


def _context(config: Config) -> Iterator[tuple[str, float, float]]:
    """Context parallelism of attention (A-21): codes of keys and values are gathered in each pass, and once more where the forward
    pass runs again; their gradients are summed over the devices in float32."""
    keys, model, variant = config.parallel, config.model, config.attention_variant
    assert variant is not None
    heads = model.num_key_value_heads // keys.tensor
    both = 2 * tokens(config) * (keys.context - 1) * heads * model.head_dim * model.num_hidden_layers
    passes = 2 if keys.checkpointing == "none" else 3
    yield "keys and values, gathered over context", passes * both, variant.fmt.bits // 8
    yield "gradients of keys and values, summed over context", both, 4


def _tensor(config: Config, backend: str) -> Iterator[tuple[str, float, float]]:
    """Tensor parallelism of attention and MLP.

    Inputs of q, k, v, gate and up are gathered, outputs of o and down summed.

    The backward pass does the reverse.
    """
    keys = config.parallel
    parts = tokens(config) * config.model.hidden_size * (keys.tensor - 1) / keys.tensor
    wide = keys.tensor_reduce_dtype == "float32" or keys.reduce == "accumulators"
    outputs = 4 if wide else 2  # P-9, P-16
    for decision in config.decisions():
        last = decision.path.split(".")[-1]
        # Linears with one input gather it once, and their grad_inputs are added before the sum: by XLA too,
        # unless accumulators are summed.
        again = _runs_again(decision.path, config, backend)
        if last in ("q_proj", "gate_proj") and keys.sequence:
            forward, backward = (_gathered(spec, config, backend) for spec in (decision.recipe.output, decision.recipe.grad_weight))
            yield "inputs, gathered over tensor", (1 + again) * parts, forward
            yield "inputs, gathered over tensor", parts, backward
        if last in (llama.COLUMN if keys.reduce == "accumulators" else ("q_proj", "gate_proj")):
            yield "grad_inputs, summed over tensor", (1 if keys.sequence else 2) * parts, outputs
        if last in ("o_proj", "down_proj"):
            yield "outputs, summed over tensor", (1 if keys.sequence else 2) * (1 + again) * parts, outputs
            if keys.sequence:
                recipe, size = decision.recipe, float(_gathered(decision.recipe.grad_input, config, backend))
                if backend == "jax" and not recipe.serves_both("grad_output"):
                    # each GEMM needs its own codes, or a bit an element beside the other's (P-6)
                    one = recipe.pairs_gradients and keys.through == "shard_map"
                    size = 9 / 8 if one else size + _gathered(recipe.grad_weight, config, backend)
                yield "grad_outputs, gathered over tensor", parts, size


def _runs_again(linear: str, config: Config, backend: str) -> bool:
    """Whether JAX runs a linear's output GEMM again in the backward pass, with its collectives. No
    gradient needs the output of the last linear of a layer."""
    return backend == "jax" and config.parallel.checkpointing == "full" and "layers" in linear and not linear.endswith("down_proj")


def _gathered(spec: GemmSpec, config: Config, backend: str) -> int:
    """Bytes an element: one if the operand is cast before the gather, else two (P-10, P-15)."""
    if spec.a is None:
        return 2
    torchao = spec.a.granularity == "tensorwise" and spec.a.policy.name == "torchao" and spec.a.delayed is None
    return 1 if backend == "jax" or (torchao and not ranks_share_amaxes(config)) else 2
