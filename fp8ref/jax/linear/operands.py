"""The operands of a linear's GEMMs: quantize each tensor along the axis that its GEMM reduces, then
gather it in FP8.

``Use`` holds what is static about one call of a linear. Each device quantizes its own piece
(``quantize``), with an amax over the devices that share the scale (P-2); ``gathered_codes`` then
gathers codes, and the scales of rows, from other devices (P-6). Where one pass takes both sets of a
tensor's codes, ``gathered_pair`` gathers them as one set and a bit an element.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import NamedSharding

from fp8ref.jax.distributed import sharding
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.gemm import gemm
from fp8ref.jax.linear import paired_codes
from fp8ref.jax.quantize import scales, scaling
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, Gemm, Recipe, Role
from fp8ref.spec import granularity as granularities
from fp8ref.spec.hardware import Multiply

Known = Mapping[Role, jax.Array | scales.Scales | Quantized]
"""What is known of a role before its tensor: the scale that a state holds; the scales of an amax
that was taken before (P-9); or the codes that an optimizer made (O-16)."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """One call of a linear: all that is static about it. Hashable, so that custom_vjp passes it by.

    layout    how XLA finds the tensors, under plain jit.
    batched   leading dims are batch dims, not flattened to M.
    turned    the weight is [K, N].
    outer     the number of sequences in M.
    dtypes    those of the results, in the order of recipe.gemms.
    measures  a tap collects quantization statistics.
    multiply  simulated hardware that runs its FP8 GEMMs.
    """

    recipe: Recipe
    name: str
    placement: Placement
    mode: sharding.Mode
    layout: sharding.Layout | None = None
    batched: bool = False
    turned: bool = False
    outer: int = 1
    dtypes: tuple = ()
    observer: Callable | None = None
    measures: bool = False
    multiply: Multiply | None = None

    def over(self, role: Role, granularity: str, axis: int) -> sharding.Axes:
        """The mesh axes over which we reduce an amax; none under jit, where XLA does."""
        return self.placement.amax_axes(role, granularity, axis) if self.mode == "shard_map" else ()

    def collective(self, which: Gemm) -> sharding.Reduction | None:
        """The sum over devices that completes a GEMM's partial results; None if there is none, or
        XLA does it."""
        reduction = self.placement.reduction(which, 1 if which == "grad_weight" else self.outer)
        return reduction if self.mode == "shard_map" and reduction.axes else None

    def summed_by_compiler(self, which: Gemm) -> bool:
        """True if XLA sums a GEMM's float32 accumulators over devices, under plain jit."""
        return (
            self.layout is not None
            and self.layout.summed(which)
            and self.placement.reduction(which, 1).parts != "result"
        )

    def scales_own_results(self) -> bool:
        """True if each device scales its own results of the backward GEMMs, not sums over devices
        (``parallel.reduce``): then their scales may be a device's own, too."""
        reductions = [self.collective(which) for which in ("grad_input", "grad_weight")]
        return all(each is None or each.parts != "accumulators" for each in reductions)

    def axis(self, which: Gemm, role: Role) -> int:
        """The axis, -1 or -2, of a tensor along which a GEMM reduces it."""
        axis = REDUCED_AXES[which][OPERANDS[which].index(role)] - 2
        return -3 - axis if self.turned and role == "weight" else axis

    def ragged(self, role: Role, axis: int) -> bool:
        """True if a device's last block of rows may be shorter (L-5). Rows that are gathered hold
        whole blocks: else those of one device would lie elsewhere."""
        return (
            role != "weight"
            and axis == -2
            and not (self.mode == "shard_map" and self.placement.gathered(role))
        )

    def serves_backward(self, role: Role) -> bool:
        """True if the output GEMM's operand of this role serves the backward GEMM too, quantized
        once."""
        return self.recipe.serves_both(role)

    def gathers_again(self, role: Role) -> bool:
        """True if the backward pass gathers again what the forward pass gathered."""
        return (
            self.mode == "shard_map"
            and bool(self.placement.gathered(role))
            and self.serves_backward(role)
        )

    def gathers_pair(self) -> bool:
        """True if one gather of grad_output serves both backward GEMMs, each with its own scales
        (``paired_codes``).
        """
        return (
            self.mode == "shard_map"
            and bool(self.placement.gathered("grad_output"))
            and self.recipe.pairs_gradients
        )


def quantize(
    x: jax.Array, role: Role, cast: CastSpec, axis: int, role_scales: Known, use: Use
) -> Quantized:
    """Quantize a device's own piece: by the scale of the role's state if it has one, or by scales
    that are made already, else by the tensor's amax. A role whose codes are known is not quantized.

    Tensors in blocks are flattened to [rows, columns]. Others keep all dims: flattening a tensor
    that is cut along two dims would gather it.

    Raises:   ValueError, naming layer, role and recipe: as ``scaling.quantize``; a block that the
              mesh cuts (P-5).
    """
    own_scale = role_scales.get(role)
    if isinstance(own_scale, Quantized):
        return dataclasses.replace(own_scale, axis=axis)
    try:
        if isinstance(own_scale, scales.Scales):
            return scaling.quantize(
                x,
                cast.fmt,
                granularity=cast.granularity,
                policy=cast.policy,
                axis=axis,
                by=own_scale,
            )
        if own_scale is not None:
            return scaling.quantize_by_state(x, own_scale, cast, axis=axis)
        over = use.over(role, cast.granularity, axis)
        if gemm.dequantizes(cast.granularity):
            x = flat(x, role, use)
            _check_whole_blocks(x, role, cast.granularity, axis, use)
        # Reducing M means reducing all leading dims.
        axes = tuple(range(x.ndim - 1)) if axis == -2 and not use.batched else axis
        axes = axes if cast.granularity == "rowwise" else axis
        largest = scaling.amax(
            x,
            cast.granularity,
            axis=axes,
            over=over,
            with_producer=role == "grad_output",
            ragged=use.ragged(role, axis),
        )
        by = scales.scales_from_amax(largest, cast.fmt, scales.implemented(cast.policy))
        return scaling.quantize(
            x, cast.fmt, granularity=cast.granularity, policy=cast.policy, axis=axes, by=by
        )
    except ValueError as error:
        raise ValueError(f"{use.name}: {role} of recipe {use.recipe.name!r}: {error}") from error


