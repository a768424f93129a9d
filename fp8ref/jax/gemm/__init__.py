"""FP8 GEMMs (spec G): by XLA, on dequantized operands, or by simulated hardware."""

from fp8ref.jax.gemm.blackwell import multiplying
from fp8ref.jax.gemm.gemm import EPILOGUES, matmul, matmul_hp

__all__ = ["EPILOGUES", "matmul", "matmul_hp", "multiplying"]
