"""Matrix multiplication of FP8 operands (SEMANTICS G): accumulate the codes, then the epilogue applies the scales."""

from typing import Literal

import numpy as np

from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32, Format
from fp8ref.sim import cast
from fp8ref.sim.scaling import Quantized

Accumulate = Literal["exact", "f32"]
OUT_DTYPES = (FLOAT32, BFLOAT16, FLOAT16)


def matmul(
    a: Quantized, b: Quantized, *, accumulate: Accumulate = "exact", epilogue: str = "scale_then_round", out_dtype: Format = FLOAT32
) -> np.ndarray:
    """[M, K] x [N, K] -> [M, N], both reduced along their last axis.

    Shapes:   a.codes [M, K], b.codes [N, K], scales tensorwise () or rowwise [M, 1] and [N, 1]; float32 [M, N] holding values of out_dtype.
    Units:    out ~ dequantize(a) @ dequantize(b).T
    Order:    accumulate over K; then the epilogue, G-4 or G-5.
    Specials: Inf and NaN as in IEEE 754; an exact zero sum is +0.
    Raises:   ValueError: shapes that do not fit; an operand not reduced along its last axis; blockwise scales; unknown names.
    Source:   SEMANTICS G-1 to G-6.
    """
    _check(a, b, out_dtype)
    values = cast.decode(a.codes, a.fmt), cast.decode(b.codes, b.fmt)
    if accumulate == "exact":
        acc = _exact(*values)
    elif accumulate == "f32":
        acc = _f32(*values)
    else:
        raise ValueError(f"accumulate is 'exact' or 'f32'; got {accumulate!r}.")
    with np.errstate(invalid="ignore", over="ignore"):  # Inf * 0 and overflow are results here
        if epilogue == "scale_then_round":
            return cast.round_to(acc * a.scale_inv * b.scale_inv.T, out_dtype)
        if epilogue == "unit_round_scale_round":
            return cast.round_to(cast.round_to(acc, out_dtype) * (a.scale_inv * b.scale_inv.T), out_dtype)
    raise ValueError(f"epilogue is 'scale_then_round' or 'unit_round_scale_round'; got {epilogue!r}.")


def matmul_hp(a, b, *, out_dtype: Format = FLOAT32) -> np.ndarray:
    """A GEMM in high precision (SEMANTICS G-9): [M, K] x [N, K] -> [M, N], summed in float64, rounded to float32, then to out_dtype."""
    with np.errstate(invalid="ignore", over="ignore"):
        return cast.round_to((cast.exact(a) @ cast.exact(b).T).astype(np.float32), out_dtype)


def _check(a: Quantized, b: Quantized, out_dtype: Format) -> None:
    if a.codes.ndim != 2 or b.codes.ndim != 2 or a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(f"a GEMM takes a [M, K] and b [N, K] with the same K; got {a.codes.shape} and {b.codes.shape}.")
    for name, q in (("a", a), ("b", b)):
        if q.granularity not in ("tensorwise", "rowwise"):
            raise ValueError(f"a GEMM takes tensorwise or rowwise operands; got {name} {q.granularity}. Dequantise it and use matmul_hp.")
        if q.granularity == "rowwise" and q.axis not in (-1, 1):
            raise ValueError(f"operands are reduced along their last axis, K; got {name} with axis={q.axis}. Quantise the transpose.")
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype is one of {OUT_DTYPES}; got {out_dtype}.")


def _f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """acc = RN32(acc + a_k * b_k), k ascending (G-3). The product of two FP8 numbers is a float32: at most 8 bits."""
    acc = np.zeros((len(a), len(b)), np.float32)
    with np.errstate(invalid="ignore"):
        for a_k, b_k in zip(a.T, b.T, strict=True):
            acc += np.outer(a_k, b_k)  # [M] x [N] -> [M, N]
    return acc


def _exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum over K, rounded once to float32 (G-2)."""
    finite = [np.where(np.isfinite(v), v, 0).astype(np.float64) for v in (a, b)]
    special = ~np.isfinite(a).all(axis=1)[:, None] | ~np.isfinite(b).all(axis=1)[None, :]
    result = _round_sum(_exact_products(*finite))
    if special.any():  # any order of IEEE sums agrees on Inf and NaN, and finite FP8 numbers cannot overflow float64
        with np.errstate(invalid="ignore"):
            result = np.where(special, (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float32), result)
    return result


def _exact_products(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """Float64 [M, N] arrays whose exact sum is a @ b.T.

    Numbers of magnitude at least 1 are multiples of 2^-3 below 2^16, the others multiples of 2^-17: at most 19 bits either
    way. Products of such parts have at most 38 bits and share one quantum, and so do sums of 2^15 of them: 53 bits, which a
    float64 matrix product adds in any order without rounding. (E4M3 and E5M2 in all variants: F-2, F-3.)
    """
    chunks = range(0, a.shape[1], 1 << 15)
    parts = [
        left @ right.T  # [M, k] x [N, k] -> [M, N]
        for k in chunks
        for left in _by_magnitude(a[:, k : k + (1 << 15)])
        for right in _by_magnitude(b[:, k : k + (1 << 15)])
    ]
    return parts or [np.zeros((len(a), len(b)))]


def _by_magnitude(x: np.ndarray) -> list[np.ndarray]:
    """Arrays that sum to x: its numbers of magnitude at least 1, and the others; whichever has any."""
    large = np.where(abs(x) >= 1, x, 0)
    return [part for part in (large, x - large) if part.any()]


def _round_sum(parts: list[np.ndarray]) -> np.ndarray:
    """RN32 of the exact sum of the parts: (total, tail) is that sum, then total is rounded to odd, then to float32.

    The parts are multiples of 2^-34 below 2^48 each, so that the error terms, at most 2^-4, add without rounding. A float64
    rounded to odd rounds to float32 as the exact value does (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    total, tail = parts[0], np.zeros_like(parts[0])
    for part in parts[1:]:
        total, error = _two_sum(total, part)
        tail += error
    total, tail = _two_sum(total, tail)
    bits = total.view(np.int64)
    even = (tail != 0) & (bits % 2 == 0)
    outward = np.where(np.signbit(tail) == np.signbit(total), 1, -1)
    odd = (bits + even * outward).view(np.float64)
    return odd.astype(np.float32) + np.float32(0)  # -0 becomes +0


def _two_sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(RN64(x + y), x + y - RN64(x + y)), both exact (Knuth)."""
    total = x + y
    back = total - x
    return total, (x - (total - back)) + (y - back)
