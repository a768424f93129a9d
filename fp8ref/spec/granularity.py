"""Granularities as data: which elements share a scale, and the shape of the scales (spec S-6)."""

import math
from dataclasses import dataclass

from fp8ref.shared import package_data, registry

Blocks = tuple[int | None, ...]
"""The length of a block along each axis of a tensor; None: the whole axis. Whatever shares a scale
is a block: ``(None, None)`` is a matrix, ``(1, 128)`` 128 elements of a row.
"""


@dataclass(frozen=True, kw_only=True)
class Granularity:
    """A block of ``other`` x ``reduced`` elements shares one scale; ``None`` is the whole axis.

    ``reduced`` is a length along the reduced axis (a GEMM's K), ``other`` along the last of the
    other axes. Axes before these two are batch dims: no block spans them. Blocks divide the reduced
    axis; along the other the last block may be shorter, as if the tensor were padded with zeros
    (spec S-6).
    """

    name: str
    other: int | None = None
    reduced: int | None = None


GRANULARITIES = {
    name: Granularity(name=name, **lengths)
    for name, lengths in package_data.tables(__file__, "granularities").items()
}
"""fp8ref's granularities by name (S-6)."""

_OF_RECIPES = {"mxfp8": "mx_1x32", "mxfp4": "mx_1x32", "nvfp4": "nvfp4_1x16"}


def by_name(name: str) -> Granularity:
    """The granularity of that name; ValueError for anything else."""
    line = _OF_RECIPES.get(str(name))
    hint = f"recipe {name!r} has granularity {line}; " if line else ""
    return registry.lookup(f"{hint}granularity is", GRANULARITIES, name)


def block_of(a: str, b: str) -> int | None:
    """The length along K that shares a scale, for both operands; None for all (G-13, L-4).

    >>> block_of("blockwise_1x128", "blockwise_128x128"), block_of("rowwise", "tensorwise")
    (128, None)

    Raises:   ValueError: lengths that differ, or blocks on one side alone; an unknown granularity.
    """
    length, other = by_name(a).reduced, by_name(b).reduced
    if length != other:
        raise ValueError(
            f"the operands' scales need the same length of K; got {a} and {b}. Quantize both "
            "alike, or dequantize and use matmul_hp."
        )
    return length


def normalize_axis(axis: int, ndim: int) -> int:
    """axis counted from the front; ValueError if a tensor of ndim dims has no such axis."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -ndim <= axis < ndim:
        raise ValueError(
            f"the reduced axis is in [-{ndim}, {ndim}) for a {ndim}-d tensor; got axis={axis!r}."
        )
    return axis % ndim


def block_sizes(shape: tuple[int, ...], blocks: Blocks) -> tuple[int, ...]:
    """The size of a whole block along each axis of a tensor of this shape."""
    return tuple(n if size is None else size for n, size in zip(shape, blocks, strict=True))


def block_counts(shape: tuple[int, ...], blocks: Blocks) -> tuple[int, ...]:
    """The shape of the scales of blocks, the last of which may be shorter along each axis: ``()``
    where a block is the whole tensor.

    >>> block_counts((2, 4, 300, 64), (1, 1, 128, None)), block_counts((2, 64), (None, None))
    ((2, 4, 3, 1), ())
    """
    if all(size is None for size in blocks):
        return ()
    sizes = block_sizes(shape, blocks)
    return tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))


def lengths(name: str, ndim: int, axis: int) -> Blocks:
    """The length of a block along each axis of a tensor of ndim dims; None: the whole axis.

    >>> lengths("blockwise_128x128", 3, -1), lengths("blockwise_128x128", 3, 1)
    ((1, 128, 128), (1, 128, 128))
    >>> lengths("tensorwise", 2, -1)
    (None, None)

    Raises:   ValueError: an unknown granularity; unless tensorwise, an axis that the tensor lacks.
    """
    granularity = by_name(name)
    if granularity.name == "tensorwise":
        return (None,) * ndim
    axis = normalize_axis(axis, ndim)
    beside = ndim - 2 if axis == ndim - 1 else ndim - 1
    sizes = {axis: granularity.reduced, beside: granularity.other}
    return tuple(sizes.get(i, 1) for i in range(ndim))


def blocks(
    name: str, shape: tuple[int, ...], axis: int, *, ragged: bool = False
) -> tuple[int, ...]:
    """A whole block's size along each axis of a tensor of this shape: ``shape`` for tensorwise.

    ragged    the last block along the reduced axis may be shorter too, as along a linear's rows
              (L-5).

    Raises:   ValueError: an empty tensor (spec S-7); unless tensorwise, an axis that x lacks
              or, unless ragged, a block that does not divide K.
    """
    is_whole = name == "tensorwise"
    result = shape if is_whole else block_sizes(shape, lengths(name, len(shape), axis))
    if math.prod(shape) == 0:
        raise ValueError(
            f"a scale needs at least one element; got x.shape={shape}. Drop empty tensors."
        )
    if is_whole:
        return result
    axis = normalize_axis(axis, len(shape))
    if shape[axis] % result[axis] and not ragged:
        raise ValueError(
            f"{name} needs K, the reduced axis, divisible by {result[axis]}; got x.shape={shape}, "
            f"axis={axis}. Pad it with zeros or use 'rowwise'."
        )
    return result


def scale_shape(
    name: str, shape: tuple[int, ...], axis: int, *, ragged: bool = False
) -> tuple[int, ...]:
    """Shape of the scales: ``()`` for tensorwise, otherwise the number of blocks along each axis.
    ragged, and raises, as ``blocks``.

    >>> scale_shape("rowwise", (64, 256), -1), scale_shape("rowwise", (64, 256), 0)
    ((64, 1), (1, 256))
    >>> scale_shape("blockwise_1x128", (64, 256), -1), scale_shape("tensorwise", (64, 256), -1)
    ((64, 2), ())
    >>> scale_shape("blockwise_128x128", (300, 256), -1)
    (3, 2)
    """
    sizes = blocks(name, shape, axis, ragged=ragged)
    if name == "tensorwise":
        return ()
    return tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))
