"""What a grouped linear takes: a recipe that runs here, states, tensors that fit (spec X)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fp8ref.recipe import Recipe, Role
from fp8ref.selection import grouped as recipes
from fp8ref.selection.grouped import GroupedRecipe
from fp8ref.torch import delayed
from fp8ref.torch.linear import linear
from fp8ref.torch.quantize import cast


def check_recipe(recipe: str | Recipe | GroupedRecipe, name: str = "") -> GroupedRecipe:
    """The grouped recipe, if this backend runs it; ValueError as ``linear.check_recipe``, or for
    blocks of several rows of input or grad_output, and operands that experts do not take.

    name      what it is for: begins the error.
    """
    try:
        recipe = recipes.by_name(recipe)
        linear.check_recipe(recipe.recipe)
        recipes.check_blocks(recipe, "torch")
    except ValueError as error:
        if not name:
            raise
        raise ValueError(f"{name}: {error}") from error
    return recipe


def states_of(
    states: Mapping[Role, delayed.RoleState] | nn.ModuleDict | None,
    recipe: GroupedRecipe,
    name: str,
) -> dict[Role, delayed.RoleState]:
    """The states by role; ValueError unless they are those of the recipe."""
    role_states = dict((states or {}).items())
    if set(role_states) != set(roles := delayed.casts(recipe.recipe)):
        raise ValueError(
            f"{name}: recipe {recipe.name!r} takes states of {', '.join(roles) or 'no role'}; got "
            f"{', '.join(role_states) or 'none'}. Use delayed.RoleState."
        )
    return role_states  # type: ignore[return-value]


def check_kinds(x: object, w: object, offs: object, name: str) -> None:
    """ValueError for what is no tensor."""
    for key, value in (("x", x), ("w", w), ("offs", offs)):
        if not isinstance(value, Tensor):
            remedy = "torch.as_tensor"
            if key == "offs":
                remedy = "torch.tensor(offs, dtype=torch.int32, device=x.device)"
            raise ValueError(
                f"{name} takes {key} as a tensor; got {type(value).__name__}. Use {remedy}."
            )


def check_tensors(x: Tensor, w: Tensor, offs: Tensor, recipe: GroupedRecipe, name: str) -> None:
    """ValueError for shapes, dtypes, devices or groups that do not fit."""
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(
            f"{name} takes x [M, K], w [E, N, K]; got {tuple(x.shape)} and {tuple(w.shape)}."
        )
    if offs.shape != w.shape[:1] or offs.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} takes offs int32 [{len(w)}], group ends; got {offs.dtype} {tuple(offs.shape)}."
        )
    if x.dtype != w.dtype or x.dtype not in cast.HIGH_PRECISION:
        raise ValueError(
            f"{name} takes x and w of one dtype, float32, float16 or bfloat16; got {x.dtype} and "
            f"{w.dtype}."
        )
    if not x.device == w.device == offs.device:
        raise ValueError(
            f"{name} takes x, w and offs on one device; got {x.device}, {w.device}, {offs.device}."
        )
    if recipe.recipe.fp8 and (w.shape[1] % 16 or w.shape[2] % 16):
        raise ValueError(
            f"{name}: FP8 needs N and K in multiples of 16; got w of shape {tuple(w.shape)}. Keep "
            "it in high precision (L-5)."
        )
    if type(offs) is Tensor and offs.device.type == "cpu" and not torch.compiler.is_compiling():
        ends = offs.tolist()
        if any(a > b for a, b in zip([0, *ends], [*ends, len(x)], strict=True)):
            raise ValueError(
                f"{name}: offs ascend from 0 to at most M={len(x)}; got {ends}. Use torch.cumsum."
            )
