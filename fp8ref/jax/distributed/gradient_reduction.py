"""Gradients summed over devices in FP8, by one scale for all devices (spec P-21, P-22, P-24).

Inside shard_map. Codes are exchanged by an all-to-all of uint8, and each device adds its piece of
all devices' codes in float32, in the order of the mesh. ``reduce_scatter`` and ``all_reduce`` are
for one's own training step; ``completed`` is the sum of a ``sharding.Reduction``.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.formats import E4M3FN, Format
from fp8ref.jax.quantize import cast, scales, scaling
from fp8ref.jax.quantize.division import product
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.policy import ScalePolicy
from fp8ref.spec import gradient_reduction
from fp8ref.spec.gradient_reduction import AutoScale, PreScale, Result

__all__ = ["Factor", "Reduced", "accumulate", "all_reduce", "next_mu", "reduce_scatter"]

MOST_COUNTED = 2**30 - 1
"""The most saturated elements of a cast that are counted: two counts are added, in int32."""

Axes = str | tuple[str, ...]
"""The mesh axes of a sum; the first named is the slowest in the order of devices."""


class Reduced(NamedTuple):
    """The sum or mean over devices: value float32, and the number of saturated elements of all
    devices, int32 (), which ``next_mu`` takes. XLA leaves the number out if nobody reads it.

    Of n devices each counts MOST_COUNTED // n elements at most, and as many sums under result
    ``codes``, so that no count overflows."""

    value: Array
    saturated: Array


def reduce_scatter(
    g: Array,
    axes: Axes,
    fmt: Format = E4M3FN,
    *,
    policy: str | ScalePolicy = "torchao",
    prescale: PreScale = "one",
    mu: Array | float = 1.0,
    mean: bool = True,
    result: Result = "float32",
) -> Reduced:
    """Sum g over the devices of mesh axes, exchanged as codes, and leave each its rows.

    Shapes:   g float32, float16 or bfloat16 [n, ...]; value float32 [ceil(n / devices), ...]:
              device i's rows, P-1's ``ceil``, filled with zeros where they are fewer. mu a number
              or float32 ().
    Order:    amax over the axes; scale; cast; all-to-all; acc = acc + code_r in float32, r
              ascending; RN32(acc * scale_inv), as ``sim.gradient_reduction.reduce``.
    Specials: an Inf or NaN on any device makes the value NaN on all.
    Raises:   ValueError: a g without dims or elements; a policy that fp8ref.jax does not implement,
              or without a scale to multiply by; an unknown prescale or result.
    Source:   spec P-21.
    """
    if not g.ndim:
        raise ValueError(
            "a reduce-scatter splits the first dim; got a gradient without dims. Use all_reduce."
        )
    n = lax.axis_size(axes)
    rows = -(-g.shape[0] // n)
    codes, factor, saturated = _shared(g, axes, fmt, policy, prescale, mu, mean)
    codes = jnp.pad(codes, [(0, rows * n - g.shape[0]), *[(0, 0)] * (g.ndim - 1)])  # code 0 is zero
    total = _added(codes.reshape(n, rows, *g.shape[1:]), axes, fmt)
    total, _, more = _rounded(total, axes, fmt, result)
    return Reduced(product(total, factor), saturated + more)


def all_reduce(
    g: Array,
    axes: Axes,
    fmt: Format = E4M3FN,
    *,
    policy: str | ScalePolicy = "torchao",
    prescale: PreScale = "one",
    mu: Array | float = 1.0,
    mean: bool = True,
    result: Result = "float32",
) -> Reduced:
    """As ``reduce_scatter``, of g of any shape; then all devices gather the whole value.

    Float32 sums are gathered, four bytes an element; under result ``codes`` their codes, one byte.
    Raises:   as reduce_scatter.
    """
    n = lax.axis_size(axes)
    codes, factor, saturated = _shared(g, axes, fmt, policy, prescale, mu, mean)
    pieces = jnp.pad(codes.reshape(-1), (0, -codes.size % n)).reshape(n, -1)
    total, sum_codes, more = _rounded(_added(pieces, axes, fmt), axes, fmt, result)
    whole = _gathered(total if sum_codes is None else sum_codes, axes)
    if sum_codes is not None:
        whole = cast.decode(whole, fmt)
    return Reduced(product(whole[: g.size].reshape(g.shape), factor), saturated + more)


def completed(
    partial: Array,
    sum_over: tuple[str, ...],
    scatter: tuple[str, ...],
    fmt: Format,
    mu: Array | float = 1.0,
) -> Reduced:
    """The sum of [rows, ...] over ``sum_over`` and ``scatter`` together, of which each device keeps
    its rows along ``scatter``: value float32 [rows / devices along scatter, ...].

    One scale and one sum for all devices: along ``sum_over``, which keeps no rows apart, each adds
    a part of the rows, and gathers the others' float32 sums. mu as in ``reduce_scatter``.
    Order:    devices along sum_over first, the slower ones, then along scatter.
    """
    axes, kept = (*sum_over, *scatter), lax.axis_size(scatter) if scatter else 1
    copies = lax.axis_size(sum_over) if sum_over else 1
    codes, scale_inv, saturated = _shared(partial, axes, fmt, "torchao", "one", mu, mean=False)
    codes = codes.reshape(kept, -1)  # device f along scatter keeps row f
    length = codes.shape[1]
    codes = jnp.pad(codes, [(0, 0), (0, -length % copies)]).reshape(kept, copies, -1)
    total = _added(codes.swapaxes(0, 1).reshape(kept * copies, -1), axes, fmt)
    if sum_over:
        total = _gathered(total, sum_over)[:length]
    rows = total.reshape(partial.shape[0] // kept, *partial.shape[1:])
    return Reduced(product(rows, scale_inv), saturated)


class Factor(NamedTuple):
    """mu of the next step's gradients, and the last saturated elements: float32 ()."""

    mu: Array
    saturated: Array


