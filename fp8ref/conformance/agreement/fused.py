"""Where a matrix lies whose neighbors others keep in the same tensor: q, k and v; gate and up; the
experts of a layer.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fp8ref.checkpoints.layers import GROUPS

__all__ = ["Place", "locate", "separate"]

Shapes = Mapping[str, tuple[int, ...]]
"""{name of a tensor: its shape}."""

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")


class Place(NamedTuple):
    """Rows of one matrix of a tensor: () or the index of an expert."""

    name: str
    matrix: tuple[int, ...]
    rows: slice


def separate(name: str, known: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the parts of a tensor that are tensors of their own elsewhere, and of what
    is left of it; of the tensor itself if none are.

    known    the shapes of all tensors, also of this one.
    """
    module, shape = name.removesuffix(".weight"), known[name]
    ending = name[len(module) :]
    parent, _, last = module.rpartition(".")
    kinds = (last, *GROUPS.get(last, ()))
    if len(shape) == 3 and parent.endswith(".experts"):
        experts = [f"{parent}.{e}" for e in range(shape[0])]
        if any(f"{expert}.{kind}.weight" in known for expert in experts for kind in kinds):
            wholes = {f"{expert}.{last}.weight": shape[1:] for expert in experts}
            every = {**known, **wholes}
            for whole in wholes:
                yield from separate(whole, every)
            return
    parts = [f"{parent}.{kind}{ending}" for kind in kinds[1:]]
    rows = {part: known[part][-2] for part in parts if part in known}
    missing, left = [part for part in parts if part not in rows], shape[-2] - sum(rows.values())
    if rows and len(missing) == 1 and left > 0:
        rows |= {missing[0]: left}
        left = 0
    yield from ((part, (*shape[:-2], n, shape[-1])) for part, n in rows.items())
    if not rows or left:
        yield name, shape


def locate(name: str, shape: tuple[int, ...], held: Shapes, known: Shapes) -> Place | None:
    """Where a tensor's matrix of this shape [N, K] lies: alone, in a fused tensor, or in one of
    all experts; None: nowhere.

    held     the shapes of the tensors to look in.
    known    those of all tensors: the sizes of the parts before or behind it.
    """
    n, k = shape[-2:]
    for place, before, behind in _candidates(name):
        rows = held.get(place.name, (0,))
        if len(rows) != len(place.matrix) + len(shape) or rows[-1] != k:
            continue
        if any(i >= size for i, size in zip(place.matrix, rows, strict=False)):
            continue
        sizes = [[known.get(part, (0, 0))[-2] for part in parts] for parts in (before, behind)]
        first = sum(sizes[0]) if all(sizes[0]) else rows[-2] - n - sum(sizes[1])
        fits = first >= 0 and first + n <= rows[-2] and (all(sizes[0]) or all(sizes[1]))
        if fits and (before or behind or rows[-2] == n):
            return place._replace(rows=slice(first, first + n))
    return None


def _candidates(name: str) -> Iterator[tuple[Place, list[str], list[str]]]:
    """(a place of unknown rows, the parts before it, those behind it) that may have a matrix."""
    module = name.removesuffix(".weight")
    ending = name[len(module) :]
    parent, _, last = module.rpartition(".")
    groups = [(fused, parts) for fused, parts in GROUPS.items() if last in parts]
    holders: list[tuple[str, tuple[int, ...], str]] = [(parent, (), ending)]
    if expert := _EXPERT.fullmatch(module):
        holders += [(expert[1], (int(expert[2]),), end) for end in ("", ".weight")]
    for holder, matrix, end in holders:
        yield Place(f"{holder}.{last}{end}" if holder else name, matrix, slice(0)), [], []
        for fused, parts in groups:
            siblings = [f"{parent}.{part}{ending}" for part in parts]
            at = parts.index(last)
            place = Place(f"{holder}.{fused}{end}", matrix, slice(0))
            yield place, siblings[:at], siblings[at + 1 :]
