"""Faults of casts to e8m0, and of the scales of MX blocks: powers of two."""

import numpy as np
from museum import ask
from museum.arithmetic import F, bf16, bits, blocks, e8m0_up, number, saturated
from museum.exhibit import Exhibit


def magnitude(x):
    """The exponent's field and the fraction's bits of |x|."""
    u = bits(x) & 0x7FFFFFFF
    return (u >> 23).astype(np.int64), u & 0x7FFFFF


def finished(x, code, infinite=255):
    """Codes from 0 to 254; 255 of NaN."""
    code = np.where(np.isinf(x), infinite, np.clip(code, 0, 254))
    return np.where(np.isnan(x), 255, code).astype(np.uint8)


def nearest(x, *, ties_up=False, infinite=255):
    """The nearest power of two; halfway to the even code, or up."""
    u = bits(x) & 0x7FFFFFFF
    up = 1 if ties_up else u >> 23 & 1
    return finished(x, (u + 0x3FFFFF + up) >> 23, infinite)


def nearest_ties_up(x):
    return nearest(x, ties_up=True)


def down(x):
    """The power of two at or below."""
    return finished(x, magnitude(x)[0])


def up(x, *, mask=0x7FFFFF):
    """One more where the fraction has a bit."""
    exponent, fraction = magnitude(x)
    return finished(x, exponent + ((fraction & mask) != 0))


def biased_by_125(scale):
    """Two is subtracted from the exponent that is stored."""
    return finished(scale, magnitude(scale)[0] - 2)


def narrow_mask(x):
    """Rounding up looks at 22 of 23 fraction bits."""
    return up(x, mask=0x4FFFFF)


def zero_as_nan(x):
    """Zero and what lies below 2^-127 is NaN."""
    return np.where(np.abs(x) < 2.0**-127, 255, down(x)).astype(np.uint8)


def carried_into_nan(x):
    """Rounding up has no bound: above 2^127 is code 255."""
    return np.where(np.isfinite(x) & (np.abs(x) > 2.0**127), 255, e8m0_up(x)).astype(np.uint8)


def one_ulp(scale):
    """'Rounded up' by one unit in the last place of the power of two below."""
    carried = number((bits(scale) & 0x7F800000) + 1)
    return np.where(np.isfinite(scale), down(carried), e8m0_up(scale)).astype(np.uint8)


def truncated_log(scale):
    """log2 is cut toward zero: up below 1, down above."""
    with np.errstate(all="ignore"):
        log = np.trunc(np.log2(np.abs(np.asarray(scale, np.float64))))
    return finished(scale, 127 + np.nan_to_num(log, posinf=127, neginf=-127).astype(int))


def of_nearest_quotient(amax, largest):
    """The nearest power of amax / max, ties up: the block's largest may be above max."""
    return nearest(np.asarray(amax, F) / F(largest), ties_up=True, infinite=254)


def of_quotient_up(amax, largest):
    return e8m0_up(np.asarray(amax, F) / F(largest))


def of_rounded_log(amax):
    """The logarithm of amax / 448, rounded to nearest."""
    with np.errstate(all="ignore"):
        log = np.rint(np.log2(np.asarray(amax, F) / F(448)))
    code = 127 + np.nan_to_num(log, posinf=127, neginf=-127).astype(int)
    return finished(amax, code, infinite=254)


def of_exponents(amax, *, through=lambda x: x):
    """The exponent of amax less that of e4m3's largest number, 8."""
    return finished(amax, magnitude(through(amax))[0] - 8)


def quantizer(code_of, *parts, **options):
    """The MXFP8 quantizer whose scales have these codes: code_of(amax, ...)."""

    def quantize(x):
        x = blocks(np.asarray(x, F), 32)
        code = code_of(np.abs(x).max(-1, keepdims=True), *parts, **options)
        scale = np.where(code == 255, F(np.nan), np.ldexp(F(1), 127 - code.astype(int)))
        return saturated(x * scale).reshape(len(x), -1), code[..., 0]

    return quantize


COMPRESSED = "https://github.com/vllm-project/compressed-tensors/"

TE_MXFP8 = quantizer(of_quotient_up, 448)

