"""What the type of an array says of a mesh: Explicit axes that cut it, and axes of shard_map along
which it varies.
"""

import jax
from jax import Array
from jax.sharding import PartitionSpec


def whole(x: Array) -> Array:
    """x, on every device if Explicit axes cut it: types then let it be flattened."""
    if any(jax.typeof(x).sharding.spec):
        return jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim))
    return x


def like(x: Array, other: Array) -> Array:
    """x, cut along the Explicit axes that cut another array of its shape."""
    spec = jax.typeof(other).sharding.spec
    return jax.sharding.reshard(x, spec) if any(spec) else x


def on_a_mesh(x: Array) -> bool:
    """Whether the type of an array has axes of a mesh: Explicit ones, or those of shard_map along
    which it varies.
    """
    kind = jax.typeof(x)
    varying = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
    return bool(getattr(kind.sharding.mesh, "explicit_axes", ()) or varying)
