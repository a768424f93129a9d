"""GEMMs of FP8 operands: accumulate along K, then the epilogue (spec G).

gemm         [M, K] x [N, K] -> [M, N]
accumulate   the sum over K: exact, float32 in order, or by a plan of tensor-core steps
tensor_core  one step of a tensor core; ``matrix_core`` one of AMD's
block_scaled tensor cores that apply the scales of MX blocks themselves
hardware     a plan for each GEMM of a recipe, for the backends to train under
"""

from fp8ref.sim.gemm.gemm import matmul, matmul_hp, mma

__all__ = ["matmul", "matmul_hp", "mma"]
