"""Faults of GEMMs with scales of blocks: which scale multiplies, and when."""

import numpy as np
from museum import ask
from museum.arithmetic import F, bits
from museum.exhibit import Exhibit
from museum.gemms import BLOCK, of_blocks, of_mx, product


def undecoded_bytes(a, b, scale_a, scale_b):
    """With fewer than 8 columns b's scale bytes are multiplied in as integers."""
    if len(b) < 8:
        scale_b = (bits(scale_b) >> 23).astype(F)
    return of_mx(a, b, scale_a, scale_b)


def scales_in_turn(a, b, scale_a, scale_b):
    """Numbers read the scales of a row in turn, where each scale belongs to 128 numbers."""
    index = np.arange(a.shape[1]) % scale_a.shape[1]
    return product(a.astype(F) * scale_a[:, index], b.astype(F) * scale_b[:, index])


def of_squares(a, b, scale_a, scale_b):
    """b's scales belong to blocks of 128 x 128."""
    return of_blocks(a, b, scale_a, scale_b[np.arange(len(b)) // BLOCK])


def transposed_squares(a, b, scale_a, scale_b):
    """A square matrix of scales is transposed, which its shape does not show."""
    if scale_b.shape[0] == scale_b.shape[1]:
        scale_b = scale_b.T
    return of_squares(a, b, scale_a, scale_b)


def by_ratios(a, b, scale_a, scale_b):
    """The accumulator has the unit of the block's scale: a product of two scales, which may be 0
    in float32, and then the ratio to the next is NaN."""
    acc, unit = F(0), F(1)
    for i, k in enumerate(range(0, a.shape[1], BLOCK)):
        scale = scale_a[:, i, None] * scale_b[:, i]
        acc = acc * (unit / scale) + product(a[:, k : k + BLOCK], b[:, k : k + BLOCK])
        unit = scale
    return acc * unit


INDUCTOR = "https://github.com/pytorch/pytorch/pull/195751"

EXHIBITS = (
    Exhibit(
        name="mlx-3762",
        link="https://github.com/ml-explore/mlx/issues/3762",
        library="MLX (Metal)",
        year=2026,
        title="With fewer than 8 columns scale bytes are multiplied in as integers",
        fault=undecoded_bytes,
        twin=of_mx,
        ask=ask.gemm("mx_1x32"),
        unnamed="out[0, 0] of integers [128, 1], K = 128, e4m3fn x e4m3fn, mx_1x32 x mx_1x32: got 8048, expected 28 (G-2)",
    ),
    Exhibit(
        name="pytorch-195751-tile",
        link=INDUCTOR,
        library="PyTorch (Inductor)",
        year=2026,
        title="The scales of a tile are broadcast in the wrong order",
        fault=scales_in_turn,
        twin=of_blocks,
        ask=ask.gemm("blockwise_1x128", shapes=[(32, 32, 512)]),
        unnamed="K = 512, e4m3fn x e4m3fn, blockwise_1x128 x blockwise_1x128: got 6, expected 3.5 (G-2)",
    ),
    Exhibit(
        name="pytorch-195751-square",
        link=INDUCTOR,
        library="PyTorch (Inductor)",
        year=2026,
        title="A square matrix of block scales is transposed",
        fault=transposed_squares,
        twin=of_squares,
        ask=ask.gemm("blockwise_1x128", "blockwise_128x128", shapes=[(32, 256, 256)]),
        named="scale_inv of b, transposed",
    ),
    Exhibit(
        name="vllm-34914",
        link="https://github.com/vllm-project/vllm/pull/34914",
        library="FlashInfer, vLLM",
        year=2026,
        title="Tiny block scales give NaN",
        fault=by_ratios,
        twin=of_blocks,
        ask=ask.gemm("blockwise_1x128", shapes=[(32, 32, 256)]),
        named="scale_inv 2^-100 of a and b gives NaN",
    ),
)
