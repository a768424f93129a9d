"""The simulator: FP8 training numerics in NumPy, the definition of correct, without jax or torch.

Read it in this order; each module cites its clauses of docs/spec:

    quantize      cast rounds to a format (C); scales has amax -> scale, by a policy (S); scaling
                  has tensor -> amax, codes and back; two_level the scales of NVFP4; stats what it
                  cost (Q)
    delayed       scales from the amaxes of earlier steps (H)
    gemm          accumulate along K, on a tensor core or exactly, then the epilogue (G)
    linear        the three GEMMs of a layer (L)
    experts       the same for each group of rows, with a weight of its own: grouped (X)
    attention     forward and backward, over tiles of keys (A)
    states        AdamW whose moments are stored in FP8 (O); health says what storing them cost
    distributed   the same over several devices: mesh, sharding, sharded_gemm, gradient_reduction
                  (P)
    llama         the trainer's model, forward pass (M)

The definition of each function is plain NumPy, named ``..._plain`` where it has a compiled twin.
The twins are in ``kernels``, and equal the definitions bit for bit. ``philox`` draws the numbers of
stochastic rounding; ``threads`` splits the kernels' work. Arrays are float32 unless said otherwise,
also where they hold values of a narrower format: such a format is a set of values.
"""

from fp8ref.sim import attention, delayed, gemm, linear, llama, states
from fp8ref.sim.distributed import gradient_reduction, mesh, sharded_gemm, sharding
from fp8ref.sim.experts import grouped
from fp8ref.sim.gemm import accumulate, hardware, tensor_core
from fp8ref.sim.quantize import cast, packing, scales, scaling, stats, two_level
from fp8ref.sim.states import health

__all__ = [
    "accumulate",
    "attention",
    "cast",
    "delayed",
    "gemm",
    "gradient_reduction",
    "grouped",
    "hardware",
    "health",
    "linear",
    "llama",
    "mesh",
    "packing",
    "scales",
    "scaling",
    "sharded_gemm",
    "sharding",
    "states",
    "stats",
    "tensor_core",
    "two_level",
]
