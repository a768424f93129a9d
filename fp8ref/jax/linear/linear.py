"""One linear layer: three GEMMs (spec L), joined to JAX's autodiff by one custom_vjp.

Read it from top to bottom. ``apply`` and ``contract`` have the arguments checked, and what is
static of them collected in a ``Use`` (``arguments``); ``_forward`` casts input and weight, runs the
output GEMM, and returns what the backward pass needs; ``_backward`` runs grad_input and
grad_weight. All three GEMMs go through ``three_gemms``: cast an operand along the axis that is
reduced, unless its codes are there already (a tensorwise operand is cast once, in ``_forward`` or
``_backward``, for both its GEMMs); gather in FP8, multiply, round. ``operands`` casts and gathers,
by ``scaling``, ``scales`` and ``cast``; ``gemm`` multiplies; ``placement`` says over which mesh
axes; ``observer`` reports each GEMM to whoever asked.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref.jax import delayed
from fp8ref.jax.distributed import explicit_sharding, sharding
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.linear import arguments, operands, three_gemms
from fp8ref.jax.linear.arguments import check_recipe
from fp8ref.jax.linear.observer import observing
from fp8ref.jax.linear.operands import Known, Use
from fp8ref.jax.quantize import cast, scaling, stats
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.jax.transforms import derivatives
from fp8ref.recipe import CastSpec, Recipe, Role
from fp8ref.spec.hardware import Multiply

__all__ = ["apply", "apply_with_stats", "check_recipe", "contract", "observing"]


def apply(
    x: jax.Array,
    w: jax.Array,
    *,
    recipe: str | Recipe,
    state: delayed.State | None = None,
    seen: delayed.Seen | None = None,
    placement: Placement | None = None,
    out_sharding: explicit_sharding.Sharding | None = None,
    name: str = "linear",
    multiply: Multiply | None = None,
    prepared: Quantized | Scales | None = None,
    mu: jax.Array | None = None,
) -> tuple[jax.Array, delayed.Seen | None]:
    """output [..., N] = input x [..., K] x weight w [N, K], and gradients by the recipe's two
    backward GEMMs.

    Works under jit, grad, vmap and shard_map, on meshes of Auto and of Explicit axes.

    Shapes:   x [..., K] and w [N, K] of one dtype, bfloat16, float16 or float32; output [..., N] of
              that dtype. With a placement, inside shard_map, all of them are a device's pieces.
    Order:    leading dims flatten to M; spec L-2, L-3, L-6; between devices P-9.
    Specials: as ``scaling.quantize`` and ``gemm.matmul``: under policy torchao a NaN or Inf makes
              NaN of every output that its scale reaches.
    out_sharding
              that of the output on Explicit axes, as of ``lax.dot_general``. Without it types and
              placement say it (P-20).
    multiply  simulated hardware, such as ``fp8ref.sim.gemm.hardware.by_name("hopper")``: multiplies
              on the host in place of XLA's FP8 dots (G-19).
    prepared  what is made of w already: its FP8 copy, as ``states.copies`` makes it, in place of a
              cast here (O-16); or its scales, as ``scales.scales_from_amax`` makes them, in place
              of an amax here (P-9). Under a copy w gives its shape and dtype and takes the
              gradient; its numbers are not read, so that under jit they are not computed. Inside
              shard_map a copy is a device's piece; scales are the whole weight's.
    mu        float32 (), the factor of the scale by which the gradient of w is exchanged in FP8,
              where the placement asks for that, the same on all devices (P-22).
    Returns:  (output, seen). Under delayed scaling, seen is merged with this use's observations of
              input and weight, and the gradient by seen with its observation of grad_output (H-4):
              give every use the seen of the use before it. A recipe that scales dynamically takes
              and gives None.
    Gradient: by x, w and seen; state is a constant. By mu it is the number of elements that the
              cast of w's gradient saturated, on all devices, float32: what
              ``gradient_reduction.next_mu`` takes. Inside shard_map gradients are complete: those
              of a device's pieces, summed over the other devices.
    Warns:    once, if dims are not multiples of 16, which XLA pads for the hardware (L-5).
    Raises:   ValueError, naming the layer: shapes or dtypes that do not fit, a recipe this backend
              cannot run, a state or seen of another recipe, or none if the recipe needs them; and
              as ``sharding.mode``. On Explicit axes also what ``lax.dot_general`` raises.
    """
    options: dict = {
        "placement": placement,
        "out_sharding": out_sharding,
        "name": name,
        "multiply": multiply,
        "prepared": prepared,
        "mu": mu,
    }
    y, seen, _ = apply_with_stats(x, w, recipe=recipe, state=state, seen=seen, tap=None, **options)
    return y, seen


def apply_with_stats(
    x: jax.Array,
    w: jax.Array,
    *,
    recipe: str | Recipe,
    state: delayed.State | None = None,
    seen: delayed.Seen | None = None,
    placement: Placement | None = None,
    out_sharding: explicit_sharding.Sharding | None = None,
    name: str = "linear",
    tap: jax.Array | None,
    multiply: Multiply | None = None,
    prepared: Quantized | Scales | None = None,
    mu: jax.Array | None = None,
) -> tuple[jax.Array, delayed.Seen | None, jax.Array | None]:
    """``apply``, and with a tap the quantization statistics of its operands (spec Q-8). Raises
    as apply.

    tap       float32 zeros [6, stats.LENGTH], one for each use of a linear; inside shard_map
              varying along all axes of its mesh.
    Returns:  (output, seen, tap): the tap holds measurements of this device's part of the output
              GEMM's operands. Those of the backward GEMMs are the gradient by the tap, in other
              rows. An operand that a GEMM takes over from an earlier one, codes and scale, is
              measured once, there.
    """
    for key, value in (("x", x), ("w", w)):
        cast.check_array(value, f"{name}: {key} is an array of float32, float16 or bfloat16")
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{name}: a linear takes x [..., K] and w [N, K] with the same K; got {x.shape} and "
            f"{w.shape}."
        )

    def body(x, w, constants, carried, layout):
        (state, prepared), (seen, tap, mu), rows = (
            constants,
            carried,
            x.reshape(1, -1) if x.ndim == 1 else x,
        )
        options: dict = {
            "out_dtype": None,
            "tap": tap,
            "multiply": multiply,
            "layout": layout,
            "prepared": prepared,
            "mu": mu,
        }
        y, *carried = contract(rows, w, recipe, state, seen, placement, name, **options)
        return y.reshape(-1) if x.ndim == 1 else y, tuple(carried)

    numbers = ((x.ndim - 1,), (1,)), ((), ())
    run = functools.partial(
        explicit_sharding.run,
        placement=placement,
        out_sharding=out_sharding,
        turned=False,
        name=name,
    )
    y, (seen, tap) = run(body, x, w, (state, prepared), (seen, tap, mu), numbers)
    return y, seen, tap


def contract(
    x: jax.Array,
    w: jax.Array,
    recipe: str | Recipe,
    state: delayed.State | None,
    seen: delayed.Seen | None,
    placement: Placement | None,
    name: str,
    *,
    out_dtype,
    turned: bool = False,
    tap: jax.Array | None = None,
    multiply: Multiply | None = None,
    layout: sharding.Layout | None = None,
    prepared: Quantized | Scales | None = None,
    mu: jax.Array | None = None,
) -> tuple[jax.Array, delayed.Seen | None, jax.Array | None]:
    """x [..., M, K] x w [N, K], or w [..., N, K] of equal leading dims, -> [..., M, N]: the core of
    ``apply`` and ``contraction``.

    turned    w is [..., K, N], as Flax keeps it: the same bits, without transposing it.
    out_dtype of the output; None: x's, which w's then is too.
    layout    how XLA finds the operands, where ``explicit_sharding`` has read it from their types.
    prepared  as in ``apply``.
    Raises:   as ``apply``; a name with '/', '(' or ')'.
    """
    options: dict = {
        "out_dtype": out_dtype,
        "turned": turned,
        "layout": layout,
        "multiply": multiply,
    }
    use = arguments.use(
        x, w, recipe, state, seen, placement, name, **options, measures=tap is not None
    )
    if mu is not None:
        arguments.check_mu(mu, use)
    if 0 in x.shape[:-1]:
        return _empty_output(x, w, seen, tap, use)
    x, w = (derivatives.reverse_only(v, name) for v in (x, w))
    scales: dict = dict(delayed.scales(state or {}, use.recipe))
    if prepared is not None:
        scales["weight"] = arguments.checked_weight(prepared, w, use)
    y, after, measured = _linear(x, w, scales, dict(seen or {}), tap, mu, use)
    return y, None if seen is None else after, None if tap is None else measured


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _linear(
    x: jax.Array,
    w: jax.Array,
    scales: Known,
    seen: dict,
    tap: jax.Array | None,
    mu: jax.Array | None,
    use: Use,
):
    """(output, seen, tap) of one use; differentiable by ``_forward`` and ``_backward``."""
    return _forward(x, w, scales, seen, tap, mu, use, differentiated=False)[0]


def _forward(
    x: jax.Array,
    w: jax.Array,
    scales: Known,
    seen: dict,
    tap: jax.Array | None,
    mu: jax.Array | None,
    use: Use,
    *,
    differentiated: bool = True,
):
    """The output GEMM: ((output, seen, tap), residuals for ``_backward``)."""
    if differentiated and use.mode == "shard_map" and not sharding.checks_variance(x):
        raise ValueError(
            f"{use.name}: gradients of a linear inside shard_map need check_vma=True; without "
            "it, a gradient taken outside would be summed over the devices twice. Use "
            "jax.shard_map(..., check_vma=True)."
        )
    # What is saved for the backward pass is x itself, which other linears save too.
    tensors: dict[Role, jax.Array] = {"input": x, "weight": w}
    if differentiated:
        tensors = {role: derivatives.not_again(v, use.name) for role, v in tensors.items()}
    casts: dict[Role, CastSpec | None] = {
        "input": use.recipe.output.a,
        "weight": use.recipe.output.b,
    }
    # ``proof`` reads layer and GEMM of a dot from this scope
    with jax.named_scope(f"{use.name}/output"):
        quantized = {
            role: operands.quantize(
                tensors[role], role, cast, use.axis("output", role), scales, use
            )
            for role, cast in casts.items()
            if cast
        }
        # [M, K] x [N, K] -> [M, N]
        y, measured, _ = three_gemms.run("output", tensors, quantized, scales, use)
    # Residuals: a tensorwise operand serves the backward pass as codes, a byte an element. Every
    # other one is quantized again from its tensor, along another axis (L-3), so the tensor is
    # saved.
    codes = {role: q for role, q in quantized.items() if use.serves_backward(role)}
    saved = {
        role: v
        for role, v in {"input": x, "weight": w}.items()
        if role not in codes or use.observer
    }
    residuals = derivatives.saved((saved, codes, scales, seen, mu))
    # no None: jax 0.12's vmap takes it for an array
    after = () if tap is None else tap + stats.rows(measured)
    return (operands.unflattened(y, x, use), _observed(seen, tensors, seen, use), after), residuals


def _backward(use: Use, residuals, cotangents):
    """grad_input and grad_weight, in the order of ``_linear``'s arguments.

    The cotangent of seen carries observations: ``later`` holds those of the uses after this one,
    and what is returned adds grad_output's. The cotangent of tap carries measurements in the same
    way.
    """
    (saved, codes, scales, seen, mu), (g, later, tap) = residuals, cotangents
    g = derivatives.not_again(g, use.name)
    # Without a barrier XLA merges this gather with the equal one of the forward pass, and keeps the
    # whole tensor until then.
    saved, codes = (
        {
            role: jax.tree.map(lax.optimization_barrier, v) if use.gathers_again(role) else v
            for role, v in those.items()
        }
        for those in (saved, codes)
    )
    tensors: dict[Role, jax.Array] = {**saved, "grad_output": g}
    quantized: dict[Role, Quantized] = dict(codes)
    first, second = use.recipe.grad_input.a, use.recipe.grad_weight.a
    # grad_output, its own piece and all of it, where one gather serves both GEMMs
    row_codes: dict[Role, tuple[Quantized, Quantized]] = {}
    column_codes: dict[Role, tuple[Quantized, Quantized]] = {}
    observed = g
    with jax.named_scope(f"{use.name}/grad_input"):
        if first is not None and first == second and first.granularity == "tensorwise":
            # One scale for all of grad_output: its codes serve both GEMMs, whichever axis each
            # reduces.
            quantized["grad_output"] = operands.quantize(g, "grad_output", first, -1, scales, use)
            if "grad_output" in seen and use.scales_own_results():
                quantized["grad_output"], observed = _after_amax(quantized["grad_output"], g)
        elif first is not None and use.gathers_pair():
            rows, columns = (
                operands.quantize(g, "grad_output", first, axis, scales, use) for axis in (-1, -2)
            )
            all_rows, all_columns = operands.gathered_pair(rows, columns, "grad_output", use)
            row_codes["grad_output"], column_codes["grad_output"] = (
                (rows, all_rows),
                (columns, all_columns),
            )
        # [M, N] x [N, K] -> [M, K]
        grad_input, first_rows, _ = three_gemms.run(
            "grad_input", tensors, quantized, scales, use, whole=row_codes
        )
    with jax.named_scope(f"{use.name}/grad_weight"):
        # [M, N] x [M, K] -> [N, K]
        grad_weight, second_rows, saturated = three_gemms.run(
            "grad_weight", tensors, quantized, scales, use, mu, whole=column_codes
        )
    grad_input = operands.unflattened(grad_input, g, use)
    tap = None if isinstance(tap, tuple) else tap + stats.rows(first_rows | second_rows)
    all_seen = _observed(later, {"grad_output": observed}, seen, use)
    return (grad_input, grad_weight, jax.tree.map(jnp.zeros_like, scales), all_seen, tap, saturated)


derivatives.defvjp(_linear, _forward, _backward)


def _after_amax(q: Quantized, x: jax.Array) -> tuple[Quantized, jax.Array]:
    """(q, this device's amax of x), so that GEMMs of q run after the amax is taken. XLA would take
    what only an observation reads at the end of the pass, and keep x until then."""
    scale_inv, amax = lax.optimization_barrier((q.scale_inv, scaling.amax(x)))
    return dataclasses.replace(q, scale_inv=scale_inv), amax


def _observed(seen: dict, tensors: Mapping[Role, jax.Array], own_seen: dict, use: Use) -> dict:
    """seen, merged with the amaxes of those of its roles that are among tensors, or of their
    amaxes; over a vmapped axis that ``own_seen`` lacks, the largest."""
    merged = {}
    for role, role_seen in seen.items():
        if role in tensors:
            role_seen = delayed.larger(
                role_seen, delayed.observe(tensors[role], over=use.over(role, "tensorwise", -1))
            )
        merged[role] = delayed.over_batch(role_seen, own_seen[role])
    return merged


def _empty_output(
    x: jax.Array, w: jax.Array, seen: delayed.Seen | None, tap: jax.Array | None, use: Use
) -> tuple:
    """The empty output of no tokens (L-9), which depends on nothing. Nothing is observed: copies,
    as what a layer gives back unchanged could seem lost."""
    gathered = math.prod(map(lax.axis_size, use.placement.fsdp)) if use.mode == "shard_map" else 1
    y = jnp.zeros((*x.shape[:-1], w.shape[-1 if use.turned else -2] * gathered), use.dtypes[0])
    return y, jax.tree.map(jnp.copy, seen), tap
