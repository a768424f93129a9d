"""Casts of groups to e4m3fn in serving engines and trainers, transcribed in PyTorch from the sources
that docs/spec/profiles.md names: x [groups, elements] -> (codes, what is stored), for each policy.

A maximum of CUDA and Triton drops NaNs (``fmax``); that of PyTorch keeps them (``amax``).
"""

import torch

MAX = torch.tensor(448.0)
E4M3 = torch.float8_e4m3fn


def fmax(x):
    """The largest magnitude, NaNs dropped: 0 of NaNs alone."""
    return x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)


def amax(x):
    return x.abs().amax(-1, keepdim=True)


def codes(y):
    """PyTorch's clamp, which keeps NaNs, and cast."""
    return y.clamp(-448, 448).to(E4M3)


def codes_on_gpu(y):
    """fminf and fmaxf, by which a NaN becomes max."""
    return codes(y.nan_to_num(nan=448.0, posinf=448.0, neginf=-448.0))


def at_least(value, least):
    return torch.maximum(value, torch.tensor(least, dtype=value.dtype))


def power_up(s):
    """2^ceil(log2 s), by the bits."""
    fraction, exponent = torch.frexp(s)
    powers = torch.ldexp(torch.ones_like(s), exponent - (fraction == 0.5).int())
    return torch.where(s.isfinite(), powers, s)


def vllm(x):
    """_per_token_group_quant_fp8, and ComputeGroupScale and QuantizeGroup in CUDA."""
    s = at_least(fmax(x), 1e-10) / MAX
    return codes_on_gpu(x.float() / s), s


def vllm_ue8m0(x):
    """_per_token_group_quant_fp8 with use_ue8m0, and SGLang's _per_token_group_quant_8bit_colmajor
    with SCALE_UE8M0."""
    s = torch.exp2(torch.ceil(torch.log2(at_least(fmax(x), 1e-10) / MAX)))
    return codes_on_gpu(x.float() / s), s


def vllm_ue8m0_cuda(x):
    """per_token_group_quant_8bit_register_kernel with SCALE_UE8M0."""
    s = power_up(at_least(at_least(fmax(x), 1e-10) / MAX, 1e-10))
    return codes_on_gpu(x.float() * (1 / s)), s


def vllm_token(x):
    """dynamic_per_token_scaled_fp8_quant_kernel_strided."""
    s = at_least(fmax(x) / MAX, 1 / (448 * 512))
    return codes_on_gpu(x.float() / s), s


def vllm_native(x):
    """QuantFP8.forward_native, by tokens and by tensors."""
    s = (amax(x).to(torch.float32) / 448).clamp(min=1 / (448 * 512))
    return codes(x.to(torch.float32) * s.reciprocal()), s


def sglang(x):
    """_per_token_group_quant_8bit, and _blockwise_cast_to_fp8 of slime, miles and verl."""
    s = at_least(fmax(x), 1e-10) / MAX
    return codes_on_gpu(x.float() * (1 / s)), s


def sglang_token(x):
    """per_token_quant_fp8_small_batch_kernel, per_tensor_quant_fp8_kernel, and vLLM's
    scaled_fp8_quant_kernel_strided_dynamic."""
    s = fmax(x) / MAX
    return codes_on_gpu(x.float() * (1 / s)), s


def sglang_cuda(x):
    """per_token_group_quant_8bit_kernel, of float scales."""
    largest = at_least(fmax(x), 1e-10)
    return codes_on_gpu(x.float() * (MAX / largest)), largest * (1 / MAX)


def sglang_ue8m0(x):
    """The same with SCALE_UE8M0; the codes of its scales as powers of two."""
    s = power_up(at_least(fmax(x), 1e-10) * (1 / MAX))
    return codes_on_gpu(x.float() * (1 / s)), s


def torchao_adamw_fp8(x):
    """block_fp8 and channel_fp8 of slime's tools/convert_hf_to_fp8.py."""
    s = amax(x).clamp(min=1e-12).to(torch.float32) / 448
    return codes(x / s), s


def deepseek_v3_2024(x):
    """block_fp8 of miles; FP8QTensor.quantize of ModelOpt, without the clamp."""
    s = amax(x).to(torch.float32) / 448
    return codes(x.float() / s), s


