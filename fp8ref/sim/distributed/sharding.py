"""Quantize a tensor that is sharded over devices, and gather it in FP8 (spec P-2 to P-6).

A *scope* names the mesh axes over which an amax is reduced. Under ``"global"`` the shards' codes
and scales are those of one device, bit for bit. Under ``"local"`` every device scales its own
shard, which is another valid result. A scope in between is wrong if it leaves out devices that
share a group of elements with one scale: ``check_replicas`` and ``gather`` then name the axes.

Order: local amax; non-finite amaxes become 0 and a flag; both are max-reduced over the scope; the
flag puts Inf or NaN back (P-3), because the maximum of some collectives drops NaNs; then each
device scales and casts its shard (P-4).
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from fp8ref import policy as policies
from fp8ref.formats import FLOAT32, Format
from fp8ref.policy import ScalePolicy
from fp8ref.sim.distributed.mesh import Device, Layout, check_shapes
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import granularity as granularities

__all__ = ["amax", "gather", "quantize"]

Maximum = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""The elementwise maximum of a collective: (partial maximum, next value) -> maximum."""


class Amax(NamedTuple):
    """amax float32; non_finite uint8, alike: 0 finite, 1 infinite, 2 NaN."""

    amax: np.ndarray
    non_finite: np.ndarray


def scope_axes(layout: Layout, scope: str | Collection[str]) -> tuple[str, ...]:
    """The mesh axes of a scope ("local": none, "global": all); ValueError if unknown."""
    if scope == "local":
        return ()
    if scope == "global":
        return layout.mesh.names
    if isinstance(scope, str):
        raise ValueError(
            f"a scope is 'local', 'global' or a tuple; got the string {scope!r}. Use ({scope!r},)."
        )
    if unknown := sorted(set(scope) - set(layout.mesh.names)):
        raise ValueError(
            f"a scope has mesh axes, {', '.join(layout.mesh.names)}; got {', '.join(unknown)}."
        )
    return tuple(name for name in layout.mesh.names if name in scope)


