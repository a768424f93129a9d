"""What kernels of attention compute, one number at a time, from their sources: Python numbers,
nothing of the simulator.

A score, a probability and a sum are NumPy float32 scalars, whose operations are IEEE 754's.
Exponentials and logarithms take their digits from ``decimal``; a fused multiply-add and a rounding
to a narrow format are fractions.
"""

import decimal
import math
from fractions import Fraction

import numpy as np

F = np.float32
NONE = F(-np.inf)
LN2 = decimal.Context(prec=50).ln(decimal.Decimal(2))
HOPPER, BLACKWELL = (13, 13), (25, 23)


def rounded(x: Fraction, fraction_bits: int, emin: int) -> Fraction:
    """x to the nearest number of a binary format, ties to even; no overflow."""
    if not x:
        return x
    exponent = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, emin) - fraction_bits)
    return round(x / unit) * unit


def to_float32(x: Fraction) -> np.float32:
    return F(float(rounded(x, 23, -126)))


def e4m3(x) -> float:
    """The saturating cast of CUDA: the number, not the code."""
    return math.copysign(min(float(rounded(Fraction(float(abs(x))), 3, -6)), 448.0), x)


def bfloat16(x) -> float:
    return float(rounded(Fraction(float(x)), 7, -126))


def fma(a, b, c) -> np.float32:
    if not all(map(math.isfinite, (a, b, c))):
        return F(float(a) * float(b) + float(c))
    return to_float32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def exponential(x, base: str) -> np.float32:
    if x == NONE or x < -200:
        return F(0)
    context = decimal.Context(prec=50)
    power = decimal.Decimal(float(x))
    return to_float32(Fraction(context.exp(context.multiply(power, LN2) if base == "2" else power)))


def tanh(x) -> np.float32:
    context, power = decimal.Context(prec=90), decimal.Decimal(float(max(min(x, 40), -40)))
    # 90 digits: 45 are lost where x is the least of float32
    square = context.exp(context.multiply(power, 2))
    return to_float32(Fraction(context.divide(context.subtract(square, 1), context.add(square, 1))))


def logarithm(x, base: str) -> np.float32:
    context = decimal.Context(prec=50)
    found = context.ln(decimal.Decimal(float(x)))
    return to_float32(Fraction(context.divide(found, LN2) if base == "2" else found))


def tensor_core(a, b, c: float, unit: tuple[int, int]) -> float:
    """Steps of 32 products of e4m3 numbers from c: aligned, cut off, added as integers, cut off."""
    fraction_bits, output_bits = unit

    def exponent(x: float, emin: int) -> int:
        return max(math.frexp(x)[1] - 1, emin)

    acc = c
    for k in range(0, len(a), 32):
        pairs = [(x, y) for x, y in zip(a[k : k + 32], b[k : k + 32], strict=True) if x and y]
        exponents = [exponent(x, -6) + exponent(y, -6) for x, y in pairs] + (
            [exponent(acc, -126)] if acc else []
        )
        if not exponents:
            acc = 0.0
            continue
        shift = fraction_bits - max(exponents)
        total = sum(int(math.ldexp(x * y, shift)) for x, y in pairs) + int(math.ldexp(acc, shift))
        result = math.ldexp(total, -shift)
        cut = output_bits - exponent(result, -126) if result else 0
        acc = math.ldexp(int(math.ldexp(result, cut)), -cut)
    return acc


def in_order(a, b, c) -> np.float32:
    acc = F(c)
    for x, y in zip(a, b, strict=True):
        acc = F(acc + F(F(x) * F(y)))
    return acc


def exact_sum(a, b) -> np.float32:
    """Products of e4m3 numbers are multiples of 2^-18 below 2^18, so that a float64 holds sums of
    2^17 of them.
    """
    return F(sum(float(x) * float(y) for x, y in zip(a, b, strict=True)))


def padded(x):
    return list(x) + [0.0] * (-len(x) % 32)


