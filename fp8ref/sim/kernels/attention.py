"""Attention kernels: exponentials rounded correctly, the online softmax of a tile (spec A-5 to
A-8), and float32 sums that go on from an accumulator (A-9).

The twins of ``attention.exponentials`` and ``attention.softmax.step_plain``. Chains that go on are
in ``chains_from``.
"""

import math
from fractions import Fraction

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from fp8ref.sim.kernels.bits import as_bits, as_bits64, as_float, as_float64, prefer_wide_vectors
from fp8ref.sim.kernels.compiled import compiled

u32, i32, i8, f32, f64 = np.uint32, np.int32, np.int8, np.float32, np.float64

TILE_ORDER, QUAD, PACKED = 0, 1, 2
"""The orders of a row's sum (A-7)."""

STEPS = 32
"""2^(i / STEPS) has a table."""


def _root(i: int) -> tuple[float, float]:
    """2^(i / STEPS) as a float64 and what that lacks, from integers alone."""
    bits = 160
    value = _integer_root(2 ** (i + STEPS * bits))
    high = float(Fraction(value, 2**bits))
    return high, float(Fraction(value, 2**bits) - Fraction(high))


def _integer_root(value: int) -> int:
    """The integer part of value^(1 / STEPS): five square roots."""
    for _ in range(5):
        value = math.isqrt(value)
    return value


_HIGH = np.array([_root(i)[0] for i in range(STEPS)])
_LOW = np.array([_root(i)[1] for i in range(STEPS)])

# ln 2 = 0x0.B17217F7D1CF79ABC9E3B39803F2F6AF...: as 38 bits and the rest, over STEPS.
_LN2 = Fraction(0xB17217F7D1CF79ABC9E3B39803F2F6AF, 2**128)
_LN2_HIGH = float(Fraction(int(_LN2 * 2**38), 2**38) / STEPS)
_LN2_LOW = float(_LN2 / STEPS - Fraction(_LN2_HIGH))
_INVERSE = float(STEPS / _LN2)
_SHIFT = 1.5 * 2.0**52
"""Added to a float64 below 2^51, it rounds to an integer, which is then in the low bits."""
_SHIFT_BITS = int(np.float64(_SHIFT).view(np.int64))
_E = [float(Fraction(1, math.factorial(n))) for n in range(9)]
_B = [float(_LN2**n / math.factorial(n)) for n in range(9)]
_E2, _E3, _E4, _E5, _E6, _E7 = _E[2:8]
_B1, _B2, _B3, _B4, _B5, _B6, _B7 = _B[1:8]


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c of float32 numbers, rounded once."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@njit(nogil=True, inline="always", error_model="numpy")
def _assemble(k, q):
    """RN32(2^(k / STEPS) (1 + q)): the sum of two float64 numbers, rounded to odd, then to float32.

    Its error is below 2^-57 of the result: no float32 argument comes so near to a midpoint.
    """
    i, power = np.uint64(k & np.int64(STEPS - 1)), k >> np.int64(5)
    high = _HIGH[i]
    tail = _LOW[i] + high * q
    total = high + tail
    error = tail - (total - high)
    bits = as_bits64(total)
    even = np.int64((bits & np.int64(1)) ^ np.int64(1))
    bits += even * (np.int64(error > 0.0) - np.int64(error < 0.0))
    return f32(as_float64(bits) * as_float64((power + np.int64(1023)) << np.int64(52)))


@njit(nogil=True, inline="always", error_model="numpy")
def exp2(x):
    """RN32(2^x) of a float32 below 128; 0 of -infinity."""
    wide = f64(max(x, f32(-150.0)))
    rounded = wide * 32.0 + _SHIFT
    k = as_bits64(rounded) - _SHIFT_BITS
    r = wide - (rounded - _SHIFT) * 0.03125
    q = r * (_B1 + r * (_B2 + r * (_B3 + r * (_B4 + r * (_B5 + r * (_B6 + r * _B7))))))
    return _assemble(k, q)


@njit(nogil=True, inline="always", error_model="numpy")
def exp(x):
    """RN32(e^x) of a float32 below 88; 0 of -infinity."""
    wide = f64(max(x, f32(-104.0)))
    rounded = wide * _INVERSE + _SHIFT
    k, steps = as_bits64(rounded) - _SHIFT_BITS, rounded - _SHIFT
    r = (wide - steps * _LN2_HIGH) - steps * _LN2_LOW
    q = r + r * r * (_E2 + r * (_E3 + r * (_E4 + r * (_E5 + r * (_E6 + r * _E7)))))
    return _assemble(k, q)


@compiled
def exponentials(x, two, out):
    """out[i] = RN32(2^x[i]) if two, else RN32(e^x[i])."""
    for i in range(x.size):
        out[i] = exp2(x[i]) if two else exp(x[i])


