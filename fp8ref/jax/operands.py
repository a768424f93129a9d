"""From a linear's tensors to the operands of its GEMMs: quantised where they lie, each along the axis that a GEMM reduces, and gathered in FP8."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fp8ref import granularity as granularities
from fp8ref.hardware import Multiply
from fp8ref.jax import gemm, scaling, sharding
from fp8ref.jax.scaling import Quantized
from fp8ref.jax.sharding import Placement
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, Gemm, Recipe, Role

Scales = Mapping[Role, jax.Array]  # of the roles whose scales a state holds


@dataclass(frozen=True, kw_only=True)
class Use:
    """What is static of one use of a linear.

    batched   leading dims are apart, not M's.
    turned    the weight is [K, N].
    outer     how many sequences M is made of.
    dtypes    of the results, in the order of recipe.gemms.
    measures  a tap takes what quantising did to its operands.
    multiply  simulated hardware that its FP8 GEMMs run under.
    """

    recipe: Recipe
    name: str
    placement: Placement
    mode: sharding.Mode
    batched: bool = False
    turned: bool = False
    outer: int = 1
    dtypes: tuple = ()
    observer: Callable | None = None
    measures: bool = False
    multiply: Multiply | None = None

    def over(self, role: Role, granularity: str, axis: int) -> sharding.Axes:
        """The mesh axes over which it is for us to take an amax."""
        return self.placement.amax_axes(role, granularity, axis) if self.mode == "shard_map" else ()

    def collective(self, which: Gemm) -> sharding.Reduction | None:
        """How partial results become a result, where that is for us to do."""
        reduction = self.placement.reduction(which, 1 if which == "grad_weight" else self.outer)
        return reduction if self.mode == "shard_map" and reduction.axes else None

    def axis(self, which: Gemm, role: Role) -> int:
        """The axis, -1 or -2, of a tensor that a GEMM reduces."""
        axis = REDUCED_AXES[which][OPERANDS[which].index(role)] - 2
        return -3 - axis if self.turned and role == "weight" else axis

    def serves_backward(self, role: Role) -> bool:
        """Whether what the output GEMM takes of this role its backward GEMM takes too."""
        return self.recipe.serves_both(role)

    def gathers_again(self, role: Role) -> bool:
        """Whether the backward pass gathers for us what the forward pass has gathered."""
        return self.mode == "shard_map" and bool(self.placement.gathered(role)) and self.serves_backward(role)


def quantize(x: jax.Array, role: Role, cast: CastSpec, axis: int, state_scales: Scales, use: Use) -> Quantized:
    """A device's own piece, by the scale of the role's state, or without one by the tensor's own amax. Blocks are of flattened tensors;
    of others all dims stay, as flattening one that is cut along two of them would gather it.

    Raises:   ValueError, naming layer, role and recipe: as ``scaling.quantize``; a block that the mesh cuts (P-5).
    """
    try:
        if role in state_scales and cast.policy.stored == "scale_inv":
            return scaling.quantize_divided(x, state_scales[role], cast.fmt, axis=axis)
        if role in state_scales:
            return scaling.quantize_with(x, state_scales[role], cast.fmt, granularity=cast.granularity, axis=axis)
        over = use.over(role, cast.granularity, axis)
        if gemm.dequantises(cast.granularity):
            x = flat(x, role, use)
            _check_whole_blocks(x, role, cast.granularity, axis, use)
        axes = tuple(range(x.ndim - 1)) if axis == -2 and not use.batched else axis  # M is all leading dims
        axes = axes if cast.granularity == "rowwise" else axis
        return scaling.quantize(x, cast.fmt, granularity=cast.granularity, policy=cast.policy, axis=axes, over=over)
    except ValueError as error:
        raise ValueError(f"{use.name}: {role} of recipe {use.recipe.name!r}: {error}") from error


def gathered_codes(q: Quantized, role: Role, axis: int, use: Use) -> Quantized:
    """[M, ...] of every device for use, in FP8, reduced along axis; a scale for each row, or for blocks of rows, goes with it."""
    blocks = gemm.dequantises(q.granularity) and use.mode == "shard_map"
    lines = blocks or (q.granularity == "rowwise" and axis == -1)
    scale, scale_inv = (gathered(v, role, use) if lines else _scales_of_columns(v, use) for v in (q.scale, q.scale_inv))
    return dataclasses.replace(q, codes=gathered(q.codes, role, use), scale=scale, scale_inv=scale_inv, axis=axis)


def gathered(x: jax.Array, role: Role, use: Use) -> jax.Array:
    """[M, ...] of every device for use, of codes, of their scales or of a tensor as it is."""
    axes = use.placement.gathered(role)
    if axes and use.mode == "jit":
        x = gather_by_compiler(x, use.placement, role)
    x = flat(x, role, use)
    return gather_rows(x, axes, 1 if role == "weight" else use.outer) if axes and use.mode == "shard_map" else x


def gather_rows(x: jax.Array, axes: sharding.Axes, outer: int) -> jax.Array:
    """Inside shard_map: [rows, columns] of every device along axes, joined within each of ``outer`` groups of rows."""
    grouped = x.reshape(outer, -1, x.shape[-1])
    return lax.all_gather(grouped, axes, axis=1, tiled=True).reshape(-1, x.shape[-1])


def gather_by_compiler(x: jax.Array, placement: Placement, role: Role) -> jax.Array:
    """Under plain jit: x [..., rows, columns] pinned to its pieces, then to whole rows, so that XLA gathers x and not what x was made of.

    With leading dims, it is those that m cuts, and the rows, of a sequence, that are gathered.
    """
    mesh, (rows, columns), gathered = jax.typeof(x).sharding.mesh, placement.at_rest(role), placement.gathered(role)
    leading = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 2)
    within = gathered if leading else rows
    columns = columns if x.shape[-1] > 1 else ()  # of scales of rows there is one column
    for cutting in (within, tuple(axis for axis in within if axis not in gathered)):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*leading, cutting, columns)))
    return x


def flat(x: jax.Array, role: Role, use: Use) -> jax.Array:
    """[..., M, columns] -> [M, columns]; batch dims stay."""
    return x if use.batched or role == "weight" else x.reshape(-1, x.shape[-1])


def unflattened(result: jax.Array, like: jax.Array, use: Use) -> jax.Array:
    """[M, columns] -> the leading dims of a tensor, whose sequences may be longer or shorter here."""
    return result if use.batched else result.reshape(*like.shape[:-2], -1, result.shape[-1])


def _scales_of_columns(scale: jax.Array, use: Use) -> jax.Array:
    """A scale of everything, of blocks, or of each column [..., 1, columns] -> [1, columns]."""
    return scale.reshape(1, scale.shape[-1]) if scale.ndim > 2 and not use.batched else scale


def _check_whole_blocks(x: jax.Array, role: Role, granularity: str, axis: int, use: Use) -> None:
    """ValueError where the devices' pieces of x [rows, columns] cut a block (P-5)."""
    if use.mode != "shard_map":
        return
    cutting, sizes = use.placement.at_rest(role), granularities.blocks(granularity, x.shape, axis)
    run = x.shape[0] // (use.outer if use.placement.gathered(role) and role != "weight" else 1)  # of rows that follow each other
    for what, length, size, axes in zip(("rows", "columns"), (run, x.shape[1]), sizes, cutting, strict=True):
        if axes and length % size:
            raise ValueError(
                f"no layout cuts a block (P-5), so pieces along {', '.join(axes)} hold a multiple of {size} {what}; they hold {length}. "
                "Use fewer devices along it, or recipe 'rowwise'."
            )
