"""Stochastic rounding in JAX (spec C-2), by integer operations: the simulator's random numbers, a
function of a seed and an element's flat index, so that any mesh gives the same.

Words are uint32, as JAX has no 64-bit integers by default: products are taken where it has, and the
48 bits of C-2 are compared as 16 and 32.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.formats import Format
from fp8ref.shared import errors

ROUNDS, MULTIPLIERS, WEYL = 7, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
"""Philox4x32-7: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011."""

BLOCK = 4096
"""Elements whose 16 high bits one run of BLOCK / 8 counters gives."""


@dataclass(frozen=True)
class Random:
    """What stochastic rounding draws from.

    key    the halves of a seed, uint32.
    bits   of each element: 48, or the highest 8 of them (C-2).
    index  uint32 of the tensor's shape: each element's flat index in the whole operand; None: that
           in the tensor.
    """

    key: tuple[Array, Array]
    bits: Literal[8, 48] = 48
    index: Array | None = None

    def like(self, shape: tuple[int, ...]) -> "Random":
        """The same of the tensor in another shape."""
        index = None if self.index is None else self.index.reshape(shape)
        return Random(self.key, self.bits, index)


def words(counter, stream, key):
    """Philox4x32 of counters below 2^32: four words each. key: halves of a seed."""
    c0, c1 = counter, jnp.zeros_like(counter)
    c2, c3 = jnp.broadcast_to(jnp.asarray(stream, jnp.uint32), counter.shape), c1
    k0, k1 = key
    for _ in range(ROUNDS):
        (p_high, p_low), (q_high, q_low) = map(_product, (c0, c2), MULTIPLIERS)
        c0, c1, c2, c3 = q_high ^ c1 ^ k0, q_low, p_high ^ c3 ^ k1, p_low
        k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
    return c0, c1, c2, c3


def key_of(seed: int, step, stream: int, *, master: bool = False):
    """The halves of the seed of a moment at one step (O-8), or of its master (O-15)."""
    key_words = words(jnp.asarray(step, jnp.uint32), stream, halves(seed))
    return key_words[2:] if master else key_words[:2]


def halves(seed) -> tuple[Array, Array]:
    """The low and high half of a seed: an integer in [0, 2^64), or uint32 [2], which may be traced.

    Raises:   ValueError: anything else.
    """
    if isinstance(seed, int):
        errors.seed(seed)
        return jnp.uint32(seed & 0xFFFFFFFF), jnp.uint32(seed >> 32)
    shape, dtype = getattr(seed, "shape", None), getattr(seed, "dtype", None)
    errors.require(
        shape == (2,) and dtype == jnp.uint32,
        "a seed is an integer in [0, 2^64), or its low and high half, uint32 [2]; got "
        f"{type(seed).__name__} of {dtype} {shape}.",
    )
    return seed[0], seed[1]


def derived(seed: tuple[Array, Array], counter, stream) -> tuple[Array, Array]:
    """The seed that counter and stream make of another one (S-24), as its halves."""
    return words(jnp.asarray(counter, jnp.uint32), stream, seed)[:2]


def codes(x, fmt: Format, random: Random):
    """The codes of x, rounded stochastically and saturated: uint32 of x's shape.

    Shapes:   x float32 of any shape, below 2^32 elements.
    Specials: NaN is fmt.nan_code; zeros keep their sign.
    Source:   spec C-2, C-3, C-5, C-6.
    """
    bits = lax.bitcast_convert_type(jnp.clip(x, -fmt.max, fmt.max), jnp.uint32)
    magnitude = bits & jnp.uint32(0x7FFFFFFF)
    field = magnitude >> 23
    exponent = jnp.maximum(field, 1).astype(jnp.int32) - 127
    mantissa = (magnitude & jnp.uint32(0x7FFFFF)) + (jnp.minimum(field, 1) << 23)
    # |x| in spacings is mantissa / 2^shift; mantissas have 24 bits: larger shifts leave nothing.
    shift = jnp.minimum(23 - fmt.mantissa_bits + jnp.maximum(fmt.emin - exponent, 0), 72).astype(
        jnp.uint32
    )
    whole = mantissa >> jnp.minimum(shift, 31)
    rest = mantissa - (whole << jnp.minimum(shift, 31))
    index = _flat_index(x.shape) if random.index is None else random.index
    h = _high_bits(index, random.key)
    # 13 is the smallest shift, of float16
    fraction = (rest << 3) >> jnp.minimum(shift - 13, 31)
    if random.bits == 8:
        up = (fraction >> 8) + (h >> 8) > 0xFF
    else:
        up = _carries(fraction + h, rest, shift, words(index, 1, random.key)[0])
    magnitude_codes = (
        whole
        + up.astype(jnp.uint32)
        + ((jnp.maximum(exponent, fmt.emin) - fmt.emin).astype(jnp.uint32) << fmt.mantissa_bits)
    )
    sign = jnp.where(bits >> 31 == 1, jnp.uint32(fmt.sign_bit), jnp.uint32(0))
    return jnp.where(
        jnp.isnan(x),
        jnp.uint32(fmt.nan_code if fmt.has_nan else fmt.max_code),
        jnp.minimum(magnitude_codes, jnp.uint32(fmt.max_code)) | sign,
    )


def _carries(high, rest, shift, w):
    """Whether the 48 bits of the fraction and the random ones carry, of which high is the sum of
    the upper 16, and w the lower 32 random bits."""
    left = jnp.clip(48 - shift.astype(jnp.int32), 0)
    right = jnp.clip(shift.astype(jnp.int32) - 48, 0)
    low = jnp.where(
        left < 32,
        (rest << jnp.minimum(left, 31).astype(jnp.uint32)) >> right.astype(jnp.uint32),
        jnp.uint32(0),
    )
    return (high > 0xFFFF) | ((high == 0xFFFF) & (low > ~w))


def _flat_index(shape: tuple[int, ...]):
    """uint32 of a shape: of each element by itself, cut by a mesh as the tensor is."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    return index


def _high_bits(index, key):
    """h (C-2) of every element, uint32."""
    within = index % (BLOCK // 2)
    c0, c1, c2, c3 = words((index // BLOCK) * (BLOCK // 8) + within // 4, 0, key)
    second_half, second_word = index % BLOCK >= BLOCK // 2, within % 4 >= 2
    word = jnp.where(second_half, jnp.where(second_word, c3, c2), jnp.where(second_word, c1, c0))
    return (word >> (index % 2 * 16)) & jnp.uint32(0xFFFF)


def _product(x, multiplier: int):
    """The high and the low word of a product. Not by lax.mulhi: inside shard_map XLA knows none
    (jax 0.10.2), and half-words compile four times as long."""
    with jax.enable_x64(True):
        product = lax.convert_element_type(x, np.uint64) * np.uint64(multiplier)
        high = lax.convert_element_type(product >> np.uint64(32), np.uint32)
        return high, lax.convert_element_type(product, np.uint32)
