"""Seconds of attention with the kernel that numerics.attention imitates, as backends' tiles.

No kernel fuses it. Each product of a tile is a GEMM that writes float32; kernels between them read
scores and write operands. The FLOPs are exact, those of hidden halves of tiles included. The bytes
assume that what stands between two products is fused as far as it can be, and that no cache keeps
anything.
"""

import math
from dataclasses import dataclass

from fp8ref.estimate.gpu_rates import Ceilings
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.attention.variants import Mask, Variant
from fp8ref.train.config.config import Config
from fp8ref.train.config.device_shapes import sequences

QUERIES, ROWS = 512, 32  # the queries of a block in JAX, and what blocks are padded to
STEP = 16  # what PyTorch pads the rows and keys of a tile to


@dataclass(frozen=True)
class Pass:
    """A walk over all pairs of queries and a tile, in one direction of a step.

    products   GEMMs of a pair.
    scores     bytes a score of what is written and read between and by them.
    sums       arrays of float32 [rows or keys, D] that a pair adds to: 16 bytes an element, of the
               product and the sum, each written and read.
    """

    products: int
    scores: int
    sums: int


def pairs(length: int, tile: int, backend: str, parts: int = 1) -> list[tuple[int, int]]:
    """(queries, keys) of each pair that a causal sequence of one head computes, with padding (A-6).

    parts     of the queries, each on a device of its own: pairs of the last part, which sees most.
              In JAX a program is the same on all devices, and leaves out no pair (A-21).
    """
    starts, own = range(0, length, tile), length // parts
    if backend == "torch":
        last, before = -(-own // STEP) * STEP, length - own
        return [
            (
                last - max(begin - before, 0) // STEP * STEP,
                -(-min(tile, length - begin) // STEP) * STEP,
            )
            for begin in starts
        ]
    rows = -(-min(own, QUERIES) // ROWS) * ROWS
    return [
        (rows, tile)
        for block in range(0, own, rows)
        for begin in starts
        if parts > 1 or begin < min(block + rows, length)
    ]


def passes(variant: Variant, checkpointing: str, scaling: str) -> list[Pass]:
    """The walks of a step. A ``current`` scale of dS, made of all of dS, takes one more, a
    ``delayed`` one none; so does a forward pass that runs again, under selective checkpointing too.
    """
    codes = 1 if variant.fmt.bits == 8 and variant.granularity != "mx_1x32" else 2
    # Scores written, read for the maximum, and read for P; P written and read.
    forward = Pass(2, 12 + 2 * codes, 1)
    # Scores and dP written and read; P and dS written, read once and twice.
    backward = Pass(5, 16 + 5 * codes, 3)
    scaled = [Pass(2, 16, 0)] if codes == 1 and scaling == "current" else []
    return [forward] * (1 if checkpointing == "none" else 2) + [*scaled, backward]


def tile_bytes(config: Config, variant: Variant, backend: str) -> tuple[int, str]:
    """(bytes, formula) of the scores that exist at a time in a backward pass: one tile's (A-18)."""
    rows, keys = max(_pairs(config, variant, backend))
    wide, codes = (
        8 if variant.real else 4,
        1 if variant.fmt.bits == 8 and variant.granularity != "mx_1x32" else 2,
    )
    each = 4 * wide + 2 * codes
    heads = _heads(config) // config.data.microbatches
    return (
        each * rows * keys * heads,
        f"{each} bytes each, of {rows:,} queries and {keys:,} keys at a time: scores, P, dP and "
        "dS, casts of two",
    )


def gathered_bytes(config: Config) -> tuple[int, str]:
    """(bytes, formula) of all parts' keys, values and their gradients, in a pass (A-21)."""
    model, variant = config.model, config.attention_variant
    assert variant is not None
    heads = sequences(config) * math.ceil(model.num_key_value_heads / config.parallel.tensor)
    each = variant.fmt.bits // 8 + 4
    size = 2 * each * heads * config.data.sequence_length * model.head_dim
    return (
        size,
        f"{each} bytes each, of whole sequences: codes, and float32 sums of gradients, of one "
        "layer",
    )


def flops(config: Config, variant: Variant, backend: str) -> int:
    """FLOPs of a layer's products on a device, in a step."""
    products = sum(one.products for one in _passes(config, variant))
    scores = sum(rows * keys for rows, keys in _pairs(config, variant, backend))
    return 2 * config.model.head_dim * _heads(config) * products * scores


def seconds(config: Config, variant: Variant, backend: str, ceilings: Ceilings) -> float:
    """Seconds of a layer's attention on a device, in a step.

    Raises:   ConfigError: products whose rate is not known; a library's kernel.
    """
    config.require_tiles("an estimate of attention's seconds")
    low = variant.fmt.bits == 8 and variant.granularity != "mx_1x32"
    if variant.real or (variant.granularity == "mx_1x32" and backend == "torch"):
        dtype = "float64" if variant.real else "float32"
        raise ConfigError(
            f"numerics.attention {variant.name!r} multiplies in {dtype} in {backend}, of which "
            "no rate is known. Name another."
        )
    rate = ceilings.fp8 if low else ceilings.bf16
    heads, width, codes = _heads(config), config.model.head_dim, 1 if low else 2
    # torch._scaled_mm takes one head of keys of one sequence; all other products are batched.
    each = 1
    if low and backend == "torch":
        each = heads * config.model.num_key_value_heads // config.model.num_attention_heads
    total = 0.0
    for one in _passes(config, variant):
        for rows, keys in _pairs(config, variant, backend):
            multiplied = one.products * 2 * rows * keys * width * heads / rate
            moved = heads * (
                one.scores * rows * keys
                + (16 * one.sums + one.products * codes) * max(rows, keys) * width
            )
            total += (
                max(multiplied, one.products * each * ceilings.launch) + moved / ceilings.bandwidth
            )
    return total


def _pairs(config: Config, variant: Variant, backend: str) -> list[tuple[int, int]]:
    tile = variant.tile(config.model.head_dim, Mask(causal=True))
    return pairs(config.data.sequence_length, tile, backend, config.parallel.context)


def _passes(config: Config, variant: Variant) -> list[Pass]:
    return passes(variant, config.parallel.checkpointing, config.numerics.attention_scaling)


def _heads(config: Config) -> int:
    """Sequences and query heads of a device, of all microbatches."""
    heads = math.ceil(config.model.num_attention_heads / config.parallel.tensor)
    return sequences(config) * config.data.microbatches * heads
