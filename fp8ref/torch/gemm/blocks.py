"""GEMMs of operands with block scales, by cuBLASLt, DeepGEMM or torchao (spec G-16, G-17, G-26).

The kernels (torch's ``scaled_mm``; ``deep_gemm``; torchao.prototype.blockwise_fp8_training) take
codes and scale_inv; their own casts are not used.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fp8ref.recipe import CastSpec
from fp8ref.spec import products
from fp8ref.spec.granularity import by_name
from fp8ref.spec.products import Products
from fp8ref.torch.gemm import blackwell
from fp8ref.torch.quantize.scaling import Quantized

_logger = logging.getLogger(__name__)

Kernel = str
"""What multiplies: torch's scaled_mm, which is cuBLASLt's, DeepGEMM's kernels or torchao's Triton
kernels on codes, or float32 on dequantized operands; or scaled_mm, by a name of ``products.KINDS``.
"""

NAMES: dict[Kernel, str] = {
    "scaled_mm": "torch's scaled_mm",
    "deep_gemm": "DeepGEMM's kernels",
    "torchao_triton": "torchao's Triton kernels",
    "dequantized": "float32 on dequantized codes",
} | {name: f"torch's scaled_mm of {name}" for name in products.KINDS}
"""Kernels, as reports name them."""

_GRANULARITIES_OF_B = ("blockwise_1x128", "blockwise_128x128")

BLOCK = 128
"""The length of a block along K that the kernels take."""

TILE = 256
"""Rows or columns of the largest tile that torchao's kernels are tuned over.

They load the scales of a whole tile, unmasked.
"""

OFFSETS = 2**31
"""The number of elements that a matrix stays below: the kernels address elements by int32."""


DEEP_GEMM_COLUMNS = 8
"""What N is a multiple of for DeepGEMM, which checks it and copies 16 bytes of bfloat16."""


SCALED_MM_ROWS = 4
"""What M is a multiple of for scaled_mm, so that columns of a's scales begin at 16 bytes."""


CHOSEN: list[Products] = ["auto"]
"""The products of each context, the innermost last."""


@contextmanager
def multiplying(by: Products) -> Iterator[None]:
    """In this context, by multiplies operands in blocks (G-26), or refuses them. A graph keeps the
    products that it was compiled under."""
    products.check(by, "torch", (10, 0), "")  # a GEMM knows its device
    CHOSEN.append(by)
    try:
        yield
    finally:
        CHOSEN.pop()


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None of another device."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return torch.cuda.get_device_capability(device) if nvidia else None


def kernel(a: Quantized, b: Quantized) -> Kernel:
    """Choose what multiplies: cuBLASLt's, DeepGEMM's or torchao's kernels on codes, or a float32
    GEMM on dequantized operands."""
    m, k, n = a.codes.shape[1 - a.axis % 2], a.codes.shape[a.axis], b.codes.shape[1 - b.axis % 2]
    if max(m * k, n * k, m * n) >= OFFSETS and CHOSEN[-1] == "auto":
        return "dequantized"
    return takes(a, b, a.codes.device, columns=n, rows=m)


def takes(
    a: Quantized | CastSpec,
    b: Quantized | CastSpec,
    device: torch.device,
    *,
    columns: int,
    rows: int = BLOCK,
) -> Kernel:
    """What multiplies such operands on a device, with M rows and N columns, up to OFFSETS;
    ValueError for what is not there."""
    if (by := CHOSEN[-1]) != "auto":
        products.check(by, "torch", capability(device), str(device))
        return "dequantized" if by == "emulated" else products.kind(a, b, by).name
    formats = a.fmt.name, b.fmt.name
    lines = a.granularity == "blockwise_1x128" and b.granularity in _GRANULARITIES_OF_B
    if formats != ("e4m3fn", "e4m3fn") or not lines or not _has_tensor_cores(device):
        return "dequantized"
    if rows % SCALED_MM_ROWS == 0 and columns % BLOCK == 0 and has_scaled_mm(device):
        return "scaled_mm"
    if _is_hopper(device) and columns % DEEP_GEMM_COLUMNS == 0 and deep_gemm() is not None:
        return "deep_gemm"
    return "torchao_triton" if kernels() is not None else "dequantized"


