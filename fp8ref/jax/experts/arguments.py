"""What a grouped linear takes: a recipe that runs here, arrays that fit, shard_map's cuts (X)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8ref.jax.attention.operands import inputs as attention_inputs
from fp8ref.jax.distributed import explicit_sharding, sharding
from fp8ref.jax.gemm import blackwell, hardware
from fp8ref.jax.linear import linear
from fp8ref.recipe import Recipe
from fp8ref.selection import grouped as recipes
from fp8ref.selection.grouped import GroupedRecipe
from fp8ref.selection.rules import casts_of
from fp8ref.shared.errors import require


def check_recipe(recipe: str | Recipe | GroupedRecipe, name: str) -> GroupedRecipe:
    """The grouped recipe, if this backend runs it; ValueError, naming the layer, otherwise."""
    try:
        recipe = recipes.by_name(recipe)
        recipes.check_blocks(recipe, "jax")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    linear.check_recipe(recipe.recipe, name)
    hardware.refuse(name, "multiplies matrices, and no groups of rows; got grouped GEMMs")
    text = f"{name}: products {blackwell.active()!r} multiply no groups of rows. Use 'emulated'."
    require(blackwell.active() in ("auto", "emulated"), text)
    return recipe


def on_one_device(
    x: Array, w: Array, group_sizes: Array, recipe: GroupedRecipe, over: tuple[str, ...], name: str
) -> tuple[Array, Array, Array, tuple[str, ...]]:
    """The arrays, inside shard_map marked as varying along all axes that one of them varies along,
    and those axes: so the gradient of one that does not vary is summed over the devices. ValueError
    for scales that would be of several devices' groups; axes of over that no array varies along."""
    axes = frozenset().union(*map(sharding.varying, (x, w, group_sizes)))
    if unknown := sorted(set(over) - axes):
        raise ValueError(
            f"{name}: over has axes of shard_map that shard the rows; got {', '.join(unknown)}, "
            "along which no argument varies."
        )
    dynamic = any(cast and cast.delayed is None for cast in casts_of(recipe.recipe).values())
    if axes and recipe.amax == "all" and dynamic:
        raise ValueError(
            f"{name}: inside shard_map amaxes are per group; recipe {recipe.name!r} needs those of "
            f"all, over {', '.join(sorted(axes))}. Use amax 'group', or plain jit."
        )
    return *(attention_inputs.as_varying(v, axes) for v in (x, w, group_sizes)), tuple(sorted(axes))  # type: ignore[return-value]


def check_arrays(x: Array, w: Array, group_sizes: Array, recipe: GroupedRecipe, name: str) -> None:
    """ValueError for shapes or dtypes that do not fit, or Explicit axes."""
    if unlike := [
        f"{argument}, {type(v).__name__}"
        for argument, v in {"x": x, "w": w, "group_sizes": group_sizes}.items()
        if not hasattr(v, "dtype")
    ]:
        raise ValueError(
            f"{name}: a grouped linear takes arrays; got {', '.join(unlike)}. Use jnp.asarray."
        )
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"{name}: a grouped linear takes x [M, K], w [E, K, N]; got {x.shape} and {w.shape}."
        )
    if group_sizes.shape != w.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"{name}: group_sizes are integers [{len(w)}]; got {group_sizes.dtype} "
            f"{list(group_sizes.shape)}."
        )
    _check_sizes(group_sizes, len(x), name)
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"{name}: x and w have one dtype: bfloat16, float16 or float32; got {x.dtype} and "
            f"{w.dtype}."
        )
    for argument, v in {"x": x, "w": w, "group_sizes": group_sizes}.items():
        if axes := explicit_sharding.cutting(v):
            raise ValueError(
                f"{name}: a grouped linear needs unsharded arrays; got {argument} cut along the "
                f"Explicit axes {', '.join(axes)}. Use jax.shard_map with over=..., or a mesh of "
                "Auto axes."
            )
    if recipe.recipe.fp8 and (w.shape[1] % 16 or w.shape[2] % 16):
        raise ValueError(
            f"{name}: FP8 needs K and N in multiples of 16; got w.shape={w.shape}. Pad the experts "
            "or use recipe 'bf16' (L-5)."
        )


def _check_sizes(group_sizes: Array, rows: int, name: str) -> None:
    """ValueError for sizes that do not fit, if the host knows them without a wait."""
    on_host = isinstance(group_sizes, np.ndarray) or (
        isinstance(group_sizes, Array)
        and not isinstance(group_sizes, jax.core.Tracer)
        and all(device.platform == "cpu" for device in group_sizes.devices())
        and group_sizes.is_fully_addressable
    )
    if not on_host or not len(group_sizes):
        return
    sizes = np.asarray(group_sizes).astype(np.int64)
    if sizes.min() < 0 or sizes.sum() > rows:
        raise ValueError(
            f"{name}: group_sizes are non-negative and sum to at most M={rows}; got "
            f"{sizes.tolist()}. From ends use jnp.diff(ends, prepend=0)."
        )