def flash_attention(
    q,
    k,
    v,
    sees,
    *,
    scale,
    dq,
    dk,
    dv,
    tile,
    unit,
    order,
    offset=8,
    threshold=0.0,
    separate=False,
    promoted=False,
    narrow=e4m3,
    softcap=None,
    sink=None,
):
    """FlashAttention's softmax and main loop for one head (hopper/softmax.h,
    mainloop_fwd_sm90_tma_gmma_ws.hpp; flash_attn/cute/softmax.py, flash_fwd_sm100.py, at 0251105):
    q [Tq, D], k and v [Tk, D] of e4m3 numbers, descales of the head. unit None: bf16, sums in
    order.

    Returns (o before the last rounding, lse, the largest probability).
    """
    outs, lses, largest = [], [], 0.0
    factor = F(F(float(F(scale)) * math.log2(math.e)) * F(dq * dk))
    before = None
    # softcap_val and softmax_scale_log2 of mainloop_fwd_sm90_tma_gmma_ws.hpp
    if softcap is not None:
        before, factor = (
            F(F(F(scale) / F(softcap)) * F(dq * dk)),
            F(float(F(softcap)) * math.log2(math.e)),
        )

    def dot(a, b, c):
        return (
            in_order(a, b, c)
            if unit is None
            else F(tensor_core(padded(a), padded(b), float(c), unit))
        )

    starts = list(range(0, len(k), tile))[::-1]
    for i, query in enumerate(q):
        row_max, lanes = NONE, [F(0)] * (4 if order == "quad" else 1)
        acc, register = [F(0)] * len(v[0]), [F(0)] * len(v[0])
        for start in starts:
            keys = range(start, min(start + tile, len(k)))
            s = [dot(query, k[j], 0) if sees(i, j) else NONE for j in keys]
            s = [x if before is None or x == NONE else tanh(F(x * before)) for x in s]
            old, new = row_max, max([row_max, *s])
            safe = F(0) if new == NONE else new
            correction = F(F(old - safe) * factor)
            rescale = exponential(correction, "2")
            if threshold and correction >= -threshold:
                new, safe, rescale = old, old, F(1)
            row_max = new
            bias = F(F(offset) - F(safe * factor)) if separate else -fma(safe, factor, -offset)
            p = [exponential(fma(x, factor, bias), "2") for x in s]
            largest = max([largest, *map(float, p)])
            if order == "quad":
                lanes = [F(lane * rescale) for lane in lanes]
                for column, x in enumerate(p):
                    lanes[column % 8 // 2] = F(lanes[column % 8 // 2] + x)
            else:
                part = [F(lanes[0] * rescale)] + [F(0)] * 7
                for column, x in enumerate(p):
                    part[column % 8] = F(part[column % 8] + x)
                pairs = [(part[n], part[n + 1]) for n in (0, 2, 4, 6)]
                left, right = (
                    tuple(F(x + y) for x, y in zip(pairs[n], pairs[n + 1], strict=True))
                    for n in (0, 2)
                )
                lanes = [F(F(left[0] + right[0]) + F(left[1] + right[1]))]
            acc, register = [F(x * rescale) for x in acc], [F(x * rescale) for x in register]
            p8 = [narrow(x) for x in p]
            register = [dot(p8, [v[j][n] for j in keys], register[n]) for n in range(len(acc))]
            if promoted:
                acc, register = (
                    [F(x + y) for x, y in zip(acc, register, strict=True)],
                    [F(0)] * len(acc),
                )
        total = F(F(lanes[0] + lanes[2]) + F(lanes[1] + lanes[3])) if order == "quad" else lanes[0]
        if sink is not None:  # flash_fwd_sm100.py's correction warps
            if row_max == NONE:
                row_max, total = F(sink * F(F(math.log2(math.e)) / factor)), F(2.0**offset)
            else:
                total = F(
                    total
                    + exponential(
                        F(F(F(sink * F(math.log2(math.e))) - F(row_max * factor)) + F(offset)), "2"
                    )
                )
        if total == 0:
            outs.append([F(0)] * len(acc))
            lses.append(NONE)
            continue
        inverse = F(F(F(1) / total) * dv)
        outs.append([F(x * inverse) for x in (acc if promoted else register)])
        if separate:
            lses.append(
                F(F(F(row_max * factor) + F(logarithm(total, "2") - F(offset))) * F(math.log(2)))
            )
        else:
            lses.append(
                fma(row_max, F(factor * F(math.log(2))), logarithm(F(total * F(2.0**-offset)), "e"))
            )
    return np.array(outs, F), np.array(lses, F), largest


def cudnn(
    q,
    k,
    sees,
    *,
    factors,
    s_scale,
    of_values,
    columns,
    score=None,
    order=1,
    base="e",
    offset=0,
    softcap=None,
):
    """cuDNN's test references for one head (cudnn-frontend 3929da2, test/python/sdpa/fp8_ref.py and
    mxfp8_ref.py) at threshold 0.

    factors(i, j) are the numbers that multiply a score, in order; score(i, j) is an exact sum if
    not given; of_values(p8, first key, column) is a tile's scaled sum. q and k have the numbers
    that sums are of. Returns (o [Tq, columns], lse).
    """
    outs, lses = [], []
    starts = list(range(0, len(k), 128))[::order]
    for i, query in enumerate(q):
        m, total, o = NONE, F(0), [F(0)] * len(columns)
        for start in starts:
            keys = range(start, min(start + 128, len(k)))
            s = []
            for j in keys:
                x = NONE
                if sees(i, j):
                    x = exact_sum(query, k[j]) if score is None else score(i, j)
                    for factor in factors(i, j):
                        x = F(x * F(factor))
                    x = x if softcap is None else F(tanh(x) * F(softcap))
                s.append(x)
            new = max([m, *s])
            correction = F(1) if new == m else F(0) if m == NONE else exponential(F(m - new), base)
            p = [F(0) if x == NONE else exponential(F(F(x - new) + F(offset)), base) for x in s]
            of_tile = F(0)
            for x in p:
                of_tile = F(of_tile + x)
            total = F(F(total * correction) + of_tile)
            p8 = [e4m3(F(x * F(s_scale))) for x in p]
            o = [
                F(F(x * correction) + of_values(p8, start, column))
                for column, x in zip(columns, o, strict=True)
            ]
            m = new
        if total == 0:
            outs.append([F(0)] * len(o))
            lses.append(NONE)
            continue
        outs.append([F(x / max(total, F(1))) for x in o])
        if base == "e":
            lses.append(F(m + logarithm(total, "e")))
        else:
            lses.append(F(F(m + F(logarithm(total, "2") - F(offset))) * F(math.log(2))))
    return np.array(outs, F), np.array(lses, F)
