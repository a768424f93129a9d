"""Casts from float32 bits to codes of at most 8 bits, one pass, eight lanes at a time, for every
format of ``encodes`` and every rounding.

The code of |x| is n + (E - emin) * 2^m, where E = max(floor(log2|x|), emin) and n is |x| in units
of the format's spacing at E, rounded to an integer. Nearest-even lets the adder round: |x| + 2^(E +
23 - m) has that spacing as its last place, and n is what remains of its bits. The other roundings
shift integers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from fp8ref.formats import Format
from fp8ref.sim import philox
from fp8ref.sim.kernels.bits import (
    AT_A_TIME,
    as_bits,
    as_float,
    fetch_ahead,
    prefer_wide_vectors,
    shift_right,
)
from fp8ref.sim.kernels.compiled import compiled

u32, u64 = np.uint32, np.uint64


class Layout(NamedTuple):
    """The constants of a kernel, decided by format, rounding and saturation. Numbers are uint32."""

    mantissa_bits: np.uint32
    spacing: np.uint32  # 23 - mantissa_bits
    emin: np.uint32  # the exponent field of float32 at the smallest normal number
    # float32 bits to which magnitudes are lowered first: max, or a number that still overflows
    limit: np.uint32
    max_code: np.uint32
    overflow_code: np.uint32
    nan_code: np.uint32
    sign_bit: np.uint32
    sign_shift: np.uint32  # from float32's sign bit to this one
    saturate: bool
    negative_zero: bool
    directed: bool  # never leaves the finite range from a finite value (spec C-4)
    away: bool
    odd: bool


def layout(fmt: Format, rounding: str, saturate: bool) -> Layout:
    """The constants of a cast's kernel."""
    limit = fmt.max if saturate else 2 ** (np.floor(np.log2(fmt.max)) + 1)
    return Layout(
        mantissa_bits=u32(fmt.mantissa_bits),
        spacing=u32(23 - fmt.mantissa_bits),
        emin=u32(127 + fmt.emin),
        limit=np.float32(limit).view(u32),
        max_code=u32(fmt.max_code),
        overflow_code=u32(fmt.nan_code if fmt.inf_code is None else fmt.inf_code),
        nan_code=u32(fmt.nan_code),
        sign_bit=u32(fmt.sign_bit),
        sign_shift=u32(32 - fmt.bits),
        saturate=saturate,
        negative_zero=fmt.negative_zero,
        directed=rounding in ("toward_zero", "to_odd"),
        away=rounding == "nearest_away",
        odd=rounding == "to_odd",
    )


def encodes(fmt: Format) -> bool:
    """Whether kernels cast to it: signed, byte codes, a mantissa whose last bit makes codes odd."""
    return fmt.signed and fmt.bits <= 8 and fmt.mantissa_bits > 0


@functools.lru_cache(maxsize=64)
def encoder(fmt: Format, rounding: str, saturate: bool) -> Callable:
    """encode(bits uint32 [n], out uint8 [n], start, seed); start: flat index of bits[0]."""
    to = layout(fmt, rounding, saturate)
    if rounding == "stochastic":
        return Stochastic(to)
    if rounding == "nearest_even":

        @compiled
        def encode(bits, out, start, seed):
            prefer_wide_vectors()
            for begin in range(0, bits.size, AT_A_TIME):
                fetch_ahead(bits, begin, AT_A_TIME)
                part = bits[begin : begin + AT_A_TIME]
                coded = out[begin : begin + AT_A_TIME]
                for i in range(part.size):
                    coded[i] = np.uint8(nearest_even(part[i], to))
    else:

        @compiled
        def encode(bits, out, start, seed):
            for i in range(bits.size):
                out[i] = np.uint8(by_shift(bits[i], to))

    return encode


