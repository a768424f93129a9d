"""A grouped linear in the shape of ``lax.ragged_dot``: three grouped GEMMs (spec X), joined to
JAX's autodiff by one custom_vjp.

    y, _ = grouped.apply(x, w, group_sizes, recipe="rowwise")  # [M, K] x [E, K, N] -> [M, N]

Read it from top to bottom, as ``linear``. ``operands`` quantizes and multiplies blocks of rows, on
FP8 codes (X-10). ``lax.ragged_dot`` itself multiplies all rows by all weights.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8ref.jax import delayed
from fp8ref.jax.attention.operands import inputs as attention_inputs
from fp8ref.jax.experts import arguments, operands, reports
from fp8ref.jax.experts.operands import Codes, Groups, Segmented, Slot
from fp8ref.jax.gemm import gemm
from fp8ref.jax.linear import carried
from fp8ref.jax.linear import observer as gemm_observer
from fp8ref.jax.linear.carried import Observations, Seen
from fp8ref.jax.quantize import stats
from fp8ref.jax.quantize.cast import DTYPES
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.jax.transforms import derivatives
from fp8ref.recipe import OPERANDS, CastSpec, Gemm, Recipe, Role
from fp8ref.selection.grouped import GroupedRecipe
from fp8ref.selection.rules import casts_of

__all__ = ["CodedRows", "apply", "apply_codes", "quantize_operand"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One call: all that is static. dtypes are those of output, grad_input and grad_weight.

    observer   of ``linear.observing``, or None; measures: whether statistics are measured.
    over       the mesh axes along which devices have rows of the same groups, and share their
               scales.
    axes       inside shard_map those that any tensor varies along: observations are of all of them.
    slot       whether grad_output arrives in FP8, as the cotangent of a slot.
    """

    recipe: GroupedRecipe
    name: str
    dtypes: tuple = ()
    observer: Callable | None = None
    measures: bool = False
    over: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    slot: bool = False


class CodedRows(NamedTuple):
    """Rows [M, K] that a cast before has made FP8 (X-14). ``codes`` makes and moves them.

    x           the rows, or what only stands for them, in dtype and shape, where codes are there.
    codes       x in FP8, observed before; None: x is cast here.
    grad_codes  whether their gradient arrives in FP8, with its observation, as the cotangent of the
                slot that ``apply_codes`` returns.
    """

    x: Array
    codes: Codes | None = None
    grad_codes: bool = False


def apply(
    x: Array,
    w: Array,
    group_sizes: Array,
    *,
    recipe: str | Recipe | GroupedRecipe,
    state: delayed.State | None = None,
    seen: Seen | None = None,
    over: tuple[str, ...] = (),
    name: str = "grouped",
) -> tuple[Array, Seen | None]:
    """output [M, N] = each group's rows of x [M, K] x its weight of w [E, K, N], and gradients by
    the recipe's grouped GEMMs. Under ``linear.observing`` each group's GEMMs report as a linear's.

    Works under jit, grad, vmap and scan; group_sizes may be traced. Under jit on sharded arrays XLA
    divides it, and amaxes are of whole arrays. Inside shard_map rows and weights are a device's
    own, as of experts that a mesh axis cuts; gradients of what all devices have are summed.

    over      mesh axes of shard_map along which devices have the same weights, and rows of the same
              groups: an amax that covers rows is of a group's rows on all of them, unless blocks
              cut the rows (X-3, X-13). Observations of delayed scaling are always of all devices.

    Shapes:   x [M, K] and w [E, K, N] of one dtype, bfloat16, float16 or float32; group_sizes
              integers [E], of a sum of at most M; output [M, N] of x's dtype.
    Order:    spec X-2, X-3, X-7; rows of no group are replaced by zeros first.
    Specials: a row of no group is not read; its output and gradient are +0. grad_weight of a group
              without rows is +0. A NaN of one group stays in it, unless a scale is shared (X-6).
    Returns:  (output, seen), as ``linear.apply``: seen merged with what this use observes (X-9);
              each GEMM's operands are measured, of all groups together.
    Gradient: by x, w and seen; state is a constant, and group_sizes are integers.
    Raises:   ValueError, naming the layer: shapes or dtypes that do not fit; on a CPU, where they
              are not traced, group_sizes below 0 or of a sum above M; under FP8 K or N that is no
              multiple of 16; a recipe this backend cannot run, a state or seen of another recipe,
              or none if the recipe needs them; inside shard_map amaxes of all groups; simulated
              hardware.
    """
    rows = CodedRows(x)
    y, seen, _ = apply_codes(
        rows, w, group_sizes, recipe=recipe, state=state, seen=seen, over=over, name=name
    )
    return y, seen


