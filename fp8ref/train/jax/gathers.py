"""Arrays that a step gathers over the devices that have a piece each, inside ``jax.shard_map``, and
the sums of their gradients (spec P-9, P-10).

``Layout`` of mesh.py says over which axes. Linears gather their own weights
(``fp8ref.jax.distributed.sharding``).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def weights(
    w: jax.Array, over: tuple[str, ...], copies: tuple[str, ...], reduce_dtype: str
) -> jax.Array:
    """Weights from pieces along their first dim on ``over``'s devices, varying along copies too."""
    w = lax.pcast(w, copies, to="varying") if copies else w
    return lax.all_gather(w, over, axis=0, tiled=True) if over else w


def _weights_backward(
    over: tuple[str, ...], copies: tuple[str, ...], reduce_dtype: str, _: None, g: jax.Array
) -> tuple[jax.Array]:
    """P-9's sum of rounded gradients: reduce-scatter over fsdp, then the sum over data; rounded."""
    total = g.astype(reduce_dtype)
    if over:
        total = lax.psum_scatter(total, over, scatter_dimension=0, tiled=True)
    return ((lax.psum(total, copies) if copies else total).astype(g.dtype),)


weights.defvjp(lambda w, *axes: (weights(w, *axes), None), _weights_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def rounded_table(
    table: jax.Array, dtype, fsdp: tuple[str, ...], others: tuple[str, ...]
) -> jax.Array:
    """Rows of all fsdp devices, rounded and gathered in dtype, as float32; varying over others."""
    info = jnp.finfo(dtype)
    narrow = lax.reduce_precision(table, info.nexp, info.nmant).astype(dtype)
    return _table(narrow, fsdp, others).astype(table.dtype)


def _table(table: jax.Array, fsdp: tuple[str, ...], others: tuple[str, ...]) -> jax.Array:
    table = lax.pcast(table, others, to="varying") if others else table
    return lax.all_gather(table, fsdp, axis=0, tiled=True)


def _table_backward(
    dtype, fsdp: tuple[str, ...], others: tuple[str, ...], table: jax.Array, g: jax.Array
) -> tuple[jax.Array]:
    """The gradient of a gather of the float32 table: float32 sums, before any rounding."""
    return jax.vjp(lambda table: _table(table, fsdp, others), table)[1](g)


rounded_table.defvjp(lambda table, *to: (rounded_table(table, *to), table), _table_backward)
