"""Chains of steps of a tensor core (spec G-10 to G-12), from codes: the twin of
``accumulate.chains_plain`` for finite operands.

``pack`` decodes a and lays it out by steps. ``columns`` fills some columns of the result, tile by
tile: it decodes a tile of b once, for as many steps as the cache holds, and takes these steps for
some rows after others (``steps``).
"""

from typing import Any, NamedTuple

import numpy as np

from fp8ref.formats import Format
from fp8ref.sim import threads
from fp8ref.sim.kernels.bits import prefer_small_code
from fp8ref.sim.kernels.chains.loops import take_chains
from fp8ref.sim.kernels.chains.rows import decode
from fp8ref.sim.kernels.chains.steps import MOST_UNITS, PARTS, zero_and_bias
from fp8ref.sim.kernels.chains.vectors import LANES, Sizes
from fp8ref.sim.kernels.compiled import compiled

u32, i32, u8, f32 = np.uint32, np.int32, np.uint8, np.float32

STEPS = 8
"""Steps whose tiles of b are laid out together.

Other numbers from 1 to 32 are at most a tenth slower.
"""


class Rows(NamedTuple):
    """a [M, K] by steps of a unit.

    numbers   magnitudes, float32 [steps, M, width], or float64 if sums of a step need it; exponents
              uint32 alike, four times a byte.
    signs     uint32 [steps, M]: bit k is the sign of number k.
    unit      width, fraction_bits and output_bits.
    """

    numbers: np.ndarray
    exponents: np.ndarray
    signs: np.ndarray
    unit: tuple[int, int, int]


def pack(a: np.ndarray, fmt: Format, width: int, fraction_bits: int, output_bits: int) -> Rows:
    """Rows of codes a [M, K] of finite numbers of a format; K is a multiple of the width."""
    # Products lie below 2^(F + 2) units and the accumulator below 2^(F + 1).
    double = (width << (fraction_bits + 2)) + (1 << (fraction_bits + 1)) >= MOST_UNITS
    a = np.ascontiguousarray(a.reshape(len(a), a.shape[1] // width, width).swapaxes(0, 1))
    numbers = np.empty(a.shape, np.float64 if double else f32)
    exponents = np.empty(a.shape, u32)
    bits = np.empty(a.size // 16, np.uint16)
    zero, _ = zero_and_bias(double)
    sizes = Sizes(mantissa_bits=fmt.mantissa_bits, bias=fmt.bias, zero=zero)
    flat = (a.reshape(-1), numbers.reshape(-1), exponents.reshape(-1))
    size_array = np.array(sizes, np.int64)

    def decode_some(i: int, j: int) -> None:
        decoded(*(x[16 * i : 16 * j] for x in flat), bits[i:j], size_array)

    if a.size:
        threads.run(decode_some, bits.size, grain=1 << 13)
    signs = _by_rows(bits, width).reshape(a.shape[:2])
    return Rows(numbers, exponents, signs, (width, fraction_bits, output_bits))


def _by_rows(bits: np.ndarray, width: int) -> np.ndarray:
    """uint32 numbers of ``width`` bits, 4 to 32, from a sequence of bits."""
    if width < 8:
        bytes_ = bits.view(u8)
        return np.stack([bytes_ & u8(15), bytes_ >> u8(4)], axis=-1).astype(u32)
    return bits.view(f"<u{width // 8}").astype(u32, copy=False)


def tiles(b: np.ndarray) -> np.ndarray:
    """b [N, K], codes, as ``columns`` takes it: uint32 [ceil(N / LANES), K / 4, LANES], words of
    four codes, zeros behind the last.
    """
    missing = -len(b) % LANES
    b = np.ascontiguousarray(np.pad(b, ((0, missing), (0, 0))) if missing else b)
    return np.ascontiguousarray(b.view(u32).reshape(-1, LANES, b.shape[1] // 4).swapaxes(1, 2))


def columns(
    a: Rows, b: np.ndarray, fmt: Format, ends: np.ndarray, out: np.ndarray, begin: int, end: int
) -> None:
    """Add to columns begin to end of out [M, N], from a multiple of LANES, chains of a, b [N, K].

    b       as ``tiles`` returns it, of codes of finite numbers of a format.
    ends    uint8 [steps]: what follows each step, CHAIN_END, SPLIT_END or RESULT.

    A chain from 0 stays a multiple of 2^(-28 - F), -28 the smallest exponent of a product, and
    below 2^32 K: float32 neither underflows nor overflows.
    """
    (_, m, width), n, kind = a.numbers.shape, out.shape[1], a.numbers.dtype
    most = max(1, min(STEPS * f32().itemsize // kind.itemsize, len(ends)))
    b_exponents = aligned(most * width * LANES, u8)
    parts = aligned(most * PARTS * width * LANES, kind)
    acc = aligned(2 * m * LANES, f32)
    acc[:] = 0
    zero, one_byte = zero_and_bias(kind == np.float64)
    decoding = fmt.mantissa_bits, fmt.bias, one_byte + zero, one_byte
    sizes = np.array(Sizes(begin, end, len(ends), most, m, n, *a.unit, *decoding), np.int64)
    left = (x.reshape(-1) for x in (a.numbers, a.exponents, a.signs, b))
    chains(*left, ends, b_exponents, parts, acc, out.reshape(-1), sizes)


def aligned(size: int, dtype: Any) -> np.ndarray:
    """A flat array that begins at a line of the cache, so that no vector lies in two."""
    length = size * np.dtype(dtype).itemsize
    raw = np.empty(length + 64, u8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + length].view(dtype)


@compiled
def decoded(codes, numbers, exponents, signs, sizes):
    """``decode``."""
    decode(codes, numbers, exponents, signs, sizes)


@compiled
def chains(a, a_exponents, signs, b, ends, b_exponents, parts, acc, out, sizes):
    """``take_chains``."""
    prefer_small_code()
    take_chains(a, a_exponents, signs, b, ends, b_exponents, parts, acc, out, sizes)
