"""Round to FP8 by XLA's own conversion (spec C): nearest even, of float32, float16, bfloat16.

``encode`` gives uint8 codes, ``to_fp8`` the native float8 array, ``decode`` float32 values. Arrays
in e2m1fn hold its numbers in float8_e4m3fn (``four_bits``).
"""

import jax.numpy as jnp
from jax import Array, lax

from fp8ref import formats
from fp8ref.formats import E2M1FN, FLOAT32, Format
from fp8ref.jax.quantize import four_bits, philox

__all__ = ["DTYPES", "code_bits", "decode", "encode", "to_f32", "to_fp8"]

DTYPES = {
    "e4m3fn": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e4m3fnuz": jnp.float8_e4m3fnuz,
    "e5m2fnuz": jnp.float8_e5m2fnuz,
    "e2m1fn": jnp.float8_e4m3fn,
}
"""{name of a format: JAX's dtype of its arrays}; those in e2m1fn hold its numbers."""

STORED = {**DTYPES, "float16": jnp.float16, "bfloat16": jnp.bfloat16, "float32": jnp.float32}
"""{name of a format that optimizer states are stored in: JAX's dtype}."""


def encode(x: Array, fmt: Format, *, saturate: bool = True) -> Array:
    """Round x once to nearest even and return the codes.

    Shapes:   x any shape, empty too, float32, float16 or bfloat16, of JAX or NumPy; codes uint8 of
              the same shape, of e2m1fn one a byte.
    Specials: as the simulator: NaN -> fmt.nan_code; -0 and underflow keep their sign, except in
              fnuz; above fmt.max, infinities included: max if saturate, else Inf, or NaN in a
              format without infinities.
    Raises:   ValueError: fmt neither FP8 nor e2m1fn; x of another dtype (float64 would be rounded
              twice); e2m1fn without saturate.
    Source:   spec C-1 to C-6, C-9.
    """
    codes = code_bits(to_fp8(x, fmt, saturate=saturate), fmt)
    if not fmt.has_nan:
        return codes
    # XLA's NaN keeps its sign; C-5 emits one code.
    return jnp.where(
        jnp.isnan(x) | (codes == fmt.nan_code | fmt.sign_bit), jnp.uint8(fmt.nan_code), codes
    )


def decode(codes: Array, fmt: Format) -> Array:
    """The values of uint8 codes (or of the native float8 array), exactly: float32 of the same
    shape. Every NaN code is NaN.

    Raises:   ValueError: fmt neither FP8 nor e2m1fn; codes of another dtype.
    """
    dtype = _dtype(fmt)
    check_array(codes, f"codes of {fmt} are an array of uint8 or {jnp.dtype(dtype).name}")
    if codes.dtype == jnp.uint8:
        codes = from_code_bits(codes, fmt)
    if codes.dtype != dtype:
        raise ValueError(f"codes of {fmt} are uint8 or {jnp.dtype(dtype).name}; got {codes.dtype}.")
    return codes.astype(jnp.float32)


def to_fp8(x: Array, fmt: Format, *, saturate: bool = True) -> Array:
    """``encode``, giving the native float8 array, whose NaNs may carry a sign. Raises as encode."""
    dtype = _dtype(fmt)
    formats.check_saturates(fmt, saturate)
    value = to_f32(x)
    if fmt == E2M1FN:
        return four_bits.rounded(value).astype(dtype)
    if saturate:
        value = jnp.clip(value, -fmt.max, fmt.max)
    return value.astype(dtype)


def code_bits(native: Array, fmt: Format) -> Array:
    """The codes, uint8, of a native array: its bytes, or of e2m1fn a code of 4 bits a byte."""
    if fmt == E2M1FN:
        return four_bits.codes(native)
    return lax.bitcast_convert_type(native, jnp.uint8)


def from_code_bits(codes: Array, fmt: Format) -> Array:
    """The native array of uint8 codes: the reverse of ``code_bits``."""
    if fmt == E2M1FN:
        return four_bits.numbers(codes)
    return lax.bitcast_convert_type(codes, _dtype(fmt))


