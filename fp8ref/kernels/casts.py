"""Codes of a tensor in both orders, amaxes and scales (spec S-2 to S-5).

Each kernel takes x [M, N] of any strides, in bfloat16, float16 or float32, as rows of its first
axis. Codes are uint8, [M, N] and [N, M], both contiguous. Amaxes are int32: the bits of |x| as
float32, whose integer maximum is S-2's, NaN before Inf before any number, in any order.
"""

import math

import numpy as np
import triton
import triton.language as tl

from fp8ref.kernels.jit import Launch, Numbers, Output

__all__ = [
    "amax",
    "amax_lines",
    "blocks",
    "cast",
    "cast_by_amax",
    "cast_lines",
    "cast_lines_by_amaxes",
    "merge",
    "recast",
    "scaled",
    "transpose",
]

ROWS, COLUMNS = 128, 64
"""A tile, of which a warp reads and writes 16 bytes a lane in both orders."""

Shape = tuple[int, int]
"""Rows and columns, or their strides."""

BLOCK = 128
"""The length of a block's line."""

PARTS = 512
"""The most partial amaxes that ``amax`` returns."""

LINE_PARTS = 16
"""The most partial amaxes that ``amax_lines`` returns of a line, of up to 131,072 numbers."""

LOADED = 2048
"""How many partial amaxes are loaded at once."""

PROGRAMS = 264
"""The most programs of ``recast``: two on each of a Hopper's processors."""

EPS = int(np.float32(1e-12).view(np.int32))
"""The bits of torchao's least amax: by it and by the float64 1e-12 all scales are the same."""


@triton.jit
def magnitude(x):
    """Bits of |x|, float32, as int32: their order is that of magnitudes, NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def codes_of(x, E5M2: tl.constexpr):
    """float32 to uint8 codes, to nearest even, saturating; Inf is the largest number."""
    if E5M2:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def scale_of(amax, E5M2: tl.constexpr, EPS: tl.constexpr, POWER: tl.constexpr = False):
    """RN32(fmt.max / max(amax, eps)) of an amax's bits (S-3), or its power of two."""
    largest: tl.constexpr = 57344.0 if E5M2 else 448.0
    floored = tl.maximum(amax, EPS).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.full(floored.shape, largest, tl.float32), floored)
    return power_of_two(scale) if POWER else scale


@triton.jit
def power_of_two(scale):
    """A normal scale, 0 or NaN by S-4's rule exp2_log2, whose logarithm float32 rounds: up to the
    next power of two where fewer than c numbers are between."""
    bits = magnitude(scale)
    k = (bits >> 23) - 126
    j = tl.where(k > 0, k - 1, -k)
    c = tl.where(j >= 2, 1, 0)
    c = tl.where(j >= 4, 2, c)
    c = tl.where(j >= 8, 5, c)
    c = tl.where(j >= 16, 11, c)
    c = tl.where(j >= 32, 22, c)
    c = tl.where(j >= 64, 44, c)
    up = tl.where(0x7FFFFF - (bits & 0x7FFFFF) < c, 1, 0)
    power = ((bits >> 23) + up) << 23
    return tl.where(bits > 0x7F800000, bits, power).to(tl.float32, bitcast=True)


@triton.jit
def load_at(
    x_ptr, i, j, stride_m, stride_n, M, N, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr
):
    """The tile of x from row i and column j on; zeros outside."""
    rows, columns = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    first = x_ptr + i.to(tl.int64) * stride_m + j.to(tl.int64) * stride_n
    at = first + (rows * stride_m + columns * stride_n)
    return tl.load(at) if EVEN else tl.load(at, mask=(i + rows < M) & (j + columns < N), other=0)


@triton.jit
def load_tile(
    x_ptr, stride_m, stride_n, M, N, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr
):
    """This program's tile of x, float32; zeros outside."""
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    return load_at(x_ptr, i, j, stride_m, stride_n, M, N, BM, BN, EVEN).to(tl.float32)


@triton.jit
def load_lines(x_ptr, axis: tl.constexpr, N, SIZE: tl.constexpr):
    """The numbers of this program's rows (axis 0) or columns (axis 1); 0 outside."""
    at = tl.program_id(axis) * SIZE + tl.arange(0, SIZE)
    return tl.load(x_ptr + at, mask=at < N, other=0.0)