def max_by_comparison(partial: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The elementwise maximum as one comparison makes it: a NaN that arrives replaces the partial
    maximum, and the next value replaces the NaN.

    Source:   gloo/math.h, max: std::max(value, partial). torch's gloo all_reduce(MAX) of ranks (1,
              NaN, 3), folded from the last rank, is 1.
    """
    return np.where(value < partial, partial, value)


def amax(
    shards: Mapping[Device, np.ndarray],
    layout: Layout,
    granularity: str = "tensorwise",
    *,
    scope: str | Collection[str],
    axis: int = -1,
    maximum: Maximum = np.maximum,
    flag: bool = True,
) -> dict[Device, Amax]:
    """Every device's amax: each group's largest magnitude, over the scope's devices with part.

    ``maximum`` is the collective's: ``np.fmax`` drops NaNs (XLA:CPU's pmax), ``max_by_comparison``
    drops some (gloo's MAX). The result does not depend on it, because only finite numbers enter it.
    ``flag=False`` leaves the flag out, to show the failure.

    Shapes:   shards[device] hp, as the layout gives it; amax and non_finite of the shape of the
              shard's own scales, the reduced axis counting as one piece.
    Order:    local amax; where it is not finite, 0 and a flag; both max-reduced in device order;
              then the flag puts Inf or NaN back.
    Specials: an empty shard contributes 0; NaN beats Inf.
    Raises:   ValueError: an empty tensor (S-7); a block cut by the layout; an unknown scope; shards
              that are not the layout's.
    Source:   spec P-2, P-3, P-5.
    """
    check_shapes({device: np.shape(shard) for device, shard in shards.items()}, layout)
    sizes = _group_sizes(layout, granularity, axis)
    # Along a mesh axis that cuts a tensor axis of several groups, the devices hold different
    # groups: nothing to merge there.
    apart = {name for i, names in layout.splits.items() for name in names if sizes[i] is not None}
    merged = tuple(name for name in scope_axes(layout, scope) if name not in apart)
    kept = tuple(name for name in layout.mesh.names if name not in merged)
    total: dict[Device, Amax] = {}
    for device in layout.mesh.devices:
        mine = _local_amax(shards[device], granularity, axis, sizes, flag)
        key = layout.mesh.along(device, kept)
        if key in total:
            flags = np.maximum(total[key].non_finite, mine.non_finite)
            mine = Amax(maximum(total[key].amax, mine.amax), flags)
        total[key] = mine
    return {
        device: _restore(total[layout.mesh.along(device, kept)]) for device in layout.mesh.devices
    }


def quantize(
    shards: Mapping[Device, np.ndarray],
    layout: Layout,
    fmt: Format,
    *,
    granularity: str = "tensorwise",
    policy: str | ScalePolicy = "torchao",
    axis: int = -1,
    scope: str | Collection[str],
    reduce: Callable[..., dict[Device, Amax]] = amax,
) -> dict[Device, Quantized]:
    """Every device casts its own shard, with scales from amaxes reduced over the scope.

    reduce    ``amax``, or that of another collective:
              ``functools.partial(amax, maximum=np.fmax, flag=False)``.
    Shapes:   codes of the shard's shape; scales of its own groups. Under global scope both are
              slices of one device's, bit for bit.
    Order:    amax over the scope; then the policy's scales and the cast (S-3 to S-5) on each
              device; a scale kept from before is 1.
    Specials: as scaling.quantize, for the elements in the scope; an empty shard has no codes, and
              under local scope the scales of amax 0.
    Raises:   ValueError: as amax and scaling.quantize.
    Source:   spec P-4.
    """
    policy = policies.by_name(policy)
    if policy.compute != FLOAT32:  # the tensor is rounded before its amax (S-13)
        shards = {device: cast.round_to(shard, policy.compute) for device, shard in shards.items()}
    reduced = reduce(shards, layout, granularity, scope=scope, axis=axis)
    result = {}
    for device, shard in shards.items():
        scales = scaling.scales_from_amax(reduced[device].amax, fmt, policy)
        if np.size(shard):
            result[device] = scaling.quantize_with(
                shard, scales, fmt, granularity=granularity, policy=policy, axis=axis
            )
        else:
            result[device] = Quantized(
                np.empty(np.shape(shard), np.uint8), *scales, fmt, granularity, axis
            )
    return result


def gather(shards: Mapping[Device, Quantized], layout: Layout) -> Quantized:
    """The whole tensor in FP8, from every device's codes and scales. Nothing is rounded again.

    Shapes:   codes of layout.shape; scales of ``scale_shape(granularity, layout.shape, axis)``.
    Specials: scales compare equal where both are NaN.
    Raises:   ValueError: as check_replicas: a group has one scale, so shards that scaled it
              differently have no FP8 gather.
    Source:   spec P-6.
    """
    check_replicas(shards, layout)
    shard = next(iter(shards.values()))
    shape = granularities.scale_shape(shard.granularity, layout.shape, shard.axis)
    codes = np.empty(layout.shape, np.uint8)
    scale = np.empty(shape, np.float32)
    scale_inv = np.empty(shape, np.float32)
    for device, q in shards.items():
        if not q.codes.size:  # under local scope its scales are those of amax 0
            continue
        codes[layout.index(device)] = q.codes
        groups = _groups(layout, device, q.granularity, q.axis)
        scale[groups], scale_inv[groups] = q.scale, q.scale_inv
    return Quantized(codes, scale[()], scale_inv[()], shard.fmt, shard.granularity, shard.axis)


def check_replicas(shards: Mapping[Device, Quantized], layout: Layout) -> None:
    """Check that the devices agree: one scale for each group, and replicas equal in every code. A
    device without elements agrees.

    Raises:   ValueError: naming the mesh axes along which scales differ, which the scope left out,
              or replicas' codes differ.
    Source:   spec P-6.
    """
    check_shapes({device: q.codes.shape for device, q in shards.items()}, layout)
    kinds = {(q.fmt, q.granularity, q.axis) for q in shards.values()}
    if len(kinds) > 1:
        raise ValueError(
            f"shards have one format, granularity and axis; got {sorted(map(str, kinds))}."
        )
    _, granularity, axis = kinds.pop()
    sizes = _group_sizes(layout, granularity, axis)
    where = {name: i for i, names in layout.splits.items() for name in names}
    names = layout.mesh.names
    # of different groups
    apart = tuple(name for name in names if name in where and sizes[where[name]] is not None)
    held = [device for device in layout.mesh.devices if shards[device].codes.size]
    # along each axis, which names the one that a scope left out; then all of a group, where empty
    # pieces are between
    along_one = [name for name in names if name not in apart]
    lines = [(name, tuple(other for other in names if other != name)) for name in along_one]
    for name, kept in (*lines, (None, apart)):
        firsts: dict[Device, Device] = {}
        for device in held:
            first = firsts.setdefault(layout.mesh.along(device, kept), device)
            a = shards[first]
            b = shards[device]
            differ = zip(names, first, device, strict=True)
            along = ", ".join(repr(axis) for axis, i, k in differ if i != k)
            pairs = (a.scale, b.scale), (a.scale_inv, b.scale_inv)
            if not all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
                raise ValueError(
                    f"devices that share a group need one scale; {granularity} scales differ along "
                    f"mesh axis {along}, between devices {first} and {device}. Quantize with a "
                    f"scope that includes {along} (P-6)."
                )
            if name is not None and name not in where and not np.array_equal(a.codes, b.codes):
                raise ValueError(
                    f"the tensor is replicated along mesh axis {along}; codes of devices {first} "
                    f"and {device} differ. Broadcast it first."
                )


def _group_sizes(layout: Layout, granularity: str, axis: int) -> list[int | None]:
    """The group size of a scale along each axis, None: whole. ValueError: a cut block."""
    granularities.scale_shape(granularity, layout.shape, axis)
    sizes = list(granularities.lengths(granularity, len(layout.shape), axis))
    if granularity == "tensorwise":
        return sizes
    for i in layout.splits:
        size, ends = sizes[i], np.cumsum(layout.pieces(i))
        if size is not None and any(end % size for end in ends if end != layout.shape[i]):
            raise ValueError(
                f"{granularity} needs whole blocks of {size} in each piece of axis {i}; got sizes "
                f"{layout.pieces(i)}. Use multiples of {size}, or 'rowwise' (P-5)."
            )
    return sizes


def _groups(layout: Layout, device: Device, granularity: str, axis: int) -> tuple[slice, ...]:
    """The slices of the global scales that belong to a device's shard."""
    if granularity == "tensorwise":
        return ()
    sizes = _group_sizes(layout, granularity, axis)
    parts = zip(layout.index(device), sizes, strict=True)
    return tuple(
        slice(0, 1) if size is None else slice(-(-part.start // size), -(-part.stop // size))
        for part, size in parts
    )


def piece(q: Quantized, layout: Layout, device: Device, axis: int) -> Quantized:
    """A device's codes and scales of a whole tensor in FP8 or FP4.

    Raises:   ValueError: a device that holds a part of a block.
    """
    own = _groups(layout, device, q.granularity, axis)
    return q._replace(
        codes=q.codes[layout.index(device)], scale=q.scale[own], scale_inv=q.scale_inv[own]
    )


def _local_amax(
    shard: np.ndarray, granularity: str, axis: int, sizes: list[int | None], flag: bool
) -> Amax:
    """A shard's amaxes before the reduction: 0 and a flag if not finite; 0 if empty."""
    shard = np.asarray(shard)
    if shard.size:
        value = scaling.amax(shard, granularity, axis=axis)
    else:
        pairs = zip(shard.shape, sizes, strict=True)
        shape = [1 if size is None else -(-n // size) for n, size in pairs]
        value = np.zeros(() if granularity == "tensorwise" else shape, np.float32)
    if not flag:
        return Amax(np.asarray(value), np.zeros(np.shape(value), np.uint8))
    non_finite = np.where(np.isnan(value), 2, np.isinf(value)).astype(np.uint8)
    return Amax(np.where(non_finite, np.float32(0), value), non_finite)


def _restore(reduced: Amax) -> Amax:
    """A reduced amax; Inf or NaN where flagged."""
    special = np.where(reduced.non_finite == 2, np.float32(np.nan), np.float32(np.inf))
    return Amax(np.where(reduced.non_finite, special, reduced.amax)[()], reduced.non_finite[()])
