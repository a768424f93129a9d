"""Faults of quantizers: scales and codes that do not belong together."""

import numpy as np
from museum import ask
from museum.arithmetic import E2M1, E4M3, E5M2, F, bf16, blocks, e8m0_up, row_amax, saturated
from museum.exhibit import Exhibit

MAX = np.finfo(F).max
SIXTH = F(1) / F(6)


def by_scale(x, scale, dtype=E4M3):
    """(codes, scale) of x * scale."""
    return saturated(np.asarray(x, F) * scale, dtype), scale


def by_inverse(x, scale_inv, dtype=E4M3):
    """(codes, scale_inv) of x / scale_inv."""
    return saturated(np.asarray(x, F) / scale_inv, dtype), scale_inv


def torchao(x):
    """448 / amax, with a floor of the amax."""
    return by_scale(x, F(448) / np.maximum(row_amax(x), F(1e-12)))


def vllm(x):
    """amax / 448, with a floor of the amax."""
    return by_inverse(x, np.maximum(row_amax(x), F(1e-10)) / F(448))


def deepseek(x):
    """amax / 448, with a larger floor."""
    return by_inverse(x, np.maximum(row_amax(x), F(1e-4)) / F(448))


def power(x):
    """The power of two at or above x, by its logarithm in float32."""
    return np.exp2(np.ceil(np.log2(x)))


def deepseek_ue8m0(x):
    """The same, rounded up to a power of two."""
    return by_inverse(x, power(np.maximum(row_amax(x), F(1e-4)) / F(448)))


def te_current(x):
    """448 / amax, and 1 for amaxes that have no scale."""
    return by_scale(x, te_scale(row_amax(x)))


def te_scale(amax):
    scale = np.where(np.isinf(F(448) / amax), MAX, F(448) / amax)
    return np.where(np.isfinite(amax) & (amax > 0), scale, F(1)).astype(F)


def dropped_nan(x):
    """A maximum that ignores NaN, as PTX's max and a comparison do."""
    amax = np.fmax.reduce(np.abs(np.asarray(x, F)), axis=-1, keepdims=True)
    return by_scale(x, F(448) / np.fmax(amax, F(1e-12)))


def mxfp8(x, *, flushes):
    """Blocks of 32 under e8m0 scales, rounded up; a device may flush scales below 2^-125, and then
    guards by the amax."""
    x = blocks(np.asarray(x, F), 32)
    amax = np.abs(x).max(-1, keepdims=True)
    code = e8m0_up(amax / F(448))
    scale = np.where(code == 255, F(np.nan), np.ldexp(F(1), 127 - code.astype(int)))
    if flushes:
        scale = np.where((code < 2) & (amax != 0), F(np.inf), scale)
    return saturated(x * scale).reshape(len(x), -1), code[..., 0]


def without_floor(x):
    """A block of zeros is divided by zero."""
    return by_inverse(x, row_amax(x) / F(448))


def torchao_without_floor(x):
    """448 / amax of a zero row is infinite, and 0 times that is NaN."""
    return by_scale(x, F(448) / row_amax(x))


def in_its_dtype(x):
    """Scale and reciprocal in the input's dtype, which float16 cannot hold."""
    x = np.asarray(x)
    if x.dtype != np.float16:
        return by_inverse(x, np.maximum(row_amax(x), F(1e-10)) / F(57344), E5M2)
    scale_inv = (np.maximum(row_amax(x), F(1e-10)) / F(57344)).astype(np.float16)
    y = x * (np.float16(1) / scale_inv)
    return saturated(y, E5M2), scale_inv.astype(F)


def in_float32(x):
    return by_inverse(x, np.maximum(row_amax(x), F(1e-10)) / F(57344), E5M2)


def rounded_afterwards(x):
    """Codes by the exact scale; the stored one alone is rounded up to a power of two."""
    scale_inv = np.maximum(row_amax(x), F(1e-4)) / F(448)
    return saturated(np.asarray(x, F) / scale_inv), power(scale_inv)


def nvfp4(x, *, elements, stored=saturated):
    """Transformer Engine's two levels; elements: (x in blocks, block amax, scale) -> scaled;
    stored: block scales -> e4m3."""
    x = blocks(np.asarray(x, F), 16)
    amax = np.abs(x).max(-1, keepdims=True)
    top = amax.max()
    tensor = F(1) if top == 0 else np.minimum(F(2688) / top, MAX)
    scale_inv = stored(amax * (tensor * SIXTH))
    scale = np.minimum(F(1) / (scale_inv.astype(F) * (F(1) / tensor)), MAX)
    y = elements(x, amax, scale)
    packed = np.clip(y, -6, 6).astype(E2M1).view(np.uint8).reshape(len(x), -1)
    return {
        "codes": packed,
        "scale_inv": scale_inv.astype(F)[..., 0],
        "tensor_scale_inv": np.atleast_1d(F(1) / tensor),
    }


def te_nvfp4(x):
    return nvfp4(x, elements=lambda x, amax, scale: x * scale)


