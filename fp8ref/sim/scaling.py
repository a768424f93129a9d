"""From a tensor to its amax, from an amax to a scale, from a scale to codes (SEMANTICS S)."""

from typing import NamedTuple

import numpy as np

from fp8ref import granularity as granularities
from fp8ref import policy as policies
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy
from fp8ref.sim import cast


class Quantized(NamedTuple):
    """An FP8 tensor: hp ~ decode(codes) * scale_inv, the scales spread over their blocks.

    codes.shape is the hp tensor's; scale and scale_inv are float32 of shape ``granularity.scale_shape``.
    """

    codes: np.ndarray
    scale: np.ndarray
    scale_inv: np.ndarray
    fmt: Format
    granularity: str
    axis: int


def amax(x, granularity: str = "tensorwise", *, axis: int = -1) -> np.ndarray:
    """The largest magnitude of every group that shares a scale (SEMANTICS S-2).

    Shapes:   x hp, any rank; float32 of ``scale_shape(granularity, x.shape, axis)``; axis is the reduced one.
    Specials: NaN if any element of the group is NaN; Inf if any is infinite; subnormals count.
    Raises:   ValueError: x empty; a block that does not divide its axis; float64, whose amax need not be a float32.
    """
    x = np.asarray(x)
    if x.dtype == np.float64:
        raise ValueError("amax is exact in the input's dtype and kept in float32 (S-2); got float64. Round x to float32 first.")
    value = np.abs(cast.exact(x).astype(np.float32))
    sizes = granularities.blocks(granularity, x.shape, axis)
    if granularity == "tensorwise":
        return value.max()[()]
    # [n, m] -> [n / bn, bn, m / bm, bm], reduced over the blocks' own axes
    split = [k for n, size in zip(x.shape, sizes, strict=True) for k in (n // size, size)]
    return value.reshape(split).max(axis=tuple(range(1, len(split), 2)))


def scale_from_amax(amax, fmt: Format, policy: str | ScalePolicy = "torchao") -> np.ndarray:
    """The factor that multiplies into FP8 (SEMANTICS S-3, S-4).

    Shapes:   amax float32, any shape; float32 of the same shape.
    Order:    max(amax, eps); fmt.max / that, as exact numbers, rounded once to float32; then the power of two.
    Specials: zero amax -> fmt.max / eps; Inf -> 0; NaN -> NaN.
    Raises:   ValueError: amax negative or not float32.
    Source:   torchao 0.18 float8/float8_utils.py, amax_to_scale.
    """
    policy = policies.by_name(policy)
    amax = np.asarray(amax)
    if amax.dtype != np.float32:
        raise ValueError(f"amax is float32; got {amax.dtype}. Convert it with .astype(np.float32).")
    if np.any(amax < 0):
        raise ValueError(f"amax is a magnitude, never negative; got {amax[amax < 0].flat[0]}. Take np.abs first.")
    # A float64 quotient of float32 numbers, rounded again to float32, is the quotient rounded once: 53 >= 2 * 24 + 2
    # (Figueroa, "When is double rounding innocuous?", 1995). eps is a float64 that is not a float32, but then the
    # quotient is one constant, far from a tie.
    scale = (fmt.max / np.maximum(amax.astype(np.float64), policy.eps)).astype(np.float32)
    if policy.power_of_two == "mask":
        bits = scale.view(np.uint32) & np.uint32(0xFF800000)
        scale = np.where(np.isnan(scale), scale, bits.view(np.float32))  # a NaN's mantissa is what makes it one
    elif policy.power_of_two == "exp2_log2":
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)).astype(np.float32)))
    return np.asarray(scale, np.float32)[()]


def scale_inv_from_scale(scale) -> np.ndarray:
    """RN32(1 / scale), the factor that multiplies out of FP8 (SEMANTICS S-1). Scale 0 -> Inf, NaN -> NaN."""
    with np.errstate(divide="ignore"):
        return np.float32(1) / np.asarray(scale, np.float32)


def quantize(x, fmt: Format, *, granularity: str = "tensorwise", policy: str | ScalePolicy = "torchao", axis: int = -1) -> Quantized:
    """Scale x into fmt's range and round to nearest even, saturating.

    Shapes:   x hp [..., K] (axis is the reduced one); codes uint8 of x's shape; scales of ``scale_shape``.
    Units:    x ~ decode(codes) * scale_inv.
    Order:    amax; scale; RN32(f32(x) * scale); clip to +-fmt.max; round to nearest even; scale_inv = RN32(1 / scale).
    Specials: -0 kept; zero amax -> codes 0; NaN anywhere in a group -> all its codes NaN; Inf -> scale 0: finite -> +-0, Inf -> NaN.
    Raises:   ValueError: as amax and scale_from_amax.
    Source:   SEMANTICS S-5; torchao 0.18 float8/float8_training_tensor.py, hp_tensor_and_scale_to_float8.
    """
    scale = scale_from_amax(amax(x, granularity, axis=axis), fmt, policy)
    value = cast.exact(x).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # Inf * 0; the clip takes an overflow
        scaled = value * spread(scale, value.shape, granularity, axis)
    codes = cast.encode(np.clip(scaled, -fmt.max, fmt.max), fmt)
    return Quantized(codes, scale, scale_inv_from_scale(scale), fmt, granularity, axis)


def dequantize(q: Quantized) -> np.ndarray:
    """RN32(decode(codes) * scale_inv), float32 of the codes' shape (SEMANTICS S-8)."""
    with np.errstate(invalid="ignore", over="ignore"):  # 0 * Inf, under an infinite amax
        return cast.decode(q.codes, q.fmt) * spread(q.scale_inv, q.codes.shape, q.granularity, q.axis)


def spread(scale: np.ndarray, shape: tuple[int, ...], granularity: str, axis: int) -> np.ndarray:
    """One scale an element: the scales repeated over their blocks, in a shape that broadcasts against ``shape``."""
    if granularity in ("tensorwise", "rowwise"):
        return scale
    for i, size in enumerate(granularities.blocks(granularity, shape, axis)):
        scale = np.repeat(scale, size, axis=i)
    return scale
