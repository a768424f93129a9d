"""The collectives of a training step: what moves, by which kind and dtype, between which devices.

In JAX those of a program that is compiled for H200s (benchmarks/results/aot.json), to the byte:
amaxes, scales of rows, bits beside codes, the loss and the norm of the gradients too, and with
experts the sizes of their groups and their balance. Not counted: the scales of gradients in FP8. In
PyTorch none of these few bytes is counted. ``flows`` sums them by purpose, by ring algorithms.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fp8ref.estimate.collectives import experts, scales
from fp8ref.estimate.collectives.scales import Shared
from fp8ref.formats import QUANTIZED_FORMATS
from fp8ref.recipe import GemmSpec, Recipe
from fp8ref.spec import llama
from fp8ref.spec.gemm import CastSpec
from fp8ref.train.config.config import Config
from fp8ref.train.config.device_shapes import (
    at_rest,
    in_fp8,
    ranks_share_amaxes,
    runs_output_again,
    tokens,
    used,
)

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
"""What a collective does."""

SIZES = dict.fromkeys(QUANTIZED_FORMATS, 1) | {
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "bfloat16": 2,
    "uint8": 1,
}
"""{dtype: bytes of an element}. Amaxes are compared as integers of their bits."""


@dataclass(frozen=True)
class Collective:
    """One or more collectives for one purpose in one microbatch.

    dtype     of ``SIZES``.
    devices   that take part; of one, nothing moves.
    elements  of the larger of what a device gives and gets: the whole gathered or summed.
    beside    whether it moves for FP8 alone: in another dtype nothing would move in its place.
    """

    purpose: str
    kind: Kind
    dtype: str
    devices: int
    elements: float
    beside: bool = False

    @property
    def bytes(self) -> float:
        """Of the larger of what a device gives and what it gets."""
        return SIZES[self.dtype] * self.elements

    @property
    def received(self) -> float:
        """Elements received by a ring: (n - 1) / n of the whole, in an all-reduce twice that."""
        passes = 1 + (self.kind == "all-reduce")
        return passes * (self.devices - 1) / self.devices * self.elements


def step_collectives(config: Config, backend: str) -> list[tuple[Collective, int]]:
    """Collectives of an optimizer step, each with how often it runs: per microbatch, or once."""
    parts = config.data.microbatches
    collectives = [(one, parts) for one in _part_collectives(config, backend)]
    if backend == "jax":
        shared = map(_scales, scales.step_amaxes(config))
        purpose = "amaxes of weights, shared"
        collectives += [(dataclasses.replace(one, purpose=purpose), 1) for one in shared]
        keys = config.parallel
        sharing, devices = keys.sharing, keys.devices
        # JAX computes the loss of each piece of a sequence by itself
        pieces = sharing * keys.context * (keys.tensor if keys.sequence else 1)
        # of all layers together, which are added first: rows and sums of probabilities (M-8)
        balance = 2 * config.model.num_experts
        collectives += [
            (_beside("loss, averaged", pieces, 1), parts),
            (_beside("norm of the gradients, summed", devices, _squares(config)), 1),
            (_beside("balance of experts, summed", sharing, balance), parts),
        ]
    return [(one, times) for one, times in collectives if one.devices > 1 and one.elements]


@dataclass
class Flow:
    """Elements that are received for one purpose in any dtype, and their bytes."""

    elements: float = 0.0
    bytes: float = 0.0


def flows(config: Config, backend: str) -> dict[str, Flow]:
    """{purpose: what a device receives for it in one optimizer step}."""
    by_purpose: dict[str, Flow] = {}
    for collective, times in step_collectives(config, backend):
        flow = by_purpose.setdefault(collective.purpose, Flow())
        flow.elements += times * collective.received * (not collective.beside)
        flow.bytes += times * collective.received * SIZES[collective.dtype]
    return by_purpose


def _part_collectives(config: Config, backend: str) -> Iterator[Collective]:
    """Those of one microbatch."""
    recipes = {f"{d.path}.weight": d.recipe for d in config.decisions() if d.experts is None}
    for name, shape in llama.parameter_shapes(config.model).items():
        yield from _parameter_collectives(name, shape, recipes.get(name), config, backend)
    if config.model.tie_word_embeddings and backend == "jax":
        # The last linear gathers the rounded table again, and its gradient is scattered by itself.
        # PyTorch's root keeps one gathered table.
        shape = llama.parameter_shapes(config.model)[llama.EMBEDDING]
        yield from _parameter_collectives("lm_head.weight", shape, None, config, backend)
        # as compiled: the partitioner gathers it twice in the forward pass
        if config.parallel.through == "jit":
            shards, size = config.parallel.shards, math.prod(shape)
            yield Collective("weights, gathered over fsdp", "all-gather", "bfloat16", shards, size)
    keys = config.parallel
    if keys.context > 1:
        yield from _context(config)
    if keys.tensor > 1:
        yield from _tensor(config, backend)
    if keys.expert > 1:
        yield from _rows(config, backend)
    if backend == "jax" and keys.devices > 1:
        yield from map(_scales, scales.part_amaxes(config))


def _beside(purpose: str, devices: int, elements: float) -> Collective:
    return Collective(purpose, "all-reduce", "float32", devices, elements, beside=True)


def _scales(shared: Shared) -> Collective:
    purpose = "scales of rows, gathered" if shared.kind == "all-gather" else "amaxes, shared"
    return Collective(
        purpose, shared.kind, shared.dtype, shared.devices, shared.elements, beside=True
    )


def _squares(config: Config) -> int:
    """Sums of a parameter's squares that devices add for the norm of the gradients: of each that
    the mesh cuts, of which ``parallel.scan`` has one of all layers. XLA adds what follows on each
    other from the first, sorted by name, before it sums over the devices."""
    keys = config.parallel

    def cut(name: str, shape: tuple[int, ...]) -> bool:
        whole = len(shape) < 2 or llama.is_router(name)
        return not whole and (
            keys.shards > 1 or (keys.tensor > 1 and name.split(".")[-2] in llama.COLUMN + llama.ROW)
        )

    shapes = llama.parameter_shapes(config.model)
    if keys.scan:
        # the mesh cuts a stack as it cuts a layer's own
        shapes = {llama.stack_of(name): shape for name, shape in shapes.items()}
    which = [cut(name, shape) for name, shape in sorted(shapes.items())]
    joined = which.index(False) if False in which else len(which)
    return sum(which) - max(0, joined - 1)


def _parameter_collectives(
    name: str, shape: tuple[int, ...], recipe: Recipe | None, config: Config, backend: str
) -> Iterator[Collective]:
    """A parameter's gathers and its gradient's sums. recipe: of its linear, if it has one."""
    keys = config.parallel
    linear = name.removesuffix(".weight")
    piece = math.prod(at_rest(name, shape, config, backend))
    whole = math.prod(used(linear, shape, config) if len(shape) == 2 else shape)
    shards = keys.shards
    if len(shape) == 3:  # of experts a device has its own
        whole, shards = whole // keys.expert, keys.fsdp
    # JAX replicates norms and routers
    if not ((len(shape) > 1 and not llama.is_router(name)) or backend == "torch"):
        parts = keys.sharing * (keys.tensor if keys.sequence else 1)
        yield Collective("gradients, summed over data", "all-reduce", "float32", parts, whole)
        return
    # gathered in the forward and in the backward pass; the embedding table once in both backends
    table = name == llama.EMBEDDING
    # float32 of a table that is not rounded first, FP8 codes, or bfloat16
    as_it_is = table and (backend == "torch" or keys.through == "jit")
    dtypes = ["float32" if as_it_is else "bfloat16"] * 3
    if recipe is not None and in_fp8(recipe, config, backend):
        casts = (recipe.output.b, recipe.grad_input.b, recipe.output.b)
        dtypes = [cast.fmt.name for cast in casts if cast is not None]
    # the whole weight waits for the backward pass, which comes next
    once = table or (keys.loss == "chunked" and linear == "lm_head")
    times = 1 if once else 3 if runs_output_again(linear, config, backend) else 2
    # of a weight that the backward pass takes in high precision, its codes twice
    for dtype in (*dtypes, dtypes[0])[:times]:
        yield Collective("weights, gathered over fsdp", "all-gather", dtype, shards, whole)
    # of linears' weights, all else in float32 (P-25)
    if keys.reduce_dtype == "float8_e4m3fn" and len(shape) == 2 and not table:
        yield from _exchanged(linear, whole, piece, config, backend)
        return
    # JAX reduces the table's gradient in the table's own dtype.
    wide = "float32"
    if keys.reduce_dtype == "bfloat16" and not (table and backend == "jax"):
        wide = "bfloat16"
    yield Collective("gradients, reduced over fsdp", "reduce-scatter", wide, shards, whole)
    if linear == "lm_head" and config.model.tie_word_embeddings and wide == "float32":
        return  # XLA adds it to the table's gradient, before it sums both over the same devices
    # a device has other tokens along tensor
    if backend == "jax" and keys.sequence and (table or linear == "lm_head"):
        purpose = "gradients, summed over data and tensor"
        yield Collective(purpose, "all-reduce", wide, keys.data * keys.tensor, piece)
    else:
        yield Collective("gradients, summed over data", "all-reduce", wide, keys.data, piece)


def _rows(config: Config, backend: str) -> Iterator[Collective]:
    """Rows of tokens that are sent to their experts and back (X-13), in bfloat16 or as codes
    (X-14), and their gradients: in PyTorch those rows alone, as if experts took equally many; in
    JAX a buffer of all of a device's rows to every other."""
    keys, model = config.parallel, config.model
    forward = 2 if keys.checkpointing == "full" else 1  # and again in the backward pass
    rows = tokens(config) * model.num_experts_per_tok * model.hidden_size
    rows *= 1 if backend == "torch" else keys.expert
    for projections in experts.layers(config):
        moving = experts.moving(projections, config)
        for codes, times in ((moving.rows, forward), (moving.gradients, 1)):
            dtype = "uint8" if codes else "bfloat16"
            sent = "rows, sent to their experts"
            yield Collective(sent, "all-to-all", dtype, keys.expert, times * rows)
        back = (forward + 1) * rows
        yield Collective("rows, sent back", "all-to-all", "bfloat16", keys.expert, back)
        if backend == "jax":
            purpose, sizes = "sizes of groups, exchanged", forward * model.num_experts
            yield Collective(purpose, "all-to-all", "int32", keys.expert, sizes, beside=True)


