"""A linear layer is three GEMMs (SEMANTICS L), joined to autodiff by one custom_vjp."""

import functools
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from fp8ref import recipe as recipes
from fp8ref.jax import delayed, gemm, scaling
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, Gemm, Recipe, Role

Scales = Mapping[Role, jax.Array]  # of the roles whose scales a state holds

_observer: ContextVar[Callable | None] = ContextVar("fp8ref_jax_observer", default=None)


def apply(
    x: jax.Array,
    w: jax.Array,
    *,
    recipe: str | Recipe,
    state: delayed.State | None = None,
    seen: delayed.Seen | None = None,
    name: str = "linear",
) -> tuple[jax.Array, delayed.Seen | None]:
    """output [..., N] = input x [..., K] x weight w [N, K], and gradients by the recipe's two backward GEMMs.

    Shapes:   x [..., K] and w [N, K] of one dtype, bfloat16, float16 or float32; output [..., N] of that dtype.
    Order:    leading dims flatten to M; SEMANTICS L-2, L-3, L-6.
    Returns:  (output, seen). Under delayed scaling, seen merged with what this use observed of input and weight, and the
              gradient by seen merged with what it observed of grad_output (H-4): give every use the seen of the one before it.
              A recipe that scales dynamically takes and gives None.
    Gradient: by x, w and seen; state is a constant.
    Raises:   ValueError, naming the layer: shapes or dtypes that do not fit, FP8 dims that are not multiples of 16, a state or
              seen of another recipe, or none where the recipe needs them.
    """
    recipe = recipes.by_name(recipe)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"{name}: a linear takes x [..., K] and w [N, K] with the same K; got {x.shape} and {w.shape}.")
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"{name}: x and w have one dtype, bfloat16, float16 or float32; got {x.dtype} and {w.dtype}. Cast the weight first."
        )
    if recipe.fp8 and (w.shape[0] % 16 or w.shape[1] % 16):
        raise ValueError(
            f"{name}: FP8 needs N and K to be multiples of 16 (L-5); got w.shape={w.shape}. Pad the layer or use recipe 'bf16'."
        )
    for gemm_name, spec in recipe.gemms.items():
        for cast in (spec.a, spec.b):
            if cast is not None and cast.granularity not in scaling.GRANULARITIES:
                raise ValueError(
                    f"{name}: fp8ref.jax scales {' or '.join(scaling.GRANULARITIES)}; recipe {recipe.name!r} has {cast.granularity!r} "
                    f"in {gemm_name}. Use a recipe of fp8ref.recipe.BACKEND_RECIPES or 'delayed'."
                )
    delayed.check(state, seen, recipe, name)
    tokens = dict(seen or {})
    y, tokens = _linear(x.reshape(-1, x.shape[-1]), w, delayed.scales(state or {}), tokens, recipe, name)
    return y.reshape(*x.shape[:-1], w.shape[0]), None if seen is None else tokens


@contextmanager
def observing(observer: Callable):
    """While a function is traced in this context, every FP8 GEMM reports what it computed, from inside the compiled program.

    observer(name, gemm, a, b, out) is called with NumPy values when it runs: a and b as (hp, codes uint8, scale), hp and
    codes in the tensors' own layout (SEMANTICS L-2's input [M, K], weight [N, K], grad_output [M, N]).
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _linear(x: jax.Array, w: jax.Array, scales: Scales, seen: dict, recipe: Recipe, name: str):
    y = _gemm("output", {"input": x, "weight": w}, scales, recipe, name, x.dtype)  # [M, K] x [N, K] -> [M, N]
    return y, _seen(seen, {"input": x, "weight": w}, seen)


def _forward(x, w, scales: Scales, seen: dict, recipe: Recipe, name: str):
    return _linear(x, w, scales, seen, recipe, name), (x, w, scales, seen)


def _backward(recipe: Recipe, name: str, saved, cotangents):
    (x, w, scales, given), (g, later) = saved, cotangents
    tensors: dict[Role, jax.Array] = {"input": x, "weight": w, "grad_output": g}
    grad_input = _gemm("grad_input", tensors, scales, recipe, name, x.dtype)  # [M, N] x [N, K] -> [M, K]
    grad_weight = _gemm("grad_weight", tensors, scales, recipe, name, w.dtype)  # [M, N] x [M, K] -> [N, K]
    return grad_input, grad_weight, jax.tree.map(jnp.zeros_like, scales), _seen(later, {"grad_output": g}, given)


_linear.defvjp(_forward, _backward)


def _seen(seen: dict, tensors: Mapping[Role, jax.Array], given: dict) -> dict:
    """seen, merged with observations of those of its roles that are here; over a vmapped axis that ``given`` has not, the largest."""
    return {
        role: delayed.over_batch(jnp.maximum(of_role, delayed.observe(tensors[role])) if role in tensors else of_role, given[role])
        for role, of_role in seen.items()
    }


def _gemm(which: Gemm, tensors: Mapping[Role, jax.Array], scales: Scales, recipe: Recipe, name: str, dtype) -> jax.Array:
    spec, axes, roles = recipe.gemms[which], REDUCED_AXES[which], OPERANDS[which]
    a, b = (tensors[role] for role in roles)
    with jax.named_scope(f"{name}/{which}"):
        if spec.a is None or spec.b is None or spec.accumulate is None:
            return gemm.matmul_hp(a, b, axes=axes, out_dtype=dtype)
        qa, qb = (
            _quantize(v, cast, axis, scales.get(role)) for v, cast, axis, role in zip((a, b), (spec.a, spec.b), axes, roles, strict=True)
        )
        out = gemm.matmul(qa, qb, accumulate=spec.accumulate, epilogue=spec.epilogue, out_dtype=gemm.output_dtype(spec, dtype))
        observer = _observer.get()
        if observer is not None:
            operands = [(v, jax.lax.bitcast_convert_type(q.codes, jnp.uint8), q.scale) for v, q in ((a, qa), (b, qb))]
            jax.debug.callback(functools.partial(observer, name, which), *operands, out)
        return out.astype(dtype)


def _quantize(x: jax.Array, cast: CastSpec, axis: int, scale: jax.Array | None) -> scaling.Quantized:
    """By the scale of the role's state, or without one by the tensor's own amax."""
    if scale is None:
        return scaling.quantize(x, cast.fmt, granularity=cast.granularity, policy=cast.policy, axis=axis)
    return scaling.quantize_with(x, scale, cast.fmt, granularity=cast.granularity, axis=axis)