def gathered_codes(q: Quantized, role: Role, axis: int, use: Use) -> Quantized:
    """q as a GEMM takes it: flattened to [M, columns], gathered in FP8 from all devices that cut
    it, and to be reduced along axis. Scales of rows, columns or blocks are gathered with it. On one
    device nothing is gathered."""
    if use.layout is not None:
        lines = q.granularity == "rowwise"
    else:
        blocks = gemm.dequantizes(q.granularity) and use.mode == "shard_map"
        # Tensorwise scales, and scales of columns, are the same on all devices that gather.
        lines = blocks or (q.granularity == "rowwise" and axis == -1)
    scale, scale_inv = (
        gathered(v, role, use) if lines else _scales_of_columns(v, use)
        for v in (q.scale, q.scale_inv)
    )
    return dataclasses.replace(
        q, codes=gathered(q.codes, role, use), scale=scale, scale_inv=scale_inv, axis=axis
    )


def gathered_pair(
    rows: Quantized, columns: Quantized, role: Role, use: Use
) -> tuple[Quantized, Quantized]:
    """Both sets of codes of a tensor from all devices that cut it: the bits of ``gathered_codes``
    of each, moved together (``paired_codes``)."""
    codes, bits = (gathered(x, role, use) for x in paired_codes.merged(rows, columns))
    row_scales = [gathered(v, role, use) for v in (rows.scale, rows.scale_inv)]
    column_scales = [_scales_of_columns(v, use) for v in (columns.scale, columns.scale_inv)]
    rows = dataclasses.replace(rows, scale=row_scales[0], scale_inv=row_scales[1], axis=-1)
    columns = dataclasses.replace(
        columns, scale=column_scales[0], scale_inv=column_scales[1], axis=-2
    )
    return paired_codes.parted(codes, bits, rows, columns)


def gathered(x: jax.Array, role: Role, use: Use) -> jax.Array:
    """Codes, scales or a tensor [M, ...], gathered from all devices that cut what a GEMM needs
    whole."""
    if use.layout is not None:
        return flat(gather_by_compiler(x, use.layout.cut(role)), role, use)
    axes = use.placement.gathered(role)
    x = flat(x, role, use)
    return (
        gather_rows(x, axes, 1 if role == "weight" else use.outer)
        if axes and use.mode == "shard_map"
        else x
    )


def gather_rows(x: jax.Array, axes: sharding.Axes, outer: int) -> jax.Array:
    """Inside shard_map: gather [rows, columns] along axes, joining rows within each of ``outer``
    groups of them."""
    grouped = x.reshape(outer, -1, x.shape[-1])
    return lax.all_gather(grouped, axes, axis=1, tiled=True).reshape(-1, x.shape[-1])


def gather_by_compiler(x: jax.Array, cut: sharding.Cut) -> jax.Array:
    """Under plain jit: pin x to its pieces, then to what is gathered of them, so that XLA gathers x
    itself.

    With one constraint XLA may move the gather in front of the cast, to the wider tensor that x was
    made of.
    """
    rest, used = cut.specs(x.shape)
    if rest == used:
        return x
    mesh = jax.typeof(x).sharding.mesh
    for spec in (rest, used):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return x


def flat(x: jax.Array, role: Role, use: Use) -> jax.Array:
    """[..., M, columns] -> [M, columns]; batch dims stay."""
    return x if use.batched or role == "weight" else x.reshape(-1, x.shape[-1])


def unflattened(result: jax.Array, like: jax.Array, use: Use) -> jax.Array:
    """[M, columns] -> [..., rows, columns], with the leading dims of ``like``; the number of rows
    may differ from its."""
    return result if use.batched else result.reshape(*like.shape[:-2], -1, result.shape[-1])


def _scales_of_columns(scale: jax.Array, use: Use) -> jax.Array:
    """Scales of columns [..., 1, columns] -> [1, columns]; a single scale and scales of blocks stay
    as they are."""
    return scale.reshape(1, scale.shape[-1]) if scale.ndim > 2 and not use.batched else scale


def _check_whole_blocks(x: jax.Array, role: Role, granularity: str, axis: int, use: Use) -> None:
    """ValueError where the devices' pieces of x [rows, columns] cut a block (P-5)."""
    if use.mode != "shard_map":
        return
    ragged = use.ragged(role, axis)
    cutting, sizes = (
        use.placement.at_rest(role),
        granularities.blocks(granularity, x.shape, axis, ragged=ragged),
    )
    # of rows that follow each other
    run = x.shape[0] // (use.outer if use.placement.gathered(role) and role != "weight" else 1)
    for dim, length, size, axes in zip(
        ("rows", "columns"), (run, x.shape[1]), sizes, cutting, strict=True
    ):
        if axes and length % size and not (ragged and dim == "rows"):
            raise ValueError(
                f"no layout cuts a block (P-5), so pieces along {', '.join(axes)} hold a "
                f"multiple of {size} {dim}; they hold {length}. Use fewer devices along it, or "
                "recipe 'rowwise'."
            )