def _exchanged(
    linear: str, whole: float, piece: float, config: Config, backend: str
) -> Iterator[Collective]:
    """A weight's gradient in FP8: codes by one all-to-all of all devices that sum it, and float32
    sums gathered along the axes that do not cut the weight (P-25)."""
    keys = config.parallel
    cut = backend == "jax" and keys.sequence and linear == "lm_head"
    copies = keys.data * (keys.tensor if cut else 1)
    devices = copies * keys.shards
    yield Collective("gradients in FP8, exchanged", "all-to-all", "e4m3fn", devices, whole)
    yield Collective("sums of gradients, gathered", "all-gather", "float32", copies, piece)


def _context(config: Config) -> Iterator[Collective]:
    """Context parallelism of attention (A-21): each pass gathers codes of keys and values, one that
    runs again once more; devices sum their gradients in float32."""
    keys, model, variant = config.parallel, config.model, config.attention_variant
    assert variant is not None
    heads = model.num_key_value_heads // keys.tensor
    own = tokens(config) * keys.context * model.num_hidden_layers
    both = 2 * own * heads * model.head_dim
    passes = 2 if keys.checkpointing == "none" else 3
    dtype = variant.fmt.name if variant.fmt.bits == 8 else "bfloat16"
    purpose = "keys and values, gathered over context"
    yield Collective(purpose, "all-gather", dtype, keys.context, passes * both)
    purpose = "gradients of keys and values, summed over context"
    yield Collective(purpose, "reduce-scatter", "float32", keys.context, both)


