"""e2m1fn by FP8 arrays: its numbers in float8_e4m3fn, and its codes (spec F-5, C-9).

Every number of e2m1fn is one of e4m3fn. So an array in e2m1fn is held as its numbers in
float8_e4m3fn: scaling, GEMMs, transposes and gathers are those of FP8. XLA's conversion to
jnp.float4_e2m1fn gives NaN another code than C-9, and took 22 times as long on a CPU (jax 0.10.2,
1024 x 1024). What shows codes calls ``codes``.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.formats import E2M1FN

_HALF = 0x30  # the code of 0.5, e2m1fn's only subnormal, in e4m3fn
_BIASES = 12  # e4m3fn's exponent field is larger by 6, which is 12 in units of an e2m1fn code
_EXPONENT, _SIGN = np.uint32(0x7F800000), np.uint32(0x80000000)  # of float32
_SIGNS = 4  # the number of bits between the two signs


def rounded(x: Array) -> Array:
    """float32 x, rounded to nearest even and saturated: the numbers of e2m1fn, float32.

    Specials: a NaN of either sign is 6; -0 and what underflows keep their sign.
    Source:   spec C-1 to C-6, C-9.
    """
    x = jnp.where(jnp.isnan(x), E2M1FN.max, x)
    magnitude = jnp.minimum(jnp.abs(x), E2M1FN.max)
    # Numbers are 0.5 apart up to 2, 2^(k-1) apart from 2^k on. Without a choice between two ways
    # XLA's GPU compiler makes one kernel of it.
    exponent = lax.bitcast_convert_type(jnp.maximum(magnitude, 1), jnp.uint32) & _EXPONENT
    down = lax.bitcast_convert_type((255 << 23) - exponent, jnp.float32)  # 2^(1-k)
    up = lax.bitcast_convert_type(exponent - (1 << 23), jnp.float32)
    steps = lax.round(magnitude * down, lax.RoundingMethod.TO_NEAREST_EVEN)
    sign = lax.bitcast_convert_type(x, jnp.uint32) & _SIGN
    return lax.bitcast_convert_type(
        lax.bitcast_convert_type(steps * up, jnp.uint32) | sign, x.dtype
    )


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
