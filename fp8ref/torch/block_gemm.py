"""GEMMs of operands with block scales, by torchao's Triton kernels (SEMANTICS G-16, G-17).

The kernels (torchao.prototype.blockwise_fp8_training) take codes and scale_inv; torchao's own casts
are not used. torch's ``scaled_mm`` of block scales is not used either: it runs on compute
capability 9.0 only, and cuBLASLt states no order of operations.
"""

import functools
from collections.abc import Callable
from typing import Literal

import torch

from fp8ref.formats import Format
from fp8ref.granularity import by_name
from fp8ref.torch.scaling import Quantized

Kernel = Literal["torchao_triton", "dequantized"]
"""What multiplies: torchao's Triton kernels on codes, or float32 on dequantized operands."""

BLOCK = 128
"""The length of a block along K that the kernels take."""

TILE = 256
"""Rows or columns of the largest tile that torchao's kernels are tuned over.

They load the scales of a whole tile, unmasked.
"""

OFFSETS = 2**31
"""The number of elements that a matrix stays below: the kernels address elements by int32."""


def kernel(a: Quantized, b: Quantized) -> Kernel:
    """Choose torchao's Triton kernel on codes, or a float32 GEMM on dequantized operands."""
    m, k, n = a.codes.shape[1 - a.axis % 2], a.codes.shape[a.axis], b.codes.shape[1 - b.axis % 2]
    fits = max(m * k, n * k, m * n) < OFFSETS and takes(a.fmt, b.fmt, a.granularity, b.granularity, a.codes.device)
    return "torchao_triton" if fits else "dequantized"


def takes(fmt_a: Format, fmt_b: Format, granularity_a: str, granularity_b: str, device: torch.device) -> bool:
    """Whether torchao's Triton kernels multiply such operands on a device, up to OFFSETS."""
    return (
        (fmt_a.name, fmt_b.name) == ("e4m3fn", "e4m3fn")
        and (granularity_a, granularity_b) in (("blockwise_1x128", "blockwise_1x128"), ("blockwise_1x128", "blockwise_128x128"))
        and _has_tensor_cores(device)
        and kernels() is not None
    )


@functools.cache
def kernels() -> tuple[Callable, Callable] | None:
    """torchao's GEMMs for b in blocks of 1x128 and of 128x128; None without Triton or them."""
    try:
        from torchao.prototype.blockwise_fp8_training.kernels import triton_fp8_gemm_1x128_128x1, triton_fp8_gemm_1x128_128x128
    except ImportError:
        return None
    return triton_fp8_gemm_1x128_128x1, triton_fp8_gemm_1x128_128x128


@torch.library.custom_op("fp8ref::block_gemm", mutates_args=())
def multiply(
    codes_a: torch.Tensor, codes_b: torch.Tensor, scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """[M, K] x [N, K] -> [M, N] of out_dtype, by torchao's kernels, as one operator.

    Shapes:   scale_inv_a [M, K/128]; scale_inv_b [N, K/128] or [ceil(N/128), K/128], float32; any
              strides.
    Order:    SEMANTICS G-17.
    Layout:   codes row-major [M, K] and column-major [K, N]; scales of a column-major, of b
              column-major in blocks of 128x128 and row-major in those of 1x128, each with room for
              whole tiles.
    """
    found = kernels()
    assert found is not None
    of_lines, of_squares = found
    a_s = _roomy(scale_inv_a.t(), columns=TILE).t()  # [M + room, K/128], column-major
    if granularity_of_b(codes_b, scale_inv_b) == "blockwise_128x128":
        # [K/128, N/128 + room], column-major
        run, b_s = of_squares, _roomy(scale_inv_b, rows=TILE // BLOCK).t()
    else:
        run, b_s = of_lines, _roomy(scale_inv_b.t(), columns=TILE)  # [K/128, N + room], row-major
    return run(a=codes_a.contiguous(), b=codes_b.contiguous().t(), a_s=a_s, b_s=b_s, block_size=BLOCK, out_dtype=out_dtype)


@multiply.register_fake
def _(codes_a, codes_b, scale_inv_a, scale_inv_b, out_dtype):
    return codes_a.new_empty((codes_a.shape[0], codes_b.shape[0]), dtype=out_dtype)


OPERATOR = torch.ops.fp8ref.block_gemm.default
"""The operator that ``multiply`` is in graphs and in dispatch."""


def granularity_of_b(codes_b: torch.Tensor, scale_inv_b: torch.Tensor) -> str:
    """The granularity of b [N, K], from the shape of its scales. For N = 1 both are the same."""
    name = "blockwise_1x128" if scale_inv_b.shape[0] == codes_b.shape[0] else "blockwise_128x128"
    assert by_name(name).reduced == BLOCK
    return name


def _has_tensor_cores(device: torch.device) -> bool:
    """Whether it is an NVIDIA GPU that torchao's prototype takes.

    Triton refuses e4m3fn before 8.9.
    """
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def _roomy(scales: torch.Tensor, *, rows: int = 1, columns: int = 1) -> torch.Tensor:
    """Scales padded with zeros to multiples of rows and columns, in a new row-major matrix."""
    # Not pad and contiguous: of a dim of length 1 they keep any stride, and the kernels need stride
    # 1.
    n, m = scales.shape
    made = scales.new_zeros(n + -n % rows, m + -m % columns)
    made[:n, :m] = scales
    return made
