"""One linear on a mesh (spec P): who runs its collectives, and how its tensors lie under plain jit.

What a ``Placement`` implies. Inside shard_map its gathers and sums are collectives of our own;
``mode`` checks it against the tensors. Under plain jit they become constraints that keep XLA from
gathering anything wider than FP8 (``Layout``). On Explicit axes ``explicit_sharding`` reads the
layout from the types of the operands.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from fp8ref.jax.distributed.placement import Axes as Axes
from fp8ref.jax.distributed.placement import GradParts as GradParts
from fp8ref.jax.distributed.placement import Parts as Parts
from fp8ref.jax.distributed.placement import Placement as Placement
from fp8ref.jax.distributed.placement import Reduction as Reduction
from fp8ref.recipe import OPERANDS, REDUCED_AXES, Gemm, Role

__all__ = [
    "FREE",
    "Cut",
    "Layout",
    "Mode",
    "check_shapes",
    "check_under_jit",
    "checks_variance",
    "gemm_dims",
    "layout",
    "mode",
    "varying",
]

Mode = Literal["one", "shard_map", "jit"]
"""Who runs a linear's collectives: nobody (``one``), fp8ref (``shard_map``) or XLA (``jit``)."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one tensor of a linear is cut under plain jit.

    rest      for each of its dims, the mesh axes that cut it before any gather; FREE where XLA
              decides.
    rows      the mesh axes that cut the last dim but one, or M, where leading dims are flattened
              to it.
    columns   the mesh axes that cut the last dim.
    gathered  the mesh axes along which its codes are gathered for use.
    """

    rest: tuple
    rows: Axes
    columns: Axes
    gathered: Axes = ()

    def specs(self, shape: tuple[int, ...]) -> tuple[PartitionSpec, PartitionSpec]:
        """Before and after the gather: the specs of codes or scales of this shape, flattened to
        [rows, columns] or not. A dim of length 1 is whole."""
        rest = self.rest if len(shape) == len(self.rest) else (self.rows, self.rest[-1])
        rest = tuple(None if size == 1 else axes for size, axes in zip(shape, rest, strict=True))
        used = (axes if axes in (None, FREE) else self.used(axes) for axes in rest)
        return PartitionSpec(*rest), PartitionSpec(*used)

    def used(self, axes: Axes) -> Axes:
        """Those of some axes that cut the tensor after the gather."""
        return tuple(axis for axis in axes if axis not in self.gathered)


FREE = PartitionSpec.UNCONSTRAINED
"""The entry of a dim whose mesh axes are left to XLA."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How all tensors of a linear are cut under plain jit: what XLA gathers, and what it sums.

    turned    the weight is [K, N].
    """

    input: Cut
    weight: Cut
    grad_output: Cut
    turned: bool = False

    def cut(self, role: Role) -> Cut:
        """The cut of the tensor of this role."""
        return {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}[role]

    def summed(self, which: Gemm) -> bool:
        """True if the dim that a GEMM reduces is cut, so that XLA sums partial results."""
        return any(
            self._cuts(role, axis - 2)
            for role, axis in zip(OPERANDS[which], REDUCED_AXES[which], strict=True)
        )

    def features(self) -> tuple[Axes, Axes]:
        """The mesh axes that cut N and K of the weight as it is used."""
        return self._cuts("weight", -2), self._cuts("weight", -1)

    def _cuts(self, role: Role, axis: int) -> Axes:
        """The mesh axes of a tensor's rows, -2, or columns, -1."""
        cut = self.cut(role)
        last = (axis == -1) != (role == "weight" and self.turned)
        return cut.used(cut.columns if last else cut.rows)


def layout(placement: Placement, ndim: Mapping[Role, int], *, turned: bool) -> Layout:
    """The layout that a placement describes under plain jit, for tensors of so many dims.

    m cuts leading dims, if any; then rows are positions of a sequence, and these are gathered.
    """

    def cut(role: Role) -> Cut:
        (rows, columns), gathered = placement.at_rest(role), placement.gathered(role)
        leading = (FREE,) * (ndim[role] - 2)
        if role == "weight" and turned:
            rows, columns = columns, rows
        first = gathered if leading and role != "weight" else rows
        rest = (*leading, first, columns)
        return Cut(rest=rest, rows=rows, columns=columns, gathered=gathered)

    return Layout(
        input=cut("input"), weight=cut("weight"), grad_output=cut("grad_output"), turned=turned
    )


