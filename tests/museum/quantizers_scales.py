"""Faults of quantizers to FP8: their scales, and how elements are scaled."""

import numpy as np
from museum import ask
from museum.arithmetic import E5M2, F, row_amax, saturated
from museum.e8m0 import finished, magnitude, of_exponents, quantizer
from museum.exhibit import Exhibit
from museum.quantizers import by_inverse, deepseek_ue8m0, power, vllm

FLOOR = F(1e-10)  # of the amax, in vLLM


def inverse_scale(x, largest):
    """amax / largest for each row."""
    return np.maximum(row_amax(x), FLOOR) / F(largest)


def max_of_fnuz(x):
    """The largest number of e4m3fnuz is 240, of which the library uses 224."""
    return by_inverse(x, inverse_scale(x, 224))


def e5m2_rows(x):
    return by_inverse(x, inverse_scale(x, 57344), E5M2)


def max_beyond_e5m2(x):
    """Exponent 16, which has the infinity and NaNs, counts as numbers: 1.5 x 2^16."""
    return by_inverse(x, inverse_scale(x, 98304), E5M2)


def of_quotient_down(amax):
    """The exponent of amax / 448, where the exponent of amax less 8 is wanted."""
    return finished(amax, magnitude(np.asarray(amax, F) / F(448))[0], infinite=254)


def blockwise(x, *, reads_on=False):
    """A scale for each 128 numbers of a row, and for the rest of it. reads_on: the last amax is of
    128 numbers in memory: the next row begins behind the rest."""
    x = np.asarray(x, F)
    m, k = x.shape
    count = -(-k // 128)
    padded = np.pad(x, ((0, 0), (0, count * 128 - k))).reshape(m, count, 128)
    seen = padded
    if reads_on:
        memory = np.append(x.reshape(-1), np.zeros(128, F))
        places = np.arange(m)[:, None] * k + np.arange(count * 128)
        seen = memory[places].reshape(m, count, 128)
    scale_inv = np.maximum(np.abs(seen).max(-1, keepdims=True), FLOOR) / F(448)
    return saturated(padded / scale_inv).reshape(m, -1)[:, :k], scale_inv[..., 0]


def beyond_the_row(x):
    return blockwise(x, reads_on=True)


def float16_multiplier(x):
    """The reciprocal of the scale in float16, in which 2^16 and more is infinite."""
    x = np.asarray(x)
    if x.dtype != np.float16:
        return deepseek_ue8m0(x)
    scale_inv = power(np.maximum(row_amax(x), F(1e-4)) / F(448))
    return saturated(x * (F(1) / scale_inv).astype(np.float16)), scale_inv


def multiplied_by_inverse(x):
    """Elements are multiplied by scale_inv, where scale is meant."""
    scale_inv = inverse_scale(x, 448)
    return saturated(np.asarray(x, F) * scale_inv), scale_inv


def scales_in_its_dtype(x):
    """The scale is rounded to the dtype of x."""
    x = np.asarray(x)
    return by_inverse(x, inverse_scale(x, 448).astype(x.dtype).astype(F))


EXHIBITS = (
    Exhibit(
        name="sglang-30900",
        link="https://github.com/sgl-project/sglang/pull/30900",
        library="SGLang (ROCm)",
        year=2026,
        title="The scale of e4m3fn is that of a maximum of 224, as for FNUZ",
        fault=max_of_fnuz,
        twin=vllm,
        ask=ask.quantizer("vllm"),
        named="0.5 times that policy's, as of a max of 224, not 448",
    ),
    Exhibit(
        name="musubi-tuner-192",
        link="https://github.com/kohya-ss/musubi-tuner/issues/192",
        library="musubi-tuner",
        year=2025,
        title="The maximum of e5m2 is taken to be 98304",
        fault=max_beyond_e5m2,
        twin=e5m2_rows,
        ask=ask.quantizer("vllm", fmt="e5m2"),
        named="its max is 98304, not 57344",
    ),
    Exhibit(
        name="vllm-43557",
        link="https://github.com/vllm-project/vllm/pull/43557",
        library="vLLM (CUTLASS)",
        year=2026,
        title="The exponent of amax / max is not the exponent of amax less that of max",
        fault=quantizer(of_quotient_down),
        twin=quantizer(of_exponents),
        ask=ask.quantizer("mx_floor_0.19", "mx_1x32"),
        named="its scale_inv is amax / max as a power of two, rounded down",
    ),
    Exhibit(
        name="bitsandbytes-1884",
        link="https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1884",
        library="bitsandbytes",
        year=2026,
        title="A last, partial block takes its amax from memory behind it",
        fault=beyond_the_row,
        twin=blockwise,
        ask=ask.quantizer("vllm", "blockwise_1x128"),
        unnamed="got code 0x6D (104), [1] 6.539480818901211e-05, expected code 0x7D (416)",
    ),
    Exhibit(
        name="sglang-33533",
        link="https://github.com/sgl-project/sglang/pull/33533",
        library="SGLang",
        year=2026,
        title="The multiplier, a power of two, overflows in float16",
        fault=float16_multiplier,
        twin=deepseek_ue8m0,
        ask=ask.quantizer("deepseek_v3_ue8m0"),
        missed="codes of float16 input are described, not judged: quotients in float16 are allowed",
    ),
    Exhibit(
        name="pytorch-195751-quantizer",
        link="https://github.com/pytorch/pytorch/pull/195751",
        library="PyTorch (Inductor)",
        year=2026,
        title="Elements are multiplied by scale_inv, not by scale",
        fault=multiplied_by_inverse,
        twin=vllm,
        ask=ask.quantizer("vllm"),
        unnamed="x [1, 1] = 1 (float32 0x3F800000): got code 0x01 (0.001953125), scale_inv 0.0022321429569274187, expected code 0x7E (448)",
        slow=True,
    ),
    Exhibit(
        name="xla-9473",
        link="https://github.com/pytorch/xla/pull/9473",
        library="PyTorch/XLA",
        year=2025,
        title="Scales are rounded to the dtype of the input",
        fault=scales_in_its_dtype,
        twin=vllm,
        ask=ask.quantizer("vllm"),
        unnamed="(bfloat16 0x2CE0): got code 0x5E (28), [1] 2.2293278334473143e-13, expected code 0x5E (28), scale_inv 2.2321428288629014e-13",
    ),
)
