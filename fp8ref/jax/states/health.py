"""What storing the moments of a step cost, measured on the devices (spec O-12).

    updates, after = optimizer.update(grads, before, params)
    found = health.numbers(health.measure(grads, before, after, layout="sqrt_e4m3"))

On a mesh XLA adds over all devices: the counts are those of whole tensors.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.jax.quantize import division, stats
from fp8ref.jax.states import moments
from fp8ref.jax.states import state as adamw_state
from fp8ref.jax.states.moments import MomentState, Scalars
from fp8ref.jax.states.state import AdamWState, check_decisions, check_moment
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states.health import COUNTS, clip_limit
from fp8ref.spec.states.layouts import Layout, Moment

__all__ = ["Measured", "measure", "numbers"]


class Measured(NamedTuple):
    """The measurement of one tensor, on the devices, or of several: then both have a first dim.

    counts  int32 [health.COUNTS].
    sums    float32 [7]: roots, excess, signal and noise, the latter two in units of the squares of
            powers of two, the exponent fields of these, and the largest ratio.
    """

    counts: Array
    sums: Array


def measure(
    grads,
    before: AdamWState,
    after: AdamWState,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    layout: str | Layout = "sqrt_e4m3",
) -> Any:
    """A tree of ``Measured`` in the structure of the parameters, of the step from before to after,
    by the gradients that it took. For use in jit too. That it is one step is not checked.

    Order:    counts are exact; sums are float32, along the last dim, then over the others.
    Specials: figures of a state that holds NaN are NaN where they are not counts.
    Raises:   ValueError: an unknown layout, or states of another; numbers outside their ranges
              (O-2); a tensor of 2^31 elements or more, which int32 does not count.
    """
    layout = states.by_name(layout)
    states.check(b1=b1, b2=b2, eps=eps, weight_decay=0.0, layout=layout)
    for state in (before, after):
        check_decisions(state, layout)
    table = np.array(states.corrections(b1, b2), np.float32)
    at_step = jnp.asarray(table)[jnp.minimum(after.count, len(table)) - 1]
    at = Scalars(
        *(jnp.asarray(x, jnp.float32) for x in (b1, 1 - b1, b2, 1 - b2, *at_step, 0.0, eps, 0.0))
    )

    def measure_leaf(g, *stored: MomentState) -> Measured:
        own = layout.of(g.size)
        for which, moment_state in enumerate(stored):
            check_moment(moment_state, g.shape, own, which % 2)
        return _measure(g, stored[:2], stored[2:], at, own)

    structure: Any
    leaves, structure = jax.tree.flatten(grads)
    owns = [layout.of(g.size) for g in leaves]
    each = [
        adamw_state.by_parameter(
            trees, structure, layout.kept[which % 2], [own.kept[which % 2] for own in owns]
        )
        for which, trees in enumerate((before.m, before.v, after.m, after.v))
    ]
    return structure.unflatten(
        [measure_leaf(g, *stored) for g, *stored in zip(leaves, *each, strict=True)]
    )


def numbers(measured) -> np.ndarray:
    """float64 [tensors, health.FIELDS] on the host, in the order of jax.tree."""
    leaves = jax.tree.leaves(measured, is_leaf=lambda x: isinstance(x, Measured))
    counts, sums = (
        np.concatenate([np.atleast_2d(x) for x in of]).astype(np.float64)
        for of in zip(*leaves, strict=True)
    )
    roots, excess, signal, noise, signal_field, noise_field, largest = sums.T
    squares = [
        x * np.exp2(2 * (field - 127))
        for x, field in ((signal, signal_field), (noise, noise_field))
    ]
    return np.concatenate([counts, np.stack([roots, excess, *squares, largest], axis=-1)], axis=-1)


def _measure(g, before, after, at: Scalars, layout: Layout) -> Measured:
    if g.size >= 2**31:
        raise ValueError(
            f"health counts below 2^31 elements per device; got {g.shape}. Set statistics.every to "
            "0."
        )
    both = (layout.m, layout.v)
    g = moments.in_range(g.astype(jnp.float32))
    old, stored = (
        [moments.read(x, moment, layout) for x, moment in zip(pair, both, strict=True)]
        for pair in (before, after)
    )
    new = moments.averages(g, old[0], old[1], at, layout)
    idle = moments.averages(jnp.zeros_like(g), stored[0], stored[1], at, layout)
    exact_ratio = moments.ratio(new[0], new[1], at)
    stored_ratio = moments.ratio(stored[0], stored[1], at)
    root, stored_root = division.sqrt(new[1]), division.sqrt(stored[1])
    masks = (
        (stored[1] == 0) & (stored[0] != 0),
        jnp.abs(exact_ratio) > at.bound if layout.bounded else None,
        *(_clipped(x, kept, moment) for x, kept, moment in zip(new, after, both, strict=True)),
        *(_stalled(x, kept, moment) for x, kept, moment in zip(idle, after, both, strict=True)),
    )
    counts = [
        jnp.int32(g.size),
        *(jnp.int32(0) if mask is None else jnp.sum(mask, dtype=jnp.int32) for mask in masks),
    ]
    assert len(counts) == len(COUNTS)
    signal, signal_field = _squares(exact_ratio)
    noise, noise_field = _squares(stored_ratio - exact_ratio)
    squares = signal, noise, signal_field, noise_field
    sums = (_sum(root), _sum(stored_root - root), *squares, moments.largest(stored_ratio))
    return Measured(jnp.stack(counts), jnp.stack(sums))


def _clipped(x, stored: MomentState, moment: Moment):
    if stored.scale_inv is None or moment.expansion:
        return None
    return moments.above(division.sqrt(x) if moment.root else x, clip_limit(moment), stored, moment)


def _stalled(x, stored: MomentState, moment: Moment):
    if moment.rounding == "stochastic":
        return None
    codes = moments.again(division.sqrt(x) if moment.root else x, stored, moment)
    if moment.fmt.bits == 8:
        new_bits, kept = (lax.bitcast_convert_type(x, jnp.uint8) for x in (codes, stored.codes))
        return (kept & 0x7F != 0) & (new_bits == kept)
    return (stored.codes != 0) & (codes == stored.codes)


def _sum(x):
    """Sum the last dim, then the others; the barrier keeps XLA from one long sum."""
    return jnp.sum(lax.optimization_barrier(jnp.sum(jnp.atleast_1d(x), axis=-1)))


def _squares(x):
    """The sum of squares in units of a power of two, and that power's exponent field."""
    field, unit = stats.unit(moments.largest(x))
    return _sum((x * unit) * (x * unit)), field.astype(jnp.float32)
