"""One linear layer: three GEMMs (spec L), joined to JAX's autodiff by one custom_vjp.

Read it from top to bottom. ``apply`` and ``contract`` have the arguments checked, and what is
static of them collected in a ``Layer`` (``arguments``); ``forward`` casts input and weight, runs
the output GEMM, and returns what the backward pass needs; ``backward`` runs grad_input and
grad_weight. What a linear carries between them is in ``carried``. All three GEMMs go through
``three_gemms``: cast an operand along the axis that is reduced, unless its codes are there already
(a tensorwise operand is cast once, in ``forward`` or ``backward``, for both its GEMMs); gather in
FP8, multiply, round. ``operands`` casts and gathers, by ``scaling``, ``scales`` and ``cast``;
``gemm`` multiplies; ``placement`` says over which mesh axes; ``observer`` reports each GEMM to
whoever asked.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.jax import delayed
from fp8ref.jax.distributed import explicit_sharding, sharding
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.linear import arguments, carried, operands, rounding, three_gemms
from fp8ref.jax.linear.arguments import check_recipe
from fp8ref.jax.linear.carried import Layer, Observations, Operand, Scale, Seen
from fp8ref.jax.linear.observer import observing
from fp8ref.jax.quantize import cast, scaling, stats
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.jax.transforms import derivatives
from fp8ref.recipe import ROLES, CastSpec, Recipe, Role

__all__ = ["Observations", "apply", "check_recipe", "contract", "observing"]


def apply(
    x: Array,
    w: Array,
    *,
    recipe: str | Recipe,
    state: delayed.State | None = None,
    seen: Seen | None = None,
    placement: Placement | None = None,
    name: str = "linear",
    prepared: Quantized | Scales | None = None,
) -> tuple[Array, Seen | None]:
    """output [..., N] = input x [..., K] x weight w [N, K]; gradients by the backward GEMMs.

    Works under jit, grad, vmap and shard_map, on meshes of Auto and of Explicit axes; under
    ``hardware.simulating`` its FP8 GEMMs are those of simulated hardware (G-19).

    Shapes:   x [..., K] and w [N, K] of one dtype, bfloat16, float16 or float32; output [..., N] of
              that dtype. With a placement, inside shard_map, all of them are a device's pieces.
    Order:    leading dims flatten to M; spec L-2, L-3, L-6; between devices P-9.
    Specials: as ``scaling.quantize`` and ``gemm.matmul``: under policy torchao a NaN or Inf makes
              NaN of every output that its scale reaches.
    prepared  what is made of w already: its FP8 copy, as ``states.copies`` makes it, in place of a
              cast here (O-16); or its scales, as ``scales.scales_from_amax`` makes them, in place
              of an amax here (P-9). Under a copy w gives its shape and dtype and takes the
              gradient; its numbers are not read, so that under jit they are not computed. Inside
              shard_map a copy is a device's piece; scales are the whole weight's.
    Returns:  (output, seen): seen as it came, ``Observations`` or their amaxes alone, with what
              this use observed of input and weight, and with statistics of its output GEMM (H-4,
              Q-8). Give every use the seen of the use before it. A recipe that scales dynamically
              has no amaxes, and takes None.
    Gradient: by x, w and seen; state is a constant. That by seen carries what the backward pass
              observes, as ``Observations`` says. Inside shard_map gradients are complete: those of
              a device's pieces, summed over the other devices.
    Warns:    once, if dims are not multiples of 16, which XLA pads for the hardware (L-5).
    Raises:   ValueError, naming the layer: shapes or dtypes that do not fit, a recipe this backend
              cannot run, a state or seen of another recipe, or none if the recipe needs them; and
              as ``sharding.mode``. On Explicit axes also what ``lax.dot_general`` raises.
    """
    for key, value in (("x", x), ("w", w)):
        cast.check_array(value, f"{name}: {key} is an array of float32, float16 or bfloat16")
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{name}: a linear takes x [..., K] and w [N, K] with one K; got {x.shape} and "
            f"{w.shape}."
        )
    layer = arguments.layer(recipe, name, placement)

    def body(x, w, constants, seen, layout):
        (state, prepared, seed), rows = constants, x.reshape(1, -1) if x.ndim == 1 else x
        own = dataclasses.replace(layer, layout=layout)
        with rounding.seeded(seed):
            y, seen = contract(rows, w, own, state, seen, prepared=prepared)
        return y.reshape(-1) if x.ndim == 1 else y, seen

    numbers = ((x.ndim - 1,), (1,)), ((), ())
    constants = state, prepared, rounding.traced_seed()
    return explicit_sharding.run(body, x, w, constants, seen, numbers, placement, name)


def contract(
    x: Array,
    w: Array,
    layer: Layer,
    state: delayed.State | None,
    seen: Seen | None,
    *,
    prepared: Quantized | Scales | None = None,
    out_dtype=None,
) -> tuple[Array, Seen | None]:
    """x [..., M, K] x w [N, K], or w [..., N, K] of equal leading dims, -> [..., M, N]: the core of
    ``apply`` and ``contraction``.

    layer     of ``arguments.layer``; w is [..., K, N], as Flax keeps it, if it says turned: the
              same bits, without transposing it.
    out_dtype of the output; None: x's, which w's then is too.
    Raises:   as ``apply``; a name with '/', '(' or ')'.
    """
    layer, scales, own_seen = bound(x, w, layer, state, seen, prepared, out_dtype)
    if 0 in x.shape[:-1]:
        # Nothing is observed: copies, as what a layer gives back unchanged could seem lost.
        return _empty_output(x, w, layer), jax.tree.map(jnp.copy, seen)
    x, w = (derivatives.reverse_only(v, layer.name) for v in (x, w))
    y, merged = _linear(x, w, scales, own_seen, layer)
    return y, carried.after(seen, *merged)


def bound(
    x: Array,
    w: Array,
    layer: Layer,
    state: delayed.State | None,
    seen: Seen | None,
    prepared: Quantized | Scales | None,
    out_dtype=None,
) -> tuple[Layer, dict[Role, Scale], Observations]:
    """The layer of these arguments, settled scales, what it observes; raises as ``contract``."""
    amaxes, statistics, mu, seed = carried.observations(seen)
    layer = dataclasses.replace(layer, measures=statistics is not None)
    layer = arguments.resolved(layer, x, w, state, amaxes, out_dtype)
    if mu is not None:
        arguments.check_mu(mu, layer)
    scales: dict[Role, Scale] = dict(delayed.scales(state or {}, layer.recipe))
    if prepared is not None:
        scales["weight"] = arguments.checked_weight(prepared, w, layer)
    if layer.recipe.stochastic:
        seed = rounding.own_seed(layer.name, seed)
    return layer, scales, Observations(dict(amaxes or {}), statistics, mu, seed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear(x: Array, w: Array, scales: dict[Role, Scale], seen: Observations, layer: Layer):
    """(output, (amaxes, statistics)); differentiated by ``forward`` and ``backward``."""
    return forward(x, w, scales, seen, layer, differentiated=False)[0]


def forward(
    x: Array | Quantized,
    w: Array,
    scales: dict[Role, Scale],
    seen: Observations,
    layer: Layer,
    *,
    differentiated: bool = True,
):
    """The output GEMM: ((output, (amaxes, statistics)), residuals for ``backward``). x may be cast
    already, by the kernel that made it. ValueError inside shard_map without check_vma=True."""
    if differentiated and layer.mode == "shard_map" and not sharding.checks_variance(w):
        raise ValueError(
            f"{layer.name}: gradients of a linear inside shard_map need check_vma=True; else they "
            "are summed twice. Use jax.shard_map(..., check_vma=True)."
        )
    # What is saved for the backward pass is x itself, which other linears save too.
    tensors: dict[Role, Array] = {"weight": w}
    if not isinstance(x, Quantized):
        tensors = {"input": x, "weight": w}
    saved = {role: Operand(tensors.get(role), scales.get(role), seed=seen.seed) for role in ROLES}
    if differentiated:
        tensors = {role: derivatives.not_again(v, layer.name) for role, v in tensors.items()}
    roles = {role: saved[role]._replace(tensor=v) for role, v in tensors.items()}
    if isinstance(x, Quantized):
        roles["input"] = saved["input"]._replace(own=x)
    output = layer.recipe.output
    casts: dict[Role, CastSpec | None] = {"input": output.a, "weight": output.b}
    # ``proof`` reads layer and GEMM of a dot from this scope
    with jax.named_scope(f"{layer.name}/output"):
        for role, spec in casts.items():
            if spec and roles[role].own is None:
                axis = layer.axis("output", role)
                own = operands.quantize(roles[role], role, spec, axis, layer)
                roles[role] = roles[role]._replace(own=own)
        # [M, K] x [N, K] -> [M, N]
        y, measured, _ = three_gemms.run("output", roles, layer)
    # Residuals: a tensorwise operand serves the backward pass as codes, a byte an element. Every
    # other one is quantized again from its tensor, along another axis (L-3), so the tensor is
    # saved.
    for role, operand in roles.items():
        if operand.own is not None and layer.serves_backward(role):
            tensor = saved[role].tensor if layer.observer else None
            saved[role] = saved[role]._replace(tensor=tensor, own=operand.own)
    residuals = derivatives.saved((saved, seen._replace(statistics=None)))
    # no None: jax 0.12's vmap takes it for an array
    total = () if seen.statistics is None else seen.statistics + stats.rows(measured)
    amaxes = _observed(seen.amaxes or {}, roles, seen, layer)
    shape = x.codes.shape if isinstance(x, Quantized) else x.shape
    return (operands.unflattened(y, shape, layer), (amaxes, total)), residuals


def backward(layer: Layer, residuals, cotangents):
    """grad_input and grad_weight, in the order of ``_linear``'s arguments. The cotangents of seen
    and statistics hold those of later uses in ``later``; this use adds its own. That of the output
    may be cast already, by the kernel that made it."""
    (saved, seen), (g, (later, statistics)) = residuals, cotangents
    if not isinstance(g, Quantized):
        g = derivatives.not_again(g, layer.name)
    # Without a barrier XLA merges this gather with the forward one, and keeps the tensor.
    barrier = functools.partial(jax.tree.map, lax.optimization_barrier)
    roles = {
        role: v._replace(tensor=barrier(v.tensor), own=barrier(v.own))
        if layer.gathers_again(role)
        else v
        for role, v in saved.items()
    }
    with jax.named_scope(f"{layer.name}/grad_input"):
        if isinstance(g, Quantized):
            for_input = for_weight = roles["grad_output"]._replace(own=g)
        else:
            operand = roles["grad_output"]._replace(tensor=g)
            for_input, for_weight = _cast_for_both(operand, seen, layer)
        # [M, N] x [N, K] -> [M, K]
        roles["grad_output"] = for_input
        grad_input, measured, _ = three_gemms.run("grad_input", roles, layer)
    with jax.named_scope(f"{layer.name}/grad_weight"):
        # [M, N] x [M, K] -> [N, K]
        roles["grad_output"] = for_weight
        grad_weight, more, saturated = three_gemms.run("grad_weight", roles, layer, seen.mu)
    shape = g.codes.shape if isinstance(g, Quantized) else g.shape
    grad_input = operands.unflattened(grad_input, shape, layer)
    total = None if isinstance(statistics, tuple) else statistics + stats.rows(measured | more)
    amaxes = _observed(later, {"grad_output": for_input}, seen, layer)
    grad_scales = {
        role: jax.tree.map(jnp.zeros_like, v.scale)
        for role, v in saved.items()
        if v.scale is not None
    }
    no_grad = None if seen.seed is None else np.zeros(seen.seed.shape, jax.dtypes.float0)
    grad_seen = Observations(amaxes, total, saturated, no_grad)  # type: ignore[arg-type]
    return grad_input, grad_weight, grad_scales, grad_seen


derivatives.defvjp(_linear, forward, backward)


def _cast_for_both(operand: Operand, seen: Observations, layer: Layer) -> tuple[Operand, Operand]:
    """grad_output as both backward GEMMs take it, with codes that both need or one gather moves."""
    first, second = layer.recipe.grad_input.a, layer.recipe.grad_weight.a
    whole = first is not None and first.granularity == "tensorwise" and first.plain
    if first is not None and whole and first == second:
        # One scale for all of grad_output: its codes serve both GEMMs, whichever axis each reduces.
        own = operands.quantize(operand, "grad_output", first, -1, layer)
        asked = "grad_output" in (seen.amaxes or {}) and layer.scales_own_results()
        if own.amax is None and asked:
            assert operand.tensor is not None
            own = _with_amax(own, operand.tensor)
        return (operand._replace(own=own),) * 2
    if first is not None and layer.gathers_pair():
        by_rows, by_columns = (
            operands.quantize(operand, "grad_output", first, axis, layer) for axis in (-1, -2)
        )
        rows, columns = operands.gathered_pair(by_rows, by_columns, "grad_output", layer)
        for_input = operand._replace(own=by_rows, whole=rows)
        return for_input, operand._replace(own=by_columns, whole=columns)
    return operand, operand


def _with_amax(q: Quantized, x: Array) -> Quantized:
    """q, with this device's amax of x; else XLA schedules the amax last and keeps x alive."""
    scale_inv, amax = lax.optimization_barrier((q.scale_inv, scaling.amax(x)))
    return dataclasses.replace(q, scale_inv=scale_inv, amax=amax)


def _observed(
    amaxes: delayed.Seen, roles: Mapping[Role, Operand], seen: Observations, layer: Layer
) -> dict[Role, Array]:
    """Amaxes merged with those that a cast took of these roles; the largest if vmapped."""
    own_seen, merged = seen.amaxes or {}, {}
    for role, role_seen in amaxes.items():
        if role in roles:
            tensor, own = roles[role].tensor, roles[role].own
            x = tensor if own is None or own.amax is None else own.amax
            assert x is not None, "what has no tensor was cast with its amax"
            over = layer.over(role, "tensorwise", -1)
            role_seen = delayed.larger(role_seen, delayed.observe(x, over=over))
        merged[role] = delayed.over_batch(role_seen, own_seen[role])
    return merged


def _empty_output(x: Array, w: Array, layer: Layer) -> Array:
    """The empty output of no tokens, which depends on nothing (L-9)."""
    fsdp = layer.placement.fsdp if layer.mode == "shard_map" else ()
    gathered = math.prod(map(lax.axis_size, fsdp))
    n = w.shape[-1 if layer.turned else -2] * gathered
    return jnp.zeros((*x.shape[:-1], n), layer.dtypes[0])
