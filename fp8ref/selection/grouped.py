"""Grouped linears as data: recipes of an expert's three GEMMs, what shares a scale (X-3, X-8).

A grouped linear multiplies each group of rows by a weight of its own. Its group e is a linear, so a
grouped recipe is a ``Recipe``, and whether amaxes are of a group or of all of them.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe, Role, check_trained
from fp8ref.selection.rules import casts_of
from fp8ref.shared import errors, registry
from fp8ref.spec import granularity, support

Amax = Literal["group", "all"]
"""Which elements a scale covers (spec X-3).

group  those that its granularity says of one group's rows and of one expert's weight
all    of all groups' rows as one matrix, and of all experts' weights as one tensor
"""


@dataclass(frozen=True, kw_only=True)
class GroupedRecipe:
    """How a grouped linear is computed.

    recipe    of each group's three GEMMs.
    amax      whether scales are of one group, or of all.

    Raises:   ValueError: an unknown amax; ``all`` with scales of blocks, which no group boundary
              cuts; ``group`` with delayed scaling, which keeps one state for all groups.
    """

    recipe: Recipe
    amax: Amax = "group"

    def __post_init__(self) -> None:
        errors.one_of("amax", self.amax, get_args(Amax))
        if self.amax == "all" and self.recipe.in_blocks:
            raise ValueError(
                f"blocks begin with their group; got amax 'all', recipe {self.recipe.name!r}. Use "
                "'group'."
            )
        if self.amax == "group" and self.recipe.delayed:
            raise ValueError(
                "delayed scaling keeps one state of each role for all groups; got amax 'group' for "
                f"recipe {self.recipe.name!r}. Use 'all' (X-9)."
            )

    @property
    def name(self) -> str:
        """That of the recipe."""
        return self.recipe.name


def _taken(recipe: Recipe) -> bool:
    """Whether experts take all its casts."""
    return all(cast.plain and cast.policy.two_level is None for cast in recipe.casts)


def _by_kernel_scales(recipe: Recipe) -> Recipe:
    """The recipe as torch's grouped kernel runs it: fast accumulation, scaled before it rounds."""

    def by_kernel(spec: GemmSpec) -> GemmSpec:
        return dataclasses.replace(spec, accumulate="fast", epilogue="scale_then_round")

    return Recipe(
        name=recipe.name,
        output=by_kernel(recipe.output),
        grad_input=by_kernel(recipe.grad_input),
        grad_weight=by_kernel(recipe.grad_weight),
    )


GROUPED_RECIPES = {
    name: GroupedRecipe(recipe=recipe, amax="all" if recipe.delayed else "group")
    for name, recipe in RECIPES.items()
    if _taken(recipe)
} | {
    # torchao 0.18, prototype/moe_training/fp8_grouped_mm.py: use_fast_accum in all three GEMMs, and
    # both scales in each call of torch._scaled_grouped_mm.
    "rowwise": GroupedRecipe(recipe=_by_kernel_scales(RECIPES["rowwise"]))
}
"""The grouped recipes by name: those of R-1 that experts take, with torchao's ``rowwise`` (X-8)."""


def grouped_recipe(recipe: Recipe) -> GroupedRecipe:
    """The grouped recipe for a recipe of linears: torchao's for ``rowwise``."""
    if RECIPES.get(recipe.name) == recipe and recipe.name in GROUPED_RECIPES:
        return GROUPED_RECIPES[recipe.name]
    return by_name(recipe)


def by_name(recipe: str | Recipe | GroupedRecipe) -> GroupedRecipe:
    """The grouped recipe of that name; a GroupedRecipe is itself, and a Recipe that of each group;
    ValueError for anything else."""
    if isinstance(recipe, Recipe) or (
        isinstance(recipe, str) and recipe in RECIPES and recipe not in GROUPED_RECIPES
    ):
        recipe = check_trained(recipe)
        return GroupedRecipe(recipe=recipe, amax="all" if recipe.delayed else "group")
    return registry.lookup(
        "a grouped recipe is a GroupedRecipe, a Recipe or", GROUPED_RECIPES, recipe, GroupedRecipe
    )


def checked(recipe: str | Recipe | GroupedRecipe) -> GroupedRecipe:
    """As ``by_name``; ValueError too for casts that experts do not take (S-24)."""
    grouped = by_name(recipe)
    errors.require(
        _taken(grouped.recipe),
        "experts neither rotate, nor round stochastically, nor scale by two levels; got recipe "
        f"{grouped.name!r}. Use 'mxfp4' or 'mxfp8' for them (S-24).",
    )
    return grouped


def check_blocks(recipe: GroupedRecipe, backend: support.Backend) -> None:
    """ValueError for blocks of several rows of input or grad_output; as ``checked``."""
    checked(recipe)
    for (gemm, role), cast in casts_of(recipe.recipe).items():
        if cast is not None and role != "weight":
            kind, about = granularity.by_name(cast.granularity), recipe.name
            support.require(
                "blocks of experts' rows", backend, kind, role=role, gemm=gemm, recipe=about
            )


def moved_cast(recipes: Iterable[GroupedRecipe], role: Role) -> CastSpec | None:
    """The one cast of input or grad_output that all GEMMs of these recipes take, if its codes may
    move (X-14); else None: where GEMMs take other casts, or none, and where a scale is not of the
    whole of a group's rows, or a state's."""
    recipes = list(recipes)
    used = {cast for r in recipes for (_, of), cast in casts_of(r.recipe).items() if of == role}
    cast = used.pop()
    if used or cast is None or cast.granularity != "tensorwise":
        return None
    return cast if cast.delayed or all(r.amax == "group" for r in recipes) else None
