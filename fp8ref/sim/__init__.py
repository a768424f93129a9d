"""The simulator: FP8 training numerics in NumPy, the definition of correct. It imports neither jax nor torch.

``cast`` rounds, ``scaling`` and ``delayed`` scale and quantise, ``sharding`` does so over a ``mesh``, ``accumulate`` and ``gemm``
multiply, ``linear`` is the three GEMMs of a layer, ``model`` the forward pass of the trainer's model, and ``stats`` says what all
that costs. Each function is written plainly in NumPy; ``kernels`` has the slow ones again, compiled, and equal bit for bit.
Arrays are float32 unless said otherwise, also where they hold values of a narrower format: a narrower format is a set of
values, not a storage type.
"""

from fp8ref import moved
from fp8ref.sim import accumulate, cast, delayed, gemm, linear, llama, mesh, scaling, sharding, stats

__all__ = ["accumulate", "cast", "delayed", "gemm", "linear", "llama", "mesh", "scaling", "sharding", "stats"]


def __getattr__(name: str):
    raise moved.attribute_error(__name__, name)
