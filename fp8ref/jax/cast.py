"""Rounding to a format with XLA's own conversion (SEMANTICS C): nearest even, from float32, float16 or bfloat16."""

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref import formats
from fp8ref.formats import Format

DTYPES = {
    "e4m3fn": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e4m3fnuz": jnp.float8_e4m3fnuz,
    "e5m2fnuz": jnp.float8_e5m2fnuz,
}


def encode(x: jax.Array, fmt: Format, *, saturate: bool = True) -> jax.Array:
    """Round x once to nearest even and return the codes.

    Shapes:   x any shape, empty too, float32, float16 or bfloat16, of JAX or NumPy; codes uint8 of the same shape.
    Specials: as the simulator: NaN -> fmt.nan_code; -0 and underflow keep their sign, but in fnuz; above fmt.max, infinities too: max if saturate,
              else Inf, or NaN in a format without infinities.
    Raises:   ValueError: fmt not FP8; x of another dtype (float64 would be rounded twice).
    Source:   SEMANTICS C-1 to C-6.
    """
    codes = lax.bitcast_convert_type(to_fp8(x, fmt, saturate=saturate), jnp.uint8)
    # XLA's NaN keeps the sign; C-5 emits one code
    return jnp.where(jnp.isnan(x) | (codes == fmt.nan_code | fmt.sign_bit), jnp.uint8(fmt.nan_code), codes)


def decode(codes: jax.Array, fmt: Format) -> jax.Array:
    """The values of uint8 codes (or of the native float8 array), exactly: float32 of the same shape. Every NaN code is NaN.

    Raises:   ValueError: fmt not FP8; codes of another dtype.
    """
    dtype = _dtype(fmt)
    if codes.dtype == jnp.uint8:
        codes = lax.bitcast_convert_type(codes, dtype)
    if codes.dtype != dtype:
        raise ValueError(f"codes of {fmt} are uint8 or {jnp.dtype(dtype).name}; got {codes.dtype}.")
    return codes.astype(jnp.float32)


def to_fp8(x: jax.Array, fmt: Format, *, saturate: bool = True) -> jax.Array:
    """As encode, but the native float8 array; its NaNs may carry a sign. Raises as encode."""
    dtype = _dtype(fmt)
    value = to_f32(x)
    if saturate:
        value = jnp.clip(value, -fmt.max, fmt.max)
    return value.astype(dtype)


def to_f32(x: jax.Array) -> jax.Array:
    """x widened to float32, rounded to its own dtype first: XLA may hand a fused consumer more digits than the dtype has. ValueError
    unless it is float32, float16 or bfloat16."""
    x = checked(x)
    if x.dtype == jnp.float32:
        return x
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant).astype(jnp.float32)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The bits of |x|, int16 or int32, which order as the magnitudes do, infinities and then NaNs the largest."""
    integer = jnp.int32 if checked(x).dtype == jnp.float32 else jnp.int16
    return lax.bitcast_convert_type(x, integer) & jnp.iinfo(integer).max


def from_magnitude_bits(bits: jax.Array, dtype) -> jax.Array:
    """The magnitudes, as float32, of ``magnitude_bits`` of an array of this dtype."""
    return lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def checked(x: jax.Array) -> jax.Array:
    """x as an array of JAX; ValueError unless it is float32, float16 or bfloat16."""
    # asked of x itself: jnp.asarray would round a NumPy float64 array to float32 first
    dtype = getattr(x, "dtype", None)
    if dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(f"casts take arrays of float32, float16 or bfloat16; got {dtype or type(x).__name__}. Convert with .astype.")
    return jnp.asarray(x)


def _dtype(fmt: Format):
    formats.check(fmt)
    if fmt.name not in DTYPES:
        raise ValueError(f"casts go to one of {', '.join(DTYPES)}; got {fmt}.")
    return DTYPES[fmt.name]
