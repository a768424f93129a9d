"""A grouped linear in the shape of ``lax.ragged_dot``: three grouped GEMMs (spec X), joined to
JAX's autodiff by one custom_vjp.

    y, _ = grouped.apply(x, w, group_sizes, recipe="rowwise")  # [M, K] x [E, K, N] -> [M, N]

Read it from top to bottom, as ``linear``. ``grouped_operands`` quantizes and multiplies, block of
rows after block of rows on FP8 codes (X-10). ``lax.ragged_dot`` itself multiplies all rows by all
weights.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref import grouped as recipes
from fp8ref.granularity import by_name
from fp8ref.grouped import GroupedRecipe
from fp8ref.jax import attention_inputs, delayed, derivatives, gemm, gemm_observer, grouped_reports, linear, sharding, stats
from fp8ref.jax import grouped_operands as operands
from fp8ref.jax.grouped_operands import Groups, Segmented
from fp8ref.jax.scaling import Quantized
from fp8ref.recipe import OPERANDS, Gemm, Recipe, Role


@dataclass(frozen=True, kw_only=True)
class Use:
    """One call: all that is static about it. dtypes are those of output, grad_input and grad_weight.

    observer   of ``linear.observing``, or None; measures: whether statistics are measured.
    over       the mesh axes along which devices have rows of the same groups, and share their scales.
    axes       inside shard_map those that any tensor varies along: observations are of all of them.
    """

    recipe: GroupedRecipe
    name: str
    dtypes: tuple = ()
    observer: Callable | None = None
    measures: bool = False
    over: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()


def apply(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    recipe: str | Recipe | GroupedRecipe,
    state: delayed.State | None = None,
    seen: delayed.Seen | None = None,
    over: tuple[str, ...] = (),
    name: str = "grouped",
) -> tuple[jax.Array, delayed.Seen | None]:
    """output [M, N] = each group's rows of x [M, K] x its weight of w [E, K, N], and gradients by
    the recipe's grouped GEMMs. Under ``linear.observing`` each group's GEMMs report as a linear's.

    Works under jit, grad, vmap and scan; group_sizes may be traced. Under jit on sharded arrays XLA
    divides it, and amaxes are of whole arrays. Inside shard_map rows and weights are a device's own,
    as of experts that a mesh axis cuts; gradients of what all devices have are summed.

    over      mesh axes of shard_map along which devices have the same weights, and rows of the same
              groups: an amax that covers rows is of a group's rows on all of them, unless blocks cut
              the rows (X-3, X-13). Observations of delayed scaling are always of all devices.

    Shapes:   x [M, K] and w [E, K, N] of one dtype, bfloat16, float16 or float32; group_sizes
              integers [E], of a sum of at most M; output [M, N] of x's dtype.
    Order:    spec X-2, X-3, X-7; rows of no group are replaced by zeros first.
    Specials: a row of no group is not read; its output and gradient are +0. grad_weight of a group
              without rows is +0. A NaN of one group stays in it, unless a scale is shared (X-6).
    Returns:  (output, seen), as ``linear.apply``: seen merged with what this use observes (X-9).
    Gradient: by x, w and seen; state is a constant, and group_sizes are integers.
    Raises:   ValueError, naming the layer: shapes or dtypes that do not fit; under FP8 K or N that
              is no multiple of 16; a recipe this backend cannot run, a state or seen of another
              recipe, or none if the recipe needs them; inside shard_map amaxes of all groups.
    """
    y, seen, _ = apply_with_stats(x, w, group_sizes, recipe=recipe, state=state, seen=seen, over=over, name=name, tap=None)
    return y, seen


def apply_with_stats(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    recipe: str | Recipe | GroupedRecipe,
    state: delayed.State | None = None,
    seen: delayed.Seen | None = None,
    over: tuple[str, ...] = (),
    name: str = "grouped",
    tap: jax.Array | None,
) -> tuple[jax.Array, delayed.Seen | None, jax.Array | None]:
    """``apply``, and with a tap the statistics of its six operands, as ``linear.apply_with_stats``: each
    GEMM's operands are measured, of all groups together. Raises as apply."""
    recipe = check_recipe(recipe, name)
    _check_arrays(x, w, group_sizes, recipe, name)
    delayed.check(state, seen, recipe.recipe, name)
    if not len(x) or not len(w):
        # The output depends on nothing. Copies, as what a layer gives back unchanged could seem lost.
        return jnp.zeros((len(x), w.shape[2]), x.dtype), jax.tree.map(jnp.copy, seen), tap
    x, w, group_sizes, axes = _on_one_device(x, w, group_sizes, recipe, over, name)
    how: dict = {"observer": gemm_observer.current(), "measures": tap is not None, "over": over, "axes": axes}
    use = Use(recipe=recipe, name=name, dtypes=(x.dtype, x.dtype, w.dtype), **how)
    x, w = (derivatives.reverse_only(v, name) for v in (x, w))
    known = dict(delayed.scales(state or {}, recipe.recipe))
    y, after, tap = _grouped(x, w, group_sizes, known, dict(seen or {}), tap, use)
    return y, None if seen is None else after, tap


