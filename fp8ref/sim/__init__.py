"""The simulator: FP8 training numerics in NumPy, the definition of correct. It imports neither jax nor torch.

``cast`` rounds, ``scaling`` scales and quantises, ``gemm`` multiplies, ``linear`` is the three GEMMs of a layer and
``model`` the forward pass of the trainer's model. Arrays are float32 unless said otherwise, also where they hold
values of a narrower format: a narrower format is a set of values, not a storage type.
"""

from fp8ref.sim import cast, gemm, linear, model, scaling

__all__ = ["cast", "gemm", "linear", "model", "scaling"]
