"""Scales of e4m3fn in serving engines and trainers of 2026, transcribed from their sources, for
docs/libraries.md: of vLLM, SGLang, slime, miles, verl, transformers, flashinfer,
compressed-tensors, ModelOpt and torchao 0.19.

Each is a function from float32 amaxes [n] to what its library stores, by the steps of its own
source and without ``fp8ref.sim``. Operations are rounded correctly, also those that Triton and CUDA
approximate. A NaN amax stays one, though maxima on a GPU drop NaNs.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from fp8ref.conformance.libraries.transcriptions import Transcription

Run = Callable[[np.ndarray], np.ndarray]

F32 = np.float32
MAX = F32(448)


def quotient(amax: np.ndarray, *, eps: float = 0.0, least: float = 0.0, up: str = "") -> np.ndarray:
    """amax / max: eps floors the amax, least the quotient; up rounds it to a power of two, by
    ``log2`` or by its ``bits``."""
    s = np.maximum(np.maximum(amax, F32(eps)) / MAX, F32(least))
    if up == "bits":
        return np.where(np.isnan(s), s, (field_up(s) << np.uint32(23)).view(F32))
    return np.exp2(np.ceil(log2(s)).astype(np.float64)).astype(F32) if up else s


def field_up(s: np.ndarray) -> np.ndarray:
    """The exponent fields of normal numbers, plus one where a mantissa bit is set."""
    bits = s.view(np.uint32)
    return (bits >> np.uint32(23)) + ((bits & np.uint32(0x7FFFFF)) != 0) * np.isfinite(s)


def log2(x: np.ndarray) -> np.ndarray:
    """The float32 logarithm, rounded once."""
    return np.log2(x.astype(np.float64)).astype(F32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as float32."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return np.where(np.isnan(x), F32(np.nan), rounded.astype(np.uint32).view(F32))


def sglang_cuda(amax: np.ndarray, *, made: str) -> np.ndarray:
    """calculate_fp8_scales: two quotients of one amax, or the exponent field of one rounded up."""
    floored = np.maximum(amax, F32(1e-10))
    if made == "scale":
        return MAX / floored
    scale_inv = floored * F32(1 / MAX)
    return scale_inv if made == "scale_inv" else field_up(scale_inv).astype(np.uint8)


def weights(amax: np.ndarray, *, up_to: float = 0.0) -> np.ndarray:
    """448 / amax as PyTorch's number / tensor, 448 * (1 / amax), and 1 for amaxes up to a number,
    or not above 0."""
    one = amax <= F32(up_to) if up_to else ~(amax > 0)
    return np.where(one, F32(1), MAX * (F32(1) / np.where(one, F32(1), amax)))


def verl_torch(amax: np.ndarray) -> np.ndarray:
    """torch.div(448, amax), a quotient, and 1 for a zero or an infinite amax."""
    return np.where((amax == 0) | np.isinf(amax), F32(1), MAX / amax)


def transformers_ue8m0(amax: np.ndarray) -> np.ndarray:
    """The reciprocal of the scale, rounded up, as a code."""
    s = np.maximum(F32(1) / weights(amax), np.finfo(F32).tiny)
    return np.minimum(np.ceil(log2(s)) + 127, 255).astype(np.uint8)


def compressed(amax: np.ndarray, *, narrow: bool = False) -> np.ndarray:
    """amax / max in float32 or bfloat16; the dtype's eps in place of 0."""
    s = bfloat16(amax / MAX) if narrow else amax / MAX
    return np.where(s == 0, F32(2.0**-7 if narrow else 2.0**-23), s)


def compressed_mx(amax: np.ndarray) -> np.ndarray:
    """Half of FP4's last place is added to the amax, for FP8 too."""
    rounded = (amax.view(np.uint32).astype(np.int64) + (1 << 21)) & 0x7F800000
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.log2(rounded.astype(np.uint32).view(F32))
    return np.clip(np.floor(exponent) + 127 - 8, 0, 255).astype(np.uint8)