def _tensor(config: Config, backend: str) -> Iterator[Collective]:
    """Tensor parallelism of attention and MLP.

    Inputs of q, k, v, gate and up are gathered, outputs of o and down summed.

    The backward pass does the reverse.
    """
    keys = config.parallel
    whole = tokens(config) * config.model.hidden_size
    wide = keys.tensor_reduce_dtype == "float32" or keys.reduce == "accumulators"
    outputs = "float32" if wide else "bfloat16"  # P-9, P-16
    summed: Kind = "reduce-scatter" if keys.sequence else "all-reduce"
    for decision in config.decisions():
        recipe, last = decision.recipe, decision.path.split(".")[-1]
        # Linears with one input gather it once, and their grad_inputs are added before the sum: by
        # XLA too, unless accumulators are summed.
        again = runs_output_again(decision.path, config, backend)
        if last in ("q_proj", "gate_proj") and keys.sequence:
            for spec in (recipe.output, *[recipe.output] * again, recipe.grad_weight):
                operand = spec.b if spec is recipe.grad_weight else spec.a
                dtype = _gathered(spec, operand, config, backend)
                purpose = "inputs, gathered over tensor"
                yield Collective(purpose, "all-gather", dtype, keys.tensor, whole)
        if last in (llama.COLUMN if keys.reduce == "accumulators" else ("q_proj", "gate_proj")):
            yield Collective("grad_inputs, summed over tensor", summed, outputs, keys.tensor, whole)
        if last in ("o_proj", "down_proj"):
            times, purpose = 1 + again, "outputs, summed over tensor"
            yield Collective(purpose, summed, outputs, keys.tensor, times * whole)
            if keys.sequence:
                yield from _grad_outputs(decision.recipe, whole, config, backend)


def _grad_outputs(
    recipe: Recipe, whole: float, config: Config, backend: str
) -> Iterator[Collective]:
    """A row-parallel grad_output: gathered once, if both backward GEMMs take the same of it."""
    keys, purpose = config.parallel, "grad_outputs, gathered over tensor"
    for_input, for_weight = (
        _gathered(spec, spec.a, config, backend) for spec in (recipe.grad_input, recipe.grad_weight)
    )
    yield Collective(purpose, "all-gather", for_input, keys.tensor, whole)
    if backend == "torch" or recipe.serves_both("grad_output"):
        return
    # a bit an element beside the other's codes (P-6)
    if recipe.pairs_gradients and keys.through == "shard_map":
        yield Collective(purpose, "all-gather", "uint8", keys.tensor, whole / 8, beside=True)
    else:
        yield Collective(purpose, "all-gather", for_weight, keys.tensor, whole, beside=True)


def _gathered(spec: GemmSpec, cast: CastSpec | None, config: Config, backend: str) -> str:
    """The dtype of a gathered operand: FP8 if it is cast before the gather (P-10, P-15)."""
    if spec.a is None or cast is None:
        return "bfloat16"
    kind = (spec.a.granularity, spec.a.policy.name, spec.a.delayed)
    torchao = kind == ("tensorwise", "torchao", None)
    if backend == "jax" or (torchao and not ranks_share_amaxes(config)):
        return cast.fmt.name
    return "bfloat16"