def check_recipe(recipe: str | Recipe | GroupedRecipe, name: str) -> GroupedRecipe:
    """The grouped recipe, if this backend runs it; ValueError, naming the layer, otherwise."""
    try:
        recipe = recipes.by_name(recipe)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    linear.check_recipe(recipe.recipe, name)
    for which, spec in recipe.recipe.gemms.items():
        for role, cast in zip(OPERANDS[which], (spec.a, spec.b), strict=True):
            if cast is not None and role != "weight" and by_name(cast.granularity).other not in (None, 1):
                raise ValueError(
                    f"{name}: no block of a grouped {role} has several rows; got {cast.granularity!r} in {which} of recipe "
                    f"{recipe.name!r}. Use 'blockwise_1x128'."
                )
    return recipe


def quantize_operand(
    which: Gemm,
    role: Role,
    tensor: jax.Array,
    groups: Groups,
    recipe: GroupedRecipe,
    scale: jax.Array | None = None,
    over: tuple[str, ...] = (),
) -> Quantized | Segmented | jax.Array:
    """A role's tensor as a GEMM takes it: x or g [M, columns], zeros in rows of no group, or w [E,
    K, N]; itself in high precision. scale is that of a delayed state, for a cast that has one; over as in
    ``apply``."""
    spec, at = recipe.recipe.gemms[which], OPERANDS[which].index(role)
    cast = (spec.a, spec.b)[at]
    if cast is None:
        return tensor
    scale = scale if cast.delayed else None
    if role == "weight":  # [E, K, N]: K is reduced by the output, N by grad_input
        return operands.quantize_weights(tensor, cast, -2 if which == "output" else -1, recipe.amax, scale)
    return operands.quantize_rows(tensor, cast, -2 if which == "grad_weight" else -1, groups, recipe.amax, scale, over)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _grouped(x: jax.Array, w: jax.Array, group_sizes: jax.Array, state_scales: dict, seen: dict, tap: jax.Array | None, use: Use):
    """(output, seen, tap) of one use; differentiable by ``_forward`` and ``_backward``."""
    return _forward(x, w, group_sizes, state_scales, seen, tap, use, differentiated=False)[0]


def _forward(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    state_scales: dict,
    seen: dict,
    tap: jax.Array | None,
    use: Use,
    *,
    differentiated: bool = True,
):
    """The output GEMM: ((output, seen, tap), residuals for ``_backward``)."""
    groups = operands.groups_of(group_sizes, len(x))
    saved = x, w
    if differentiated:
        x, w = (derivatives.not_again(v, use.name) for v in saved)
    tensors: dict[Role, jax.Array] = {"input": groups.only(x), "weight": w}
    y, measured = _gemm("output", tensors, groups, state_scales, use)  # [M, K] x [E, K, N] -> [M, N]
    tap = None if tap is None else tap + stats.rows(measured)
    return (y, _observed(seen, tensors, seen, groups, use), tap), (saved, group_sizes, state_scales, seen)


def _backward(use: Use, residuals, cotangents):
    """grad_input and grad_weight, in the order of ``_grouped``'s arguments; the cotangents of seen and
    tap carry observations and measurements, as in ``linear``."""
    ((x, w), group_sizes, state_scales, seen), (g, later, tap) = residuals, cotangents
    groups = operands.groups_of(group_sizes, len(x))
    g = derivatives.not_again(g, use.name)
    tensors: dict[Role, jax.Array] = {"input": groups.only(x), "weight": w, "grad_output": groups.only(g)}
    grad_input, of_first = _gemm("grad_input", tensors, groups, state_scales, use)  # [M, N] x [E, K, N] -> [M, K]
    grad_weight, of_second = _gemm("grad_weight", tensors, groups, state_scales, use)  # [M, N] x [M, K] -> [E, K, N]
    of_seen = _observed(later, {"grad_output": tensors["grad_output"]}, seen, groups, use)
    tap = None if tap is None else tap + stats.rows(of_first | of_second)
    return grad_input, grad_weight, None, jax.tree.map(jnp.zeros_like, state_scales), of_seen, tap


_grouped.defvjp(_forward, _backward)


