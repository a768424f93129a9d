"""FP8 training in JAX: ``linear.apply`` is one linear layer by any recipe; ``flax.convert`` puts FP8 into an existing model.

``cast``, ``scaling``, ``scales``, ``delayed`` and ``gemm`` are the parts. ``contraction`` has dot_general and einsum, ``sharding`` a linear's placement
on a mesh, ``proof`` what a compiled step really multiplies, ``hardware`` simulated hardware in place of XLA's FP8 dots.

Held to docs/SEMANTICS.md by ``fp8ref.crosscheck``; shares no code with the simulator. The trainer is ``fp8ref.train.jax``.
"""

from fp8ref import extras, moved

extras.require("jax", "fp8ref.jax", "jax", "flax", "optax")

from fp8ref.jax import cast, contraction, delayed, flax, gemm, hardware, linear, proof, scales, scaling, sharding

__all__ = ["cast", "contraction", "delayed", "flax", "gemm", "hardware", "linear", "proof", "scales", "scaling", "sharding"]


def __getattr__(name: str):
    raise moved.attribute_error(__name__, name)
