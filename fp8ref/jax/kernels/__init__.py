"""Casts in Triton's kernels (``fp8ref.kernels``), launched from JAX programs.

launch   one launch, compiled by jax-triton for a GPU or interpreted on a CPU; who chooses kernels
casts    FP8 codes of a tensor in both orders, and its amax

Importing this imports no Triton.
"""

from fp8ref.jax.kernels.launch import TritonKernels, casting

__all__ = ["TritonKernels", "casting"]
