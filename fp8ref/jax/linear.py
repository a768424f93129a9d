"""A linear layer is three GEMMs (SEMANTICS L), joined to autodiff by one custom_vjp."""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from fp8ref import recipe as recipes
from fp8ref.jax import gemm, scaling
from fp8ref.recipe import REDUCED_AXES, Gemm, Recipe

_observer: ContextVar[Callable | None] = ContextVar("fp8ref_jax_observer", default=None)


def apply(x: jax.Array, w: jax.Array, *, recipe: str | Recipe, state: None = None, seen: None = None, name: str = "linear"):
    """output [..., N] = input x [..., K] x weight w [N, K], and gradients by the recipe's two backward GEMMs.

    Shapes:   x [..., K] and w [N, K] of one dtype, bfloat16, float16 or float32; output [..., N] of that dtype.
    Order:    leading dims flatten to M; SEMANTICS L-2, L-3.
    Returns:  (output, seen). Dynamic scaling keeps no state and observes nothing: state and seen are None and stay so.
    Raises:   ValueError, naming the layer: shapes or dtypes that do not fit, FP8 dims that are not multiples of 16, a state.
    """
    recipe = recipes.by_name(recipe)
    if state is not None or seen is not None:
        raise ValueError(f"{name}: recipe {recipe.name!r} scales dynamically, so state and seen are None; got {state!r} and {seen!r}.")
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
            if cast is not None and cast.delayed is not None:
                raise ValueError(f"{name}: fp8ref.jax scales dynamically; recipe {recipe.name!r} is delayed. Use 'tensorwise'.")
            if cast is not None and cast.granularity not in scaling.GRANULARITIES:
                raise ValueError(
                    f"{name}: fp8ref.jax scales {' or '.join(scaling.GRANULARITIES)}; recipe {recipe.name!r} has {cast.granularity!r} "
                    f"in {gemm_name}. Use a recipe of fp8ref.recipe.BACKEND_RECIPES."
                )
    y = _linear(x.reshape(-1, x.shape[-1]), w, recipe, name)
    return y.reshape(*x.shape[:-1], w.shape[0]), seen


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _linear(x: jax.Array, w: jax.Array, recipe: Recipe, name: str) -> jax.Array:
    return _gemm("output", x, w, recipe, name, x.dtype)  # [M, K] x [N, K] -> [M, N]


def _forward(x, w, recipe: Recipe, name: str):
    return _linear(x, w, recipe, name), (x, w)


def _backward(recipe: Recipe, name: str, saved, g: jax.Array):
    x, w = saved
    grad_input = _gemm("grad_input", g, w, recipe, name, x.dtype)  # [M, N] x [N, K] -> [M, K]
    grad_weight = _gemm("grad_weight", g, x, recipe, name, w.dtype)  # [M, N] x [M, K] -> [N, K]
    return grad_input, grad_weight


_linear.defvjp(_forward, _backward)


def _gemm(which: Gemm, a: jax.Array, b: jax.Array, recipe: Recipe, name: str, dtype) -> jax.Array:
    spec, axes = recipe.gemms[which], REDUCED_AXES[which]
    with jax.named_scope(f"{name}/{which}"):
        if spec.a is None or spec.b is None or spec.accumulate is None:
            return gemm.matmul_hp(a, b, axes=axes, out_dtype=dtype)
        qa, qb = (
            scaling.quantize(v, cast.fmt, granularity=cast.granularity, policy=cast.policy, axis=axis)
            for v, cast, axis in ((a, spec.a, axes[0]), (b, spec.b, axes[1]))
        )
        out = gemm.matmul(qa, qb, accumulate=spec.accumulate, epilogue=spec.epilogue, out_dtype=gemm.output_dtype(spec, dtype))
        observer = _observer.get()
        if observer is not None:
            operands = [(v, jax.lax.bitcast_convert_type(q.codes, jnp.uint8), q.scale) for v, q in ((a, qa), (b, qb))]
            jax.debug.callback(functools.partial(observer, name, which), *operands, out)
        return out.astype(dtype)