@compiled
def step(
    s,
    factors,
    raw,
    factor,
    offset,
    fused,
    two,
    threshold,
    order,
    low,
    high,
    q_documents,
    k_documents,
    documents,
    m,
    sums,
    c,
    p,
):
    """One tile of the online softmax: fills p with unrounded probabilities, c with the factors of
    what came before, and updates the maxima m and the sums.

    s           float32 [rows, keys]; scaled scores are overwritten by s.
    factors     what multiplies scaled scores; factor, that of raw ones in the exponent.
    low, high   the keys that each row sees, counted from the tile's first.
    *_documents int64 [rows] and [keys]: a query sees keys of its own document, if there are
    ``documents``.
    sums        float32 [rows, 4]: the lanes of QUAD; the other orders use the first.
    """
    prefer_wide_vectors()
    keys = s.shape[1]
    lanes = np.zeros(8, np.float32)
    for i in range(s.shape[0]):
        row, out = s[i], p[i]
        begin = min(max(low[i], 0), keys)
        end = max(begin, min(high[i], keys))
        if not raw:
            for multiplier in factors:
                for j in range(keys):
                    row[j] *= multiplier
        if documents:
            for j in range(keys):
                row[j] = row[j] if q_documents[i] == k_documents[j] else f32(-np.inf)
        old, largest = m[i], _maximum(row, begin, end)
        if raw:
            new = max(old, largest)
            safe = new if new > f32(-np.inf) else f32(0)
            behind = f32(f32(old - safe) * factor)
            if threshold > f32(0) and behind >= -threshold:
                new, safe, c[i] = old, old, f32(1)
            else:
                c[i] = exp2(behind)
        else:
            new = largest if old == f32(-np.inf) or f32(largest - old) > threshold else old
            safe = new if new > f32(-np.inf) else f32(0)
            behind = f32(old - new)
            c[i] = f32(1)
            if behind < -threshold:
                c[i] = exp2(behind) if two else exp(behind)
        m[i] = new
        for j in range(begin):
            out[j] = f32(0)
        if raw:
            bias = -fma(safe, factor, -offset) if fused else f32(offset - f32(safe * factor))
            for j in range(begin, end):
                out[j] = exp2(fma(row[j], factor, bias))
        elif two:
            for j in range(begin, end):
                out[j] = exp2(f32(f32(row[j] - safe) + offset))
        else:
            for j in range(begin, end):
                out[j] = exp(f32(row[j] - safe))
        for j in range(end, keys):
            out[j] = f32(0)
        _add(out, c[i], order, sums[i], lanes)


@njit(nogil=True, inline="always", error_model="numpy")
def _maximum(row, begin, end):
    """max(row[begin:end]), -infinity if empty; compared as integers, which numba vectorizes."""
    largest = i32(-0x7F800001)  # the key of -infinity
    for j in range(begin, end):
        bits = i32(as_bits(row[j]))
        largest = max(largest, i32(bits ^ i32((bits >> i32(31)) & i32(0x7FFFFFFF))))
    return as_float(u32(i32(largest ^ i32((largest >> i32(31)) & i32(0x7FFFFFFF)))))


@njit(nogil=True, inline="always", error_model="numpy")
def _add(p, c, order, sums, lanes):
    """Multiply the sums of a row by c, then add its probabilities."""
    if order == QUAD:
        a0 = f32(sums[0] * c)
        a1 = f32(sums[1] * c)
        a2 = f32(sums[2] * c)
        a3 = f32(sums[3] * c)
        for j in range(0, p.size, 8):
            a0, a1 = f32(f32(a0 + p[j]) + p[j + 1]), f32(f32(a1 + p[j + 2]) + p[j + 3])
            a2, a3 = f32(f32(a2 + p[j + 4]) + p[j + 5]), f32(f32(a3 + p[j + 6]) + p[j + 7])
        sums[0], sums[1], sums[2], sums[3] = a0, a1, a2, a3
    elif order == PACKED:
        lanes[:] = f32(0)
        lanes[0] = f32(sums[0] * c)
        for j in range(0, p.size, 8):
            for t in range(8):
                lanes[t] += p[j + t]
        even = f32(f32(lanes[0] + lanes[2]) + f32(lanes[4] + lanes[6]))
        odd = f32(f32(lanes[1] + lanes[3]) + f32(lanes[5] + lanes[7]))
        sums[0] = f32(even + odd)
    else:
        total = f32(0)
        for j in range(p.size):
            total += p[j]
        sums[0] = f32(f32(sums[0] * c) + total)


@compiled
def round_values(p, scale, mantissa_bits, emin, largest, out):
    """out = p * scale rounded to a format, saturated; p is not negative. Returns how many left its
    range, and how many of at least 2^-126 became 0."""
    prefer_wide_vectors()
    clipped, lost = 0, 0
    places = u32(23 - mantissa_bits)
    keep = u32(u32(0xFFFFFFFF) << places)
    half = u32((u32(1) << u32(places - u32(1))) - u32(1))
    smallest, shift = f32(2.0**emin), f32(1.5 * 2.0 ** (23 + emin - mantissa_bits))
    for i in range(p.size):
        x = f32(p[i] * scale)
        bits = as_bits(x)
        normal = as_float(u32(u32(bits + half + u32(u32(bits >> places) & u32(1))) & keep))
        y = normal if x >= smallest else f32(f32(x + shift) - shift)
        clipped += y > largest
        lost += (y == f32(0)) & (p[i] >= f32(2.0**-126))
        out[i] = min(y, largest)
    return clipped, lost


@compiled
def in_order(a, b, acc):
    """acc[i] = RN32(acc[i] + a_ik * b_k), k ascending: a [M, K], b [K, N]."""
    for i in range(a.shape[0]):
        row = acc[i]
        for k in range(a.shape[1]):
            x, line = a[i, k], b[k]
            for j in range(row.size):
                row[j] += f32(x * line[j])