def by_unrounded_amax(x):
    """Elements by the block's amax, whose rounding to e4m3 is only in the stored scale."""
    return nvfp4(x, elements=lambda x, amax, scale: x * (F(6) / amax))


def by_memory(x):
    """A floor of the scale for contiguous input, one of the amax for other input."""
    x = np.asarray(x)
    amax = row_amax(x)
    if x.flags.c_contiguous:
        return by_inverse(x, power(np.maximum(amax, F(1e-4)) / F(448)))
    return by_inverse(x, power(np.maximum(amax / F(448), F(1e-4))))


def of_the_copy(x):
    """The rollout's weights: a bfloat16 copy of the trainer's float32 ones."""
    return vllm(bf16(x))


def static(x, *, clips):
    """A calibrated scale of 1."""
    x = np.asarray(x, F) / F(1)
    return saturated(x) if clips else x.astype(E4M3)


def clipped_at_448(x):
    """e4m3's bound, whatever the output type."""
    return np.clip(x, -448, 448).astype(E5M2)


def one_level(x, *, product):
    """torchao's NVFP4 without a scale of the tensor."""
    x = blocks(np.asarray(x, F), 16)
    scale_inv = saturated(np.maximum(np.abs(x).max(-1, keepdims=True) / F(6), F(2.0**-6)))
    y = product(x, scale_inv.astype(F))
    return {
        "codes": np.clip(y, -6, 6).astype(E2M1).view(np.uint8).reshape(len(x), -1),
        "scale_inv": scale_inv.astype(F)[..., 0],
    }


def replaced_for_the_amax(x):
    """NaN and infinity are replaced where the amax is taken, not among the elements."""
    amax = np.nan_to_num(row_amax(x), nan=0.0, posinf=MAX)
    return by_scale(x, te_scale(amax))


