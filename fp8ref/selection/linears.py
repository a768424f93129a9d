"""Which linears of a model a recipe converts, and why (R-2 to R-4): one rule for both backends."""

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fp8ref import recipe as recipes
from fp8ref.recipe import RECIPES, Gemm, Recipe
from fp8ref.shared.errors import require
from fp8ref.spec import granularity

__all__ = ["select"]

AUTO_FILTER = "auto_filter_small_kn"
"""The word of filter_fqns that keeps small linears in high precision (R-4)."""

SMALL: dict[str, tuple[tuple[float, float], ...]] = {
    "tensorwise": ((1024, 4096),),
    "rowwise": ((2048, math.inf), (math.inf, 1024), (4096, 2048)),
    "delayed": ((1024, 4096),),
}
"""Recipe -> limits of the weights [N, K] that are small: N and K no more than those of a pair.

These are torchao 0.18's, float8/float8_linear_utils.py, _auto_filter_for_recipe: where FP8 gained
too little on an H100. It states none for other recipes. ``delayed`` and ``tensorwise_pow2`` take
tensorwise's, ``rowwise_native`` rowwise's: their GEMMs multiply the same operands.
"""
SMALL |= {"tensorwise_pow2": SMALL["tensorwise"], "rowwise_native": SMALL["rowwise"]}


