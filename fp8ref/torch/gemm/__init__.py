"""FP8 GEMMs (spec G): torch._scaled_mm, block kernels, or simulated hardware."""

from fp8ref.torch.gemm.blocks import multiplying
from fp8ref.torch.gemm.gemm import EPILOGUES, matmul, matmul_hp

__all__ = ["EPILOGUES", "matmul", "matmul_hp", "multiplying"]