def mode(x: Array, w: Array, placement: Placement | None, name: str) -> Mode:
    """Who runs a linear's collectives: nobody (``one``), we inside ``shard_map``, or XLA (``jit``).

    Raises:   ValueError, naming the layer: no placement inside shard_map; axes that the mesh lacks;
              tensors that vary along other axes than placement says; a sequence that its devices do
              not divide; local scope outside shard_map.
    """
    mesh = jax.typeof(x).sharding.mesh
    manual = set(getattr(mesh, "manual_axes", ()))
    if placement is None:
        if manual:
            raise ValueError(
                f"{name}: inside shard_map a linear needs its placement, so that devices share "
                "amaxes. Use linear.apply(..., placement=sharding.Placement(m=(...), ...)) with "
                "the mesh axes of tokens, features and weight."
            )
        return "one"
    if unknown := [axis for axis in placement.axes if axis not in mesh.axis_names]:
        names = ", ".join(mesh.axis_names) or "none, as its arguments are on one device"
        raise ValueError(f"{name}: placement axes are {names}; got {', '.join(unknown)}.")
    if not manual:
        check_under_jit(placement, name)
        return "jit"
    if outside := [axis for axis in placement.axes if axis not in manual]:
        raise ValueError(
            f"{name}: inside shard_map placement axes are {', '.join(manual)}; got "
            f"{', '.join(outside)}."
        )
    if checks_variance(x):
        _check_variance(x, w, placement, name)
    if placement.sequence and x.shape[-2] % (parts := math.prod(map(lax.axis_size, placement.k))):
        raise ValueError(
            f"{name}: the sequence is divisible by {parts} pieces along {', '.join(placement.k)}; "
            f"got {x.shape[-2]}. Pad it (P-1)."
        )
    return "shard_map"


def check_under_jit(placement: Placement, name: str) -> None:
    """ValueError, naming the layer, for what plain jit lacks: scales of a device's own, and
    gradients in FP8, as XLA inserts the sum."""
    if placement.scope == "local":
        raise ValueError(
            f"{name}: scope 'local' needs visible devices. Use shard_map, or scope='global'."
        )
    if placement.reduce_grads == "float8_e4m3fn":
        raise ValueError(
            f"{name}: plain jit sums gradients in wide dtypes; got reduce_grads 'float8_e4m3fn'. "
            "Use shard_map, or reduce_grads='result'."
        )


def checks_variance(x: Array) -> bool:
    """True inside shard_map(check_vma=True), which knows along which axes a value varies."""
    return bool(
        varying(lax.pcast(jnp.float32(0), jax.typeof(x).sharding.mesh.manual_axes, to="varying"))
    )


def gemm_dims(
    w: Array, placement: Placement, layout: Layout | None, *, turned: bool
) -> tuple[int, int]:
    """N and K of a device's own GEMMs, with the weight gathered. layout: under plain jit."""
    n, k = w.shape[-2:][:: -1 if turned else 1]
    if layout is None:
        return n * math.prod(map(lax.axis_size, placement.fsdp)), k
    sizes = jax.typeof(w).sharding.mesh.shape
    n, k = (
        size // math.prod(sizes[axis] for axis in axes)
        for size, axes in zip((n, k), layout.features(), strict=True)
    )
    return n, k


def check_shapes(
    name: str, tokens: int, shape: tuple[int, int], placement: Placement, mesh_shape: dict[str, int]
) -> None:
    """ValueError, naming the layer, unless the mesh cuts every dim into equal pieces.

    tokens: the number of tokens of the global batch.
    """
    gathered = placement.gathered("input") or placement.gathered("grad_output")
    cuts = (
        ("M", tokens, (*placement.m, *gathered)),
        ("N", shape[0], placement.at_rest("weight")[0]),
        ("K", shape[1], placement.k),
    )
    for dim, size, axes in cuts:
        parts = math.prod(mesh_shape[axis] for axis in axes)
        if size % parts:
            raise ValueError(
                f"{name}: {dim} is divisible by its {parts} pieces along {', '.join(axes)}; got "
                f"{dim}={size}. Change the mesh, or pad the layer (P-1)."
            )


def _check_variance(x: Array, w: Array, placement: Placement, name: str) -> None:
    roles: tuple[Role, Role] = ("input", "weight")
    expected = [{axis for dim in placement.at_rest(role) for axis in dim} for role in roles]
    varied = [set(varying(x)), set(varying(w))]
    # Along an axis that both vary along, if not placed, each device has a linear of its own.
    apart = (varied[0] & varied[1]) - {axis for axes in expected for axis in axes}
    for operand, cut_axes, got in zip(("x", "w"), expected, varied, strict=True):
        if got - apart != cut_axes:
            raise ValueError(
                f"{name}: placement shards {operand} along {_names(cut_axes)}; it varies along "
                f"{_names(got)}. Fix placement or shard_map's in_specs; mark a replicated value "
                "with lax.pcast(..., to='varying')."
            )


def varying(x: Array) -> frozenset[str]:
    """The mesh axes along which a value differs between devices, inside shard_map."""
    kind = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def varying_as(out: jax.Array, *like: jax.Array) -> jax.Array:
    """A result, as varying wherever one of like does: some operations give theirs no such type."""
    axes = frozenset().union(*map(varying, like)) - varying(out)
    return lax.pcast(out, tuple(axes), to="varying") if axes else out


def _names(axes: set[str]) -> str:
    return ", ".join(sorted(axes)) or "none"
