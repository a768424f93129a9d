"""Linears of one input with what is before and between them, in one custom_vjp, so that kernels
cast what they make and write no tensor (spec M-11): RMSNorm before them, and SwiGLU between gate
and up and down.

Where kernels do not cast (``takes``), use ``plain.normed``, ``linear.apply`` and
``plain.swiglu``.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from fp8ref.jax import delayed
from fp8ref.jax.distributed import sharding
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.kernels import casts, norms, plain, swiglu
from fp8ref.jax.kernels import rotary as rotary_kernels
from fp8ref.jax.kernels.launch import TritonKernels
from fp8ref.jax.linear import arguments, carried, linear, operands
from fp8ref.jax.linear.carried import Layer, Seen
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.jax.transforms import derivatives
from fp8ref.recipe import ROLES, CastSpec, Recipe

__all__ = ["Norm", "Reader", "Rotary", "apply", "takes"]


class Norm(NamedTuple):
    """RMSNorm: weight [K], and eps."""

    weight: Array
    eps: float


class Rotary(NamedTuple):
    """Tables of a rotary embedding, float32 [T, D], D a power of two."""

    cos: Array
    sin: Array


class Reader(NamedTuple):
    """A linear of a group: w [N, K], and the rest as of ``linear.apply``."""

    w: Array
    recipe: str | Recipe
    name: str
    state: delayed.State | None = None
    seen: Seen | None = None
    placement: Placement | None = None
    prepared: Quantized | Scales | None = None


@dataclass(frozen=True)
class _Group:
    """What is static of a group.

    layers  of all that read the norm; under swiglu those of gate, up, down, and of what makes the
            residual.
    adds    whether a residual is added before the norm.
    kept    the ``checkpoint_name`` of the outputs of gate and up.
    """

    layers: tuple[Layer, ...]
    eps: float
    adds: bool
    swiglu: bool
    kept: str

    @property
    def readers(self) -> int:
        """How many read the norm."""
        return 2 if self.swiglu else len(self.layers)


class _Stream(NamedTuple):
    """What is normed: h, and what is added to it before; the norm's weight; rotary tables."""

    h: Array
    residual: Array | None
    weight: Array
    tables: Rotary | None


def takes(h: Array, readers: list[Reader]) -> bool:
    """Whether ``apply`` computes these linears: two to four of one recipe, all of whose operands
    kernels cast, of some tokens, with features that no device cuts, on one device or inside
    shard_map, and without an observer or statistics, which want tensors that are never written."""
    layer = arguments.layer(readers[0].recipe, readers[0].name, readers[0].placement)
    specs = [c for gemm in layer.recipe.gemms.values() for c in (gemm.a, gemm.b)]
    return (
        len(readers) in (2, 3, 4)
        and h.size > 0
        and layer.observer is None
        and all(r.recipe == readers[0].recipe for r in readers)
        and all(carried.observations(r.seen).statistics is None for r in readers)
        and all(c is not None and layer.by_kernel("input", c) for c in specs)
        and all(layer.recipe.serves_both(role) for role in ROLES)
        and all(_whole_features(h, r.placement) for r in readers)
    )


def apply(
    h: Array,
    readers: list[Reader],
    *,
    norm: Norm,
    residual: Array | None = None,
    swiglu: bool = False,
    rotary: Rotary | None = None,
    kept: str = "linear",
) -> tuple[Array, list[Array], list[Seen | None]]:
    """(h + residual, or h; the readers' outputs of its norm; their seen). What else reads h reads
    the first, so that one kernel adds its gradient.

    Shapes:   h and residual [..., K]; outputs [..., N].
    swiglu    readers are gate, up, down, and the linear that makes the residual of what is given
              as such; the only output is down's.
    rotary    heads of the first two outputs, [B, T, H D], are rotated.
    Order:    M-11; each linear as ``linear.apply``. Under delayed scaling what readers share is
              cast by the first one's state of it.
    Gradient: as of ``linear.apply``; of the norm M-11.
    """
    assert takes(h, readers)
    stream = _Stream(h, residual, norm.weight, None)
    bound = [
        linear.bound(
            h, r.w, arguments.layer(r.recipe, r.name, r.placement), r.state, r.seen, r.prepared
        )
        for r in readers
    ]
    layers, scales, seen = zip(*bound, strict=True)
    group = _Group(layers, norm.eps, residual is not None, swiglu, kept)
    stream, weights = jax.tree.map(
        functools.partial(derivatives.reverse_only, name=readers[0].name),
        (stream, tuple(r.w for r in readers)),
    )
    stream = stream._replace(tables=rotary)
    total, outputs, observed = _linears(group, stream, weights, scales, seen)
    after = [carried.after(r.seen, *each) for r, each in zip(readers, observed, strict=True)]
    return total, list(outputs), after


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linears(group: _Group, stream: _Stream, weights: tuple, scales: tuple, seen: tuple):
    """(h + residual, outputs, (amaxes, ()) of each)."""
    return _forward(group, stream, weights, scales, seen, differentiated=False)[0]