def _gemm(
    which: Gemm, tensors: Mapping[Role, jax.Array], groups: Groups, state_scales: Mapping[Role, jax.Array], use: Use
) -> tuple[jax.Array, stats.Measured]:
    """One of the three grouped GEMMs: quantize, multiply, round as G-8 says, cast to the result's dtype; and
    measurements of its operands."""
    spec, roles, dtype = use.recipe.recipe.gemms[which], OPERANDS[which], use.dtypes[list(OPERANDS).index(which)]
    out_dtype = gemm.output_dtype(spec, dtype)
    scope = f"{use.name}/{which}"
    with jax.named_scope(scope):
        a, b = (quantize_operand(which, role, tensors[role], groups, use.recipe, state_scales.get(role), use.over) for role in roles)
        if isinstance(a, jax.Array) or isinstance(b, jax.Array):
            # An operand that is cast beside one that is not is dequantized, and rounded to its tensor's dtype (L-4).
            a, b = (
                v if isinstance(v, jax.Array) else operands.dequantized(v).astype(tensors[role].dtype)
                for role, v in zip(roles, (a, b), strict=True)
            )
            if which == "grad_weight":
                return operands.rows_by_rows_hp(a, b, groups, dtype, scope=scope), {}
            return operands.rows_by_weights_hp(a, b, groups, which == "grad_input", dtype, scope=scope), {}
        assert isinstance(a, Quantized | Segmented)
        assert isinstance(b, Quantized | Segmented)
        if which == "grad_weight":
            out = operands.rows_by_rows(a, b, spec, groups, out_dtype, scope=scope)
        else:
            assert isinstance(b, Quantized)
            out = operands.rows_by_weights(a, b, spec, groups, out_dtype, scope=scope)
    given = tuple(tensors[role] for role in roles)
    if use.observer is not None:
        grouped_reports.observe(use.observer, use.name, which, given, (a, b), groups, out)
    measured: stats.Measured = {}
    if use.measures:
        measured = {(which, role): grouped_reports.measure(x, q, groups) for role, x, q in zip(roles, given, (a, b), strict=True)}
    return out.astype(dtype), measured


def _observed(seen: dict, tensors: Mapping[Role, jax.Array], given: dict, groups: Groups, use: Use) -> dict:
    """seen, merged with the amaxes of those of its roles that are among tensors, on all devices, unless no
    group has rows (X-9)."""
    if not seen:
        return {}
    used, merged = (lax.pmax(groups.ends[-1], use.axes) if use.axes else groups.ends[-1]) > 0, {}
    for role, of_role in seen.items():
        if role in tensors:
            found = jnp.where(used, delayed.observe(tensors[role], over=use.axes), 0.0)
            of_role = delayed.larger(of_role, found)
        merged[role] = delayed.over_batch(of_role, given[role])
    return merged


def _on_one_device(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, recipe: GroupedRecipe, over: tuple[str, ...], name: str
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[str, ...]]:
    """The arrays, inside shard_map marked as varying along all axes that one of them varies along, and those axes: so the
    gradient of one that does not vary is summed over the devices. ValueError for scales that would be of several devices' groups;
    axes of over that no array varies along."""
    axes = frozenset().union(*map(sharding.varying, (x, w, group_sizes)))
    if unknown := sorted(set(over) - axes):
        raise ValueError(
            f"{name}: over names axes of shard_map along which devices have rows of their own; got {', '.join(unknown)}, along which no "
            "argument varies. Leave them out."
        )
    casts = [cast for spec in recipe.recipe.gemms.values() for cast in (spec.a, spec.b) if cast is not None]
    if axes and recipe.amax == "all" and any(cast.delayed is None for cast in casts):
        raise ValueError(
            f"{name}: inside shard_map amaxes are of one device's groups; recipe {recipe.name!r} has amaxes of all groups, over "
            f"{', '.join(sorted(axes))}. Use amaxes of a 'group', or plain jit."
        )
    return *(attention_inputs.as_varying(v, axes) for v in (x, w, group_sizes)), tuple(sorted(axes))  # type: ignore[return-value]


def _check_arrays(x: jax.Array, w: jax.Array, group_sizes: jax.Array, recipe: GroupedRecipe, name: str) -> None:
    """ValueError for shapes or dtypes that do not fit."""
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{name}: a grouped linear takes x [M, K] and w [E, K, N] with the same K; got {x.shape} and {w.shape}.")
    if group_sizes.shape != w.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"{name}: group_sizes are integers [E], one for each of {len(w)} weights; got {group_sizes.dtype} {group_sizes.shape}."
        )
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"{name}: x and w are of one dtype, bfloat16, float16 or float32; got {x.dtype} and {w.dtype}. Cast the weight first."
        )
    if recipe.recipe.fp8 and (w.shape[1] % 16 or w.shape[2] % 16):
        raise ValueError(
            f"{name}: FP8 needs K and N to be multiples of 16 (L-5); got w.shape={w.shape}. Pad the experts or use recipe 'bf16'."
        )
