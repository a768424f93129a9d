"""What SageAttention's kernel for sm90 computes, one thread at a time, from its sources: nothing of the simulator.

thu-ml/SageAttention d1a57a5: sageattention/core.py (sageattn_qk_int8_pv_fp8_cuda_sm90), triton/quant_per_thread.py, csrc/fused/fused.cu
(MeanScaleKernel), csrc/qattn/qk_int_sv_f8_cuda_sm90.cu and attn_utils.cuh (update_mdo, normalize_d). Exponentials, logarithms, reciprocals
and quotients, which its build approximates, are rounded correctly. The order of torch's mean and of its product with q is this project's.
"""

import math

import numpy as np
from attention_sources import F, bfloat16, e4m3, exponential, fma, logarithm, tensor_core

LOG2E = F(1.44269504088896340736)
OFFSET = F(8.807)
FAR = F(-5000000.0)


def mean(k) -> list[np.float32]:
    """The mean over tokens of k [T, D], bfloat16 numbers."""
    rows = [[F(x) for x in row] for row in k]
    while len(rows) & (len(rows) - 1):
        rows.append([F(0)] * len(k[0]))
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [[F(x + y) for x, y in zip(rows[n], rows[n + half], strict=True)] for n in range(half)]
    return [F(bfloat16(F(x * F(F(1) / F(len(k)))))) for x in rows[0]]


def int8(rows) -> tuple[list[list[int]], np.float32]:
    """Triton's kernel of one group of rows: codes and the scale."""
    largest = max((abs(F(x)) for row in rows for x in row), default=F(0))
    scale = F(F(largest / F(127.0)) + F(0.0000001))
    codes = []
    for row in rows:
        quotients = [F(F(x) / scale) for x in row]
        codes.append([int(F(x + F(0.5 if x >= 0 else -0.5))) for x in quotients])
    return codes, scale


def quantized(x, groups) -> tuple[list[list[int]], list[np.float32]]:
    """Codes of x [T, D], and the scale of each row; groups are lists of rows."""
    codes, scales = [None] * len(x), [None] * len(x)
    for group in groups:
        made, scale = int8([x[n] for n in group])
        for n, row in zip(group, made, strict=True):
            codes[n], scales[n] = row, scale
    return codes, scales


def sage(q, k, v, scale, *, causal=False, rows=None):
    """One head: q [Tq, D], k and v [Tk, D], bfloat16 numbers; all rows, or those named. Returns (o before its rounding, lse, {codes and
    scales by role}, the cast P by (row, key))."""
    length, keys, features = len(q), len(k), len(q[0])
    km = mean(k)
    smooth = [[F(bfloat16(F(F(x) - y))) for x, y in zip(row, km, strict=True)] for row in k]
    of_q = [[n for n in (block * 16 + t, block * 16 + t + 8) if n < length] for block in range(-(-length // 16)) for t in range(8)]
    of_k = [
        [n for n in (block * 128 + 8 * a + 2 * t + b for a in range(16) for b in range(2)) if n < keys]
        for block in range(-(-keys // 128))
        for t in range(4)
    ]
    q8, q_scale = quantized(q, of_q)
    k8, k_scale = quantized(smooth, of_k)
    v_amax = [max(abs(F(row[n])) for row in v) for n in range(features)]
    v_scale = [F(x / F(448.0)) for x in v_amax]
    v8 = [[e4m3(F(F(x) * F(F(448.0) / a))) for x, a in zip(row, v_amax, strict=True)] for row in v]
    original = F(F(scale) * LOG2E)
    out, lse, cast = np.zeros((length, features), F), np.zeros(length, F), {}
    for row in range(length) if rows is None else rows:
        limit = min(keys, (row // 64 + 1) * 64) if causal else keys
        iterations = -(-limit // 128)
        m, d, ro = FAR, [F(1.0)] * 4, [F(0)] * features
        for iteration in range(iterations):
            own = range(iteration * 128, iteration * 128 + 128)
            scores, factor = {}, original
            final = iteration == iterations - 1
            for j in own:
                products = 0 if j >= keys else sum(a * b for a, b in zip(q8[row], k8[j], strict=True))
                dequant = F(q_scale[row] * k_scale[j]) if j < keys else F(0)
                scores[j] = F(F(products) * dequant) if final else F(products)
                if final and (j >= keys or (causal and j > row)):
                    scores[j] = FAR
            local = []
            for thread in range(4):
                of_thread = [j for j in own if j % 8 // 2 == thread]
                factor = original if final else F(original * F(q_scale[row] * k_scale[of_thread[0]]))
                local.append(fma(max([FAR, *(scores[j] for j in of_thread)]), factor, F(-OFFSET)))
            before, m = m, max(m, *local)
            rescale = exponential(F(before - m), "2")
            d, ro = [F(x * rescale) for x in d], [F(x * rescale) for x in ro]
            p = {}
            for j in own:
                factor = original if final else F(original * F(q_scale[row] * k_scale[j]))
                p[j] = exponential(fma(scores[j], factor, F(-m)), "2")
            for thread in range(4):
                for sixteen in range(own.start, own.stop, 16):
                    a, b, c, e = (p[sixteen + 2 * thread + n] for n in (0, 1, 8, 9))
                    d[thread] = F(d[thread] + F(F(F(a + b) + c) + e))
            p8 = [e4m3(p[j]) for j in own]
            cast |= {(row, j): x for j, x in zip(own, p8, strict=True) if j < keys}
            for n in range(features):
                column = [v8[j][n] if j < keys else 0.0 for j in own]
                ro[n] = F(ro[n] + F(tensor_core(p8, column, 0.0, (13, 13))))
        total = F(F(d[0] + d[1]) + F(d[2] + d[3]))
        inverse = F(F(1) / total)
        out[row] = [F(F(x * inverse) * s) for x, s in zip(ro, v_scale, strict=True)]
        correction = F(0)
        for x, y in zip(q[row], km, strict=True):
            correction = F(correction + F(F(x) * y))
        lse[row] = F(F(F(logarithm(total, "2") + m) / F(1.44269504)) + F(F(bfloat16(correction)) * F(scale)))
    return out, lse, {"q": (q8, q_scale), "k": (k8, k_scale), "v": (v8, v_scale)}, cast


def scale_of(features: int) -> float:
    return float(F(1 / math.sqrt(features)))
