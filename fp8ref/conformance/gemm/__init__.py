"""Identify a scaled GEMM's arithmetic from its results for chosen operands (SEMANTICS G-18).

``identify_gemm`` names the accumulation plan and the epilogue of a ``ScaledGemm``; ``named`` gives
those of PyTorch and JAX. ``recording`` keeps results bit for bit; ``instruction`` identifies one
tensor-core instruction.
"""

from fp8ref.conformance.gemm.identify import identify as identify_gemm
from fp8ref.conformance.gemm.library_gemms import named as named
from fp8ref.conformance.gemm.scaled_gemm import ScaledGemm as ScaledGemm

__all__ = ["ScaledGemm", "identify_gemm", "named"]
