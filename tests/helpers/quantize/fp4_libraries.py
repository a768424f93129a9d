"""Quantizers to e2m1fn of libraries: torchao's as they are, and Transformer Engine's
transcribed.
"""

import torch

TOP = torch.finfo(torch.float32).max


def torchao_nvfp4(x):
    """torchao 0.18, with the scale of a tensor from its amax."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))


def torchao_nvfp4_one_level(x):
    """torchao 0.18, without it."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return NVFP4Tensor.to_nvfp4(x)


def torchao_mx(mode):
    """torchao 0.18, to_mx in blocks of 32: pairs of codes, and codes of scale_inv."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def quantize(x):
        scale, codes = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode(mode))
        return codes, scale

    return quantize


def transformer_engine(x, rows=1, row_scaled=False):
    """TransformerEngine, pytorch/custom_recipes/reference_nvfp4.py: _quantize_blockwise_reference
    and cast_to_fp4x2 (commit d0067d0d), of blocks of rows x 16: (pairs of codes, scales of blocks,
    a row each, the amax of the tensor, or those of its rows under row_scaled_nvfp4)."""
    m, n = x.shape
    x = x.float()
    blocks = (
        x.abs()
        .reshape(m // rows, rows, n // 16, 16)
        .amax(dim=(1, 3))
        .repeat_interleave(rows, 0)
        .unsqueeze(-1)
    )
    top, largest = torch.tensor(6.0), torch.tensor(TOP)
    amax = x.abs().amax(1).view(m, 1, 1) if row_scaled else x.abs().max()
    encode = torch.minimum(torch.tensor(448.0) * top / amax, largest)
    # of a zero amax in core_nvfp4.cuh
    encode = torch.where((encode == 0) | (amax == 0), torch.tensor(1.0), encode)
    decode = torch.div(1.0, encode)
    scale = (
        torch.minimum(blocks * (encode * torch.reciprocal(top)), largest)
        .clamp(-448.0, 448.0)
        .to(torch.float8_e4m3fn)
    )
    by = torch.minimum(torch.div(1.0, scale.float() * decode), largest)
    scaled = (x.view(m, n // 16, 16) * by).clamp(-6, 6).reshape(m, n)
    return pairs(scaled), scale.squeeze(-1), amax.flatten() if row_scaled else amax


def four_over_six(x, rows, error, largest, *, fast_math=False, row_scaled=False):
    """TransformerEngine, pytorch/custom_recipes/reference_nvfp4.py:
    _quantize_blockwise_4over6_reference (commit d0067d0d): (pairs of codes, scales, a row each).

    fast_math  accumulate_fp16_scaled_error_pair of quantize_4over6_nvfp4.cuh: float16 products.
    """
    m, n = x.shape
    blocks, top = x.float().view(m, n // 16, 16), torch.tensor(6.0)
    amaxes = blocks.abs().amax(-1).view(m // rows, rows, -1).amax(1).repeat_interleave(rows, 0)
    amax = x.abs().amax(1, keepdim=True).float() if row_scaled else x.abs().max().float()
    biggest = torch.tensor(TOP)
    encode = torch.minimum(torch.tensor(float(largest)) * top / amax, biggest)
    base = torch.div(amaxes, top) * encode
    made = {}
    for name, wanted in (("six", base), ("four", base * 1.5)):
        scale = wanted.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        by = torch.minimum(torch.div(1.0, scale.float() * torch.div(1.0, encode)), biggest)
        codes = pairs((blocks * by.unsqueeze(-1)).clamp(-6, 6).reshape(m, n))
        read = values(codes).view(m, n // 16, 16)
        total = torch.zeros(m, n // 16)
        for i in range(16):
            if fast_math:
                candidate = (read[:, :, i].half() * scale.half()).float()
                diff = candidate - blocks[:, :, i] * encode
            else:
                diff = read[:, :, i] * scale.float() * amax / (top * largest) - blocks[:, :, i]
            total = total + (diff * diff if error == "mse" else diff.abs())
        if rows == 16:
            by_row = total.view(m // 16, 16, -1)
            for half in (8, 4, 2, 1):
                by_row = by_row[:, :half] + by_row[:, half : 2 * half]
            total = by_row.repeat_interleave(16, 1).reshape(m, -1)
        made[name] = codes, scale.float(), total
    four = made["four"][2] < made["six"][2]
    codes = torch.where(four.repeat_interleave(8, 1), made["four"][0], made["six"][0])
    return codes, torch.where(four, made["four"][1], made["six"][1]), four


def values(codes):
    """The numbers of pairs of codes."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    both = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1)
    return both.flatten(-2)


def pairs(x):
    """cast_to_fp4x2: the thresholds between neighbors, ties to the even code."""
    code = torch.zeros_like(x, dtype=torch.uint8)
    for low, high, closed, value in (
        (0.25, 0.75, False, 1),
        (0.75, 1.25, True, 2),
        (1.25, 1.75, False, 3),
        (1.75, 2.5, True, 4),
        (2.5, 3.5, False, 5),
        (3.5, 5, True, 6),
    ):
        size = x.abs()
        code[(size >= low) & (size <= high) if closed else (size > low) & (size < high)] = value
    code[x.abs() > 5] = 7
    code |= torch.signbit(x).to(torch.uint8) << 3
    return code[:, ::2] + code[:, 1::2] * 16
