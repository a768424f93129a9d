"""Sums and maxima over a quantised tensor, or over each group that shares a scale, in slabs of bounded memory."""

from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import numpy as np

from fp8ref import granularity as granularities
from fp8ref.sim import cast
from fp8ref.sim.scaling import Quantized

SLAB = 1 << 20  # elements: 8 MiB a float64 temporary
K = TypeVar("K", bound=Hashable)


def reduce_groups(
    x, q: Quantized, measure: Callable[[np.ndarray, Quantized], Iterator[tuple[K, np.ufunc, np.ndarray]]], *, per_group: bool
) -> dict[K, np.ndarray]:
    """The reductions that ``measure`` asks for, over all elements or over each of q's groups.

    ``measure`` takes a slab, as float32, and its Quantized, and yields (key, np.add or np.maximum, one value an element); truth values are counted.
    Slabs are whole rows of the first axis and cut no group of scales, so a tensor of one row is one slab.

    Shapes:   x not empty, the shape of q.codes; a result () or, per group, the shape of q.scale.
    Order:    within a slab the last axis first; slabs in order.
    """
    x, codes = np.atleast_1d(np.asarray(x)), np.atleast_1d(q.codes)
    sizes: list[int | None] = [None] * x.ndim
    if q.granularity != "tensorwise":
        kind, axis = granularities.by_name(q.granularity), granularities.normalise_axis(q.axis, x.ndim)
        sizes = [kind.reduced if i == axis else kind.other for i in range(x.ndim)]
    block = sizes[0] or 1
    groups: list[int | None] = sizes if per_group else [None] * x.ndim
    rows = max(1, SLAB // max(1, x[0].size) // block) * block
    parts: dict[K, list[np.ndarray]] = {}
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        scales = ... if sizes[0] is None else slice(start // block, -(-min(start + rows, len(x)) // block))
        slab = q._replace(codes=codes[part], scale=q.scale[scales], scale_inv=q.scale_inv[scales])
        for key, combine, values in measure(cast.exact(x[part]).astype(np.float32), slab):
            value = _reduce(values, combine, groups)
            if key in parts and groups[0] is None:
                value = combine(parts[key].pop(), value)
            parts.setdefault(key, []).append(value)
    shape = q.scale.shape if per_group else ()
    return {key: np.concatenate(values).reshape(shape)[()] for key, values in parts.items()}


def _reduce(values: np.ndarray, combine: np.ufunc, groups: list[int | None]) -> np.ndarray:
    for i in reversed(range(values.ndim)):
        dtype = np.int64 if values.dtype == np.bool_ else values.dtype
        size = groups[i]
        if size is None:
            values = combine.reduce(values, axis=i, keepdims=True, dtype=dtype)
        else:
            values = combine.reduceat(values, range(0, values.shape[i], size), axis=i, dtype=dtype)
    return values
