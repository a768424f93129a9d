"""FP8 training in JAX: ``linear.apply`` is one linear layer by any recipe; ``flax.convert`` puts
FP8 into an existing model.

    linear        one layer, forward and backward; ``linear_arguments`` checks what it is given, ``linear_gemm``
                  multiplies, ``operands`` quantizes and gathers, ``gemm_observer`` reports its GEMMs
    contraction   dot_general and einsum by a recipe
    grouped       a linear for each group of rows, for experts; ``grouped_operands`` quantizes and
                  multiplies for it
    attention     attention by a variant, a tile of keys at a time; ``attention_inputs`` and ``attention_operands``
                  check and cut, ``online_softmax`` and ``probability_value`` are a tile's steps,
                  ``attention_gradients`` and ``attention_gradients_mx`` the backward pass, ``attention_real``
                  real arithmetic; ``head_scaling``, ``hadamard`` and ``elementary`` its casts and functions
    flax          hooks for linen and NNX layers, convert, report, value_and_grad
    cast, scaling, scales, delayed, gemm
                  the parts, under the same names as in ``fp8ref.sim``
    states        AdamW whose moments are stored in FP8, for optax, with masters and FP8 copies of weights;
                  ``moments`` is one of them, ``adamw_kernel`` a GPU's kernel of a step, ``philox`` the
                  stochastic rounding; ``health`` what storing them cost
    division      quotients and roots that are rounded once, on GPUs too
    placement, sharding, explicit_sharding, array_types
                  the placement of a linear on a mesh; as the types of Explicit axes say it, and what types say
    gradient_reduction
                  gradients summed over devices in FP8, and over microbatches
    derivatives   refuses those that a linear does not have
    proof         which GEMMs and collectives of a compiled step run in FP8
    hardware      simulated hardware in place of XLA's FP8 dots
    stats         quantization statistics, measured on the device

``fp8ref.crosscheck`` compares all of it with the simulator, of which it shares no code. The trainer
is ``fp8ref.train.jax``.
"""

from fp8ref import extras

extras.require("jax", "fp8ref.jax", "jax", "flax", "optax")

from fp8ref.jax import (
    attention,
    cast,
    contraction,
    delayed,
    flax,
    gemm,
    gradient_reduction,
    grouped,
    hardware,
    health,
    linear,
    proof,
    scales,
    scaling,
    sharding,
    states,
)

__all__ = [
    "attention",
    "cast",
    "contraction",
    "delayed",
    "flax",
    "gemm",
    "gradient_reduction",
    "grouped",
    "hardware",
    "health",
    "linear",
    "proof",
    "scales",
    "scaling",
    "sharding",
    "states",
]
