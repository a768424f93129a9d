"""Quantization statistics of a GEMM's operand, measured on the device (spec Q-8, Q-9).

A measurement is float32 [LENGTH]: every count as two numbers below 2^16, which float32 holds
exactly; the sums of squares in units of a power of two near the operand's amax, so that none leaves
float32's range; that power's exponent field; amax and extreme scales. ``parts`` decodes it.
"""

import operator

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.formats import Format
from fp8ref.jax.quantize import cast, scales, scaling
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import OPERANDS, Gemm, Role
from fp8ref.selection.statistics import COUNTS
from fp8ref.spec.gemm import MX_BLOCKS

__all__ = ["LENGTH", "ROWS", "Measured", "measure", "parts"]

LENGTH = 2 * len(COUNTS) + 6
"""The numbers of a measurement: two for each of ``COUNTS``, and six more."""

ROWS: tuple[tuple[Gemm, Role], ...] = tuple(
    (gemm, role) for gemm, roles in OPERANDS.items() for role in roles
)
"""The six operands of a linear as (GEMM, role), in the order of ``rows``."""

Measured = dict[tuple[Gemm, Role], Array]
"""(GEMM, role) -> measurement float32 [LENGTH]."""


def measure(x: Array, q: Quantized) -> Array:
    """The measurement float32 [LENGTH] of x and its quantized form q.

    Shapes:   x float32, float16 or bfloat16, of as many elements as q.codes.
    Specials: x that are not finite are counted, and enter no sum; scales of which one is NaN have
              NaN extremes.
    Order:    errors e = RN32(decode(code) * scale_inv) - x in float32, where XLA may leave out the
              rounding of that product; squares are summed along the last dim, then over the others
              (Q-9).
    Raises:   ValueError: 2^31 elements or more, which int32 does not count.
    """
    if x.size >= 2**31:
        raise ValueError(
            f"statistics count below 2^31 elements per device; got {x.shape}. Use more devices "
            "with shard_map, or set statistics.every to 0."
        )
    x, shape = x.reshape(q.codes.shape), q.codes.shape
    value, decoded = cast.to_f32(x), cast.decode(q.codes, q.fmt)
    finite = jnp.isfinite(value)
    kept = jnp.where(finite, value, 0.0)
    # which the quantizer may have taken too: XLA then computes it once
    group_amaxes = scaling.amax(x, q.granularity, axis=q.axis, ragged=True)
    amax = scaling.amax(group_amaxes)
    field, in_units = unit(amax)
    scale_inv = scaling.spread(q.both_scale_inv, shape, q.blocks)
    error = jnp.where(finite, decoded * scale_inv - kept, 0.0)
    times = scales.times_e8m0 if q.granularity in MX_BLOCKS else operator.mul
    bound, above = _overflow_bound(q.fmt)

    def rare() -> list[Array]:
        wide = cast.to_f32(x)  # again: what a branch takes from outside, XLA would write to memory
        scaled = jnp.abs(times(wide, scaling.spread(q.scale, shape, q.blocks)))
        return [_number(~jnp.isfinite(wide)), _number(scaled > bound if above else scaled >= bound)]

    # The amaxes say whether there is any of either, so that the branch seldom runs.
    none = jnp.isfinite(amax) & (jnp.max(times(group_amaxes, q.scale)) < bound)
    non_finite, overflows = lax.cond(none, lambda: [jnp.zeros_like(amax, jnp.int32)] * 2, rare)
    counts = {
        "count": jnp.int32(x.size),
        "non_finite": non_finite,
        # by bits: XLA on a CPU takes subnormals for zero
        "underflows": _number((cast.magnitude_bits(x) != 0) & (decoded == 0)),
        "saturated": _number(jnp.abs(decoded) == q.fmt.max),
        "overflows": overflows,
    }
    # XLA's extrema on a CPU may drop NaNs
    poisoned = jnp.where(jnp.isnan(q.scale).any(), jnp.nan, 0.0)
    extremes = [q.scale.min() + poisoned, q.scale.max() + poisoned]
    sums = [_squares(v * in_units) for v in (kept, error)]
    return jnp.stack([*_limbs(counts), *sums, field.astype(jnp.float32), amax, *extremes])