EXHIBITS = (
    Exhibit(
        name="compressed-tensors-538",
        link=COMPRESSED + "pull/538",
        library="compressed-tensors",
        year=2026,
        title="Stored MX scales have a bias of 125",
        fault=biased_by_125,
        twin=down,
        ask=ask.cast("e8m0fnu", "ocp_floor"),
        named="the bias of stored exponents is 125, not 127",
    ),
    Exhibit(
        name="onnx-7784",
        link="https://github.com/onnx/onnx/pull/7784",
        library="onnx",
        year=2026,
        title="Rounding up looks at 22 of 23 fraction bits",
        fault=narrow_mask,
        twin=up,
        ask=ask.cast("e8m0fnu", "onnx_up"),
        named="rounds up (it reads the fraction bits 0x4FFFFF alone)",
    ),
    Exhibit(
        name="ml_dtypes-398",
        link="https://github.com/jax-ml/ml_dtypes/pull/398",
        library="ml_dtypes",
        year=2026,
        title="Every exact tie is rounded up",
        fault=nearest_ties_up,
        twin=nearest,
        ask=ask.cast("e8m0fnu", None, rounding="nearest_even"),
        named="rounding: nearest; ",
    ),
    Exhibit(
        name="onnxruntime-28435",
        link="https://github.com/microsoft/onnxruntime/pull/28435",
        library="ONNX Runtime",
        year=2026,
        title="The rounding mode concerns ties alone",
        fault=nearest_ties_up,
        twin=up,
        ask=ask.cast("e8m0fnu", "onnx_up"),
        named="rounding: nearest; ",
    ),
    Exhibit(
        name="gfloat-62",
        link="https://github.com/graphcore-research/gfloat/issues/62",
        library="gfloat",
        year=2026,
        title="Zero and underflow become NaN",
        fault=zero_as_nan,
        twin=down,
        ask=ask.cast("e8m0fnu", "ocp_floor"),
        named="zero: nan",
    ),
    Exhibit(
        name="tilelang-metax-101",
        link="https://github.com/tile-ai/tilelang-metax/pull/101",
        library="TileLang (Metax)",
        year=2026,
        title="Rounding up carries the largest numbers into NaN",
        fault=carried_into_nan,
        twin=e8m0_up,
        ask=ask.cast("e8m0fnu", "cuda_up"),
        named="overflow gives nan",
    ),
    Exhibit(
        name="humming-39",
        link="https://github.com/inclusionAI/humming/pull/39",
        library="Humming",
        year=2026,
        title="The scale is 'rounded up' by one unit in the last place",
        fault=one_ulp,
        twin=e8m0_up,
        ask=ask.cast("e8m0fnu", "cuda_up"),
        named="rounding: down",
    ),
    Exhibit(
        name="compressed-tensors-630",
        link=COMPRESSED + "pull/630",
        library="compressed-tensors",
        year=2026,
        title="log2 of a scale is truncated toward zero",
        fault=truncated_log,
        twin=down,
        ask=ask.cast("e8m0fnu", "ocp_floor"),
        named="rounds toward_one",
    ),
    Exhibit(
        name="aiter-3212",
        link="https://github.com/ROCm/aiter/pull/3212",
        library="aiter",
        year=2026,
        title="The MX scale goes to the nearest power of two",
        fault=quantizer(of_nearest_quotient, 448),
        twin=TE_MXFP8,
        ask=ask.quantizer("te_mxfp8_2.13", "mx_1x32"),
        named="its scale_inv is amax / max as the nearest power",
    ),
    Exhibit(
        name="rmlx-463",
        link="https://github.com/Pushkinist/rMLX/issues/463",
        library="rMLX",
        year=2026,
        title="MXFP8 scales are rounded to the nearest exponent after dividing by 448",
        fault=quantizer(of_rounded_log),
        twin=TE_MXFP8,
        ask=ask.quantizer("te_mxfp8_2.13", "mx_1x32"),
        named="its scale_inv is amax / max as the nearest power of two, by log2",
    ),
    Exhibit(
        name="ao-4725",
        link="https://github.com/pytorch/ao/pull/4725",
        library="torchao",
        year=2026,
        title="amax goes through bfloat16 before its exponent is taken",
        fault=quantizer(of_exponents, through=bf16),
        twin=quantizer(of_exponents),
        ask=ask.quantizer("mx_floor_0.19", "mx_1x32"),
        named="its amax is rounded to bfloat16",
    ),
)
