"""Rows that move between devices that hold different experts (spec X-13), inside ``jax.shard_map``.

    def layer(x, w, sizes):                      # x, sizes: this device's rows; w: its experts'
                                                 weights
        moved = expert_parallel.dispatch(x, sizes, "expert")
        y, _ = grouped.apply(moved.rows, w, moved.sizes, recipe="rowwise")
        return expert_parallel.combine(y, moved, "expert")

Device d of an axis of D has the experts from d E / D on. Each sends its rows of an expert to the
device that has it, as one all-to-all of D buffers that each hold all rows of a device: XLA knows no
sizes. ``dispatch_quantized`` sends codes and scales.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from fp8ref.jax.experts import operands
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.spec.granularity import by_name

__all__ = ["Moved", "combine", "dispatch", "dispatch_quantized"]


class Moved(NamedTuple):
    """Rows of this device's own experts, from all devices.

    rows     [D M, C], in groups by expert, and in a group by sending device, then as they were
             sent; rows of no group last.
    sizes    int32 [E / D]: the rows of each.
    order    int32 [D M]: where each row is in what was received.
    places   int32 [M]: where each row that this device sent lies in [D, M].
    """

    rows: Array
    sizes: Array
    order: Array
    places: Array


def dispatch(x: Array, group_sizes: Array, axis: str) -> Moved:
    """Send rows x [M, C], in groups of these sizes, of all E experts, to the experts' devices.

    Order:    bits are moved, none is computed. The groups are those that one device with all rows
              would have, if the devices' rows are its own in the order of the axis.
    Gradient: of rows; each comes back to the device that sent it.
    Raises:   ValueError: E that the axis does not divide.
    """
    places, sizes, order = plan(group_sizes, len(x), axis)
    return Moved(sent(x, places, order, axis), sizes, order, places)


def dispatch_quantized(q: Quantized, group_sizes: Array, axis: str) -> tuple[Quantized, Moved]:
    """``dispatch`` of rows that are cast already along their columns: codes, a byte an element, and
    scales [M, 1] or [M, blocks] move (X-12). The rows of Moved are the codes.

    Raises:   ValueError: as dispatch; scales that cover several rows.
    """
    if q.axis != -1 or by_name(q.granularity).other != 1:
        raise ValueError(
            f"codes move only with one scale per row; got {q.granularity!r} along axis {q.axis}. "
            "Move the tensor, then cast (X-12)."
        )
    places, sizes, order = plan(group_sizes, len(q.codes), axis)
    codes, scale, scale_inv = (
        sent(v, places, order, axis) for v in (q.codes, q.scale, q.scale_inv)
    )
    return dataclasses.replace(q, codes=codes, scale=scale, scale_inv=scale_inv), Moved(
        codes, sizes, order, places
    )


def combine(y: Array, moved: Moved, axis: str) -> Array:
    """Send results [D M, N] of moved rows back, in the order of dispatch: [M, N]."""
    devices = lax.axis_size(axis)
    received = jnp.zeros_like(y).at[moved.order].set(y, unique_indices=True)
    received = received.reshape(devices, -1, y.shape[-1])
    returned = lax.all_to_all(received, axis, split_axis=0, concat_axis=0)  # [D, M, N]
    flat = returned.reshape(-1, y.shape[-1])
    return flat.at[moved.places].get(mode="fill", fill_value=0)


def plan(group_sizes: Array, rows: int, axis: str) -> tuple[Array, Array, Array]:
    """(places, sizes, order) of ``Moved``. ValueError as dispatch."""
    devices, experts = lax.axis_size(axis), len(group_sizes)
    if experts % devices:
        raise ValueError(
            f"experts are divisible by the {devices} devices of axis {axis!r}; got {experts}."
        )
    own = experts // devices
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    row = jnp.arange(rows, dtype=jnp.int32)
    device = operands.group_of_each(rows, ends) // own  # D for a row of none
    begin = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])[jnp.minimum(device, devices - 1) * own]
    places = jnp.where(device < devices, device * rows + row - begin, devices * rows)
    # [D, E / D], of each sender
    received = lax.all_to_all(sizes.reshape(devices, own), axis, split_axis=0, concat_axis=0)
    ended = jnp.cumsum(received, axis=1)[:, None, :] <= row[None, :, None]
    order = jnp.argsort(ended.sum(axis=2, dtype=jnp.int32).reshape(-1), stable=True)
    return places, received.sum(axis=0), order


def sent(x: Array, places: Array, order: Array, axis: str) -> Array:
    """x [M, C] to the devices that have its rows' experts: [D M, C], in groups."""
    devices = lax.axis_size(axis)
    buffers = jnp.zeros((devices * len(x), x.shape[1]), x.dtype)
    buffers = buffers.at[places].set(x, mode="drop", unique_indices=True)
    buffers = buffers.reshape(devices, len(x), -1)
    received = lax.all_to_all(buffers, axis, split_axis=0, concat_axis=0)
    return received.reshape(devices * len(x), -1).at[order].get(unique_indices=True)