@triton.jit
def store_at(x, out_ptr, i, j, M, N, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr):
    """Store a tile [BM, BN] in out [M, N], contiguous, from row i and column j on."""
    rows, columns = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    at = out_ptr + i.to(tl.int64) * N + j + (rows * N + columns)
    if EVEN:
        tl.store(at, x)
    else:
        tl.store(at, x, mask=(i + rows < M) & (j + columns < N))


@triton.jit
def store_tile(x, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr):
    """Store this program's tile [BM, BN] in out [M, N], contiguous."""
    store_at(x, out_ptr, tl.program_id(0) * BM, tl.program_id(1) * BN, M, N, BM, BN, EVEN)


@triton.jit
def store_transposed(codes, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr):
    """Store this program's tile of codes [BM, BN] in out [N, M]."""
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    store_at(tl.trans(codes), out_ptr, j, i, N, M, BN, BM, EVEN)


@triton.jit
def store_amax(x, amax_ptr):
    """Store the largest magnitude of a tile at this program's place."""
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(amax_ptr + place, tl.max(tl.max(magnitude(x), 1), 0))


@triton.jit
def store_cast(
    x, scale, q_ptr, t_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    """Cast a tile by a scale that broadcasts to it, and store the codes in both orders."""
    codes = codes_of(x * scale, E5M2)
    store_tile(codes, q_ptr, M, N, BM, BN, EVEN)
    store_transposed(codes, t_ptr, M, N, BM, BN, EVEN)


@triton.jit
def read_tiles(
    x_ptr, q_ptr, t_ptr, scale, stride_m, stride_n, M, N, STEP, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, CASTS: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    """The amax of every STEP-th tile from this program's on; CASTS: they are cast, and stored."""
    columns, largest = tl.cdiv(N, BN), tl.zeros((BM,), tl.int32)
    tiles = tl.cdiv(M, BM) * columns
    # addresses that are kept from tile to tile would take registers that other warps need
    for tile in tl.range(tl.program_id(0), tiles, STEP, disable_licm=True):
        i, j = tile // columns * BM, tile % columns * BN
        x = load_at(x_ptr, i, j, stride_m, stride_n, M, N, BM, BN, EVEN).to(tl.float32)
        largest = tl.maximum(largest, tl.max(magnitude(x), 1))
        if CASTS:
            codes = codes_of(x * scale, E5M2)
            store_at(codes, q_ptr, i, j, M, N, BM, BN, EVEN)
            store_at(tl.trans(codes), t_ptr, j, i, N, M, BN, BM, EVEN)
    return tl.max(largest, 0)


@triton.jit
def _cast(
    x_ptr, scale_ptr, q_ptr, t_ptr, amax_ptr, stride_m, stride_n, M, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    x = load_tile(x_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    store_cast(x, tl.load(scale_ptr), q_ptr, t_ptr, M, N, BM, BN, EVEN, E5M2)
    store_amax(x, amax_ptr)


@triton.jit
def _cast_by_amax(
    x_ptr, amax_ptr, q_ptr, t_ptr, scale_ptr, inverse_ptr, stride_m, stride_n, M, N,
    COUNT, PARTS: tl.constexpr, EPS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, E5M2: tl.constexpr, POWER: tl.constexpr
):  # fmt: skip
    scale = scale_of(load_amax(amax_ptr, COUNT, PARTS), E5M2, EPS, POWER)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, scale)
        tl.store(inverse_ptr, tl.div_rn(1.0, scale))
    x = load_tile(x_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    store_cast(x, scale, q_ptr, t_ptr, M, N, BM, BN, EVEN, E5M2)


@triton.jit
def load_amax(parts_ptr, COUNT, SIZE: tl.constexpr):
    """The largest of partial amaxes."""
    part, largest = tl.arange(0, SIZE), tl.zeros((SIZE,), tl.int32)
    for start in range(0, COUNT, SIZE):
        mask = start + part < COUNT
        largest = tl.maximum(largest, tl.load(parts_ptr + start + part, mask=mask, other=0))
    return tl.max(largest, 0)


@triton.jit
def _merge(parts_ptr, seen_ptr, out_ptr, COUNT, SIZE: tl.constexpr):
    bits = load_amax(parts_ptr, COUNT, SIZE)
    finite = bits < 0x7F800000
    amax = tl.where(finite, bits, 0).to(tl.float32, bitcast=True)
    tl.store(out_ptr, tl.maximum(tl.load(seen_ptr), amax))
    not_finite = tl.where(finite, 0.0, 1.0)
    tl.store(out_ptr + 1, tl.maximum(tl.load(seen_ptr + 1), not_finite))
    tl.store(out_ptr + 2, 1.0)


@triton.jit
def _recast(
    x_ptr, amax_ptr, used_ptr, q_ptr, t_ptr, guess_ptr, scale_ptr, inverse_ptr,
    stride_m, stride_n, M, N, COUNT, PROGRAMS: tl.constexpr, SIZE: tl.constexpr,
    EPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    E5M2: tl.constexpr
):  # fmt: skip
    scale = scale_of(load_amax(amax_ptr, COUNT, SIZE), E5M2, EPS, True)
    if tl.program_id(0) == 0:
        tl.store(guess_ptr, scale)
        tl.store(scale_ptr, scale)
        tl.store(inverse_ptr, tl.div_rn(1.0, scale))
    # a NaN counts as another scale
    if scale != tl.load(used_ptr):
        read_tiles(
            x_ptr, q_ptr, t_ptr, scale, stride_m, stride_n, M, N, PROGRAMS, BM, BN, EVEN, True, E5M2
        )  # fmt: skip


@triton.jit
def _cast_lines(
    x_ptr, rows_ptr, columns_ptr, q_ptr, t_ptr, stride_m, stride_n, M, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    x = load_tile(x_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    store_cast_lines(x, rows_ptr, columns_ptr, q_ptr, t_ptr, M, N, BM, BN, EVEN, E5M2)


@triton.jit
def store_cast_lines(
    x, rows_ptr, columns_ptr, q_ptr, t_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    """Cast a tile by scales of its rows, and transposed by those of its columns; store both."""
    rows = load_lines(rows_ptr, 0, M, BM)[:, None]
    columns = load_lines(columns_ptr, 1, N, BN)[None, :]
    store_tile(codes_of(x * rows, E5M2), q_ptr, M, N, BM, BN, EVEN)
    store_transposed(codes_of(x * columns, E5M2), t_ptr, M, N, BM, BN, EVEN)


@triton.jit
def _cast_lines_by_amaxes(
    x_ptr, rows_ptr, columns_ptr, q_ptr, scale_ptr, inverse_ptr, t_ptr, scale_t_ptr,
    inverse_t_ptr, stride_m, stride_n, M, N, ROW_PARTS, COLUMN_PARTS, SIZE: tl.constexpr,
    EPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    E5M2: tl.constexpr, POWER: tl.constexpr
):  # fmt: skip
    rows = scales_of_lines(
        rows_ptr, scale_ptr, inverse_ptr, 0, M, ROW_PARTS, SIZE, EPS, BM, E5M2, POWER
    )
    columns = scales_of_lines(
        columns_ptr, scale_t_ptr, inverse_t_ptr, 1, N, COLUMN_PARTS, SIZE, EPS, BN, E5M2, POWER
    )
    x = load_tile(x_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    store_tile(codes_of(x * rows[:, None], E5M2), q_ptr, M, N, BM, BN, EVEN)
    store_transposed(codes_of(x * columns[None, :], E5M2), t_ptr, M, N, BM, BN, EVEN)


@triton.jit
def scales_of_lines(
    parts_ptr, scale_ptr, inverse_ptr, axis: tl.constexpr, N, COUNT, PARTS: tl.constexpr,
    EPS: tl.constexpr, SIZE: tl.constexpr, E5M2: tl.constexpr, POWER: tl.constexpr
):  # fmt: skip
    """The scales of this program's rows (axis 0) or columns (axis 1) by their partial amaxes
    [COUNT, N]. The first program along the other axis stores them and scale_inv."""
    part, at = tl.arange(0, PARTS)[:, None], tl.program_id(axis) * SIZE + tl.arange(0, SIZE)
    mask = (part < COUNT) & (at < N)[None, :]
    parts = tl.load(parts_ptr + part * N + at[None, :], mask=mask, other=0)
    scale = scale_of(tl.max(parts, 0), E5M2, EPS, POWER)
    if tl.program_id(1 - axis) == 0:
        store_scales(scale, scale_ptr, inverse_ptr, at, at < N)
    return scale


@triton.jit
def _scaled(
    x_ptr, rows_ptr, columns_ptr, out_ptr, stride_m, stride_n, M, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    x = load_tile(x_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    rows, columns = load_lines(rows_ptr, 0, M, BM), load_lines(columns_ptr, 1, N, BN)
    y = x * (rows[:, None] * columns[None, :])
    store_tile(y.to(out_ptr.dtype.element_ty), out_ptr, M, N, BM, BN, EVEN)


@triton.jit
def _transpose(
    x_ptr, t_ptr, stride_m, stride_n, M, N, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr
):
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    codes = load_at(x_ptr, i, j, stride_m, stride_n, M, N, BM, BN, EVEN)
    store_transposed(codes, t_ptr, M, N, BM, BN, EVEN)


@triton.jit
def _amax(
    x_ptr, amax_ptr, stride_m, stride_n, M, N, COUNT, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    amax = read_tiles(
        x_ptr, x_ptr, x_ptr, 1.0, stride_m, stride_n, M, N, COUNT, BM, BN, EVEN, False, False
    )  # fmt: skip
    tl.store(amax_ptr + tl.program_id(0), amax)


@triton.jit
def _amax_lines(
    x_ptr, rows_ptr, columns_ptr, stride_m, stride_n, M, N, TILES, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    j = tl.program_id(1) * BN
    largest = tl.zeros((BM, BN), tl.int32)
    start = tl.program_id(0) * TILES
    for tile in range(tl.minimum(TILES, tl.cdiv(M, BM) - start)):
        i = (start + tile) * BM
        x = load_at(x_ptr, i, j, stride_m, stride_n, M, N, BM, BN, EVEN)
        bits, rows = magnitude(x.to(tl.float32)), i + tl.arange(0, BM)
        tl.store(rows_ptr + tl.program_id(1) * M + rows, tl.max(bits, 1), mask=rows < M)
        largest = tl.maximum(largest, bits)
    at = j + tl.arange(0, BN)
    tl.store(columns_ptr + tl.program_id(0) * N + at, tl.max(largest, 0), mask=at < N)


@triton.jit
def store_amax_lines(
    x, rows_ptr, columns_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Store the amaxes of a tile's rows and of its columns at this program's places."""
    bits = magnitude(x)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    tl.store(rows_ptr + tl.program_id(1) * M + rows, tl.max(bits, 1), mask=rows < M)
    tl.store(columns_ptr + tl.program_id(0) * N + columns, tl.max(bits, 0), mask=columns < N)


@triton.jit
def store_scales(scale, scale_ptr, inverse_ptr, at, mask):
    """Store scales and RN32(1 / scale)."""
    tl.store(scale_ptr + at, scale, mask=mask)
    tl.store(inverse_ptr + at, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), mask=mask)


@triton.jit
def _squares(
    x_ptr, q_ptr, t_ptr, scale_ptr, inverse_ptr, stride_m, stride_n, M, N,
    EPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    E5M2: tl.constexpr
):  # fmt: skip
    x = load_tile(x_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    scale = scale_of(tl.max(tl.max(magnitude(x), 1), 0), E5M2, EPS)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scale_ptr + place, scale)
    tl.store(inverse_ptr + place, tl.div_rn(1.0, scale))
    store_cast(x, scale, q_ptr, t_ptr, M, N, BM, BN, EVEN, E5M2)


@triton.jit
def _lines(
    x_ptr, q_ptr, t_ptr, scale_ptr, inverse_ptr, scale_t_ptr, inverse_t_ptr,
    stride_m, stride_n, M, N, EPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    x = load_tile(x_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    store_lines(
        x, q_ptr, t_ptr, scale_ptr, inverse_ptr, scale_t_ptr, inverse_t_ptr, M, N, EPS, BM, BN,
        EVEN, E5M2
    )  # fmt: skip


@triton.jit
def store_lines(
    x, q_ptr, t_ptr, scale_ptr, inverse_ptr, scale_t_ptr, inverse_t_ptr, M, N,
    EPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    E5M2: tl.constexpr
):  # fmt: skip
    """Cast this program's tile by the amaxes of its rows, and transposed by those of its columns;
    store codes, scales and scale_inv of both."""
    bits = magnitude(x)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    scale = scale_of(tl.max(bits, 1), E5M2, EPS)
    at = rows * tl.num_programs(1) + tl.program_id(1)
    store_scales(scale, scale_ptr, inverse_ptr, at, rows < M)
    store_tile(codes_of(x * scale[:, None], E5M2), q_ptr, M, N, BM, BN, EVEN)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    scale = scale_of(tl.max(bits, 0), E5M2, EPS)
    at = tl.program_id(0) * N + columns
    store_scales(scale, scale_t_ptr, inverse_t_ptr, at, columns < N)
    store_transposed(codes_of(x * scale[None, :], E5M2), t_ptr, M, N, BM, BN, EVEN)


def tiles(rows: int, columns: int, tile: tuple[int, int] = (ROWS, COLUMNS)) -> tuple[int, int]:
    """How many tiles cover a matrix along each axis."""
    return -(-rows // tile[0]), -(-columns // tile[1])


def parts(shape: Shape) -> int:
    """How many partial amaxes ``amax`` returns of a matrix."""
    rows, columns = tiles(*shape)
    return min(PARTS, rows * columns)


def matrix(shape: Shape, strides: Shape, tile: tuple[int, int] = (ROWS, COLUMNS)) -> Numbers:
    """The numbers of a kernel that say where a matrix lies, and whether tiles divide it."""
    even = shape[0] % tile[0] == 0 and shape[1] % tile[1] == 0
    return {
        "stride_m": strides[0],
        "stride_n": strides[1],
        "M": shape[0],
        "N": shape[1],
        "BM": tile[0],
        "BN": tile[1],
        "EVEN": even,
    }


def codes(shape: Shape, e5m2: bool) -> tuple[Output, Output]:
    """Codes in both orders, as outputs."""
    fmt = "e5m2" if e5m2 else "e4m3fn"
    return (shape, fmt), (shape[::-1], fmt)


def parts_of(grid: tuple[int, ...]) -> tuple[Output]:
    """A partial amax of each program, as an output."""
    return (((math.prod(grid),), "int32"),)


def cast(shape: Shape, strides: Shape, *, e5m2: bool) -> Launch:
    """x and a scale () -> codes [M, N], codes [N, M] and partial amaxes of x.

    Order:    RN32(f32(x) * scale), then to nearest even, saturating (S-5).
    Amaxes:   int32 [programs], of x itself.
    """
    numbers, grid = matrix(shape, strides) | {"E5M2": e5m2}, tiles(*shape)
    return Launch(_cast, grid, numbers, codes(shape, e5m2) + parts_of(grid))


def cast_by_amax(shape: Shape, strides: Shape, *, e5m2: bool, power: bool = False) -> Launch:
    """x and the partial amaxes of ``amax`` -> codes [M, N], codes [N, M], scale () and scale_inv
    (), by policy torchao (S-3); power: by torchao_pow2 (S-4)."""
    numbers = matrix(shape, strides) | {"COUNT": parts(shape), "PARTS": PARTS, "EPS": EPS}
    numbers |= {"E5M2": e5m2, "POWER": power}
    outputs = (*codes(shape, e5m2), *(((), "float32"),) * 2)
    return Launch(_cast_by_amax, tiles(*shape), numbers, outputs)


def recast(shape: Shape, strides: Shape, *, e5m2: bool) -> Launch:
    """x, its partial amaxes and the scale by which ``cast`` cast it, a guess -> its codes in both
    orders, the next guess, scale and scale_inv, each () float32.

    Order:    the scale is that of policy torchao_pow2 (S-4), whatever was guessed. Codes are
              written only if the guess is another: otherwise each program ends at once.
    """
    rows, columns = tiles(*shape)
    numbers = matrix(shape, strides) | {"COUNT": rows * columns, "SIZE": LOADED, "EPS": EPS}
    programs = min(PROGRAMS, rows * columns)
    numbers |= {"PROGRAMS": programs, "E5M2": e5m2}
    return Launch(_recast, (programs,), numbers, (*codes(shape, e5m2), *(((), "float32"),) * 3))


def cast_lines(shape: Shape, strides: Shape, *, e5m2: bool) -> Launch:
    """x, a scale for each row [M] and for each column [N] -> codes [M, N] by rows, codes [N, M] by
    columns."""
    numbers = matrix(shape, strides) | {"E5M2": e5m2}
    return Launch(_cast_lines, tiles(*shape), numbers, codes(shape, e5m2))


def cast_lines_by_amaxes(
    shape: Shape, strides: Shape, *, e5m2: bool, power: bool = False
) -> Launch:
    """x and the partial amaxes of ``amax_lines`` -> codes [M, N], scale [M, 1] and scale_inv of
    rows; codes [N, M], scale [1, N] and scale_inv of columns, by policy torchao (S-3); power: by
    torchao_pow2 (S-4)."""
    _, bands = _bands(shape)
    numbers = matrix(shape, strides) | {"ROW_PARTS": bands[1], "COLUMN_PARTS": bands[0]}
    numbers |= {"SIZE": triton.next_power_of_2(max(bands)), "EPS": EPS}
    numbers |= {"E5M2": e5m2, "POWER": power}
    by_rows, by_columns = codes(shape, e5m2)
    rows, columns = ((shape[0], 1), "float32"), ((1, shape[1]), "float32")
    outputs = (by_rows, rows, rows, by_columns, columns, columns)
    return Launch(_cast_lines_by_amaxes, tiles(*shape), numbers, outputs)


def scaled(shape: Shape, strides: Shape) -> Launch:
    """x [M, N], a factor for each row [M] and for each column [N] -> their product, in x's dtype.

    Order:    RN32(row * column); RN32(f32(x) * it); rounded once to x's dtype (G-5).
    """
    return Launch(_scaled, tiles(*shape), matrix(shape, strides), ((shape, "like"),))


def transpose(shape: Shape, strides: Shape) -> Launch:
    """Codes [M, N], uint8 -> the same codes [N, M]."""
    outputs = ((shape[::-1], "like"),)
    return Launch(_transpose, tiles(*shape), matrix(shape, strides), outputs)


def amax(shape: Shape, strides: Shape) -> Launch:
    """x -> partial amaxes, int32 [programs], at most PARTS."""
    numbers, grid = matrix(shape, strides) | {"COUNT": parts(shape)}, (parts(shape),)
    return Launch(_amax, grid, numbers, parts_of(grid))


def merge(shape: tuple[int]) -> Launch:
    """Partial amaxes, int32 [count], and an observation, float32 [3] -> both merged: amax of finite
    ones, not finite, seen (H-4). The output may be the observation's memory."""
    return Launch(_merge, (1,), {"COUNT": shape[0], "SIZE": LOADED}, (((3,), "float32"),))


def amax_lines(shape: Shape, strides: Shape) -> Launch:
    """x -> partial amaxes of rows, int32 [parts, M], and of columns, int32 [parts, N]."""
    tile, bands = _bands(shape)
    count = tiles(*shape, tile)[0]
    numbers = matrix(shape, strides, tile) | {"TILES": -(-count // bands[0])}
    return Launch(_amax_lines, bands, numbers, parts_of_lines(shape, bands))


def _bands(shape: Shape) -> tuple[Shape, Shape]:
    """The tile of ``amax_lines``, as wide as LINE_PARTS ask for, and its programs: each reads tiles
    that lie one below the other."""
    width = min(ROWS * COLUMNS, max(COLUMNS, triton.next_power_of_2(-(-shape[1] // LINE_PARTS))))
    tile = ROWS * COLUMNS // width, width
    rows, columns = tiles(*shape, tile)
    return tile, (-(-rows // -(-rows // LINE_PARTS)), columns)


def parts_of_lines(shape: Shape, grid: Shape) -> tuple[Output, ...]:
    """Partial amaxes of rows and of columns, from a grid of tiles."""
    return ((grid[1], shape[0]), "int32"), ((grid[0], shape[1]), "int32")


def blocks(shape: Shape, strides: Shape, *, e5m2: bool, square: bool) -> Launch:
    """x -> codes [M, N], codes [N, M], and scales and scale_inv of blocks, by policy torchao (S-6).

    square   scale and scale_inv of 128 x 128, float32 [tiles along M, tiles along N], of both
             orders. Else those of 1 x 128 along N, [M, tiles along N], and those of 128 x 1 along
             M, [tiles along M, N], by which the transposed codes are made.
    """
    tile = (BLOCK, BLOCK)
    numbers = matrix(shape, strides, tile) | {"EPS": EPS, "E5M2": e5m2}
    rows, columns = grid = tiles(*shape, tile)
    if square:
        outputs = (*codes(shape, e5m2), *((grid, "float32"),) * 2)
        return Launch(_squares, grid, numbers, outputs)
    along, down = ((shape[0], columns), "float32"), ((rows, shape[1]), "float32")
    return Launch(_lines, grid, numbers, (*codes(shape, e5m2), along, along, down, down))
