"""Two sets of codes of one tensor, by the scales of its rows and by those of its columns, in little
more than the bytes of one (spec P-6).

Where all scales are powers of two and saturate no number (``CastSpec.pairs``), both codes of an
element are roundings of one significand. The code by the larger scale, the finer one, is kept. The
other is that one, rounded again on a coarser grid: the same bits, but where that rounding meets a
tie, which the number itself may not have been. A bit an element says so.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from fp8ref.jax.quantize import cast
from fp8ref.jax.quantize.scaling import Quantized

BITS = 8
"""Elements whose bits are kept in a byte."""


def merged(rows: Quantized, columns: Quantized) -> tuple[Array, Array]:
    """The finer codes of both, and bits where the coarser code is not the finer one rounded.

    Shapes:   codes [..., M, N]; scales of rows [..., M, 1], of columns [..., 1, N]; codes as
              theirs; bits uint8 [..., M, ceil(N / 8)]: bit i of byte j is of element i * ceil(N /
              8) + j.
    Specials: a NaN scale counts as the least, then zero: an infinite amax's. Codes under a NaN
    scale are NaN.
    """
    by_rows, ratio = _finer(rows.scale, rows.scale_inv, columns.scale, columns.scale_inv)
    row_codes, column_codes = (
        lax.bitcast_convert_type(q.codes, jnp.uint8) for q in (rows, columns)
    )
    finer, coarser = (
        jnp.where(by_rows, *pair) for pair in ((row_codes, column_codes), (column_codes, row_codes))
    )
    again = lax.bitcast_convert_type(
        _rounded(finer, ratio, rows).astype(rows.codes.dtype), jnp.uint8
    )
    return lax.bitcast_convert_type(finer, rows.codes.dtype), _packed(again != coarser)


def parted(
    codes: Array, bits: Array, rows: Quantized, columns: Quantized
) -> tuple[Quantized, Quantized]:
    """Both sets of codes of ``merged``, bit for bit; rows and columns give their scales only.

    Specials: of NaN codes the sign may differ.
    """
    by_rows, ratio = _finer(rows.scale, rows.scale_inv, columns.scale, columns.scale_inv)
    finer = lax.bitcast_convert_type(codes, jnp.uint8)
    value = _rounded(finer, ratio, rows)
    near = value.astype(codes.dtype).astype(jnp.float32)
    # A tie lies in the middle between two codes: what is as far from it on the other side is exact.
    value = jnp.where(_unpacked(bits, codes.shape[-1]), 2 * value - near, value)
    coarser = lax.bitcast_convert_type(value.astype(codes.dtype), jnp.uint8)
    choices = ((finer, coarser), (coarser, finer))
    row_codes, column_codes = (
        lax.bitcast_convert_type(jnp.where(by_rows, *pair), codes.dtype) for pair in choices
    )
    return dataclasses.replace(rows, codes=row_codes), dataclasses.replace(
        columns, codes=column_codes
    )


def _finer(rows: Array, rows_inv: Array, columns: Array, columns_inv: Array) -> tuple[Array, Array]:
    """Whether the row's scale is the finer one; the coarser in its units, a power of two."""
    row_scales, column_scales = (
        jnp.where(jnp.isnan(scale), jnp.float32(-1), scale) for scale in (rows, columns)
    )
    by_rows = row_scales >= column_scales
    # A ratio that float32 has not is of codes that become zeros.
    ratio = jnp.where(by_rows, columns * rows_inv, rows * columns_inv)
    coarser = jnp.where(by_rows, columns, rows)
    return by_rows, jnp.where(
        (row_scales == column_scales) & ~jnp.isnan(coarser), jnp.float32(1), ratio
    )


def _rounded(finer: Array, ratio: Array, like: Quantized) -> Array:
    """Finer codes' values under the coarser scale, in float32: exact, or 0."""
    return cast.decode(finer, like.fmt) * ratio


def _packed(bits: Array) -> Array:
    """uint8 [..., ceil(N / 8)] of bool [..., N]."""
    length = -(-bits.shape[-1] // BITS)
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, length * BITS - bits.shape[-1])]).astype(
        jnp.uint8
    )
    slices = [
        lax.slice_in_dim(bits, i * length, (i + 1) * length, axis=-1) << i for i in range(BITS)
    ]
    return sum(slices[1:], slices[0])


def _unpacked(packed: Array, length: int) -> Array:
    """Undo ``_packed``: bool [..., length]."""
    slices = [(packed >> i) & 1 != 0 for i in range(BITS)]
    return jnp.concatenate(slices, axis=-1)[..., :length]
