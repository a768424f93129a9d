"""The MX backward pass against the formulas of cuDNN's reference (spec A-16)."""

import ml_dtypes
import numpy as np
import pytest
from helpers.attention import attention_sources as source

from fp8ref.sim.attention import attention
from fp8ref.sim.attention.gradients.gradients import backward
from fp8ref.spec.attention.variants import VARIANTS, Mask

F = np.float32


def quantized(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """(e4m3 numbers, scales 2^n spread over x) of blocks of 32 along an axis of a matrix: amax /
    448 rounded up.
    """
    x = x.T if axis == 0 else x
    wide = np.pad(x, ((0, 0), (0, -x.shape[1] % 32)))
    blocks = wide.reshape(len(x), -1, 32)
    ratio = (np.abs(blocks).max(axis=-1) / F(448)).astype(np.float64)
    power = 2.0 ** np.where(ratio == 0, 0, np.ceil(np.log2(np.where(ratio == 0, 1, ratio))))
    power = np.repeat(power, 32, axis=1)[:, : x.shape[1]].astype(F)
    numbers = np.vectorize(source.e4m3)(x / power).astype(F)
    return (numbers.T, power.T) if axis == 0 else (numbers, power)


def summed(a, of_a, b, of_b) -> np.ndarray:
    """a [M, K] times b [K, N], blocks of 32 of K: exact sums in float64, rounded, times both
    scales, added in order.
    """
    found = np.zeros((len(a), b.shape[1]), F)
    for k in range(0, a.shape[1], 32):
        part = slice(k, k + 32)
        exact = (a[:, part].astype(np.float64) @ b[part].astype(np.float64)).astype(F)
        found = found + exact * of_a[:, k, None] * of_b[None, k]
    return found


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True)], ids=str)
def test_the_reference(mask):
    """mxfp8_ref.py of cudnn-frontend 3929da2, compute_ref_backward, with P from the log-sum-exp, as
    in its graph.
    """
    rng = np.random.default_rng(0)
    tq, tk = 37, 45
    q, k, v, do = (
        rng.normal(size=(1, h, t, 64)).astype(ml_dtypes.bfloat16).astype(F)
        for h, t in ((2, tq), (1, tk), (1, tk), (2, tq))
    )
    forward = attention.forward(q, k, v, variant="mxfp8", mask=mask)
    found = backward(do, q, k, v, forward, variant="mxfp8", mask=mask)
    seen = (
        np.arange(tk) <= np.arange(tq)[:, None] + tk - tq
        if mask.causal
        else np.ones((tq, tk), bool)
    )
    dk, dv, largest = np.zeros((tk, 64), F), np.zeros((tk, 64), F), 0.0
    (k8, of_k), (kt, of_kt), (v8, of_v) = (
        quantized(k[0, 0], 1),
        quantized(k[0, 0], 0),
        quantized(v[0, 0], 0),
    )
    for j in range(2):
        (q8, of_q), (qt, of_qt) = quantized(q[0, j], 1), quantized(q[0, j], 0)
        (do8, of_do), (dot, of_dot) = quantized(do[0, j], 1), quantized(do[0, j], 0)
        s = summed(q8, of_q, k8.T, of_k.T) * F(1 / 8) - forward.lse[0, j][:, None]
        p = np.where(seen, np.vectorize(lambda x: source.exponential(x, "e"))(s), F(0)).astype(F)
        p8 = np.vectorize(source.e4m3)(p * F(256)).astype(F)
        dv += summed(p8.T, np.full((tk, tq), F(1 / 256)), dot, of_dot)
        d, dp = np.zeros(tq, F), np.zeros((tq, tk), F)
        for n in range(64):
            d = d + do[0, j, :, n] * forward.o[0, j, :, n]
            dp = dp + np.outer(do8[:, n] * of_do[:, n], v8[:, n] * of_v[:, n])
        ds = (dp - d[:, None]) * p * F(1 / 8)
        largest = max(largest, np.abs(ds).max())
        (ds8, of_ds), (dst, of_dst) = quantized(ds, 1), quantized(ds, 0)
        dq = summed(ds8, of_ds, kt, of_kt)
        dk += summed(dst.T, of_dst.T, qt, of_qt)
        np.testing.assert_array_equal(found.dq[0, j], dq.astype(ml_dtypes.bfloat16).astype(F))
    np.testing.assert_array_equal(found.dk[0, 0], dk.astype(ml_dtypes.bfloat16).astype(F))
    np.testing.assert_array_equal(found.dv[0, 0], dv.astype(ml_dtypes.bfloat16).astype(F))
    assert found.amaxes["ds"] == largest
    assert found.saturated == 0
    assert VARIANTS["mxfp8"].backward == "cast"


def test_delayed_scales_are_refused():  # MX scales are those of their blocks
    q = np.ones((1, 1, 4, 64), F)
    forward = attention.forward(q, q, q, variant="mxfp8")
    with pytest.raises(ValueError, match="takes scales for no role"):
        backward(q, q, q, q, forward, variant="mxfp8", scales={"do": F(1)})