def next_mu(
    mu: Array, saturated: Array, elements: int, auto: AutoScale = gradient_reduction.AUTO
) -> Array:
    """mu of the next step, float32 (), from the saturated elements of this one (spec P-22)."""
    mu = jnp.where(saturated > auto.allowed(elements), mu * np.float32(0.5), mu * auto.growth)
    return jnp.clip(
        mu, np.float32(gradient_reduction.MU_MIN), np.float32(gradient_reduction.MU_MAX)
    )


def accumulate(
    total: Quantized | None,
    g: Array,
    fmt: Format = E4M3FN,
    *,
    policy: str | ScalePolicy = "torchao",
    over: tuple[str, ...] = (),
) -> Quantized:
    """Add the gradient of a microbatch to a sum that is kept in FP8.

    total     the sum so far; None before the first microbatch.
    over      mesh axes that cut the gradient, inside shard_map: its amax is that of all pieces.
    Shapes:   g float32, float16 or bfloat16; codes native float8 of its shape, scales ().
    Order:    RN32(RN32(code * scale_inv) + f32(g)); amax; scale; codes.
    Specials: an Inf or NaN makes every code NaN, from then on.
    Raises:   ValueError: as reduce_scatter; a g of another shape.
    Source:   spec P-24.
    """
    value = cast.to_f32(g)
    if total is not None:
        if total.codes.shape != g.shape:
            raise ValueError(
                f"microbatches have gradients of one shape, {total.codes.shape}; got {g.shape}."
            )
        value = product(cast.decode(total.codes, fmt), total.scale_inv) + value
    by = _scales(scaling.amax(value, over=over), fmt, policy, 1.0)
    codes = scaling.quantize_blocks(value, by, fmt, (None,) * value.ndim)
    return Quantized(codes=codes, **by._asdict(), fmt=fmt, granularity="tensorwise", axis=-1)


def _scales(amax: Array, fmt: Format, policy: str | ScalePolicy, factor) -> scales.Scales:
    """``sim.gradient_reduction.shared_scales`` of an amax; the policy's eps is its floor."""
    gradient_reduction.check_format(fmt)
    gradient_reduction.check_policy(policy)
    amax = jnp.where(amax <= np.float32(gradient_reduction.LARGEST), amax, jnp.float32(jnp.nan))
    # The barrier keeps XLA from merging the factors with the quotient.
    scale = lax.optimization_barrier(scales.scale_from_amax(amax, fmt, policy))
    return scales.with_inverse(scale * factor)


def _shared(
    g: Array, axes: Axes, fmt: Format, policy, prescale: PreScale, mu, mean: bool
) -> tuple[Array, Array, Array]:
    """uint8 codes of g; what multiplies their sum: scale_inv, for the mean divided by the devices;
    and saturated elements on all devices."""
    names = (axes,) if isinstance(axes, str) else axes
    pre = gradient_reduction.factor(prescale, lax.axis_size(axes))
    factor = pre * (mu if isinstance(mu, Array) else gradient_reduction.constant_mu(mu))
    by = _scales(scaling.amax(g, over=names), fmt, policy, factor)
    scaled = scaling.scale_blocks(g, by, (None,) * g.ndim)
    factor = by.scale_inv
    if mean:
        factor = factor * gradient_reduction.share_of(lax.axis_size(axes))
    return _codes(scaled, fmt), factor, _counted(scaled, axes, fmt)


def _codes(scaled: Array, fmt: Format) -> Array:
    return lax.bitcast_convert_type(scaling.saturate(scaled, fmt), jnp.uint8)


def _added(pieces: Array, axes: Axes, fmt: Format) -> Array:
    """uint8 [devices, ...] -> this device's piece, summed in float32."""
    # Barriers: XLA may move a conversion across a collective, and four bytes travel.
    received = lax.optimization_barrier(
        lax.all_to_all(lax.optimization_barrier(pieces), axes, 0, 0, tiled=True)
    )
    values = cast.decode(received, fmt)
    total = values[0]
    for r in range(1, values.shape[0]):
        total = total + values[r]
    return total


def _rounded(
    total: Array, axes: Axes, fmt: Format, result: Result
) -> tuple[Array, Array | None, Array | int]:
    """The sum, rounded under result ``codes``; its codes and saturated elements on all devices."""
    gradient_reduction.check_result(result)
    if result == "float32":
        return total, None, 0
    codes = _codes(total, fmt)
    return cast.decode(codes, fmt), codes, _counted(total, axes, fmt)


def _counted(scaled: Array, axes: Axes, fmt: Format) -> Array:
    """Saturated elements on all devices, int32 ()."""
    own = jnp.sum(jnp.abs(scaled) > gradient_reduction.saturates_above(fmt), dtype=jnp.int32)
    return lax.psum(jnp.minimum(own, MOST_COUNTED // lax.axis_size(axes)), axes)


def _gathered(x: Array, axes: Axes) -> Array:
    """x of all devices, concatenated along the first dim; the same on all."""
    return lax.all_gather(x, axes, axis=0, tiled=True, to="invarying")
