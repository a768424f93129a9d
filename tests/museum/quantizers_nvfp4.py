"""Faults of quantizers to NVFP4: blocks of 16 under a scale in e4m3."""

import numpy as np
from museum import ask
from museum.arithmetic import E2M1, E4M3, F, blocks, saturated, spacing
from museum.exhibit import Exhibit
from museum.quantizers import nvfp4, te_nvfp4

SMALLEST = 2.0**-6  # the smallest normal number of e4m3
SUBNORMAL = 2.0**-9  # the smallest number


def packed(y):
    """Codes of e2m1 [M, K] of numbers in blocks."""
    return np.clip(y, -6, 6).astype(E2M1).view(np.uint8).reshape(len(y), -1)


def one_level(x, *, floor=SMALLEST, shared_by=16):
    """torchao's NVFP4 without a scale of the tensor. shared_by: numbers whose amax is taken."""
    x = np.asarray(x, F)
    amax = np.abs(blocks(x, shared_by)).max(-1, keepdims=True)
    scale_inv = np.maximum(np.repeat(amax, shared_by // 16, axis=1) / F(6), F(floor))
    scale_inv = saturated(scale_inv).astype(F)
    return {"codes": packed(blocks(x, 16) / scale_inv), "scale_inv": scale_inv[..., 0]}


def torchao_one_level(x):
    return one_level(x)


def without_floor(x):
    """Small scales are rounded to 0."""
    return one_level(x, floor=0)


def pairs_of_blocks(x):
    """Behind the first 32 numbers of a row two blocks share an amax."""
    own, shared = one_level(x), one_level(x, shared_by=32)
    return {
        "codes": np.hstack([own["codes"][:, :32], shared["codes"][:, 32:]]),
        "scale_inv": np.hstack([own["scale_inv"][:, :2], shared["scale_inv"][:, 2:]]),
    }


def without_tensor_scale(x):
    """amax / 6 in e4m3 for each block, which above 448 saturates; the tensor's scale is 1."""
    x = blocks(np.asarray(x, F), 16)
    scale_inv = saturated(np.abs(x).max(-1, keepdims=True) / F(6)).astype(F)
    scale_inv = np.where(scale_inv == 0, F(SUBNORMAL), scale_inv)
    return {
        "codes": packed(x * (F(1) / scale_inv)),
        "scale_inv": scale_inv[..., 0],
        "tensor_scale_inv": np.ones(1, F),
    }


def cut(x):
    """A cast to e4m3 that truncates."""
    q = spacing(x, E4M3)
    return saturated(np.trunc(x / q) * q)


def cut_scales(x):
    return nvfp4(x, elements=lambda x, amax, scale: x * scale, stored=cut)


def unwritten_scales(x):
    """Where M is a multiple of 128, a kernel runs that does not write the scales."""
    out = te_nvfp4(x)
    if len(x) % 128 == 0:
        out["scale_inv"] = np.zeros_like(out["scale_inv"])
    return out


EXHIBITS = (
    Exhibit(
        name="imp-1544",
        link="https://github.com/kekzl/imp/issues/1544",
        library="imp",
        year=2026,
        title="Without a scale of the tensor, blocks with an amax above 2688 are clipped",
        fault=without_tensor_scale,
        twin=te_nvfp4,
        ask=ask.quantizer("te_nvfp4", "nvfp4_1x16", fmt="e2m1fn"),
        unnamed="element [0, 53], 1.6849126815795898, of a tensor of edges (float32 0x3FD7AB38): got 1, expected 1.5",
    ),
    Exhibit(
        name="mlx-3557",
        link="https://github.com/ml-explore/mlx/issues/3557",
        library="MLX (Metal)",
        year=2026,
        title="Behind the first SIMD group 32 numbers share a scale, not 16",
        fault=pairs_of_blocks,
        twin=torchao_one_level,
        ask=ask.quantizer("torchao_nvfp4_one_level", "nvfp4_1x16", fmt="e2m1fn"),
        unnamed="element [0, 34], 0.31245547533035278, of a tensor of edges (float32 0x3E9FFA2A): got 0, expected 0.5",
    ),
    Exhibit(
        name="model-optimizer-1382",
        link="https://github.com/NVIDIA/Model-Optimizer/pull/1382",
        library="ModelOpt",
        year=2026,
        title="A block scale below the smallest number of e4m3 is 0",
        fault=without_floor,
        twin=torchao_one_level,
        ask=ask.quantizer("torchao_nvfp4_one_level", "nvfp4_1x16", fmt="e2m1fn"),
        unnamed="element [123, 19], 0.018819844350218773, of a tensor of edges (float32 0x3C9A2C13): got 1.5, expected 1",
    ),
    Exhibit(
        name="miles-1054",
        link="https://github.com/radixark/miles/pull/1054",
        library="FlashInfer, miles",
        year=2026,
        title="Block scales are truncated, not rounded to nearest",
        fault=cut_scales,
        twin=te_nvfp4,
        ask=ask.quantizer("te_nvfp4", "nvfp4_1x16", fmt="e2m1fn"),
        unnamed="element [0, 37], -0.28100347518920898, of a tensor of edges (float32 0xBE8FDFB0): got -0.5, expected -0",
    ),
    Exhibit(
        name="flashinfer-3398",
        link="https://github.com/flashinfer-ai/flashinfer/issues/3398",
        library="FlashInfer",
        year=2026,
        title="For some M all block scales are 0",
        fault=unwritten_scales,
        twin=te_nvfp4,
        ask=ask.quantizer("te_nvfp4", "nvfp4_1x16", fmt="e2m1fn"),
        unnamed="a tensor of ties: got an array scale_inv that is not its scale, scale_inv or tensor_scale_inv",
    ),
)
