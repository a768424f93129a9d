"""FP8 training in JAX: ``linear.apply`` is a linear by a recipe; ``flax.convert`` converts models.

    linear        one layer, forward and backward; ``contraction`` has dot_general and einsum by a
                  recipe
    flax          hooks for linen and NNX layers, convert, report, value_and_grad
    delayed       scales from the amaxes of earlier steps
    attention     attention by a variant, a tile of keys at a time
    experts       a linear for each group of rows: ``grouped``
    states        AdamW whose moments are stored in FP8, for optax, with masters and FP8 copies of
                  weights; ``health`` says what storing them cost
    quantize      cast, scales, scaling: the parts, under the same names as in ``fp8ref.sim``
    gemm          FP8 GEMMs; ``hardware`` simulates other hardware in place of XLA's FP8 dots
    distributed   a linear on a mesh: ``sharding``; gradients summed in FP8: ``gradient_reduction``
    transforms    what JAX's transformations may do with it
    proof         which GEMMs and collectives of a compiled step run in FP8

``fp8ref.crosscheck`` compares all of it with the simulator, of which it shares no code. The trainer
is ``fp8ref.train.jax``.
"""

from fp8ref.shared import extras

extras.require("jax", "fp8ref.jax", "jax", "flax", "optax")

from fp8ref.jax import attention, delayed, flax, gemm, linear, proof, states
from fp8ref.jax.distributed import gradient_reduction, sharding
from fp8ref.jax.experts import grouped
from fp8ref.jax.gemm import hardware
from fp8ref.jax.linear import contraction
from fp8ref.jax.quantize import cast, scales, scaling
from fp8ref.jax.states import health

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
