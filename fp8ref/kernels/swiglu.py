"""SwiGLU, silu(gate) * up, and its gradients, with their casts (spec M-3).

gate, up and the gradient of the product are [M, N], contiguous, of one dtype. Results are computed
in float32, rounded once to that dtype in registers, and then cast, as if they had been stored.
exp is a GPU's, which is approximate; a division is rounded correctly.
"""

import dataclasses

import triton
import triton.language as tl

from fp8ref.kernels import casts
from fp8ref.kernels.casts import (
    Shape,
    load_tile,
    store_amax,
    store_amax_lines,
    store_cast,
    store_cast_lines,
    store_lines,
)
from fp8ref.kernels.jit import Launch

__all__ = [
    "amax",
    "amax_lines",
    "cast",
    "cast_gradient_lines",
    "cast_gradients",
    "cast_lines",
    "gradient_amax_lines",
    "gradient_amaxes",
    "gradient_lines",
    "lines",
]

ROWS, COLUMNS = 64, 64
"""A tile of the backward pass, which holds three of them in registers."""


@triton.jit
def _product(
    gate_ptr, up_ptr, stride_m, stride_n, M, N, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, TWICE: tl.constexpr
):  # fmt: skip
    """This program's tile of the product."""
    gate = load_tile(gate_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    up = load_tile(up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate))
    if TWICE:
        silu = silu.to(gate_ptr.dtype.element_ty).to(tl.float32)
    return (silu * up).to(gate_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _amax(
    gate_ptr, up_ptr, amax_ptr, stride_m, stride_n, M, N, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr
):  # fmt: skip
    y = _product(gate_ptr, up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE)
    store_amax(y, amax_ptr)


@triton.jit
def _cast(
    gate_ptr, up_ptr, scale_ptr, q_ptr, t_ptr, amax_ptr, stride_m, stride_n, M, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr,
    E5M2: tl.constexpr
):  # fmt: skip
    y = _product(gate_ptr, up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE)
    store_cast(y, tl.load(scale_ptr), q_ptr, t_ptr, M, N, BM, BN, EVEN, E5M2)
    store_amax(y, amax_ptr)


@triton.jit
def _lines(
    gate_ptr, up_ptr, q_ptr, t_ptr, scale_ptr, inverse_ptr, scale_t_ptr, inverse_t_ptr,
    stride_m, stride_n, M, N, EPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, TWICE: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    y = _product(gate_ptr, up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE)
    store_lines(
        y, q_ptr, t_ptr, scale_ptr, inverse_ptr, scale_t_ptr, inverse_t_ptr, M, N, EPS, BM, BN,
        EVEN, E5M2
    )  # fmt: skip


@triton.jit
def _gradient_lines(
    d_ptr, gate_ptr, up_ptr,
    gate_q, gate_t, gate_scale, gate_inverse, gate_scale_t, gate_inverse_t,
    up_q, up_t, up_scale, up_inverse, up_scale_t, up_inverse_t,
    stride_m, stride_n, M, N, EPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, TWICE: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    # One after the other, from memory that is in cache: registers hold no two tiles of results.
    gate, _ = _gradients(d_ptr, gate_ptr, up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE)
    store_lines(
        gate, gate_q, gate_t, gate_scale, gate_inverse, gate_scale_t, gate_inverse_t, M, N, EPS,
        BM, BN, EVEN, E5M2
    )  # fmt: skip
    _, up = _gradients(d_ptr, gate_ptr, up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE)
    store_lines(
        up, up_q, up_t, up_scale, up_inverse, up_scale_t, up_inverse_t, M, N, EPS, BM, BN, EVEN,
        E5M2
    )  # fmt: skip


@triton.jit
def _amax_lines(
    gate_ptr, up_ptr, rows_ptr, columns_ptr, stride_m, stride_n, M, N, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr
):  # fmt: skip
    y = _product(gate_ptr, up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE)
    store_amax_lines(y, rows_ptr, columns_ptr, M, N, BM, BN)


@triton.jit
def _cast_lines(
    gate_ptr, up_ptr, rows_ptr, columns_ptr, q_ptr, t_ptr, stride_m, stride_n, M, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    y = _product(gate_ptr, up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE)
    store_cast_lines(y, rows_ptr, columns_ptr, q_ptr, t_ptr, M, N, BM, BN, EVEN, E5M2)


@triton.jit
def _gradients(
    d_ptr, gate_ptr, up_ptr, stride_m, stride_n, M, N, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr
):  # fmt: skip
    """This program's tiles of gate's gradient and of up's."""
    d = load_tile(d_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    gate = load_tile(gate_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    up = load_tile(up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    sigmoid = tl.div_rn(tl.full(gate.shape, 1.0, tl.float32), 1.0 + tl.exp(-gate))
    silu, silu_gradient = gate * sigmoid, d * up
    if TWICE:
        silu = silu.to(d_ptr.dtype.element_ty).to(tl.float32)
        silu_gradient = silu_gradient.to(d_ptr.dtype.element_ty).to(tl.float32)
    gate_gradient = silu_gradient * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    up_gradient = d * silu
    gate_gradient = gate_gradient.to(d_ptr.dtype.element_ty).to(tl.float32)
    return gate_gradient, up_gradient.to(d_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _gradient_amaxes(
    d_ptr, gate_ptr, up_ptr, gate_amax_ptr, up_amax_ptr, stride_m, stride_n, M, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr
):  # fmt: skip
    gate_gradient, up_gradient = _gradients(
        d_ptr, gate_ptr, up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE
    )
    store_amax(gate_gradient, gate_amax_ptr)
    store_amax(up_gradient, up_amax_ptr)


@triton.jit
def _cast_gradients(
    d_ptr, gate_ptr, up_ptr, gate_scale_ptr, up_scale_ptr, gate_q_ptr, gate_t_ptr,
    up_q_ptr, up_t_ptr, gate_amax_ptr, up_amax_ptr, stride_m, stride_n, M, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr,
    E5M2: tl.constexpr
):  # fmt: skip
    gate_gradient, up_gradient = _gradients(
        d_ptr, gate_ptr, up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE
    )
    scale = tl.load(gate_scale_ptr)
    store_cast(gate_gradient, scale, gate_q_ptr, gate_t_ptr, M, N, BM, BN, EVEN, E5M2)
    store_amax(gate_gradient, gate_amax_ptr)
    scale = tl.load(up_scale_ptr)
    store_cast(up_gradient, scale, up_q_ptr, up_t_ptr, M, N, BM, BN, EVEN, E5M2)
    store_amax(up_gradient, up_amax_ptr)


@triton.jit
def _gradient_amax_lines(
    d_ptr, gate_ptr, up_ptr, gate_rows, gate_columns, up_rows, up_columns, stride_m, stride_n, M, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr
):  # fmt: skip
    gate_gradient, up_gradient = _gradients(
        d_ptr, gate_ptr, up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE
    )
    store_amax_lines(gate_gradient, gate_rows, gate_columns, M, N, BM, BN)
    store_amax_lines(up_gradient, up_rows, up_columns, M, N, BM, BN)


@triton.jit
def _cast_gradient_lines(
    d_ptr, gate_ptr, up_ptr, gate_rows, gate_columns, up_rows, up_columns,
    gate_q, gate_t, up_q, up_t, stride_m, stride_n, M, N, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    gate_gradient, up_gradient = _gradients(
        d_ptr, gate_ptr, up_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE
    )
    store_cast_lines(
        gate_gradient, gate_rows, gate_columns, gate_q, gate_t, M, N, BM, BN, EVEN, E5M2
    )
    store_cast_lines(up_gradient, up_rows, up_columns, up_q, up_t, M, N, BM, BN, EVEN, E5M2)


def amax(shape: Shape, *, twice: bool = False) -> Launch:
    """gate and up -> partial amaxes of the product, for the scale of ``cast``.

    twice    whether silu(gate) is rounded to its dtype too, as in transformers and torchtitan.
    """
    numbers = casts.matrix(shape, (shape[1], 1)) | {"TWICE": twice}
    grid = casts.tiles(*shape)
    return Launch(_amax, grid, numbers, casts.parts_of(grid))


def cast(shape: Shape, *, e5m2: bool, twice: bool = False) -> Launch:
    """gate, up and a scale () -> codes of the product [M, N] and [N, M], and its partial amaxes.

    Order:   silu(gate) = gate / (1 + exp(-gate)); times up; rounded; RN32(. * scale); cast.
    """
    numbers = casts.matrix(shape, (shape[1], 1)) | {"TWICE": twice, "E5M2": e5m2}
    grid = casts.tiles(*shape)
    outputs = (*casts.codes(shape, e5m2), *casts.parts_of(grid))
    return Launch(_cast, grid, numbers, outputs)


def gradient_amaxes(shape: Shape, *, twice: bool = False) -> Launch:
    """The product's gradient d, gate and up -> partial amaxes of gate's gradient, and of up's."""
    tile = (ROWS, COLUMNS)
    numbers = casts.matrix(shape, (shape[1], 1), tile) | {"TWICE": twice}
    grid = casts.tiles(*shape, tile)
    return Launch(_gradient_amaxes, grid, numbers, casts.parts_of(grid) * 2)


def cast_gradients(shape: Shape, *, e5m2: bool, twice: bool = False) -> Launch:
    """d, gate, up, and the scales () of both results -> codes of gate's gradient [M, N] and
    [N, M], codes of up's, and partial amaxes of both.

    Order:   s = 1 / (1 + exp(-gate)); gate's (d * up) * (s * (1 + gate * (1 - s))); up's
             d * (gate * s); each rounded, then cast by its scale.
    twice    whether d * up and gate * s are rounded to the dtype too, as autograd does where
             silu(gate) was.
    """
    tile = (ROWS, COLUMNS)
    numbers = casts.matrix(shape, (shape[1], 1), tile) | {"TWICE": twice, "E5M2": e5m2}
    grid = casts.tiles(*shape, tile)
    outputs = casts.codes(shape, e5m2) * 2 + casts.parts_of(grid) * 2
    return Launch(_cast_gradients, grid, numbers, outputs)


def lines(shape: Shape, *, e5m2: bool, twice: bool = False) -> Launch:
    """gate and up -> what ``casts.blocks`` returns of the product, of lines."""
    blocks = casts.blocks(shape, (shape[1], 1), e5m2=e5m2, square=False)
    return Launch(_lines, blocks.grid, blocks.numbers | {"TWICE": twice}, blocks.outputs, 16)


def gradient_lines(shape: Shape, *, e5m2: bool, twice: bool = False) -> Launch:
    """d, gate and up -> what ``casts.blocks`` returns of gate's gradient, and of up's, of lines."""
    whole = lines(shape, e5m2=e5m2, twice=twice)
    return dataclasses.replace(whole, kernel=_gradient_lines, outputs=whole.outputs * 2)


def amax_lines(shape: Shape, *, twice: bool = False) -> Launch:
    """gate and up -> what ``casts.amax_lines`` returns of the product."""
    grid, numbers = casts.tiles(*shape), casts.matrix(shape, (shape[1], 1)) | {"TWICE": twice}
    return Launch(_amax_lines, grid, numbers, casts.parts_of_lines(shape, grid))


def cast_lines(shape: Shape, *, e5m2: bool, twice: bool = False) -> Launch:
    """gate, up, and scales of rows [M] and columns [N] -> codes of the product by rows [M, N], and
    by columns [N, M]."""
    numbers = casts.matrix(shape, (shape[1], 1)) | {"TWICE": twice, "E5M2": e5m2}
    return Launch(_cast_lines, casts.tiles(*shape), numbers, casts.codes(shape, e5m2))


def gradient_amax_lines(shape: Shape, *, twice: bool = False) -> Launch:
    """d, gate and up -> what ``casts.amax_lines`` returns of gate's gradient, and of up's."""
    whole = gradient_amaxes(shape, twice=twice)
    outputs = casts.parts_of_lines(shape, casts.tiles(*shape, (ROWS, COLUMNS))) * 2
    return dataclasses.replace(whole, kernel=_gradient_amax_lines, outputs=outputs)


def cast_gradient_lines(shape: Shape, *, e5m2: bool, twice: bool = False) -> Launch:
    """d, gate, up, and scales of rows and columns of gate's gradient and of up's -> codes of gate's
    gradient by rows and by columns, and of up's."""
    whole = cast_gradients(shape, e5m2=e5m2, twice=twice)
    return dataclasses.replace(whole, kernel=_cast_gradient_lines, outputs=whole.outputs[:4])