def _forward(
    group: _Group,
    stream: _Stream,
    weights: tuple,
    scales: tuple,
    seen: tuple,
    *,
    differentiated: bool = True,
):
    first = group.layers[0]
    cast, kernels = _by(first, first.recipe.output.a)
    forward = functools.partial(linear.forward, differentiated=differentiated)
    h, weight = (derivatives.not_again(x, first.name) for x in (stream.h, stream.weight))
    calls, last = list(zip(weights, scales, seen, group.layers, strict=True)), []
    residual = stream.residual
    if group.swiglu:
        # what makes the residual: its gradient is the sum's, whose amax the norm's gradient takes
        assert residual is not None
        last = [forward(residual, *calls[3])]
        residual = checkpoint_name(last[0][0][0], group.kept)
    if by := operands.settled(scales[0].get("input")):
        h, factors, x = norms.normed(h, residual, weight, group.eps, by, cast.fmt, kernels)
    else:
        h, factors, amax = norms.statistics(h, residual, weight, group.eps, kernels)
        by = operands.dynamic_scales(amax, "input", cast, first)
        x = norms.quantize(h, factors, weight, by, cast.fmt, kernels)
    passes = [forward(x, *call) for call in calls[: group.readers]]
    outputs = [output for (output, _), _ in passes]
    if stream.tables is not None:
        for i, y in enumerate(outputs[:2]):
            outputs[i] = plain.rotate(_heads(y, stream.tables), *stream.tables).reshape(y.shape)
    between: tuple[Array, ...] = ()
    if group.swiglu:
        between = gate, up = tuple(checkpoint_name(y, group.kept) for y in outputs)
        by = operands.settled(scales[2].get("input")) or operands.dynamic_scales(
            swiglu.amax(gate, up, kernels), "input", cast, group.layers[2]
        )
        product = swiglu.quantize(gate, up, by, cast.fmt, kernels)
        passes = [*passes, forward(product, *calls[2]), *last]
        outputs = [passes[2][0][0]]
    observed = tuple(seen for (_, seen), _ in passes)
    residuals = h, factors, weight, stream.tables, between, tuple(kept for _, kept in passes)
    return (h, tuple(outputs), observed), residuals


def _backward(group: _Group, residuals, cotangents):
    h, factors, weight, tables, between, kept = residuals
    for_total, for_outputs, observed = cotangents
    layers = group.layers
    if group.swiglu:
        down = linear.backward(layers[2], kept[2], (for_outputs[0], observed[2]))
        for_outputs = _cast_gradients(down[0], between, group, kept)
    if tables is not None:
        for_outputs = [
            _cast_rotated(g, tables, layer, saved) if i < 2 else g
            for i, (g, layer, (saved, _)) in enumerate(zip(for_outputs, layers, kept, strict=True))
        ]
    passes = [
        linear.backward(layers[i], kept[i], (for_outputs[i], observed[i]))
        for i in range(group.readers)
    ]
    _, kernels = _by(layers[0], layers[0].recipe.grad_input.a)
    readers = [for_x for for_x, *_ in passes]
    for_h, for_weight, amax = norms.gradient(readers, for_total, h, factors, weight, kernels)
    if axes := tuple(sharding.varying(for_weight) - sharding.varying(weight)):
        for_weight = lax.psum(for_weight, axes)
    for_residual = for_h if group.adds else None
    if group.swiglu:
        for_y = _cast_again(for_h, amax, layers[3], kept[3][0])
        for_residual, *rest = linear.backward(layers[3], kept[3], (for_y, observed[3]))
        passes = [*passes, down, (for_residual, *rest)]
    for_weight = for_weight.astype(weight.dtype)
    stream = _Stream(for_h, for_residual, for_weight, jax.tree.map(jnp.zeros_like, tables))
    _, for_weights, for_scales, for_seen = zip(*passes, strict=True)
    return stream, for_weights, for_scales, for_seen


derivatives.defvjp(_linears, _forward, _backward)


def _cast_gradients(
    d: Array, between: tuple[Array, Array], group: _Group, kept: tuple
) -> tuple[Quantized, Quantized]:
    """The gradients of gate and of up, cast; d is that of their product."""
    layers = group.layers[:2]
    cast, kernels = _by(layers[0], layers[0].recipe.grad_input.a)
    by_gate, by_up = (operands.settled(saved["grad_output"].scale) for saved, _ in kept[:2])
    if by_gate is None or by_up is None:
        amaxes = swiglu.gradient_amaxes(d, *between, kernels)
        by_gate, by_up = (
            each or operands.dynamic_scales(amax, "grad_output", cast, layer)
            for each, amax, layer in zip((by_gate, by_up), amaxes, layers, strict=True)
        )
    return swiglu.quantize_gradients((d, *between), (by_gate, by_up), cast.fmt, kernels)


def _cast_again(g: Array, amax: Array, layer: Layer, saved: dict) -> Array | Quantized:
    """The gradient g of what made the residual, cast by its amax, which the norm's gradient has
    taken; as it is where a state has its scale."""
    cast, kernels = _by(layer, layer.recipe.grad_input.a)
    if saved["grad_output"].scale is not None:
        return g
    by = operands.dynamic_scales(amax, "grad_output", cast, layer)
    return casts.quantize(g, by, cast.fmt, -1, kernels)


def _cast_rotated(g: Array, tables: Rotary, layer: Layer, saved: dict) -> Quantized:
    """The gradient of rotated heads, rotated back and cast."""
    (cast, kernels), heads = _by(layer, layer.recipe.grad_input.a), _heads(g, tables)
    by = operands.settled(saved["grad_output"].scale) or operands.dynamic_scales(
        rotary_kernels.amax(heads, *tables, kernels), "grad_output", cast, layer
    )
    return rotary_kernels.quantize(heads, tables, by, cast.fmt, kernels)


def _heads(x: Array, tables: Rotary) -> Array:
    """[B, T, H D] as [B, T, H, D]."""
    return x.reshape(*x.shape[:-1], -1, tables.cos.shape[-1])


def _by(layer: Layer, cast: CastSpec | None) -> tuple[CastSpec, TritonKernels]:
    """How kernels cast for a layer that they cast for."""
    assert cast is not None
    assert layer.kernels is not None
    return cast, layer.kernels


def _whole_features(h: Array, placement: Placement | None) -> bool:
    inside = getattr(jax.typeof(h).sharding.mesh, "manual_axes", ())
    return placement is None or bool(inside and not placement.n and not placement.k)