def measurement(
    x: Array,
    codes: Array,
    fmt: Format,
    scale: Array,
    scale_inv: Array,
    inside: Array,
    times=operator.mul,
) -> Array:
    """``measure`` of the elements that are inside, with scales that broadcast to x's shape; times
    scales x.
    """
    value, decoded = cast.to_f32(x), cast.decode(codes, fmt)
    finite = jnp.isfinite(value)
    kept = jnp.where(finite & inside, value, 0.0)
    amax = scaling.amax(jnp.where(inside, x, jnp.zeros((), x.dtype)))
    field, in_units = unit(amax)
    error = jnp.where(finite & inside, decoded * scale_inv - kept, 0.0)
    bound, above = _overflow_bound(fmt)
    scaled = jnp.abs(times(value, scale))
    masks = {
        "count": inside,
        "non_finite": ~finite & inside,
        "underflows": (cast.magnitude_bits(x) != 0) & (decoded == 0) & inside,
        "saturated": (jnp.abs(decoded) == fmt.max) & inside,
        "overflows": (scaled > bound if above else scaled >= bound) & inside,
    }
    counts = {name: _number(masks[name].reshape(-1, x.shape[-1])) for name in COUNTS}
    extremes = [jnp.where(inside, scale, jnp.inf).min(), jnp.where(inside, scale, -jnp.inf).max()]
    poisoned = jnp.where(jnp.isnan(jnp.where(inside, scale, 1.0)).any(), jnp.nan, 0.0)
    sums = (_squares(v.reshape(-1, x.shape[-1])) for v in (kept * in_units, error * in_units))
    extremes = [s + poisoned for s in extremes]
    return jnp.stack([*_limbs(counts), *sums, field.astype(jnp.float32), amax, *extremes])


def rows(measured: Measured) -> Array:
    """float32 [6, LENGTH]: measurements of a linear's operands by ROWS, or zeros."""
    return jnp.stack([measured.get(row, jnp.zeros(LENGTH, jnp.float32)) for row in ROWS])


def parts(measurements: np.ndarray) -> np.ndarray:
    """Measurements float32 [..., LENGTH] as float64 [..., statistics.FIELDS]."""
    limbs, rest = np.split(measurements.astype(np.float64), [2 * len(COUNTS)], axis=-1)
    signal, noise, field, *others = np.moveaxis(rest, -1, 0)
    counts = limbs[..., 0::2] * 2**16 + limbs[..., 1::2]
    squared = np.exp2(2 * (field - 127))
    sums = np.stack([signal * squared, noise * squared, *others], axis=-1)
    return np.concatenate([counts, sums], axis=-1)


def _limbs(counts: dict[str, Array]) -> list[Array]:
    """Each of ``COUNTS`` as its high and low 16 bits, float32."""
    halves = [half for name in COUNTS for half in (counts[name] >> 16, counts[name] & 0xFFFF)]
    return [half.astype(jnp.float32) for half in halves]


def unit(largest: Array) -> tuple[Array, Array]:
    """The exponent field, of a normal number, of an amax, and 2^-exponent: both that and its
    reciprocal are normal. One where it is not finite."""
    field = jnp.clip(lax.bitcast_convert_type(largest, jnp.int32) >> 23, 1, 253)
    field = jnp.where(jnp.isfinite(largest), field, 127)
    return field, lax.bitcast_convert_type((254 - field) << 23, jnp.float32)


def _number(mask: Array) -> Array:
    """int32: how many are true; rows in float32, exact below 2^24, three times as fast."""
    return jnp.sum(jnp.sum(mask.astype(jnp.float32), axis=-1).astype(jnp.int32))


def _squares(x: Array) -> Array:
    """The sum of squares; the barrier keeps XLA from one long sum, whose error grows."""
    return jnp.sum(lax.optimization_barrier(jnp.sum(x * x, axis=-1)))


def _overflow_bound(fmt: Format) -> tuple[float, bool]:
    """The tie between max and its successor, and whether only values above it overflow (C-4)."""
    below = float(np.ldexp(1.0, int(np.frexp(fmt.max)[1]) - 1 - fmt.mantissa_bits))
    return fmt.max + below / 2, fmt.max_code % 2 == 0
