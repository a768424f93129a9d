"""The operands of attention, by blocks of queries and tiles of keys (spec A-2, A-4, A-6, A-9).

Query heads that share a head of keys lie in an axis of their own, [B, Hkv, G, T, D], so that k and
v are not repeated. A pass is a loop over pairs of a block of queries and a tile of keys. Pairs that
the mask hides from all queries are left out while the loop is traced.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.jax.attention import exponentials
from fp8ref.jax.attention.operands import context, hadamard
from fp8ref.jax.attention.operands import heads as head_scaling
from fp8ref.jax.attention.operands import inputs as inputs
from fp8ref.jax.attention.operands.heads import Heads
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.jax.gemm import gemm, hardware
from fp8ref.jax.quantize import cast, scales, scaling
from fp8ref.jax.states import moments
from fp8ref.spec.attention.variant import MX
from fp8ref.spec.attention.variants import Variant

QUERIES = 512
"""Queries of a block under a mask that hides keys. Without one all queries are a block."""

FAST = ("hopper_fast", "ada")
"""Plans that accumulate in a tensor core's own registers.

XLA's dot is then of fast accumulation.
"""


class Grid(NamedTuple):
    """Blocks of queries and tiles of keys (A-6).

    length, tiles  keys of a tile, and how many tiles there are.
    rows, blocks   queries of a block, and how many blocks there are.
    low, high      int32 [rows * blocks]: the keys that a query sees (A-3); none of a padded query.
    pairs          int32 [n] each: the blocks and tiles that see each other. Tiles of a block are in
                   the variant's order.
    """

    length: int
    tiles: int
    rows: int
    blocks: int
    low: np.ndarray
    high: np.ndarray
    pairs: tuple[np.ndarray, np.ndarray]


def grid(call: DeviceCall, tq: int, tk: int, features: int) -> Grid:
    """The blocks and tiles of so many queries and keys."""
    length = call.variant.tile(features, call.mask)
    tiles = -(-tk // length)
    rows = tq if call.mask.kind == "full" or tq <= QUERIES else QUERIES
    rows = -(-rows // MX) * MX
    blocks = -(-tq // rows)
    low, high = (np.pad(x, (0, rows * blocks - tq)) for x in inputs.visible(tq, tk, call.mask))
    order = range(tiles)[::-1] if call.variant.descending else range(tiles)

    def seen(block: int, tile: int) -> bool:
        part = slice(block * rows, (block + 1) * rows)
        begin, end = tile * length, (tile + 1) * length
        return bool((np.maximum(low[part], begin) < np.minimum(high[part], end)).any())

    # Which tiles a device's part of the queries sees is known when it runs.
    every = itertools.product(range(blocks), order)
    seen_tiles = [pair for pair in every if call.tokens or seen(*pair)]
    pairs = np.array(seen_tiles, np.int32).reshape(-1, 2)
    return Grid(length, tiles, rows, blocks, low, high, (pairs[:, 0], pairs[:, 1]))


def loop(body: Callable, carry, grid: Grid):
    """carry after body(carry, block, tile) -> carry, over all pairs in order."""
    pairs = tuple(jnp.asarray(x) for x in grid.pairs)
    return lax.scan(lambda carry, pair: (body(carry, *pair), None), carry, pairs)[0]


def quantize(inputs: Inputs, call: DeviceCall, scales_: dict) -> dict[str, Heads]:
    """q, k and v as the variant quantizes them, by role (A-2, A-13)."""
    variant = call.variant
    quantized = functools.partial(
        head_scaling.quantize,
        fmt=variant.fmt,
        granularity=variant.granularity,
        policy=variant.policy,
        heads=inputs.k.shape[1],
        over=call.over,
    )
    q, k, v = inputs[:3]
    if variant.rotated:
        q, k = rotated(q, call), rotated(k, call)
    return {
        "q": quantized(q, scale=scales_.get("q")),
        "k": quantized(k, scale=scales_.get("k")),
        "v": quantized(v, scale=scales_.get("v"), along_tokens=True),
    }


def rotated(x: Array, call: DeviceCall) -> Array:
    """q or k as a rotated variant quantizes it (A-13)."""
    return hadamard.rotate(x, hadamard.signs(x.shape[-1], call.seed))


def probability_scale(variant: Variant, scales_: dict) -> tuple[Array, Array]:
    """(scale, scale_inv) of the probabilities (A-8)."""
    if "s" in scales_:
        return scales.with_inverse(head_scaling.given_scale(scales_["s"], ()))
    if variant.p_scale == "state":
        policy = head_scaling.implemented(variant.policy)
        return head_scaling.scales_from_amax(jnp.float32(1), variant.fmt, policy)
    return jnp.float32(variant.p_scale), jnp.float32(np.float32(1) / np.float32(variant.p_scale))


def narrow(x: Array, variant: Variant, fmt=None) -> Array:
    """float32 numbers as a GEMM's operand of a format, by default the variant's: rounded,
    saturated; of MX blocks in bfloat16, which holds all numbers of FP8."""
    fmt = fmt or variant.fmt
    if fmt.bits != 8:
        return head_scaling.to_hp(x, fmt)
    # Past a barrier XLA cannot leave out the cast and conversion back that begin a CPU's dot.
    codes = lax.optimization_barrier(scaling.saturate(x, fmt))
    return codes.astype(jnp.bfloat16) if variant.granularity == "mx_1x32" else codes


def fp8(operand: Array, variant: Variant) -> Array:
    """The codes of a result of ``narrow``."""
    narrow = operand.dtype != jnp.bfloat16
    return operand if narrow else operand.astype(cast.DTYPES[variant.fmt.name])


def clipped(x: Array, fmt) -> Array:
    """How many numbers a saturating cast to fmt brings back into its range, int32 (A-8)."""
    if fmt.bits != 8:
        return jnp.int32(0)
    spacing = 2.0 ** (np.floor(np.log2(fmt.max)) - fmt.mantissa_bits)
    limit, magnitude = np.float32(fmt.max + spacing / 2), jnp.abs(x)  # a tie goes to the even code
    return jnp.sum(magnitude >= limit if fmt.max_code & 1 else magnitude > limit, dtype=jnp.int32)


def lost(x: Array, operand: Array, fmt) -> Array:
    """Numbers of at least 2^-126 that a cast to FP8 made 0, int32 (A-12), of codes or numbers."""
    if fmt.bits != 8:
        return jnp.int32(0)
    narrow = operand.dtype.itemsize == 1
    zero = (lax.bitcast_convert_type(operand, jnp.uint8) & 0x7F) == 0 if narrow else operand == 0
    return jnp.sum(zero & (jnp.abs(x) >= np.finfo(np.float32).tiny), dtype=jnp.int32)


class Parts:
    """Operands in whole blocks and tiles, and the scales that belong to them."""

    def __init__(self, inputs: Inputs, call: DeviceCall, tensors: dict[str, Heads]) -> None:
        self.call, self.variant = call, call.variant
        self.shape_q, self.shape_k = inputs.q.shape, inputs.k.shape
        self.group = self.shape_q[1] // self.shape_k[1]
        features = self.shape_q[3]
        self.scale, self.factor = call.softmax_scale(features), call.score_factor(features)
        self.grid = grid(call, self.shape_q[2], self.shape_k[2], self.shape_q[3])
        self.tensors = tensors
        self.q = self.by_group(self.operand(tensors["q"]))  # [B, N, G, T, D]
        self.k = self.by_tiles(self.operand(tensors["k"]))  # [B, N, T, D]
        self.v = self.by_tiles(self.operand(tensors["v"], along_tokens=True))  # [B, N, T, D]
        self.documents = inputs.documents
        if inputs.documents is not None:
            queries, keys = inputs.documents
            rows, tokens = self.grid.rows * self.grid.blocks, self.grid.length * self.grid.tiles
            queries = jnp.pad(queries, ((0, 0), (0, rows - queries.shape[1])))
            self.documents = queries, jnp.pad(keys, ((0, 0), (0, tokens - keys.shape[1])))
        self.low, self.high = jnp.asarray(self.grid.low), jnp.asarray(self.grid.high)
        if call.tokens:
            sizes = self.shape_q[2], self.shape_k[2], self.grid.rows * self.grid.blocks
            self.low, self.high = context.visible(*sizes, call.mask, call.tokens)
        self.inverse = {}
        if self.variant.granularity in ("tensor", "head"):  # [1 or B, 1 or N, 1, 1, 1]
            self.inverse = {
                role: self.head_scales(t.scale_inv) for role, t in tensors.items() if role != "o"
            }
        elif self.variant.granularity == "rows_128":
            # [B, N, tiles, 1, 1]
            self.inverse = {role: tensors[role].scale_inv[..., None] for role in ("k", "v")}
            self.inverse["q"] = self.by_group(
                head_scaling.spread(tensors["q"].scale_inv, self.shape_q, "rows_128")
            )

    def operand(self, tensor: Heads, *, along_tokens: bool = False, fmt=None) -> Array:
        """A GEMM's operand: codes; of MX blocks the dequantized tensor in bfloat16, exactly,
        because no FP8 dot takes scales that vary along K (G-16)."""
        if self.variant.granularity != "mx_1x32":
            return tensor.codes
        element_scales = head_scaling.spread(
            tensor.scale_inv, tensor.codes.shape, "mx_1x32", along_tokens=along_tokens
        )
        numbers = cast.decode(tensor.codes, fmt or self.variant.fmt)
        return (numbers * element_scales).astype(jnp.bfloat16)

    def head_scales(self, scale: Array) -> Array:
        """Scales of tensors or heads, to be multiplied into [B, N, G, T, D]."""
        return scale.reshape(1, 1, 1, 1, 1) if scale.ndim == 0 else scale[..., None]

    def by_group(self, x: Array) -> Array:
        """[B, H, T, ...] as [B, N, G, whole blocks of T, ...]."""
        b, h, t, *rest = x.shape
        x = x.reshape(b, h // self.group, self.group, t, *rest)
        behind = self.grid.rows * self.grid.blocks - t
        return jnp.pad(x, [(0, 0)] * 3 + [(0, behind)] + [(0, 0)] * len(rest)) if behind else x

    def by_tiles(self, x: Array) -> Array:
        """[B, N, T, D] in whole tiles of T."""
        behind = self.grid.length * self.grid.tiles - x.shape[2]
        return jnp.pad(x, ((0, 0), (0, 0), (0, behind), (0, 0))) if behind else x

    def ungrouped(self, x: Array) -> Array:
        """[B, N, G, T, ...] as [B, H, Tq, ...]."""
        b, n, g, _, *rest = x.shape
        return x[:, :, :, : self.shape_q[2]].reshape(b, n * g, self.shape_q[2], *rest)

    def zeros(self, *shape: int, dtype=jnp.float32) -> Array:
        """Zeros that a loop may begin with: they vary over devices as the operands do."""
        return inputs.like(jnp.zeros(shape, dtype), self.q)

    def over_devices(self, largest: Array) -> Array:
        """The largest of all devices."""
        return lax.pmax(largest, self.call.over) if self.call.over else largest

    def block(self, x: Array, block: Array, axis: int = 3) -> Array:
        """The queries of a block, of an array of all queries."""
        if self.grid.blocks == 1:
            return x
        return lax.dynamic_slice_in_dim(x, block * self.grid.rows, self.grid.rows, axis)

    def put_block(self, x: Array, part: Array, block: Array) -> Array:
        """x with the queries of a block replaced, along axis 3."""
        if self.grid.blocks == 1:
            return part
        return lax.dynamic_update_slice_in_dim(x, part, block * self.grid.rows, 3)

    def tile(self, x: Array, tile: Array, axis: int = 2) -> Array:
        """The keys of a tile, of an array of all keys."""
        return lax.dynamic_slice_in_dim(x, tile * self.grid.length, self.grid.length, axis)

    def put_tile(self, x: Array, part: Array, tile: Array, axis: int = 3) -> Array:
        """x with the keys of a tile replaced."""
        return lax.dynamic_update_slice_in_dim(x, part, tile * self.grid.length, axis)

    def seen(self, block: Array, tile: Array) -> Array:
        """Which keys of a tile a block's queries see, broadcastable to [B, N, G, rows, keys]."""
        keys = tile * self.grid.length + lax.iota(jnp.int32, self.grid.length)
        low, high = (self.block(x, block, 0)[:, None] for x in (self.low, self.high))
        inside = ((keys[None] >= low) & (keys[None] < high))[None, None, None]
        if self.documents is None:
            return inside
        queries, keys = self.documents
        q_ids, k_ids = self.block(queries, block, 1), self.tile(keys, tile, 1)
        return inside & (q_ids[:, None, None, :, None] == k_ids[:, None, None, None, :])

    def pairs(self, seen: Array) -> Array:
        """How many scores of a block and a tile are of keys that are seen, int32."""
        b, n = self.shape_k[:2]
        return jnp.sum(jnp.broadcast_to(seen, (b, n, self.group, *seen.shape[3:])), dtype=jnp.int32)

    def scores_and_slope(self, block: Array, tile: Array) -> tuple[Array, Array | None]:
        """(sums of products of q and k [B, N, G, rows, keys], times all factors if the variant
        scales them (A-4), or in the fast form, with a softcap (A-22); what that multiplies dS by,
        None without one).
        """
        with self.call.scope("scores"):
            s = self.dot(self.block(self.q, block), self.tile(self.k, tile), ((4,), (3,)))
        capped, raw = self.call.softcap is not None, self.variant.scores == "raw"
        arithmetic = self.call.arithmetic
        if self.call.fast:
            s = s * self.whole_factor(block, tile)
        elif not raw or capped:
            for factor in [self._raw_factor()] if raw else self.factors(block, tile):
                s = moments.product(s, factor)
        if not capped:
            return s, None
        t = exponentials.tanh(s, arithmetic)
        slope = jnp.float32(1) - exponentials.times(t, t, arithmetic)
        s = t if raw and not self.call.fast else exponentials.times(t, self.call.cap, arithmetic)
        return s, slope

    def whole_factor(self, block: Array, tile: Array) -> Array:
        """All factors of scores in one, under the variant's base (A-18)."""
        if self.variant.granularity in ("mx_1x32", None):
            return jnp.float32(self.factor)
        return self._scale_of_block(block) * self.scale_of_tile("k", tile) * self.factor

    def factors(self, block: Array, tile: Array) -> list:
        """What multiplies scaled scores, in order."""
        if self.variant.granularity == "mx_1x32":
            return [self.factor]
        q_inverse, k_inverse = self._scale_of_block(block), self.scale_of_tile("k", tile)
        named_factors: dict = {
            "scale": self.factor,
            "q": q_inverse,
            "k": k_inverse,
            "qk": moments.product(q_inverse, k_inverse),
        }
        return [named_factors[name] for name in self.variant.factors]

    def _scale_of_block(self, block: Array) -> Array:
        q_inverse = self.inverse["q"]
        return self.block(q_inverse, block) if self.variant.granularity == "rows_128" else q_inverse

    def scale_of_tile(self, role: str, tile: Array) -> Array:
        """scale_inv of k or v, to be multiplied into a tile's [B, N, G, rows, keys or D]."""
        if self.variant.granularity != "rows_128":
            return self.inverse[role]
        return lax.dynamic_index_in_dim(self.inverse[role], tile, 2, keepdims=True)

    def raw_factor(self) -> Array:
        """f of A-5, of raw scores."""
        return self._raw_factor() if self.call.softcap is None else jnp.float32(self.call.cap)

    def _raw_factor(self) -> Array:
        if self.variant.granularity is None:
            return jnp.float32(self.factor)
        return self.factor * moments.product(self.inverse["q"], self.inverse["k"])

    def dot(self, a: Array, b: Array, axes: tuple, batch: int = 2) -> Array:
        """A GEMM of codes, float32, of equal leading dims; accumulated as the library does (G-7).
        FP8 operands stay FP8."""
        leading = tuple(range(batch))
        plan, simulated = "slow", self.call.simulated
        if a.dtype.itemsize > 1 or self.variant.plan in FAST:
            plan = "fast"
        if simulated is None:
            return lax.dot_general(
                a,
                b,
                (axes, (leading, leading)),
                precision=gemm.PRECISION[plan],
                preferred_element_type=jnp.float32,
            )
        # matrices with the summed axis last (G-19)
        a, b = (jnp.moveaxis(x, axis, -1) for x, (axis,) in zip((a, b), axes, strict=True))
        shape = *a.shape[:-1], *b.shape[batch:-1]
        a, b = (x.reshape(math.prod(x.shape[:batch]), -1, x.shape[-1]) for x in (a, b))
        return hardware.batched_matmul(a, b, by=simulated, accumulate=plan).reshape(shape)