def transformers(x):
    """Fp8Quantize._quantize_one; flashinfer's _quantize_fp8_per_expert."""
    largest = amax(x.float())
    safe = torch.where(largest > 0, largest, torch.ones_like(largest))
    scale = 448.0 / safe  # PyTorch: 448 * safe.reciprocal()
    scale = torch.where(largest > 0, scale, torch.ones_like(scale))
    return codes(x.float() * scale), (1.0 / scale).float()


def verl_torch(x):
    """_scaled_fp8_blockwise_pytorch."""
    largest = amax(x.to(torch.float32))
    scale = torch.div(MAX, largest)
    scale = torch.where((largest == 0) | (largest == torch.inf), torch.ones_like(scale), scale)
    return codes(x.to(torch.float32) * scale), torch.reciprocal(scale)


def flashinfer(x):
    """_deepseek_fp8_quantize_activations; _fp8_act_quant_kernel of finegrained-fp8."""
    s = (amax(x.float()) / 448.0).clamp(min=1e-12)
    return codes(x.float() / s), s


def compressed_tensors(x):
    """calculate_qparams and _quantize, in x's dtype."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    zero = torch.zeros_like(low)
    s = torch.max(torch.min(low, zero).abs(), torch.max(high, zero).abs()) / (896.0 / 2)
    eps = torch.tensor(torch.finfo(s.dtype).eps, dtype=s.dtype)
    s = torch.where(s == 0, eps, s)
    return codes(x / s), s


def modelopt(x):
    """FP8QTensor.quantize, in x's dtype; PyTorch's cast saturates from 2.12 on."""
    s = amax(x) / 448.0
    return codes(x / s), s


def modelopt_mx(x):
    """MXFP8QTensor.quantize; the codes of its scales as powers of two."""
    s = amax(x).float() / 448.0
    exponent = torch.where(s > 0, torch.log2(s), torch.tensor(-127.0)).ceil().clamp(-127, 127)
    code = (exponent + 127).to(torch.uint8)
    return codes(x * torch.exp2(127 - code.float())), torch.ldexp(
        torch.ones_like(s), code.int() - 127
    )


def torchao_mx(mode):
    """to_mx of torchao 0.19 and _to_mx_rceil, eager; codes of scales as powers of two."""

    def quantize(x):
        largest = amax(x).float()
        finite = largest.isfinite()
        bits = (largest * (1.0 / 448.0) if mode == "rceil" else largest).view(torch.int32)
        if mode == "even":
            bits = torch.where(largest.isnan(), bits, (bits + (1 << 19)) & 0x7F800000)
            finite = bits.view(torch.float32).isfinite() & ~largest.isnan()
        field, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
        if mode == "rceil":
            code = field + torch.where(field == 0, mantissa > 0x400000, mantissa != 0)
        else:
            code = (field + (mantissa > 0) * (mode == "ceil") - 8).clamp(0, 255)
        code = torch.where(finite, code, 255)
        nan = torch.where(code == 255, torch.nan, 1.0)
        scale_inv = torch.ldexp(torch.ones_like(largest), code - 127) * nan
        # the reciprocal's code is 254 - code
        return codes(
            x.float() * (torch.ldexp(torch.ones_like(largest), 127 - code) * nan)
        ), scale_inv

    return quantize


KERNELS = {
    f.__name__: f
    for f in (
        *(vllm, vllm_ue8m0, vllm_ue8m0_cuda, vllm_token),
        *(sglang, sglang_token, sglang_cuda, sglang_ue8m0),
    )
}
"""{policy: a kernel's cast}."""

IN_PYTORCH = {
    f.__name__: f
    for f in (
        *(vllm_native, torchao_adamw_fp8, deepseek_v3_2024, transformers, verl_torch),
        *(flashinfer, compressed_tensors, modelopt_mx),
    )
} | {f"mx_{mode}_0.19": torchao_mx(mode) for mode in ("floor", "ceil", "even", "rceil")}
"""{policy: a cast in PyTorch}."""

OF_BFLOAT16 = {"compressed_tensors_bf16": compressed_tensors, "modelopt_bf16": modelopt}
"""{policy: a cast in PyTorch of a bfloat16 tensor}."""