@njit(inline="always")
def nearest_even(bits, to):
    """The code of a float32's bits; adding a number of the right spacing rounds it."""
    u = u32(bits & u32(0x7FFFFFFF))
    u = u if u < to.limit else to.limit  # numba compiles min and max as functions, and takes longer
    emin, exponent = u32(to.emin << u32(23)), u32(u & u32(0x7F800000))
    exponent = exponent if exponent > emin else emin
    # 2^(E + 23 - mantissa_bits): a float32 whose last place is the format's spacing at |x|.
    field = u32(to.spacing << u32(23))
    adder = u32(exponent + field)
    # The sum keeps the adder's exponent, so the bits above the adder's count spacings: they are n.
    # Then come the steps of the exponent, (exponent - emin) >> spacing, of which what no x changes
    # is taken off at once.
    total = as_bits(np.float32(as_float(u) + as_float(adder)))
    code = u32(
        u32(total - u32(exponent - shift_right(exponent, to.spacing)))
        - u32(field + shift_right(emin, to.spacing))
    )
    return pack(bits, code, to)


@njit(inline="always")
def by_shift(bits, to):
    """The code under other roundings: shift the significand, inspect the lost bits."""
    u = min(u32(bits & u32(0x7FFFFFFF)), to.limit)
    sig = u32(u32(u & u32(0x7FFFFF)) | u32(0x800000)) if u > u32(0) else u32(0)
    # below that every shift is past sig's first bit
    e = max(shift_right(u, u32(23)), u32(to.emin - u32(8)))
    top = max(e, to.emin)
    # Below emin the spacing stays, so the shift grows as the exponent falls.
    shift = u32(u32(top + to.spacing) - e)
    n = shift_right(sig, shift)
    rest = u32(sig - u32(n << shift))
    if to.away:
        n = u32(n + (u32(1) if u32(rest << u32(1)) >= u32(u32(1) << shift) else u32(0)))
    elif to.odd:
        n = u32(n | (u32(1) if rest > u32(0) else u32(0)))
    return pack(bits, u32(n + u32(u32(top - to.emin) << to.mantissa_bits)), to)


@njit(inline="always")
def pack(bits, code, to):
    """From the bits of x and the rounded code of |x|: overflow, sign, NaN (spec C-3 to
    C-6)."""
    u = u32(bits & u32(0x7FFFFFFF))
    sign = u32(shift_right(bits, to.sign_shift) & to.sign_bit)
    if not to.saturate:
        # From a finite value a directed rounding never leaves the finite range (C-4).
        kept = to.directed and u < u32(0x7F800000)
        code = (to.max_code if kept else to.overflow_code) if code > to.max_code else code
        sign = sign if code != to.nan_code else u32(0)
    if not to.negative_zero:
        sign = sign if code > u32(0) else u32(0)
    return to.nan_code if u > u32(0x7F800000) else u32(code | sign)