def to_stored(x: Array, fmt: Format, *, key=None, numbers: Array | None = None) -> Array:
    """x float32 rounded to a format of ``STORED``, saturated, in its dtype (spec O-8).

    key       of stochastic rounding (C-2), two words; None: to nearest even.
    numbers   where one is not zero, the code is not zero either: the smallest of its sign.
    """
    dtype = STORED[fmt.name]
    if fmt == FLOAT32:
        return x
    if key is not None:
        codes = philox.codes(x, fmt, philox.Random(key))
        if numbers is not None:
            zero = codes & ~jnp.uint32(fmt.sign_bit) == 0
            codes = jnp.where((numbers != 0) & zero, codes | jnp.uint32(1), codes)
        unsigned = jnp.uint8 if fmt.bits == 8 else jnp.uint16
        return lax.bitcast_convert_type(codes.astype(unsigned), dtype)
    if fmt.bits == 8:
        codes = encode(x, fmt)  # ends in integers: XLA leaves out no cast and its reverse
        if numbers is not None:
            codes = jnp.where((numbers != 0) & (codes & 0x7F == 0), codes | jnp.uint8(1), codes)
        return lax.bitcast_convert_type(codes, dtype)
    codes = jnp.clip(x, -fmt.max, fmt.max).astype(dtype)
    if numbers is not None:
        smallest = jnp.asarray(fmt.smallest_subnormal, dtype)
        signed = jnp.where(jnp.signbit(numbers), -smallest, smallest)
        codes = jnp.where((numbers != 0) & (codes == 0), signed, codes)
    return lax.optimization_barrier(codes)  # or XLA would leave out the cast and its reverse


def from_stored(codes: Array, fmt: Format) -> Array:
    """The values of ``to_stored``, float32."""
    return decode(codes, fmt) if fmt.bits == 8 else codes.astype(jnp.float32)


def to_f32(x: Array) -> Array:
    """x as float32, rounded to its own dtype; ValueError for float64 and others."""
    x = checked(x)
    if x.dtype == jnp.float32:
        return x
    # Fusing the producer of a bfloat16 x, XLA may pass on more digits. This rounds them.
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant).astype(jnp.float32)


def bits(x: Array) -> Array:
    """The bits of x, int16 or int32."""
    return lax.bitcast_convert_type(x, jnp.int32 if checked(x).dtype == jnp.float32 else jnp.int16)


def magnitude_bits(x: Array) -> Array:
    """The bits of |x|, int16 or int32, ordered as magnitudes, then infinities, NaNs."""
    return without_sign(bits(x))


def without_sign(bits: Array) -> Array:
    """``magnitude_bits`` of an array, of its ``bits``."""
    return bits & jnp.iinfo(bits.dtype).max


def from_magnitude_bits(bits: Array, dtype) -> Array:
    """The magnitudes, as float32, of ``magnitude_bits`` of an array of this dtype."""
    return lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def check_array(x: object, rule: str = "casts take arrays of float32, float16 or bfloat16") -> None:
    """ValueError unless x has a dtype and a shape, as arrays of JAX and NumPy do."""
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        raise ValueError(f"{rule}; got {type(x).__name__}. Convert with jnp.asarray.")


def checked(x: Array) -> Array:
    """x as a JAX array; ValueError unless it is float32, float16 or bfloat16."""
    # The dtype is x's own: jnp.asarray would first round a NumPy float64 array to float32.
    dtype = getattr(x, "dtype", None)
    if dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(
            f"casts take float32, float16 or bfloat16; got {dtype or type(x).__name__}. Convert "
            "with .astype."
        )
    return jnp.asarray(x)


def _dtype(fmt: Format):
    formats.check(fmt)
    if fmt.name not in DTYPES:
        raise ValueError(f"casts go to one of {', '.join(DTYPES)}; got {fmt}.")
    return DTYPES[fmt.name]
