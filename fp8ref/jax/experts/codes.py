"""Rows that move between devices with different experts as FP8 codes (X-14), in ``jax.shard_map``.

    cast = expert_codes.cast_of([recipe], "input")            # None: rows move in their own dtype
    moved, codes = expert_codes.dispatch(x, sizes, "expert", cast)
    rows = grouped.CodedRows(moved.rows, codes, grad_codes=True)
    y, _, slot = grouped.apply_codes(rows, w, moved.sizes, recipe=recipe)
    y = expert_codes.combine(y, slot, moved, sizes, "expert", cast_of_grad)

One scale of all of an expert's rows serves both GEMMs that take them, so codes alone are enough.
The sender casts: under dynamic scaling by the amaxes of each expert's rows on all devices. The
array that goes through autodiff in place of the rows is a constant NaN, which no program computes
with. Codes of a gradient are the cotangent of a slot that the grouped linear also gives out.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8ref.jax import delayed
from fp8ref.jax.attention.operands import inputs as attention_inputs
from fp8ref.jax.distributed import sharding
from fp8ref.jax.experts import operands, parallel
from fp8ref.jax.experts.operands import Codes, Segmented, Slot
from fp8ref.jax.experts.parallel import Moved
from fp8ref.jax.quantize import cast
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import CastSpec
from fp8ref.selection.grouped import moved_cast as cast_of

__all__ = ["cast_of", "combine", "dispatch", "observed"]


def dispatch(
    x: Array,
    group_sizes: Array,
    axis: str,
    spec: CastSpec,
    *,
    scale: Array | None = None,
    over: tuple[str, ...] = (),
) -> tuple[Moved, Codes]:
    """Send rows x [M, C], in groups of all E experts, in FP8 to the devices of the experts.

    scale     of a delayed state: that of input of every linear that takes the rows. So they have
              observed the same rows, at the same steps; scales are traced, and none is compared
              here.
    over      mesh axes along which devices have the same experts, and share their scales (X-3).
    Returns:  as ``parallel.dispatch``, with rows that only stand for them; and the rows in FP8.
    Gradient: as ``parallel.dispatch``, in x's dtype.
    """
    q = _quantized(lax.stop_gradient(x), group_sizes, axis, spec, scale, over)
    places, own, order = parallel.plan(group_sizes, len(x), axis)
    rows, codes = _sent(x, cast.code_bits(q.codes, q.fmt), places, order, axis)
    return Moved(rows, own, order, places), Codes(codes, *_own_scales(q, axis))


def combine(
    y: Array,
    slot: Slot,
    moved: Moved,
    group_sizes: Array,
    axis: str,
    spec: CastSpec,
    *,
    scale: Array | None = None,
    over: tuple[str, ...] = (),
) -> Array:
    """``parallel.combine`` of what ``grouped.apply_codes`` made, with its slot: the gradient moves
    to the experts in FP8, and under delayed scaling is observed before.

    group_sizes
              as they were dispatched: of all E experts' rows on this device.
    """
    return _returned(y, slot, group_sizes, moved, scale, (axis, spec, over))


def observed(x: Array, group_sizes: Array) -> Array:
    """The observation of all devices' rows before they move, as of one device (X-9)."""
    rows = operands.groups_of(group_sizes, len(x)).only(lax.stop_gradient(x))
    return delayed.observe(rows, over=tuple(sorted(sharding.varying(x))))


def _quantized(
    x: Array,
    group_sizes: Array,
    axis: str,
    spec: CastSpec,
    scale: Array | None,
    over: tuple[str, ...],
) -> Quantized | Segmented:
    """x with the scale of the expert's device: scales () or [E, 1], of all experts."""
    groups = operands.groups_of(group_sizes, len(x))
    return operands.quantize_rows(groups.only(x), spec, -1, groups, "group", scale, (*over, axis))


def _own_scales(q: Quantized | Segmented, axis: str) -> tuple[Array, Array]:
    if q.scale.ndim == 0:
        return q.scale, q.scale_inv
    own = len(q.scale) // lax.axis_size(axis)
    first = lax.axis_index(axis) * own
    scale, scale_inv = (lax.dynamic_slice_in_dim(s, first, own) for s in (q.scale, q.scale_inv))
    return scale, scale_inv


def _nothing(like: Array, rows: int) -> Array:
    """[rows, C] of NaN that varies as another array does."""
    return attention_inputs.like(jnp.full((rows, like.shape[1]), jnp.nan, like.dtype), like)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sent(x: Array, codes: Array, places: Array, order: Array, axis: str) -> tuple[Array, Array]:
    """(stand-in for the rows, their codes) on arrival; the stand-in's gradient moves back."""
    return _nothing(x, len(order)), parallel.sent(codes, places, order, axis)


def _sent_backward(axis: str, residuals, cotangents):
    (places, order), (g, _) = residuals, cotangents
    return parallel.combine(g, Moved(g, places, order, places), axis), None, None, None


_sent.defvjp(lambda *arguments: (_sent(*arguments), arguments[2:4]), _sent_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _returned(
    y: Array, slot: Slot, group_sizes: Array, moved: Moved, scale: Array | None, settings: tuple
) -> Array:
    """Results back to the sending devices; the gradient moves to the experts in the slot."""
    return parallel.combine(y, moved, settings[0])


def _returned_forward(y, slot, group_sizes, moved: Moved, scale, settings: tuple):
    residuals = group_sizes, moved.order, moved.places, scale
    return _returned(y, slot, group_sizes, moved, scale, settings), residuals


def _returned_backward(settings: tuple, residuals, g: Array):
    (group_sizes, order, places, scale), (axis, spec, over) = residuals, settings
    q = _quantized(g, group_sizes, axis, spec, scale, over)
    codes = parallel.sent(cast.code_bits(q.codes, q.fmt), places, order, axis)
    seen = jnp.zeros(3, jnp.float32) if spec.delayed is None else observed(g, group_sizes)
    native = cast.from_code_bits(codes, spec.fmt)
    slot = Slot(*(attention_inputs.like(v, g) for v in (native, *_own_scales(q, axis))), seen)  # type: ignore[call-arg]
    moved_grads = Moved(*(None for _ in Moved._fields))  # type: ignore[arg-type]
    scale_grad = None if scale is None else jnp.zeros_like(scale)
    return _nothing(g, len(order)), slot, None, moved_grads, scale_grad


_returned.defvjp(_returned_forward, _returned_backward)
