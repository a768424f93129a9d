"""Steps of tensor cores that cut off toward zero (G-10, G-23, G-24), and AMD's matrix cores (G-25).

The twins of ``tensor_core.chain_plain`` and ``matrix_core.chain_plain``, in float64, which holds
every sum of a step exactly. The columns of the result are a vector's lanes. Exponents of factors
are given: rules for zeros and subnormals are theirs.
"""

import numpy as np
from numba import njit

from fp8ref.sim.kernels.bits import as_bits64, as_float64
from fp8ref.sim.kernels.compiled import compiled

i16, i64, f64 = np.int16, np.int64, np.float64

NONE, NO_EXPONENT = -1000, -10000
"""An E below NONE is of nothing but zeros: E is 0 then.

NO_EXPONENT is of a zero that takes no part in E.
"""


@njit(nogil=True, inline="always", error_model="numpy")
def _power(exponent):
    """2^exponent, of -1022 to 1023."""
    return as_float64((exponent + i64(1023)) << i64(52))


@njit(nogil=True, inline="always", error_model="numpy")
def _exponent(value, emin, zero):
    """max(floor(log2|v|), emin); ``zero`` of a zero."""
    bits = as_bits64(value) & i64(0x7FFFFFFFFFFFFFFF)
    return max((bits >> i64(52)) - i64(1023), i64(emin)) if bits > i64(0) else i64(zero)


@compiled
def chain(
    a,
    a_exponents,
    b,
    b_exponents,
    scales_a,
    scales_b,
    acc,
    begin,
    end,
    steps,
    width,
    fraction_bits,
    output_bits,
    nearest,
    emin,
    zero,
    beyond,
):
    """acc [M, N] becomes the chain from it, for the rows begin to end.

    a, a_exponents
                 float64 [M, K] and int16 exponents, from NO_EXPONENT to 127; b, b_exponents [K, N].
    scales_a     int64 [M, steps], exponents of scales; scales_b [steps, N].
    nearest      the result is rounded to nearest even, else cut off toward zero.
    emin, zero   of the accumulator; beyond: results from it on are infinite.
    """
    n = acc.shape[1]
    largest = np.empty(n, np.int16)
    unit = np.empty(n)
    factor = np.empty(n)
    total = np.empty(n)
    for i in range(begin, end):
        for s in range(steps):
            for j in range(n):
                largest[j] = i16(2 * NO_EXPONENT)
            for k in range(s * width, (s + 1) * width):
                e = a_exponents[i, k]
                for j in range(n):
                    largest[j] = max(largest[j], i16(e + b_exponents[k, j]))
            for j in range(n):
                scale = scales_a[i, s] + scales_b[s, j]
                e = max(i64(largest[j]) + scale, _exponent(acc[i, j], emin, zero))
                e = e if e >= i64(NONE) else i64(0)
                e = min(e, i64(600))  # of an infinite accumulator, which stays
                unit[j] = _power(i64(fraction_bits) - e)
                factor[j] = _power(i64(fraction_bits) - e + scale)
                total[j] = np.trunc(acc[i, j] * unit[j])
            for k in range(s * width, (s + 1) * width):
                x = a[i, k]
                for j in range(n):
                    total[j] += np.trunc(x * b[k, j] * factor[j])
            for j in range(n):
                value = total[j] / unit[j]
                places = (
                    _power(_exponent(value, emin, emin) - i64(output_bits))
                    if abs(value) < np.inf
                    else 1.0
                )
                count = value / places
                count = np.rint(count) if nearest else np.trunc(count)
                result = count * places + 0.0
                acc[i, j] = np.copysign(np.inf, result) if abs(result) >= beyond else result


@compiled
def matrix_core_chain(
    a,
    a_exponents,
    b,
    b_exponents,
    acc,
    begin,
    end,
    steps,
    group,
    fraction_bits,
    sum_bits,
    accumulator_bits,
    reach,
):
    """acc [M, N], finite, becomes AMD's chain from it, rows begin to end; arguments as ``chain``.

    No sum overflows: products, below 2^36, are under half a last place of 2^127.
    """
    n = acc.shape[1]
    tops, sums, factor = np.empty((2, n), np.int16), np.empty((2, n)), np.empty(n)
    for i in range(begin, end):
        for s in range(steps):
            for half in range(2):
                top, total = tops[half], sums[half]
                for j in range(n):
                    top[j] = i16(2 * NO_EXPONENT)
                    total[j] = 0.0
                for k in range(s * group + half, (s + 1) * group, 2):
                    e = a_exponents[i, k]
                    for j in range(n):
                        top[j] = max(top[j], i16(e + b_exponents[k, j]))
                for j in range(n):
                    factor[j] = _power(i64(fraction_bits) - i64(top[j]))
                for k in range(s * group + half, (s + 1) * group, 2):
                    x = a[i, k]
                    for j in range(n):
                        total[j] += np.trunc(x * b[k, j] * factor[j])
            for j in range(n):
                c = acc[i, j]
                both = max(i64(tops[0, j]), i64(tops[1, j]))
                first = np.floor(sums[0, j] * _power(i64(tops[0, j]) - both))
                last = np.floor(sums[1, j] * _power(i64(tops[1, j]) - both))
                value = (first + last) * _power(both - i64(fraction_bits))
                c_exponent = _exponent(c, -126, -126)
                top_of_all = max(both, c_exponent)
                added = np.floor(c * _power(i64(accumulator_bits) - top_of_all)) * _power(
                    top_of_all - i64(accumulator_bits)
                )
                added = added if c_exponent >= top_of_all - i64(reach) else 0.0
                kept = np.floor(value * _power(i64(sum_bits) - top_of_all)) * _power(
                    top_of_all - i64(sum_bits)
                )
                acc[i, j] = f64(np.float32(kept + added)) + 0.0