def stale_rows():
    """M is padded to 16 in a scratch whose other rows the last call left behind."""
    scratch = np.zeros((1 << 20,), F)

    def quantize(x):
        nonlocal scratch
        x = np.asarray(x, F)
        size = -(-len(x) // 16) * 16 * x.shape[1]
        if size > scratch.size:
            scratch = np.zeros(size, F)
        scratch[: x.size] = x.reshape(-1)
        amax = np.abs(scratch[:size]).max(keepdims=True)
        return by_inverse(x, np.maximum(amax, F(1e-10)).reshape(()) / F(448))

    return quantize


def tensorwise(x):
    return by_inverse(x, np.maximum(np.abs(np.asarray(x, F)).max(), F(1e-10)) / F(448))


def every_other(x):
    """A loop over pairs that compares one element of each."""
    amax = row_amax(np.asarray(x, F)[:, ::2])
    return by_inverse(x, np.maximum(amax, F(1e-10)) / F(448))


def signed_maximum(x):
    """The tensor's scale from the largest number, not the largest magnitude."""
    x = np.asarray(x, F)
    return by_inverse(x, np.maximum(x.max(), F(1e-10)) / F(448))


AO, FLASHINFER = "https://github.com/pytorch/ao/", "https://github.com/flashinfer-ai/flashinfer/"
VLLM = "https://github.com/vllm-project/vllm/"
HUGGING_FACE = "https://github.com/huggingface/"

EXHIBITS = (
    Exhibit(
        name="ao-4725-nan",
        link=AO + "pull/4725",
        library="torchao",
        year=2026,
        title="A NaN is left out of its block's amax",
        fault=dropped_nan,
        twin=torchao,
        ask=ask.quantizer("torchao"),
        named="an amax of NaN has scale 450",
    ),
    Exhibit(
        name="flashinfer-2440",
        link=FLASHINFER + "issues/2440",
        library="FlashInfer",
        year=2026,
        title="A scale that underflows to zero is inverted",
        fault=lambda x: mxfp8(x, flushes=True),
        twin=lambda x: mxfp8(x, flushes=False),
        ask=ask.quantizer("te_mxfp8_2.13", "mx_1x32"),
        named="beside a scale_inv of 2^-127 its scale is inf, as if flushed to 0",
    ),
    Exhibit(
        name="kernels-community-681",
        link=HUGGING_FACE + "kernels-community/issues/681",
        library="HF kernels (finegrained-fp8)",
        year=2026,
        title="A block of zeros quantizes to NaN",
        fault=without_floor,
        twin=deepseek,
        ask=ask.quantizer("deepseek_v3"),
        named="its eps is 0, not 0.0001); a block of zeros is NaN",
    ),
    Exhibit(
        name="ao-4762",
        link=AO + "pull/4762",
        library="torchao",
        year=2026,
        title="One zeroed row of a tensor becomes NaN",
        fault=torchao_without_floor,
        twin=torchao,
        ask=ask.quantizer("torchao"),
        named="a block of zeros is NaN",
    ),
    Exhibit(
        name="ao-1766",
        link=AO + "issues/1766",
        library="torchao",
        year=2025,
        title="The reciprocal of a float16 scale is infinite",
        fault=in_its_dtype,
        twin=in_float32,
        ask=ask.quantizer("vllm", fmt="e5m2"),
        unnamed="(float16 0x0001): got code 0x7B (57344), [1] 0",
    ),
    Exhibit(
        name="transformers-46763",
        link=HUGGING_FACE + "transformers/pull/46763",
        library="transformers",
        year=2026,
        title="The stored scale is rounded to a power of two after quantizing",
        fault=rounded_afterwards,
        twin=deepseek_ue8m0,
        ask=ask.quantizer("deepseek_v3_ue8m0"),
        named="its codes are made by other scales than it returns",
    ),
    Exhibit(
        name="fbgemm-4884",
        link="https://github.com/pytorch/FBGEMM/pull/4884",
        library="FBGEMM",
        year=2025,
        title="NVFP4 elements are scaled by the unrounded block maximum",
        fault=by_unrounded_amax,
        twin=te_nvfp4,
        ask=ask.quantizer("te_nvfp4", "nvfp4_1x16", fmt="e2m1fn"),
        unnamed="got 4, expected 3 of te_nvfp4 in nvfp4_1x16, axis -1, nearest_even (S-22)",
    ),
    Exhibit(
        name="vllm-53346",
        link=VLLM + "pull/53346",
        library="vLLM",
        year=2026,
        title="The floor of a scale depends on the input's memory layout",
        fault=by_memory,
        twin=deepseek_ue8m0,
        ask=ask.quantizer("deepseek_v3_ue8m0"),
        named="transposed in memory",
    ),
    Exhibit(
        name="xtuner-2044",
        link="https://github.com/InternLM/xtuner/pull/2044",
        library="XTuner",
        year=2026,
        title="The trainer quantizes float32 weights, the rollout their bfloat16 copy",
        fault=of_the_copy,
        twin=vllm,
        ask=ask.quantizer("vllm"),
        named="x is rounded to bfloat16 before its amax",
    ),
    Exhibit(
        name="transformers-42775",
        link=HUGGING_FACE + "transformers/pull/42775",
        library="transformers",
        year=2025,
        title="Static scales without a clamp give NaN",
        fault=lambda x: static(x, clips=False),
        twin=lambda x: static(x, clips=True),
        ask=ask.cast("e4m3fn"),
        named="overflow: nan",
    ),
    Exhibit(
        name="flashinfer-2639",
        link=FLASHINFER + "pull/2639",
        library="FlashInfer",
        year=2026,
        title="e5m2 output is clipped at e4m3's maximum",
        fault=clipped_at_448,
        twin=lambda x: saturated(x, E5M2),
        ask=ask.cast("e5m2"),
        named="numbers are clipped to 448, not 57344",
    ),
    Exhibit(
        name="arch-com-905",
        link="https://github.com/arch-hdl-lang/arch-com/issues/905",
        library="Arch HDL",
        year=2026,
        title="Multiplying by a reciprocal is not dividing",
        fault=lambda x: by_scale(x, F(1) / (np.maximum(row_amax(x), F(1e-10)) / F(448))),
        twin=vllm,
        ask=ask.quantizer("vllm"),
        named="it multiplies by 1 / scale_inv in the place of dividing by it",
    ),
    Exhibit(
        name="flashinfer-4091",
        link=FLASHINFER + "pull/4091",
        library="FlashInfer",
        year=2026,
        title="NaN is replaced for the amax but not for the elements",
        fault=replaced_for_the_amax,
        twin=te_current,
        ask=ask.quantizer("te_current"),
        named="an infinite amax has scale 1.31655376e-36",
    ),
    Exhibit(
        name="prime-rl-3112",
        link="https://github.com/PrimeIntellect-ai/prime-rl/pull/3112",
        library="prime-rl",
        year=2026,
        title="Power-of-two scales where the other side has float scales",
        fault=deepseek_ue8m0,
        twin=deepseek,
        ask=ask.quantizer("deepseek_v3"),
        named="its scales are powers of two",
    ),
    Exhibit(
        name="aprender-2765",
        link="https://github.com/paiml/aprender/issues/2765",
        library="aprender",
        year=2026,
        title="Padding rows are what the last product left behind",
        fault=stale_rows(),
        twin=tensorwise,
        ask=ask.quantizer("vllm", "tensorwise", axis=None),
        named="keeps numbers of an earlier call with another shape",
    ),
    Exhibit(
        name="sglang-8290",
        link="https://github.com/sgl-project/sglang/pull/8290",
        library="SGLang",
        year=2025,
        title="Every other element is left out of the amax",
        fault=every_other,
        twin=vllm,
        ask=ask.quantizer("vllm"),
        named="(as without x[0, 1])",
    ),
    Exhibit(
        name="vllm-20578",
        link=VLLM + "pull/20578",
        library="vLLM",
        year=2025,
        title="The global scale is taken from the signed maximum",
        fault=signed_maximum,
        twin=tensorwise,
        ask=ask.quantizer("vllm", "tensorwise", axis=None),
        named="its amax is the largest element, without abs",
    ),
)
