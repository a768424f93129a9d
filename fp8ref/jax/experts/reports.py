"""What grouped GEMMs report of their operands: to observers, and as statistics (spec Q-8, X).

``observe`` calls an observer of ``linear.observing`` once for each group, as if its GEMM were a
linear's. ``measure`` measures all rows in groups, or all weights, together.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8ref.jax.experts.operands import Groups, Segmented
from fp8ref.jax.quantize import cast, scales, scaling, stats
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import Gemm
from fp8ref.spec.granularity import by_name


def observe(
    observer: Callable,
    name: str,
    which: Gemm,
    tensors: tuple,
    operands: tuple[Quantized | Segmented, ...],
    groups: Groups,
    out: Array,
) -> None:
    """Report each group that has rows, from inside a compiled program; under delayed scaling a
    group without rows as one row of zeros, so that its weight is seen (X-9).

    tensors   of both operands: rows [M, C], or weights [E, K, N], which are reported as [N, K].
    """
    about = tuple((is_rows(q), q.granularity, q.axis) for q in operands)
    arrays = [
        (x, cast.code_bits(q.codes, q.fmt), q.scale) for x, q in zip(tensors, operands, strict=True)
    ]

    def report(*arrays: Any) -> None:
        for _, parts, group_out in group_gemms(which, about, *arrays):
            observer(name, which, *parts, group_out)

    jax.debug.callback(report, groups.ends, *arrays, out)


def is_rows(q: Quantized | Segmented) -> bool:
    """Whether an operand is rows of groups, not weights."""
    return q.codes.ndim == 2


def measure(x: Array, q: Quantized | Segmented, groups: Groups) -> Array:
    """The measurement float32 [stats.LENGTH] of rows x [M, C] in groups, or of weights x [E, K, N],
    and their quantized form q."""
    if not is_rows(q):
        assert isinstance(q, Quantized)
        scale, scale_inv = (_weight_scales(s, q) for s in (q.scale, q.scale_inv))
        inside = jnp.ones((1, 1, 1), bool)
    else:
        scale, scale_inv = (
            q.lines(s) if isinstance(q, Segmented) else scaling.spread(s, x.shape, q.blocks)
            for s in (q.scale, q.scale_inv)
        )
        inside = (groups.group < len(groups.sizes))[:, None]
    times = scales.times_e8m0 if q.granularity == "mx_1x32" else operator.mul
    return stats.measurement(
        x, q.codes, q.fmt, scale, scale_inv, jnp.broadcast_to(inside, x.shape), times
    )


def _weight_scales(scale: Array, q: Quantized) -> Array:
    """Scales of weights [E, K, N], broadcast to elements."""
    if scale.ndim == 0:
        return jnp.broadcast_to(scale, q.codes.shape)
    shape = q.codes.shape[1:]
    blocks = scaling.blocks(q.granularity, shape, q.axis)
    return jax.vmap(lambda s: jnp.broadcast_to(scaling.spread(s, shape, blocks), shape))(scale)


def group_gemms(
    which: Gemm, about: tuple, ends, a: tuple, b: tuple, out
) -> Iterator[tuple[int, list[tuple], np.ndarray]]:
    """(e, operands, result) of each group's GEMM, as those of a linear.

    about     of each operand: whether it is of rows, its granularity and axis.
    a, b      the tensor, codes uint8 and scales of each, of all groups; with the results arrays of
              NumPy, or taken as such.
    """
    ends = np.asarray(ends)
    a, b = (tuple(map(np.asarray, v)) for v in (a, b))
    out = np.asarray(out)
    first = 0
    shared = a[2].ndim == 0 and b[2].ndim == 0  # under delayed scaling
    size = by_name(about[0][1]).reduced or 1
    for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if begin == end and not shared:
            continue
        parts = [
            _part(v, layout, which, e, begin, end, first)
            for v, layout in zip((a, b), about, strict=True)
        ]
        first += -(-(end - begin) // size)
        group_out = out[e].T if which == "grad_weight" else out[begin:end]  # [E, K, N], or rows
        yield e, parts, group_out if len(group_out) else np.zeros((1, out.shape[-1]), out.dtype)


def _part(
    arrays: tuple, layout: tuple, which: Gemm, e: int, begin: int, end: int, first: int
) -> tuple:
    """(hp, codes, scale) of one group, in a linear's layout."""
    (x, codes, scale), (rows, granularity, axis) = arrays, layout
    one = granularity == "tensorwise"
    if not rows:
        expert_scale = scale if scale.ndim == 0 else scale[e].reshape(()) if one else scale[e].T
        return x[e].T, codes[e].T, expert_scale
    x, codes, size = x[begin:end], codes[begin:end], by_name(granularity).reduced or 1
    count = -(-len(x) // size)
    if not len(x):  # one row of zeros
        x, codes = (np.zeros((1, v.shape[1]), v.dtype) for v in (x, codes))
    if scale.ndim == 0:
        return x, codes, scale
    if one:
        return x, codes, scale[e].reshape(())
    if axis == -1:
        return x, codes, scale[begin:end]
    if size > 1:
        return x, codes, scale[first : first + count]
    return x, codes, scale[e if len(scale) > 1 else 0][None]
