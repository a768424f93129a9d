"""A linear's operands, each quantized along the axis that its GEMM reduces, and gathered in FP8.

Each device quantizes its own piece
(``quantize``), with an amax over the devices that share the scale (P-2); ``gathered_codes`` then
gathers codes, and the scales of rows, from other devices (P-6). Where one pass takes both sets of a
tensor's codes, ``gathered_pair`` gathers them as one set and a bit an element.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding

from fp8ref.jax.attention.operands import hadamard
from fp8ref.jax.distributed import sharding
from fp8ref.jax.gemm import gemm
from fp8ref.jax.kernels import casts as kernel_casts
from fp8ref.jax.linear import paired_codes, rounding
from fp8ref.jax.linear.carried import Layer, Operand
from fp8ref.jax.quantize import scales, scaling
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import CastSpec, Role
from fp8ref.shared.errors import require
from fp8ref.spec import granularity as granularities


def quantize(operand: Operand, role: Role, cast: CastSpec, axis: int, layer: Layer) -> Quantized:
    """Quantize a device's own piece: by the scale that is settled of it, a state's or one that
    was made before, else by the tensor's amax. Where codes are settled, nothing is quantized.

    Tensors in blocks are flattened to [rows, columns]. Others keep all dims: flattening a tensor
    that is cut along two dims would gather it.

    Raises:   ValueError, naming layer, role and recipe: as ``scaling.quantize``; a block that the
              mesh cuts (P-5).
    """
    x, scale = operand.tensor, operand.scale
    if isinstance(scale, Quantized):
        return dataclasses.replace(scale, axis=axis)
    assert x is not None
    quantized = functools.partial(
        scaling.quantize, fmt=cast.fmt, granularity=cast.granularity, policy=cast.policy
    )
    try:
        if layer.kernels and layer.by_kernel(role, cast):
            by = settled(scale) or dynamic_scales(scaling.amax(x), role, cast, layer)
            return kernel_casts.quantize(x, by, cast.fmt, axis, layer.kernels)
        random = rounding.random(operand.seed, x.shape, cast, role, axis, layer)
        if isinstance(scale, scales.Scales):
            return quantized(x, axis=axis, by=scale, random=random)
        if scale is not None:
            return scaling.quantize_by_state(x, scale, cast, axis=axis, random=random)
        if gemm.dequantizes(cast.granularity) or not cast.plain:
            x = flat(x, role, layer)
            random = random and random.like(x.shape)
            _check_whole_blocks(x, role, cast.granularity, axis, layer)
        x = rotated(x, cast, axis)
        # Reducing M means reducing all leading dims.
        axes = tuple(range(x.ndim - 1)) if axis == -2 and not layer.batched else axis
        axes = axes if cast.granularity == "rowwise" else axis
        largest = scaling.amax(
            x,
            cast.granularity,
            axis=axes,
            over=layer.over(role, cast.granularity, axis),
            with_producer=role == "grad_output",
            ragged=layer.ragged(role, axis),
        )
        whole = None
        if cast.policy.two_level is not None:
            whole = scaling.amax(x, over=layer.over(role, "tensorwise", axis))
        scales.implemented(cast.policy)
        own = scaling.scales_of(x, cast, largest, whole, axis)
        return quantized(x, axis=axes, by=own, random=random)
    except ValueError as error:
        raise ValueError(
            f"{layer.name}: {role} of recipe {layer.recipe.name!r}: {error}"
        ) from error


def rotated(x: Array, cast: CastSpec, axis: int) -> Array:
    """x, its blocks along axis rotated and rounded to bfloat16, if the cast rotates (S-23).

    Raises:   ValueError: an axis that blocks do not divide.
    """
    if cast.rotation is None:
        return x
    size, lines = cast.rotation.size, jnp.swapaxes(x, axis, -1)
    require(
        lines.shape[-1] % size == 0,
        f"a rotation of {size} needs the reduced axis divisible by it; got x.shape={x.shape}, "
        f"axis={axis}. Pad it, or take a recipe without a rotation.",
    )
    blocks = lines.reshape(*lines.shape[:-1], -1, size)
    turned = hadamard.rotate(blocks, jnp.array(cast.rotation.signs, jnp.float32))
    return jnp.swapaxes(turned.astype(jnp.bfloat16).reshape(lines.shape), axis, -1)


def settled(scale: Array | scales.Scales | None) -> scales.Scales | None:
    """The scales that a state holds, or that were made before."""
    return scales.with_inverse(scale) if isinstance(scale, Array) else scale


def dynamic_scales(amax: Array, role: Role, cast: CastSpec, layer: Layer) -> scales.Scales:
    """The scales of a tensorwise cast, of a device's amax (S-3, P-2)."""
    amax = scaling.over_devices(amax, layer.over(role, "tensorwise", -1))
    return scales.scales_from_amax(amax, cast.fmt, scales.implemented(cast.policy))