def matches(pattern: str, name: str) -> bool:
    """Whether pattern names this module (R-3): a run of dotted components, or a shell pattern.

    >>> matches("layers.1", "model.layers.1.mlp.up_proj")
    True
    >>> matches("layers.1", "model.layers.10.mlp.up_proj")
    False
    >>> matches("*.mlp.*", "model.layers.10.mlp.up_proj")
    True
    >>> matches("mlp", "model.layers.10.mlp.up_proj")
    True
    """
    if any(c in pattern for c in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return bool(pattern) and f".{pattern}." in f".{name}."


def listed(names: Collection[str], most: int = 16) -> str:
    """Names of linears for an error; of many the first and the last."""
    names = list(names)
    if len(names) > most:
        names = [*names[: most - 2], f"{len(names) - most + 1} more", names[-1]]
    return ", ".join(names)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The choice for one linear; reason, for a person, names the pattern or rule."""

    path: str
    shape: tuple[int, int]  # [N, K]
    recipe: Recipe  # RECIPES["bf16"] when not converted
    reason: str
    experts: int | None = None  # how many weights of this shape it has; None of a linear with one

    @property
    def size(self) -> int:
        """The elements of all its weights."""
        return math.prod(self.shape) * (self.experts or 1)

    @property
    def fp8(self) -> bool:
        """Whether the linear is converted."""
        return self.recipe.fp8


def select(
    linears: Mapping[str, tuple[int, int]],
    recipe: str | Recipe,
    *,
    filter_fqns: Sequence[str] = (),
    fp8_fqns: Sequence[str] = (),
) -> list[Decision]:
    """Which linears a recipe converts (spec R-2 to R-4), by one rule for both backends.

    Shapes:   linears maps a module's name to its weight's shape [N, K], whole if sharded.
    Returns:  one Decision a linear, in the order given.
    Raises:   ValueError: a pattern that names nothing; a linear named in fp8_fqns whose dims are
              not multiples of 16 or of the recipe's blocks; 'auto_filter_small_kn' for a recipe
              without thresholds; an FP8 recipe that converts nothing.
    """
    recipe = recipes.by_name(recipe)
    for key, patterns in (("filter_fqns", filter_fqns), ("fp8_fqns", fp8_fqns)):
        text = f"{key} is a list of patterns; got the string {patterns!r}. Write [{patterns!r}]."
        require(not isinstance(patterns, str), text)
        if not isinstance(patterns, Collection) or not all(
            isinstance(pattern, str) for pattern in patterns
        ):
            raise ValueError(
                f"{key} is a list of patterns, each a string; got {patterns!r}. Leave it out, or "
                "name linears."
            )
        for pattern in patterns:
            if key == "filter_fqns" and pattern == AUTO_FILTER:
                continue
            text = f"{key} pattern {pattern!r} matches none of: {listed(linears) or 'no linears'}."
            require(any(matches(pattern, name) for name in linears), text)
    small = _small(recipe) if AUTO_FILTER in filter_fqns else ()
    decisions = [
        _decide(name, shape, recipe, filter_fqns, fp8_fqns, small)
        for name, shape in linears.items()
    ]
    if recipe.fp8 and not any(d.fp8 for d in decisions):
        shown = [f"{d.path or 'the model itself'}: {d.reason}" for d in decisions[:8]] + [
            f"and {len(decisions) - 8} more"
        ] * (len(decisions) > 8)
        reasons = "; ".join(shown) or "the model has no linears"
        raise ValueError(
            f"recipe {recipe.name!r} converts no linear ({reasons}). Change filter_fqns or use "
            "recipe 'bf16'."
        )
    return decisions


def check_shape(name: str, shape: tuple[int, int], recipe: Recipe) -> None:
    """ValueError unless [N, K] are multiples of what a recipe's casts take (L-5, S-6)."""
    if reason := _misfit(name, shape, recipe):
        raise ValueError(f"{reason}. Leave it out.")


def _misfit(name: str, shape: tuple[int, int], recipe: Recipe) -> str:
    """Why a recipe's casts do not take a weight [N, K]; "" if they do."""
    # which reduce N and K
    multiples = [_multiple(recipe, which) for which in ("grad_input", "output")]
    if not any(length % multiple for length, multiple in zip(shape, multiples, strict=True)):
        return ""
    return (
        f"recipe {recipe.name!r} needs multiples of {multiples} for [N, K] (L-5, S-6); "
        f"{name or 'it'} is {list(shape)}"
    )


def _small(recipe: Recipe) -> Sequence[tuple[float, float]]:
    """The thresholds of AUTO_FILTER; ValueError for an FP8 recipe without any."""
    if not recipe.fp8:
        return ()
    if recipe.name not in SMALL or recipe != RECIPES[recipe.name]:
        raise ValueError(
            f"{AUTO_FILTER!r} in filter_fqns needs recipe {', '.join(SMALL)}; got {recipe.name!r}, "
            "for which there is no data. Name the small linears in filter_fqns instead (R-4)."
        )
    return SMALL[recipe.name]


def _decide(
    name: str,
    shape: tuple[int, int],
    recipe: Recipe,
    filter_fqns: Sequence[str],
    fp8_fqns: Sequence[str],
    small: Sequence[tuple[float, float]],
) -> Decision:
    def kept(reason: str) -> Decision:
        return Decision(path=name, shape=shape, recipe=RECIPES["bf16"], reason=reason)

    if not recipe.fp8:
        return kept(f"recipe {recipe.name!r} has no FP8 GEMM")
    named = [p for p in fp8_fqns if matches(p, name)]
    filtered = [p for p in filter_fqns if matches(p, name)]
    if filtered and not named:
        return kept(f"named by filter_fqns {filtered[0]!r}")
    if reason := _misfit(name, shape, recipe):
        if named:
            raise ValueError(
                f"{reason}, and fp8_fqns {named[0]!r} names it. Pad the layer or drop the pattern."
            )
        return kept(reason)
    for most in () if named else small:
        if all(length <= limit for length, limit in zip(shape, most, strict=True)):
            limits = " and ".join(
                f"{axis} <= {limit}"
                for axis, limit in zip("NK", most, strict=True)
                if limit < math.inf
            )
            return kept(
                f"{AUTO_FILTER!r} keeps {limits} from recipe {recipe.name!r} (R-4); "
                f"{name or 'it'} is {list(shape)}"
            )
    return Decision(
        path=name,
        shape=shape,
        recipe=recipe,
        reason=f"named by fp8_fqns {named[0]!r}" if named else "every linear not filtered",
    )


def _multiple(recipe: Recipe, which: Gemm) -> int:
    """The multiple of a GEMM's reduced length: 16 (L-5) and its operands' blocks (S-6)."""
    gemm = recipe.gemms[which]
    casts = [cast for cast in (gemm.a, gemm.b) if cast is not None]
    return math.lcm(16, *(granularity.by_name(cast.granularity).reduced or 1 for cast in casts))
