"""The simulator: FP8 training numerics in NumPy, the definition of correct. It imports neither jax
nor torch.

Read it in this order; each module cites its clauses of docs/spec:

    cast          round to a format (C)
    scales        amax -> scale, by a policy (S)
    scaling       tensor -> amax, codes and back (S); ``two_level`` has the scales of NVFP4, ``packing``
                  puts two codes of 4 bits into a byte
    delayed       scales from the amaxes of earlier steps (H)
    states        AdamW whose moments are stored in FP8 (O); ``moments`` is one of them
    health        what storing them cost (O-12)
    tensor_core   one step of a tensor core (G)
    accumulate    sum over K: exact, float32 in order, plans of tensor-core steps (G)
    gemm          accumulate, then the epilogue (G)
    linear        the three GEMMs of a layer (L)
    grouped       the same for each group of rows, with a weight of its own (X)
    attention     forward, over tiles of keys (A): ``head_scaling`` quantizes, ``hadamard`` rotates,
                  ``online_softmax`` and ``probability_value`` are its two halves, ``elementary`` its
                  exponentials; ``attention_gradients`` is the backward pass, ``..._mx`` that of MX blocks
    mesh, sharding, sharded_gemm
                  the same over several devices (P)
    gradient_reduction
                  gradients summed over devices in FP8, and over microbatches (P-21 to P-24)
    llama         the trainer's model, forward pass (M)
    stats         what quantizing cost (Q)
    hardware      a plan for each of a recipe's GEMMs, for the backends to call (G-19)

The definition of each function is plain NumPy, named ``..._plain`` where it has a compiled twin.
The twins are in ``kernels``, and equal the definitions bit for bit. ``philox`` draws the numbers of
stochastic rounding; ``threads`` splits the kernels' work. Arrays are float32 unless said otherwise,
also where they hold values of a narrower format: such a format is a set of values.
"""

from fp8ref.sim import (
    accumulate,
    attention,
    attention_gradients,
    cast,
    delayed,
    gemm,
    gradient_reduction,
    grouped,
    health,
    linear,
    llama,
    mesh,
    packing,
    scaling,
    sharding,
    states,
    stats,
    two_level,
)

__all__ = [
    "accumulate",
    "attention",
    "attention_gradients",
    "cast",
    "delayed",
    "gemm",
    "gradient_reduction",
    "grouped",
    "health",
    "linear",
    "llama",
    "mesh",
    "packing",
    "scaling",
    "sharding",
    "states",
    "stats",
    "two_level",
]
