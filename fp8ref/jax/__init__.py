"""FP8 training in JAX: begin with ``linear.apply``, one linear layer by any recipe, or with ``flax.convert``, for a model that is there.

``cast``, ``scaling``, ``scales``, ``delayed``, ``gemm`` are what it is made of; ``contraction`` has dot_general and einsum, ``sharding`` a linear's
placement on a mesh, ``proof`` what a compiled step really multiplies; ``model``, ``parallel``, ``train`` and ``replay`` are the trainer's own.

Held to docs/SEMANTICS.md by ``fp8ref.check``; shares no code with the simulator.
"""

try:
    # by other names, as ``flax`` is one of our own modules
    import flax as _flax
    import jax as _jax
    import optax as _optax
except ImportError as error:
    raise ImportError(
        f"fp8ref.jax needs jax, flax and optax; {error.name} is missing. Install them with: pip install 'fp8ref[jax]'"
    ) from error

from fp8ref.jax import cast, contraction, delayed, flax, gemm, linear, model, parallel, proof, replay, scales, scaling, sharding, train

__all__ = [
    "cast",
    "contraction",
    "delayed",
    "flax",
    "gemm",
    "linear",
    "model",
    "parallel",
    "proof",
    "replay",
    "scales",
    "scaling",
    "sharding",
    "train",
]
del _flax, _jax, _optax