def modelopt_mx(amax: np.ndarray) -> np.ndarray:
    """What is not above 0 has the least exponent."""
    s = amax / MAX
    exponent = np.where(s > 0, np.ceil(log2(s)), F32(-127))
    return (np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def torchao_mx(amax: np.ndarray, *, mode: str) -> np.ndarray:
    """to_mx of 0.19, eager: code 255 for a NaN or infinite amax."""
    value = amax * F32(1 / MAX) if mode == "rceil" else amax
    bits = value.view(np.uint32).astype(np.int64) + (1 << 19) * (mode == "even")
    field, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    up = {"ceil": mantissa > 0, "rceil": mantissa > 0x400000 * (field == 0)}.get(mode, 0)
    codes = np.clip(field + up - 8 * (mode != "rceil"), 0, 255)
    infinite = ~np.isfinite(amax) | ((mode == "even") & (field == 255))  # of the rounded amax
    return np.where(infinite, 255, codes).astype(np.uint8)


GROUP = partial(quotient, eps=1e-10)
VLLM_TOKEN = partial(quotient, least=1 / (448 * 512))
FLASHINFER = partial(quotient, least=1e-12)
VLLM, SGLANG = "vllm-project/vllm ", "sgl-project/sglang "
LAYERS = "model_executor/layers/quantization/"
PREPARE = "flashinfer-ai/flashinfer flashinfer/fused_moe/prepare.py fb28d724"
KERNEL = "sgl-kernel/csrc/gemm/"
HELPERS = "vllm-project/compressed-tensors src/compressed_tensors/quantization/utils/"
MODELOPT = "NVIDIA/Model-Optimizer modelopt/torch/quantization/"

ROWS: dict[tuple[str, str], tuple[tuple[str, str, str, Run], ...]] = {
    ("vLLM", VLLM + f"vllm/{LAYERS}utils/fp8_utils.py 007d5005"): (
        ("group", "_per_token_group_quant_fp8", "scale_inv", GROUP),
        ("group_ue8m0", "_per_token_group_quant_fp8", "scale_inv", partial(GROUP, up="log2")),
    ),
    ("vLLM", VLLM + "csrc/quantization/w8a8/fp8/per_token_group_quant.cu 0f5257e2"): (
        ("cuda", "ComputeGroupScale", "scale_inv", GROUP),
        ("cuda_ue8m0", "ComputeGroupScale", "scale_inv", partial(GROUP, least=1e-10, up="bits")),
    ),
    ("vLLM", VLLM + "csrc/quantization/w8a8/fp8/common.cu 096d3dc9"): (
        ("token", "dynamic_per_token_scaled_fp8_quant", "scale_inv", VLLM_TOKEN),
        ("tensor", "dynamic_scaled_fp8_quant", "scale_inv", quotient),
    ),
    ("vLLM", VLLM + f"vllm/{LAYERS}input_quant_fp8.py 014af6b5"): (
        ("native", "QuantFP8.forward_native", "scale_inv", VLLM_TOKEN),
    ),
    ("SGLang", SGLANG + f"python/sglang/srt/{LAYERS[15:]}fp8_kernel.py 008601fa"): (
        ("group", "_per_token_group_quant_8bit", "scale_inv", GROUP),
        ("ue8m0", "_per_token_group_quant_8bit_colmajor", "scale_inv", partial(GROUP, up="log2")),
    ),
    ("SGLang", SGLANG + f"{KERNEL}per_token_group_quant_8bit_v2.cu 037cd6ea"): (
        ("cuda", "calculate_fp8_scales", "scale_inv", partial(sglang_cuda, made="scale_inv")),
        ("cuda_scale", "calculate_fp8_scales", "scale", partial(sglang_cuda, made="scale")),
        ("cuda_ue8m0", "calculate_fp8_scales", "e8m0", partial(sglang_cuda, made="e8m0")),
    ),
    ("SGLang", SGLANG + f"{KERNEL}per_token_quant_fp8.cu 0490047f"): (
        ("token", "per_token_quant_fp8_kernel", "scale_inv", quotient),
    ),
    ("SGLang", SGLANG + f"{KERNEL}per_tensor_quant_fp8.cu 28f9412d"): (
        ("tensor", "per_tensor_absmax_kernel", "scale_inv", quotient),
    ),
    ("slime", "THUDM/slime slime/backends/megatron_utils/kernels/fp8_kernel.py 624b824a"): (
        ("block", "_blockwise_cast_to_fp8_triton", "scale_inv", GROUP),
    ),
    ("slime", "THUDM/slime tools/convert_hf_to_fp8.py 624b824a"): (
        ("convert", "block_fp8", "scale_inv", partial(quotient, eps=1e-12)),
    ),
    ("miles", "radixark/miles miles/utils/fp8_kernel.py 31f1ca96"): (
        ("block", "_blockwise_cast_to_fp8_triton", "scale_inv", GROUP),
    ),
    ("miles", "radixark/miles tools/convert_hf_to_fp8.py 31f1ca96"): (
        ("convert", "block_fp8", "scale_inv", quotient),
        ("convert_channel", "channel_fp8", "scale_inv", partial(quotient, eps=1e-12)),
    ),
    ("verl", "verl-project/verl verl/utils/kernel/fp8_kernel.py 1dda039b"): (
        ("block", "_blockwise_cast_to_fp8_kernel", "scale_inv", GROUP),
        ("torch", "_scaled_fp8_blockwise_pytorch", "scale", verl_torch),
    ),
    ("transformers", "transformers 5.23 (PyPI) integrations/finegrained_fp8.py"): (
        ("weights", "Fp8Quantize", "scale", weights),
        ("weights_ue8m0", "Fp8Quantize", "e8m0", transformers_ue8m0),
    ),
    (
        "transformers",
        "huggingface/kernels-community finegrained-fp8/torch-ext/finegrained_fp8/act_quant.py "
        "46fa5522",
    ): (("activations", "_fp8_act_quant_kernel", "scale_inv", FLASHINFER),),
    ("flashinfer", PREPARE): (
        ("deepseek", "_deepseek_fp8_quantize_activations", "scale_inv", FLASHINFER),
        ("expert", "_quantize_fp8_per_expert", "scale", weights),
    ),
    ("flashinfer", "flashinfer-ai/flashinfer flashinfer/testing/utils.py fb28d724"): (
        ("testing", "per_token_cast_to_fp8", "scale_inv", partial(quotient, eps=1e-4, up="log2")),
    ),
    ("compressed-tensors", HELPERS + "helpers.py ac8e2ba8"): (
        ("float32", "calculate_qparams", "scale_inv", compressed),
        ("bfloat16", "calculate_qparams", "scale_inv", partial(compressed, narrow=True)),
    ),
    ("compressed-tensors", HELPERS + "mxfp_utils.py ac8e2ba8"): (
        ("mx", "generate_mx_scales", "e8m0", compressed_mx),
    ),
    ("ModelOpt", MODELOPT + "qtensor/fp8_tensor.py a2fbac7b"): (
        ("float32", "FP8QTensor.quantize", "scale_inv", quotient),
        ("bfloat16", "FP8QTensor.quantize", "scale_inv", lambda amax: bfloat16(quotient(amax))),
    ),
    ("ModelOpt", MODELOPT + "qtensor/mxfp8_tensor.py a2fbac7b"): (
        ("mx", "MXFP8QTensor._compute_e8m0_exponent", "e8m0", modelopt_mx),
    ),
    ("ModelOpt", MODELOPT + "tensor_quant.py a2fbac7b"): (
        ("fake", "_fp8_eager", "scale", partial(weights, up_to=2.0**-24)),
    ),
    ("torchao 0.19", "pytorch/ao torchao/prototype/mx_formats/mx_tensor.py 36027d82"): tuple(
        (f"mx_{mode}", "to_mx", "e8m0", partial(torchao_mx, mode=mode))
        for mode in ("floor", "rceil", "ceil", "even")
    ),
}
"""{(library, source): rows (variant, function in that source, what it makes, transcription)}."""

ENGINES = tuple(
    Transcription(library, variant, f"`{call}`", source, made, lambda fmt, run=run: run)
    for (library, source), rows in ROWS.items()
    for variant, call, made, run in rows
)
"""The rows, each for e4m3fn alone."""