def apply_codes(
    rows: CodedRows,
    w: Array,
    group_sizes: Array,
    *,
    recipe: str | Recipe | GroupedRecipe,
    state: delayed.State | None = None,
    seen: Seen | None = None,
    over: tuple[str, ...] = (),
    name: str = "grouped",
) -> tuple[Array, Seen | None, Slot | None]:
    """``apply`` to rows that a cast before has made FP8 (X-14): where one cast of them serves both
    GEMMs, all GEMMs take its codes. Observers and statistics see no such rows. The slot of
    ``grad_codes`` is returned last."""
    recipe, x = arguments.check_recipe(recipe, name), rows.x
    amaxes, statistics, *_ = carried.observations(seen)
    arguments.check_arrays(x, w, group_sizes, recipe, name)
    delayed.check(state, amaxes, recipe.recipe, name)
    if not len(x) or not len(w):
        # The output depends on nothing. Copies: a layer's input given back could seem lost.
        return jnp.zeros((len(x), w.shape[2]), x.dtype), jax.tree.map(jnp.copy, seen), None
    x, w, group_sizes, axes = arguments.on_one_device(x, w, group_sizes, recipe, over, name)
    layer = Layer(
        recipe=recipe,
        name=name,
        dtypes=(x.dtype, x.dtype, w.dtype),
        observer=gemm_observer.current(),
        measures=statistics is not None,
        over=over,
        axes=axes,
        slot=rows.grad_codes,
    )
    x, w = (derivatives.reverse_only(v, name) for v in (x, w))
    scales = dict(delayed.scales(state or {}, recipe.recipe))
    own_seen = Observations(dict(amaxes or {}), statistics)
    y, merged, slot = _grouped(x, w, group_sizes, scales, own_seen, rows.codes, layer)
    return y, carried.after(seen, *merged), slot


def quantize_operand(
    which: Gemm,
    role: Role,
    tensor: Array,
    groups: Groups,
    recipe: GroupedRecipe,
    scale: Array | None = None,
    over: tuple[str, ...] = (),
) -> Quantized | Segmented | Array:
    """A role's tensor as a GEMM takes it: x or g [M, columns], zeros in rows of no group, or w [E,
    K, N]; itself in high precision. scale is that of a delayed state, for a cast that has one; over
    as in ``apply``."""
    cast = casts_of(recipe.recipe)[which, role]
    if cast is None:
        return tensor
    scale = scale if cast.delayed else None
    if role == "weight":  # [E, K, N]: K is reduced by the output, N by grad_input
        axis = -2 if which == "output" else -1
        return operands.quantize_weights(tensor, cast, axis, recipe.amax, scale)
    axis = -2 if which == "grad_weight" else -1
    return operands.quantize_rows(tensor, cast, axis, groups, recipe.amax, scale, over)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _grouped(x, w, group_sizes, scales: dict, seen: Observations, codes, layer: Layer):
    """(output, (amaxes, statistics), slot); differentiated by ``_forward`` and ``_backward``."""
    return _forward(x, w, group_sizes, scales, seen, codes, layer, differentiated=False)[0]


def _forward(
    x: Array,
    w: Array,
    group_sizes: Array,
    scales: dict,
    seen: Observations,
    codes: Codes | None,
    layer: Layer,
    *,
    differentiated: bool = True,
):
    """The output GEMM: ((output, (amaxes, statistics), slot), residuals for ``_backward``)."""
    groups = operands.groups_of(group_sizes, len(x))
    saved = (x if codes is None else None), w  # what stands for rows would take their memory
    if differentiated:
        x, w = (derivatives.not_again(v, layer.name) for v in (x, w))
    tensors: dict[Role, Array | Codes] = {
        "input": groups.only(x) if codes is None else codes,
        "weight": w,
    }
    # [M, K] x [E, K, N] -> [M, N]
    y, measured = _gemm("output", tensors, groups, scales, layer)
    statistics = None if seen.statistics is None else seen.statistics + stats.rows(measured)
    slot = _slot(y, len(w), layer) if layer.slot else None
    own_amaxes = seen.amaxes or {}
    amaxes = _observed(own_amaxes, tensors, own_amaxes, groups, layer)
    residuals = saved, group_sizes, scales, own_amaxes, codes
    return (y, (amaxes, statistics), slot), derivatives.saved(residuals)


def _slot(y: Array, experts: int, layer: Layer) -> Slot:
    """Zeros with the shapes of grad_output in FP8."""
    spec = layer.recipe.recipe.grad_input.a
    assert spec is not None
    table = jnp.zeros(() if spec.delayed else (experts, 1), jnp.float32)
    codes, table = (
        attention_inputs.like(v, y) for v in (jnp.zeros(y.shape, DTYPES[spec.fmt.name]), table)
    )
    return Slot(codes, table, table, jnp.zeros(3, jnp.float32))  # an observation is of all devices


