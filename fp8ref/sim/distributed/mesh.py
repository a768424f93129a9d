"""Layouts: which device holds which piece of a tensor (P-1). Nothing communicates or rounds.

``Mesh`` is a grid of devices with named axes, ``Layout`` a tensor's cut, ``split`` its pieces.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fp8ref.shared.errors import require

__all__ = ["Layout", "Mesh", "split"]

Device = tuple[int, ...]
"""The coordinates of a device, one on each axis of its mesh, in order."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices, named by coordinates, in a grid of named axes: ``Mesh(axes={"data": 2})``.

    Raises:   ValueError: an axis of fewer than one device.
    """

    axes: Mapping[str, int]

    def __post_init__(self) -> None:
        for name, size in self.axes.items():
            if size < 1:
                raise ValueError(
                    f"a mesh axis has at least one device; got {name!r} of size {size}. Drop it."
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, in order."""
        return tuple(self.axes)

    @property
    def devices(self) -> list[Device]:
        """Every device, the last axis fastest."""
        return list(itertools.product(*map(range, self.axes.values())))

    def along(self, device: Device, names: tuple[str, ...]) -> Device:
        """The device's coordinates on these axes alone, in the order of ``names``."""
        return tuple(device[self.names.index(name)] for name in names)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a tensor is cut over a mesh (spec P-1).

    splits  tensor axis -> the mesh axes that cut it, the first one slowest; mesh axes not named
            replicate.
    rule    ``ceil``: pieces of ceil(n / parts) until nothing is left, then a shorter one and empty
            ones; ``balanced``: pieces differ by at most one, longer ones first.
    sizes   tensor axis -> the size of every piece, in place of the rule: any partition, empty
            pieces included.
    Raises: ValueError: axes that the tensor or the mesh lacks, a mesh axis that cuts twice, sizes
            that do not add up, another rule.

    >>> layout = Layout(mesh=Mesh(axes={"data": 4}), shape=(5, 2), splits={0: ("data",)})
    >>> layout.pieces(0), layout.index((2,))
    ((2, 2, 1, 0), (slice(4, 5, None), slice(0, 2, None)))
    """

    mesh: Mesh
    shape: tuple[int, ...]
    splits: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    rule: Literal["ceil", "balanced"] = "ceil"
    sizes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rule not in ("ceil", "balanced"):
            raise ValueError(f"rule is 'ceil' or 'balanced'; got {self.rule!r}.")
        for axis, names in self.splits.items():
            text = f"splits map axes of a tensor of shape {self.shape}, from 0; got axis {axis}."
            require(0 <= axis < len(self.shape), text)
            if isinstance(names, str):
                raise ValueError(
                    f"splits map an axis to a tuple of mesh axes; got {names!r}. Use ({names!r},)."
                )
        used = [name for names in self.splits.values() for name in names]
        for name in used:
            text = f"splits name axes of the mesh, {', '.join(self.mesh.names)}; got {name!r}."
            require(name in self.mesh.axes, text)
            if used.count(name) > 1:
                raise ValueError(
                    f"a mesh axis splits one axis; got {name!r} more than once in {self.splits}."
                )
        for axis, sizes in self.sizes.items():
            text = f"sizes are for split axes, {dict(self.splits)}; got axis {axis}."
            require(axis in self.splits, text)
            if len(sizes) != self.parts(axis) or sum(sizes) != self.shape[axis] or min(sizes) < 0:
                raise ValueError(
                    f"axis {axis} has {self.parts(axis)} sizes >= 0 of sum {self.shape[axis]}; got "
                    f"{sizes}."
                )

    def parts(self, axis: int) -> int:
        """How many pieces a tensor axis is cut into."""
        return math.prod(self.mesh.axes[name] for name in self.splits.get(axis, ()))

    def pieces(self, axis: int) -> tuple[int, ...]:
        """The sizes of the pieces of a tensor axis, in order."""
        n, parts = self.shape[axis], self.parts(axis)
        if axis in self.sizes:
            return tuple(self.sizes[axis])
        if self.rule == "balanced":
            return tuple(n // parts + (i < n % parts) for i in range(parts))
        step = -(-n // parts)
        return tuple(max(0, min(step, n - i * step)) for i in range(parts))

    def index(self, device: Device) -> tuple[slice, ...]:
        """Which part of the tensor the device holds."""
        slices = []
        for axis in range(len(self.shape)):
            names, pieces = self.splits.get(axis, ()), self.pieces(axis)
            place = 0
            for name, coordinate in zip(names, self.mesh.along(device, names), strict=True):
                # The place among the pieces, the mesh axes read as digits, the first one slowest.
                place = place * self.mesh.axes[name] + coordinate
            start = sum(pieces[:place])
            slices.append(slice(start, start + pieces[place]))
        return tuple(slices)


def split(x, layout: Layout) -> dict[Device, np.ndarray]:
    """Every device's piece of x, as views.

    Shapes:   x of layout.shape; shards[device] = x[layout.index(device)], possibly empty.
    Raises:   ValueError: x of another shape.
    Source:   spec P-1. ``ceil`` is torch.chunk's and DTensor's rule and the one XLA pads by;
              ``balanced`` is np.array_split's.
    """
    x = np.asarray(x)
    if x.shape != layout.shape:
        raise ValueError(f"the layout needs x.shape={layout.shape}; got {x.shape}.")
    return {device: x[layout.index(device)] for device in layout.mesh.devices}


def check_shapes(shapes: Mapping[Device, tuple[int, ...]], layout: Layout) -> None:
    """ValueError unless every device has a shard of the layout's shape."""
    text = f"each device has one shard: {layout.mesh.devices}; got {sorted(shapes)}."
    require(set(shapes) == set(layout.mesh.devices), text)
    for device, shape in shapes.items():
        expected = tuple(part.stop - part.start for part in layout.index(device))
        text = f"the shard of device {device} has shape {expected}; got {shape}."
        require(shape == expected, text)
