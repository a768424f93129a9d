"""The arguments of a linear: checked, by the name of the layer, and what is static of them
collected in a ``Layer`` (spec L, R-1).
"""

import dataclasses
import math
import warnings

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8ref import recipe as recipes
from fp8ref.jax import delayed
from fp8ref.jax.distributed import explicit_sharding, sharding
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.gemm import blackwell, hardware
from fp8ref.jax.kernels import launch
from fp8ref.jax.linear import observer
from fp8ref.jax.linear.carried import Layer
from fp8ref.jax.quantize import cast
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import Recipe, Role
from fp8ref.shared import errors


def layer(recipe: str | Recipe, name: str, placement: Placement | None) -> Layer:
    """A linear's static part before its tensors; asks who observes GEMMs or simulates hardware."""
    placement, _ = explicit_sharding.parts(placement, name)
    return Layer(
        recipe=check_recipe(recipe, name),
        name=name,
        placement=placement or Placement(),
        placed=placement is not None,
        observer=observer.current(),
        multiply=hardware.active(),
        products=blackwell.active(),
        kernels=launch.active(),
    )


def resolved(
    layer: Layer,
    x: Array,
    w: Array,
    state: delayed.State | None,
    amaxes: delayed.Seen | None,
    out_dtype,
) -> Layer:
    """The layer, with what these arguments of ``linear.contract`` add to it.

    Warns:    once a layer, of dims that are not multiples of 16 (L-5).
    Raises:   ValueError, naming the layer, as ``linear.apply``; a name with '/', '(' or ')'.
    """
    recipe, name, placement = layer.recipe, layer.name, layer.placement
    out_dtype = _check_arrays(x, w, out_dtype, name)
    delayed.check(state, amaxes, recipe, name)
    stacks = [jnp.shape(role_state.stored) for role_state in (state or {}).values()]
    if any(stacks):
        raise ValueError(
            f"{name}: one linear has one state; got a stack of {list(max(stacks))}. Scan or vmap "
            "over states, seen and weights."
        )
    layout, turned = layer.layout, layer.turned
    mode: sharding.Mode = "jit"
    if layout is None:
        mode = sharding.mode(x, w, placement if layer.placed else None, name)
    if delayed.keeps_state(recipe) and placement.scope == "local":
        raise ValueError(
            f"{name}: delayed scaling has global amaxes; got scope 'local'. Use 'global'."
        )
    if layer.multiply is not None:
        hardware.check(x, w, mode, name)
    text = f"{name}: products 'scaled_matmul' on a mesh need shard_map (parallel.through)."
    errors.require(layer.products != "scaled_matmul" or mode != "jit", text)
    if mode == "jit" and layout is None:
        ndim: dict[Role, int] = {"input": x.ndim, "weight": w.ndim, "grad_output": x.ndim}
        layout = sharding.layout(placement, ndim, turned=turned)
    n, k = sharding.gemm_dims(w, placement, layout, turned=turned)
    if recipe.fp8 and (n % 16 or k % 16):
        _warn_of_padding(name, n, k)
    return dataclasses.replace(
        layer,
        mode=mode,
        layout=layout,
        batched=w.ndim > 2,
        outer=math.prod(x.shape[:-2]),
        dtypes=(out_dtype, x.dtype, w.dtype),
    )


def check_recipe(recipe: str | Recipe, name: str) -> Recipe:
    """The recipe, if this backend runs it; ValueError, naming the layer, otherwise."""
    try:
        recipe = recipes.by_name(recipe)
        recipes.check_gemms(recipe, "jax")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return recipe


def checked_weight(prepared: Quantized | Scales, w: Array, layer: Layer) -> Quantized | Scales:
    """The FP8 copy of a weight, or its scales, as constants; ValueError, naming the layer, unless
    they are of the recipe's cast, and of the whole weight."""
    name = layer.name
    try:
        spec = recipes.weight_copy(layer.recipe)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    expected = f"a tensorwise Quantized of {spec.fmt} and w's shape, {w.shape}, or its Scales"
    if not isinstance(prepared, (Quantized, Scales)):
        raise ValueError(
            f"{name}: prepared is {expected}; got {type(prepared).__name__}. Use states.copies, or "
            "scales.scales_from_amax."
        )
    if isinstance(prepared, Quantized):
        codes = prepared.codes
        if (prepared.fmt, prepared.granularity, codes.shape, codes.dtype) != (
            spec.fmt,
            "tensorwise",
            w.shape,
            cast.DTYPES[spec.fmt.name],
        ):
            has = f"{prepared.fmt} {prepared.granularity} {codes.shape} in {codes.dtype}"
            raise ValueError(
                f"{name}: prepared is {expected}; got {has}. Use states.copies or scales_from_amax."
            )
    pair = prepared.scale, prepared.scale_inv
    kinds = [f"{v.dtype} {v.shape}" if hasattr(v, "dtype") else type(v).__name__ for v in pair]
    if kinds != ["float32 ()"] * 2:
        raise ValueError(
            f"{name}: weight scales are float32 (); got {', '.join(kinds)}. Use scales_from_amax."
        )
    if own := {axis for v in pair for axis in sharding.varying(v)} & set(
        layer.over("weight", "tensorwise", -1)
    ):
        raise ValueError(
            f"{name}: scales are the whole weight's; got scales that vary along "
            f"{', '.join(sorted(own))}. Use scaling.amax(w, over=...)."
        )
    return jax.tree.map(lax.stop_gradient, prepared)


def _check_arrays(x: Array, w: Array, out_dtype, name: str):
    """The output's dtype; ValueError for other dtypes or a name that ``proof`` could not read."""
    if set(name) & set("/()"):
        raise ValueError(
            f"a layer's name has no '/', '(' or ')', which separate names in proofs; got {name!r}."
        )
    if out_dtype is None and x.dtype != w.dtype:
        raise ValueError(
            f"{name}: x and w have one dtype unless preferred_element_type is set; got {x.dtype} "
            f"and {w.dtype}. Cast the weight."
        )
    out_dtype = x.dtype if out_dtype is None else jnp.dtype(out_dtype)
    for dtype in (x.dtype, w.dtype, out_dtype):
        if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise ValueError(
                f"{name}: x, w and the output are bfloat16, float16 or float32; got {dtype}."
            )
    return out_dtype


def _warn_of_padding(name: str, n: int, k: int) -> None:
    """Warn once for each layer that XLA pads the weight."""
    padded = [-(-size // 16) * 16 for size in (n, k)]
    warnings.warn(
        f"{name}: FP8 kernels take multiples of 16; XLA pads the weight [{n}, {k}] to {padded}: "
        f"{padded[0] * padded[1] / (n * k):.2f} times the multiplications, and extra copies. Pad "
        "the layer or use recipe 'bf16' (L-5).",
        stacklevel=5,
    )


def check_mu(mu: Array, layer: Layer) -> None:
    """ValueError, naming the layer, unless weight gradients travel in FP8, by this factor."""
    placement = layer.placement
    if layer.mode != "shard_map" or placement.reduce_grads != "float8_e4m3fn" or not placement.m:
        raise ValueError(
            f"{layer.name}: mu is of gradients reduced in FP8; got reduce_grads "
            f"{placement.reduce_grads!r} over m={placement.m}. Set reduce_grads 'float8_e4m3fn' "
            "and m inside shard_map (P-22)."
        )
    if mu.shape != () or mu.dtype != jnp.float32:
        raise ValueError(f"{layer.name}: mu is float32 (); got {mu.dtype} {mu.shape}.")
