"""Which layers of experts of a PyTorch model a conversion takes, and why (spec X-11): what
``selection.linears`` is to linears."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from fp8ref.recipe import Recipe
from fp8ref.selection import linears as linear_selection
from fp8ref.selection.grouped import GroupedRecipe
from fp8ref.selection.linears import Decision
from fp8ref.selection.rules import Rule, casts_of
from fp8ref.spec.granularity import by_name as by_granularity
from fp8ref.torch.experts.models import (
    OWN,
    ByMethod,
    by_name,
    convertible_experts,
    kind_of,
    shapes_of,
    weights_of,
)


def choose(
    model: nn.Module, recipe: Recipe, filter_fqns: Sequence[str], linears: Iterable[str]
) -> tuple[dict[str, nn.Module], list[str]]:
    """The modules of experts to convert, and filter_fqns's patterns not of experts alone.

    linears   names of the model's.
    Raises:   ValueError: none is converted.
    """
    modules, matches = convertible_experts(model), linear_selection.matches
    filtered = {name for name in modules for pattern in filter_fqns if matches(pattern, name)}
    reasons = {
        name: "named by filter_fqns" if name in filtered else left_out(m, by_name(recipe))
        for name, m in modules.items()
    }
    if all(reasons.values()):
        listing = (
            "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:4])
            or "the model has none that is known"
        )
        raise ValueError(
            f"experts=True converts no experts ({listing}). Leave it out, or call grouped.apply."
        )
    others = [
        p
        for p in filter_fqns
        if any(matches(p, name) for name in linears)
        or not any(matches(p, name) for name in modules)
    ]
    return {name: m for name, m in modules.items() if not reasons[name]}, others


def left_out(module: nn.Module, recipe: GroupedRecipe) -> str:
    """Why a recipe does not convert a module of experts; "" if it does."""
    output, grad_input = (
        math.lcm(16, by_granularity(spec.b.granularity).reduced or 1) if spec.b is not None else 1
        for spec in (recipe.recipe.output, recipe.recipe.grad_input)
    )
    for key, (n, k) in shapes_of(module).items():
        if k % output or n % grad_input:
            shape = list(weights_of(module)[key].shape)
            return f"{key} {shape} has no multiple of {output} inputs, or of {grad_input} outputs"
    if recipe.recipe.delayed and kind_of(module) is ByMethod:
        return "its weights share one method, and delayed scaling keeps a state for each"
    return ""


def check(name: str, module: nn.Module) -> None:
    """ValueError unless the class of a module of experts can be changed."""
    if parametrize.is_parametrized(module):
        raise ValueError(
            f"{name} has parametrized weights, which would be lost. Name it in filter_fqns."
        )
    if replaced := [
        key for key in ("forward", "_experts_forward", "_grouped_mm", *OWN) if key in vars(module)
    ]:
        raise ValueError(
            f"{name} has a {replaced[0]} of its own, which would be lost. Name it in filter_fqns."
        )
    for key, p in module.named_parameters(recurse=False):
        if isinstance(p, DTensor):
            raise ValueError(
                f"{name} is sharded already (its {key} is a DTensor). Convert a model first."
            )
        if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"{name} has a {key} of {p.dtype}; FP8 is cast from float32, bfloat16 or float16."
            )


def planned(chosen: Mapping[str, nn.Module], recipe: GroupedRecipe) -> list[Decision]:
    """A decision of each weight that is multiplied by itself, as rules take them; those of one
    method are none."""
    decision = Decision(path="", shape=(0, 0), recipe=recipe.recipe, reason="converted")
    return [
        dataclasses.replace(
            decision, path=f"{name}.{key}", shape=shape, experts=len(weights_of(module)[key])
        )
        for name, module in chosen.items()
        for key, shape in shapes_of(module).items()
        if kind_of(module) is not ByMethod
    ]


def check_shared(
    chosen: Mapping[str, nn.Module],
    recipe: Recipe,
    decisions: Iterable[Decision],
    in_groups: Iterable[Decision],
) -> None:
    """ValueError where ranks that share amaxes would each silently scale experts' rows apart.

    recipe    of experts that no decision is of.
    decisions of single weights of experts, after rules; in_groups: of grouped linears.
    """
    whole = [
        Decision(path=name, shape=(0, 0), recipe=recipe, reason="")
        for name, m in chosen.items()
        if kind_of(m) is ByMethod
    ]
    # other grouped linears share those of groups
    for d in (*whole, *decisions, *(d for d in in_groups if d.recipe.delayed)):
        if any(
            cast and not cast.delayed
            for (_, role), cast in casts_of(d.recipe).items()
            if role != "weight"
        ):
            raise ValueError(
                "experts scale by their own rank's amaxes, unless delayed; got amax_group with "
                f"recipe {d.recipe.name!r} of {d.path}. Leave amax_group out, or use recipe "
                "'delayed'."
            )


def reasons(
    chosen: Mapping[str, nn.Module], decisions: Iterable[Decision], rules: Sequence[Rule]
) -> dict[str, str]:
    """Why modules of experts have the recipe that they have, by name, for reports: which rules
    changed weights, or did not reach them."""
    by_path, module_reasons = {d.path: d.reason for d in decisions}, {}
    for name, module in chosen.items():
        paths = {key: f"{name}.{key}" for key in weights_of(module)}
        if kind_of(module) is ByMethod:
            near = [
                str(i)
                for i, rule in enumerate(rules, 1)
                if any(linear_selection.matches(p, v) for p in rule.layers for v in paths.values())
            ]
            module_reasons[name] = "converted"
            if near:
                module_reasons[name] += (
                    f"; its weights share one method, so that rule {', '.join(near)} does not "
                    "change them (X-16)"
                )
        else:
            key_reasons = {key: by_path[path] for key, path in paths.items()}
            changed = [f"{key}: {why}" for key, why in key_reasons.items() if why != "converted"]
            every = set(key_reasons.values())
            whole = "; ".join(["converted", *changed])
            module_reasons[name] = every.pop() if len(every) == 1 else whole
    return module_reasons