def has_scaled_mm(device: torch.device) -> bool:
    """Whether torch's scaled_mm takes 1x128 and 128x128 scales: cuBLASLt 12.9, capability 9.0."""
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    return hasattr(functional, "scaled_mm") and cuda >= (12, 9) and _is_hopper(device)


@functools.cache
def deep_gemm() -> ModuleType | None:
    """The module ``deep_gemm``, or None. That it is installed and cannot be imported is logged."""
    if importlib.util.find_spec("deep_gemm") is None:
        return None
    fault = ""
    try:
        library = importlib.import_module("deep_gemm")
    except Exception as error:  # it asserts a CUDA toolkit, and loads a library
        fault = f"is installed and cannot be imported ({type(error).__name__}: {error})"
    else:
        if not hasattr(library, "fp8_gemm_nt"):
            fault = f"{getattr(library, '__version__', '')} has no fp8_gemm_nt"
    if fault:
        _logger.warning("deep_gemm %s: torchao's kernels multiply.", fault)
        return None
    return library


@functools.cache
def kernels() -> tuple[Callable, Callable] | None:
    """torchao's GEMMs for b in blocks of 1x128 and of 128x128; None without Triton or them."""
    try:
        from torchao.prototype.blockwise_fp8_training.kernels import (
            triton_fp8_gemm_1x128_128x1,
            triton_fp8_gemm_1x128_128x128,
        )
    except ImportError:
        return None
    return triton_fp8_gemm_1x128_128x1, triton_fp8_gemm_1x128_128x128


@torch.library.custom_op("fp8ref::block_gemm", mutates_args=())
def multiply(
    codes_a: Tensor,
    codes_b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    out_dtype: torch.dtype,
    by: str,
    factor: Tensor | None = None,
) -> Tensor:
    """[M, K] x [N, K] -> [M, N] of out_dtype, by any Kernel on codes, as one operator.

    factor    of nvfp4, the product of both scales of tensors.
    Shapes:   scale_inv_a [M, K/128]; scale_inv_b [N, K/128] or [ceil(N/128), K/128], float32; any
              strides. Of G-26, blocks of its lengths.
    Order:    spec G-17, G-26.
    """
    if kind := products.KINDS.get(by):
        pairs = (codes_a, scale_inv_a), (codes_b, scale_inv_b)
        return blackwell.multiply(kind, *pairs, factor, out_dtype)
    run = {"scaled_mm": _by_scaled_mm, "deep_gemm": _by_deep_gemm}.get(by, _by_torchao)
    return run(
        _Operands(codes_a.contiguous(), codes_b.contiguous(), scale_inv_a, scale_inv_b), out_dtype
    )


@multiply.register_fake
def _(codes_a, codes_b, scale_inv_a, scale_inv_b, out_dtype, by, factor=None):
    return codes_a.new_empty((codes_a.shape[0], codes_b.shape[0]), dtype=out_dtype)


class _Operands(NamedTuple):
    """The operands of ``multiply``, of row-major codes [M, K] and [N, K]."""

    codes_a: Tensor
    codes_b: Tensor
    scale_inv_a: Tensor
    scale_inv_b: Tensor

    @property
    def squares(self) -> bool:
        """Whether b is in blocks of 128x128, or in those of 1x128."""
        return granularity_of_b(self.codes_b, self.scale_inv_b) == "blockwise_128x128"


def _by_scaled_mm(x: _Operands, out_dtype: torch.dtype) -> Tensor:
    """``torch.nn.functional.scaled_mm`` (PyTorch 2bec3bdf, ATen/native/cuda/ScaledBlas.cpp).

    Layout:   codes row-major [M, K] and column-major [K, N]; scales of 1x128 [M, K/128], of 128x128
              [K/128, N/128] with K/128 filled to a multiple of 4; both column-major. It writes
              bfloat16 and float32, and has no fast accumulation of such scales.
    """
    line, square = (functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128)
    scale_inv_b = x.scale_inv_b
    return functional.scaled_mm(
        x.codes_a,
        x.codes_b.t(),
        _column_major(x.scale_inv_a),
        line,
        _roomy(scale_inv_b, columns=4).t() if x.squares else _column_major(scale_inv_b),
        square if x.squares else line,
        output_dtype=torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32,
    ).to(out_dtype)


