"""FP8 training in JAX: ``cast``, ``scaling``, ``delayed``, ``gemm``, ``linear``, the ``model`` in Flax NNX and its ``train`` step with optax.

Held to docs/SEMANTICS.md by ``fp8ref.check``; shares no code with the simulator.
"""

try:
    import flax
    import jax
    import optax
except ImportError as error:
    raise ImportError(
        f"fp8ref.jax needs jax, flax and optax; {error.name} is missing. Install them with: pip install 'fp8ref[jax]'"
    ) from error

from fp8ref.jax import cast, contraction, delayed, gemm, linear, model, parallel, proof, scales, scaling, sharding, train

__all__ = ["cast", "contraction", "delayed", "gemm", "linear", "model", "parallel", "proof", "scales", "scaling", "sharding", "train"]
del flax, jax, optax
