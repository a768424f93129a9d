"""e2m1fn by FP8 arrays: its numbers in float8_e4m3fn, and its codes (spec F-5, C-9).

Every number of e2m1fn is one of e4m3fn. So an array in e2m1fn is held as its numbers in
float8_e4m3fn: scaling, GEMMs, transposes and gathers are those of FP8. XLA's conversion to
jnp.float4_e2m1fn gives NaN another code than C-9, and took 22 times as long on a CPU (jax 0.10.2,
1024 x 1024). What shows codes calls ``codes``.
"""

import jax.numpy as jnp
from jax import Array, lax

from fp8ref.formats import E2M1FN

_HALF = 0x30  # the code of 0.5, e2m1fn's only subnormal, in e4m3fn
_BIASES = 12  # e4m3fn's exponent field is larger by 6, which is 12 in units of an e2m1fn code
_SIGNS = 4  # the number of bits between the two signs


def rounded(x: Array) -> Array:
    """float32 x, rounded to nearest even and saturated: the numbers of e2m1fn, float32.

    Specials: a NaN of either sign is 6; -0 and what underflows keep their sign.
    Source:   spec C-1 to C-6, C-9.
    """
    magnitude = jnp.minimum(jnp.abs(x), E2M1FN.max)
    # Below the smallest normal number, 1, the spacing stays 0.5.
    fixed = lax.round(magnitude * 2, lax.RoundingMethod.TO_NEAREST_EVEN) * 0.5
    floating = lax.reduce_precision(magnitude, 8, E2M1FN.mantissa_bits)
    signed = jnp.copysign(jnp.where(magnitude < 1, fixed, floating), x)
    return jnp.where(jnp.isnan(x), E2M1FN.max, signed)


def codes(numbers: Array) -> Array:
    """The codes, uint8 up to 15, of numbers of e2m1fn in float8_e4m3fn."""
    bits = lax.bitcast_convert_type(numbers, jnp.uint8).astype(jnp.int32)
    magnitude = bits & 0x7F
    # Both formats have the same lowest exponent but for the subnormal, which is code 1.
    code = jnp.maximum((magnitude >> 2) - _BIASES, (magnitude > 0).astype(jnp.int32))
    return (code | ((bits & 0x80) >> _SIGNS)).astype(jnp.uint8)


def numbers(codes: Array) -> Array:
    """The numbers, float8_e4m3fn, of uint8 codes of e2m1fn: the reverse of ``codes``."""
    magnitude = codes.astype(jnp.int32) & 7
    bits = jnp.where(magnitude < 2, magnitude * _HALF, (magnitude + _BIASES) << 2)
    signed = bits | ((codes.astype(jnp.int32) & 8) << _SIGNS)
    return lax.bitcast_convert_type(signed.astype(jnp.uint8), jnp.float8_e4m3fn)