def _backward(layer: Layer, residuals, cotangents):
    """grad_input and grad_weight, as ``_grouped``'s arguments; seen as in ``linear``."""
    (x, w), group_sizes, scales, amaxes, codes = residuals
    g, later, slot = cotangents
    groups = operands.groups_of(group_sizes, len(g))
    g = derivatives.not_again(g, layer.name)
    tensors: dict[Role, Array | Codes] = {
        "input": groups.only(x) if codes is None else codes,
        "weight": w,
        "grad_output": groups.only(g) if slot is None else Codes(*slot[:3]),
    }
    # [M, N] x [E, K, N] -> [M, K]
    grad_input, measured = _gemm("grad_input", tensors, groups, scales, layer)
    # [M, N] x [M, K] -> [E, K, N]
    grad_weight, more = _gemm("grad_weight", tensors, groups, scales, layer)
    later_amaxes, statistics = later
    grads: dict[Role, Array | Codes] = {"grad_output": tensors["grad_output"]}
    merged = _observed(later_amaxes, grads, amaxes, groups, layer)
    if slot is not None and "grad_output" in amaxes:
        largest = delayed.larger(merged["grad_output"], slot.seen)
        merged["grad_output"] = delayed.over_batch(largest, amaxes["grad_output"])
    if statistics is not None:
        statistics = statistics + stats.rows(measured | more)
    zeros = jax.tree.map(jnp.zeros_like, scales)
    return grad_input, grad_weight, None, zeros, Observations(merged, statistics), None


derivatives.defvjp(_grouped, _forward, _backward)


def _gemm(
    which: Gemm,
    tensors: Mapping[Role, Array | Codes],
    groups: Groups,
    scales: Mapping[Role, Array],
    layer: Layer,
) -> tuple[Array, stats.Measured]:
    """One of three grouped GEMMs: quantize, multiply, round (G-8), cast to its dtype; measured."""
    spec, roles = layer.recipe.recipe.gemms[which], OPERANDS[which]
    dtype = layer.dtypes[list(OPERANDS).index(which)]
    out_dtype, (x_dtype, _, w_dtype) = gemm.output_dtype(spec, dtype), layer.dtypes
    scope = f"{layer.name}/{which}"

    def operand(role: Role, cast: CastSpec | None) -> Quantized | Segmented | Array:
        tensor = tensors[role]
        if isinstance(tensor, Codes):
            assert cast is not None
            return tensor.operand(cast, -2 if which == "grad_weight" else -1, groups)
        return quantize_operand(
            which, role, tensor, groups, layer.recipe, scales.get(role), layer.over
        )

    with jax.named_scope(scope):
        a, b = (operand(role, cast) for role, cast in zip(roles, (spec.a, spec.b), strict=True))
        if isinstance(a, Array) or isinstance(b, Array):
            # An operand cast beside one that is not is dequantized, and rounded to its dtype (L-4).
            a, b = (
                v
                if isinstance(v, Array)
                else operands.dequantized(v).astype(w_dtype if role == "weight" else x_dtype)
                for role, v in zip(roles, (a, b), strict=True)
            )
            return operands.multiply_hp(which, a, b, groups, dtype, scope=scope), {}
        assert isinstance(a, Quantized | Segmented)
        assert isinstance(b, Quantized | Segmented)
        if which == "grad_weight":
            out = operands.rows_by_rows(a, b, spec, groups, out_dtype, scope=scope)
        else:
            assert isinstance(b, Quantized)
            out = operands.rows_by_weights(a, b, spec, groups, out_dtype, scope=scope)
    sources = tuple(tensors[role] for role in roles)
    assert not (layer.observer or layer.measures) or not any(
        isinstance(v, Codes) for v in sources
    ), "what observes sees rows"
    if layer.observer is not None:
        reports.observe(layer.observer, layer.name, which, sources, (a, b), groups, out)
    measured: stats.Measured = {}
    if layer.measures:
        shown = zip(roles, sources, (a, b), strict=True)
        measured = {(which, role): reports.measure(x, q, groups) for role, x, q in shown}  # type: ignore[arg-type]
    return out.astype(dtype), measured


def _observed(
    seen: Mapping,
    tensors: Mapping[Role, Array | Codes],
    own_seen: Mapping,
    groups: Groups,
    layer: Layer,
) -> dict:
    """seen with the amaxes of its roles among tensors, on all devices, unless no group has rows
    (X-9). FP8 tensors were observed before."""
    if not seen:
        return {}
    rows = groups.ends[-1]
    used = (lax.pmax(rows, layer.axes) if layer.axes else rows) > 0
    merged = {}
    for role, role_seen in seen.items():
        tensor = tensors.get(role)
        if tensor is not None and not isinstance(tensor, Codes):
            observation = jnp.where(used, delayed.observe(tensor, over=layer.axes), 0.0)
            role_seen = delayed.larger(role_seen, observation)
        merged[role] = delayed.over_batch(role_seen, own_seen[role])
    return merged