class Stochastic:
    """``encode`` by stochastic rounding: 16 random bits decide nearly every element. Returns the
    places of the others, one in 2^16, whose codes are of no use: 32 more bits decide them (C-2)."""

    def __init__(self, to: Layout) -> None:
        @compiled
        def add(bits, random, out, late):
            """Random becomes the 16 bits below the sum.

            Returns how many of them are all ones: they do not decide, and late holds their places.
            """
            prefer_wide_vectors()
            count = 0
            for begin in range(0, bits.size, AT_A_TIME):
                fetch_ahead(bits, begin, AT_A_TIME)
                part = bits[begin : begin + AT_A_TIME]
                drawn = random[begin : begin + AT_A_TIME]
                coded = out[begin : begin + AT_A_TIME]
                for i in range(part.size):
                    b = part[i]
                    u = u32(b & u32(0x7FFFFFFF))
                    fixed, steps = _fixed_point(u if u < to.limit else to.limit, to)
                    total = u32(fixed + u32(drawn[i]))
                    drawn[i] = np.uint16(total & u32(0xFFFF))
                    coded[i] = np.uint8(
                        pack(
                            b, u32(shift_right(total, u32(16)) + u32(steps << to.mantissa_bits)), to
                        )
                    )
                most = np.uint16(0)
                for i in range(part.size):
                    most = drawn[i] if drawn[i] > most else most
                if most == np.uint16(0xFFFF):
                    for i in range(part.size):
                        if drawn[i] == np.uint16(0xFFFF):
                            late[count] = begin + i
                            count += 1
            return count

        self._add: Any = add

    @property
    def overloads(self) -> dict:
        """What is compiled, as of a kernel."""
        return self._add.overloads

    def __call__(self, bits: np.ndarray, out: np.ndarray, start: int, seed: int) -> np.ndarray:
        keys = np.array(
            [
                [(half + r * weyl) & 0xFFFFFFFF for r in range(philox.ROUNDS)]
                for half, weyl in _halves(int(seed))
            ],
            np.uint64,
        )
        # which so many elements touch at most
        blocks = min(BLOCKS, (bits.size + 2 * philox.BLOCK - 2) // philox.BLOCK)
        random, late, done = np.empty(blocks * (philox.BLOCK // 4), np.uint64), [], 0
        halves = random.view(np.uint16)
        places = np.empty(halves.size, np.int64)
        while done < bits.size:
            block, offset = divmod(start + done, philox.BLOCK)
            fill(random, u64(block * (philox.BLOCK // 8)), keys)
            n = min(halves.size - offset, bits.size - done)
            count = self._add(
                bits[done : done + n], halves[offset : offset + n], out[done : done + n], places
            )
            late.append(done + places[:count])
            done += n
        return np.concatenate(late) if late else np.empty(0, np.int64)


BLOCKS = 32
"""Blocks of random numbers that are drawn at a time: 256 KiB, which the second cache holds."""


def _halves(seed: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (seed & 0xFFFFFFFF, philox.WEYL[0]), (seed >> 32, philox.WEYL[1])


@njit(inline="always")
def _fixed_point(u, to):
    """(|x| in units of its spacing as 16.16 fixed point, E - emin); all zero far below emin."""
    e, least = shift_right(u, u32(23)), u32(to.emin - u32(24))
    e = e if e > least else least
    top = e if e > to.emin else to.emin
    sig = u32(u32(u & u32(0x7FFFFF)) | u32(0x800000))
    return shift_right(sig, u32(u32(top + u32(to.spacing - u32(16))) - e)), u32(top - to.emin)


# Philox in 64-bit lanes: products take the low 32 bits of factors; nothing else needs masks.
_M0, _M1 = (u64(m) for m in philox.MULTIPLIERS)
_LOW, _32 = u64(0xFFFFFFFF), u64(32)


@njit(inline="always")
def _round(c0, c1, c2, c3, k0, k1):
    p0, p1 = u64(_M0 * u64(c0 & _LOW)), u64(_M1 * u64(c2 & _LOW))
    return u64(u64(u64(p1 >> _32) ^ c1) ^ k0), p1, u64(u64(u64(p0 >> _32) ^ c3) ^ k1), p0


@compiled
def fill(random, first, keys):
    """random uint64 [blocks, 2, BLOCK / 8], flat: of each block the words (0, 1), then (2, 3), of
    its counters, of which ``first`` is the first of all; stream 0. keys uint64 [2, ROUNDS]."""
    prefer_wide_vectors()
    each = philox.BLOCK // 8
    for block in range(random.size // (2 * each)):
        for j in range(each):
            counter = u64(first + u64(block * each + j))
            c0, c1, c2, c3 = counter, u64(counter >> _32), u64(0), u64(0)
            for r in range(philox.ROUNDS):
                c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[0, r], keys[1, r])
            random[2 * block * each + j] = u64(c0 & _LOW) | u64(c1 << _32)
            random[(2 * block + 1) * each + j] = u64(c2 & _LOW) | u64(c3 << _32)