def _by_torchao(x: _Operands, out_dtype: torch.dtype) -> Tensor:
    """Layout: codes row-major [M, K] and column-major [K, N]; scales of a column-major, of b
    column-major in blocks of 128x128 and row-major in those of 1x128, each with room for whole
    tiles.
    """
    kernel_pair = kernels()
    assert kernel_pair is not None
    run = kernel_pair[x.squares]
    a_s = _roomy(x.scale_inv_a.t(), columns=TILE).t()  # [M + room, K/128], column-major
    if x.squares:  # [K/128, N/128 + room], column-major
        b_s = _roomy(x.scale_inv_b, rows=TILE // BLOCK).t()
    else:  # [K/128, N + room], row-major
        b_s = _roomy(x.scale_inv_b.t(), columns=TILE)
    return run(
        a=x.codes_a, b=x.codes_b.t(), a_s=a_s, b_s=b_s, block_size=BLOCK, out_dtype=out_dtype
    )


def _by_deep_gemm(x: _Operands, out_dtype: torch.dtype) -> Tensor:
    """``fp8_gemm_nt`` writes d = c + a @ b.T (DeepGEMM 54e2261, csrc/apis/gemm.hpp, of 9.0).

    Layout:   codes row-major; scales of 1x128 in any layout, which it turns by itself; those of
              128x128 contiguous. Of squares it writes bfloat16, without c. Of lines it adds to
              float32, which has to be there as c: the same tensor, of zeros. Results of squares in
              another dtype are of lines with the squares' scales.
    """
    library = deep_gemm()
    assert library is not None
    m, n, a = len(x.codes_a), len(x.codes_b), (x.codes_a, x.scale_inv_a)
    if x.squares and out_dtype == torch.bfloat16:
        out = x.codes_a.new_empty(m, n, dtype=out_dtype)
        b = x.codes_b, x.scale_inv_b.contiguous()
        library.fp8_gemm_nt(a, b, out, recipe=(1, BLOCK, BLOCK))
        return out
    lines = x.scale_inv_b.repeat_interleave(BLOCK, dim=0)[:n] if x.squares else x.scale_inv_b
    out = x.codes_a.new_zeros(m, n, dtype=torch.float32)
    library.fp8_gemm_nt(a, (x.codes_b, lines), out, c=out, recipe=(1, 1, BLOCK))
    return out.to(out_dtype)


OPERATOR = torch.ops.fp8ref.block_gemm.default
"""The operator that ``multiply`` is in graphs and in dispatch."""


def granularity_of_b(codes_b: Tensor, scale_inv_b: Tensor) -> str:
    """The granularity of b [N, K], from the shape of its scales. For N = 1 both are the same."""
    name = "blockwise_1x128" if scale_inv_b.shape[0] == codes_b.shape[0] else "blockwise_128x128"
    assert by_name(name).reduced == BLOCK
    return name


def _has_tensor_cores(device: torch.device) -> bool:
    """Whether it is an NVIDIA GPU that torchao's prototype takes.

    Triton refuses e4m3fn before 8.9.
    """
    return (capability(device) or (0, 0)) >= (9, 0)


def _is_hopper(device: torch.device) -> bool:
    """Whether it has compute capability 9.0: elsewhere DeepGEMM takes power-of-two scales."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def _column_major(scales: Tensor) -> Tensor:
    """Scales [M, K/128] of strides (1, M); those of grad_weight's operands have them already."""
    if scales.stride() == (1, len(scales)):
        return scales
    return scales.new_empty(scales.shape[::-1]).copy_(scales.t()).t()


def _roomy(scales: Tensor, *, rows: int = 1, columns: int = 1) -> Tensor:
    """Scales padded with zeros to multiples of rows and columns, in a new row-major matrix."""
    # Not pad and contiguous: a dim of length 1 keeps any stride, and kernels need stride 1.
    n, m = scales.shape
    padded = scales.new_zeros(n + -n % rows, m + -m % columns)
    padded[:n, :m] = scales
    return padded