def gathered_codes(q: Quantized, role: Role, axis: int, layer: Layer) -> Quantized:
    """q as a GEMM takes it: flattened to [M, columns], gathered in FP8 from all devices that cut
    it, and to be reduced along axis. Scales of rows, columns or blocks are gathered with it. On one
    device nothing is gathered. Transposed codes, which no mesh gathers, are taken where they are
    reduced along their last axis."""
    if q.transposed is not None and axis == -2:
        return dataclasses.replace(q, codes=q.transposed, transposed=None, axis=-1)
    if layer.layout is not None:
        lines = q.granularity == "rowwise"
    else:
        blocks = gemm.dequantizes(q.granularity) and layer.mode == "shard_map"
        # Tensorwise scales, and scales of columns, are the same on all devices that gather.
        lines = blocks or (q.granularity == "rowwise" and axis == -1)
    scale, scale_inv = (
        gathered(v, role, layer) if lines else _scales_of_columns(v, layer)
        for v in (q.scale, q.scale_inv)
    )
    return dataclasses.replace(
        q, codes=gathered(q.codes, role, layer), scale=scale, scale_inv=scale_inv, axis=axis
    )


def gathered_pair(
    rows: Quantized, columns: Quantized, role: Role, layer: Layer
) -> tuple[Quantized, Quantized]:
    """Both sets of codes of a tensor from all devices that cut it: the bits of ``gathered_codes``
    of each, moved together (``paired_codes``)."""
    codes, bits = (gathered(x, role, layer) for x in paired_codes.merged(rows, columns))
    row_scales = [gathered(v, role, layer) for v in (rows.scale, rows.scale_inv)]
    column_scales = [_scales_of_columns(v, layer) for v in (columns.scale, columns.scale_inv)]
    rows = dataclasses.replace(rows, scale=row_scales[0], scale_inv=row_scales[1], axis=-1)
    columns = dataclasses.replace(
        columns, scale=column_scales[0], scale_inv=column_scales[1], axis=-2
    )
    return paired_codes.parted(codes, bits, rows, columns)


def gathered(x: Array, role: Role, layer: Layer) -> Array:
    """Codes, scales or a tensor [M, ...], gathered as a GEMM needs it."""
    if layer.layout is not None:
        return flat(gather_by_compiler(x, layer.layout.cut(role)), role, layer)
    axes = layer.placement.gathered(role)
    x = flat(x, role, layer)
    if axes and layer.mode == "shard_map":
        return gather_rows(x, axes, 1 if role == "weight" else layer.outer)
    return x


def gather_rows(x: Array, axes: sharding.Axes, outer: int) -> Array:
    """Inside shard_map: gather [rows, columns] along axes within ``outer`` row groups."""
    grouped = x.reshape(outer, -1, x.shape[-1])
    return lax.all_gather(grouped, axes, axis=1, tiled=True).reshape(-1, x.shape[-1])


def gather_by_compiler(x: Array, cut: sharding.Cut) -> Array:
    """Under plain jit: pin x to its pieces, then to what is gathered, so that XLA gathers x itself.

    With one constraint XLA may move the gather before the cast, to the wider tensor under x.
    """
    rest, used = cut.specs(x.shape)
    if rest == used:
        return x
    mesh = jax.typeof(x).sharding.mesh
    for spec in (rest, used):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return x


def flat(x: Array, role: Role, layer: Layer) -> Array:
    """[..., M, columns] -> [M, columns]; batch dims stay."""
    return x if layer.batched or role == "weight" else x.reshape(-1, x.shape[-1])


def unflattened(result: Array, shape: tuple[int, ...], layer: Layer) -> Array:
    """[M, columns] -> [..., rows, columns] with the leading dims of a shape."""
    if layer.batched:
        return result
    return result.reshape(*shape[:-2], -1, result.shape[-1])


def _scales_of_columns(scale: Array, layer: Layer) -> Array:
    """Scales [..., 1, columns] -> [1, columns]; others as they are."""
    if scale.ndim > 2 and not layer.batched:
        return scale.reshape(1, scale.shape[-1])
    return scale


def _check_whole_blocks(x: Array, role: Role, granularity: str, axis: int, layer: Layer) -> None:
    """ValueError where a device's piece of x [rows, columns] splits a block (P-5)."""
    if layer.mode != "shard_map":
        return
    ragged = layer.ragged(role, axis)
    cutting = layer.placement.at_rest(role)
    sizes = granularities.blocks(granularity, x.shape, axis, ragged=ragged)
    # of rows that follow each other
    run = x.shape[0] // (layer.outer if layer.placement.gathered(role) and role != "weight" else 1)
    for dim, length, size, axes in zip(
        ("rows", "columns"), (run, x.shape[1]), sizes, cutting, strict=True
    ):
        if axes and length % size and not (ragged and dim == "rows"):
            raise ValueError(
                f"pieces along {', '.join(axes)} need multiples of {size} {dim}; they hold "
                f"{length}. Use fewer devices, or recipe 'rowwise' (P-5)."
            )
