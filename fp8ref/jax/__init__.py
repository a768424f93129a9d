"""FP8 training in JAX: ``cast``, ``scaling``, ``delayed``, ``gemm``, ``linear``, hooks for ``flax``, the ``model`` in Flax NNX and its ``train``
step with optax.

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
