"""What ``convert`` makes of a model, checked before it changes (R-2 to R-8, X-8, X-11)."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fp8ref.recipe import Recipe
from fp8ref.selection import linears as linear_selection
from fp8ref.selection import routers
from fp8ref.selection import rules as linear_rules
from fp8ref.selection.grouped import GroupedRecipe
from fp8ref.selection.linears import Decision
from fp8ref.selection.rules import Rule
from fp8ref.spec.kernels import Choice
from fp8ref.spec.kernels import check as check_kernels
from fp8ref.torch.experts import arguments as grouped_arguments
from fp8ref.torch.experts import layer as grouped_linear
from fp8ref.torch.experts import models as experts_models
from fp8ref.torch.experts import selection as experts_selection
from fp8ref.torch.gemm import gemm
from fp8ref.torch.kernels import choice as kernel_choice
from fp8ref.torch.linear import torchao_linear
from fp8ref.torch.linear.linear import check_recipe
from fp8ref.torch.linear.model_checks import check_model
from fp8ref.torch.linear.spec import casts_by_kernels
from fp8ref.torch.model import report as reports
from fp8ref.torch.model.convert_checks import check_linear, device_of


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the caller of ``convert`` selects of a model."""

    filter_fqns: Sequence[str] = ()
    fp8_fqns: Sequence[str] = ()
    rules: Sequence[Rule] = ()
    experts: bool = False
    kernels: Choice = "auto"


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """Which modules of a model become FP8, by which recipe.

    recipe            of linears that no rule changes.
    linears           every nn.Linear of the model by its name; of two names, both.
    grouped           every ``GroupedLinear`` of the model.
    mixtures          modules of experts that are converted.
    decisions         of linears and grouped linears.
    expert_decisions  of the weights of mixtures.
    group_recipes     {name: grouped recipe} of the grouped linears that become FP8.
    expert_plans      how each mixture will multiply.
    expert_reasons    why weights of mixtures are in FP8 or not, for the report.
    by_torchao        the recipes whose linears are torchao's; of others they are fp8ref's.
    """

    recipe: Recipe
    linears: Mapping[str, nn.Linear]
    grouped: Mapping[str, grouped_linear.GroupedLinear]
    mixtures: Mapping[str, nn.Module]
    decisions: Sequence[Decision]
    expert_decisions: Sequence[Decision]
    group_recipes: Mapping[str, GroupedRecipe]
    expert_plans: Mapping[str, experts_models.Plan]
    expert_reasons: Mapping[str, str]
    by_torchao: frozenset[Recipe]

    @property
    def linear_recipes(self) -> dict[str, Recipe]:
        """{name: recipe} of the linears that become FP8."""
        return {d.path: d.recipe for d in self.decisions if d.fp8 and d.path not in self.grouped}

    @property
    def is_empty(self) -> bool:
        """Whether nothing becomes FP8."""
        return not self.linear_recipes and not self.mixtures and not self.group_recipes

    @property
    def recipes(self) -> set[Recipe]:
        """Every recipe by which something becomes FP8."""
        experts = [self.recipe] if self.mixtures else []
        return {
            *self.linear_recipes.values(),
            *(grouped.recipe for grouped in self.group_recipes.values()),
            *experts,
            *(d.recipe for d in self.expert_decisions if d.fp8),
        }

    @property
    def devices(self) -> set[str]:
        """The kinds of devices that hold what becomes FP8. ValueError as ``device_of``."""
        weights = [self.linears[name].weight for name in self.linear_recipes]
        weights += [self.grouped[name].weight for name in self.group_recipes]
        weights += [next(m.parameters(recurse=False)) for m in self.mixtures.values()]
        # ``check`` refuses a linear without a weight
        return {device_of(weight).type for weight in weights if weight is not None}

    def check(self, model: nn.Module) -> None:
        """ValueError for what cannot be converted, as ``convert`` says; nothing is changed."""
        for recipe in self.recipes - self.by_torchao:
            check_recipe(recipe)
        check_model(model, "Convert a model first, then {} it")
        for name in self.linear_recipes:
            parent = model.get_submodule(name.rpartition(".")[0]) if name else None
            check_linear(name, self.linears, parent)
        for name, module in self.mixtures.items():
            experts_selection.check(name, module)
        if "cpu" in self.devices:
            for recipe in self.recipes:
                gemm.check_cpu(recipe)


def plan_conversion(
    model: nn.Module, recipe: Recipe, selection: Selection, *, shared: bool
) -> ConversionPlan:
    """Decide what becomes of each linear, grouped linear and module of experts.

    shared    whether ranks share amaxes, which torchao's linears do not.
    Raises:   ValueError: as ``convert``, of patterns, rules and recipes.
    """
    check_kernels(selection.kernels)
    linears = {
        name: m
        for name, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, nn.Linear)
    }
    grouped = grouped_linear.grouped_linears(model)
    shapes = _shapes(model, grouped)
    mixtures: dict[str, nn.Module] = {}
    if selection.experts and recipe.fp8:
        mixtures, filter_fqns = experts_selection.choose(
            model, recipe, selection.filter_fqns, shapes
        )
        selection = dataclasses.replace(selection, filter_fqns=filter_fqns)
    selected = _with_groups(_select(model, shapes, recipe, selection), grouped)
    sizes: set[int | None] = {d.experts for d in selected if d.fp8 and d.experts}
    sizes |= {getattr(m, "num_experts", None) for m in mixtures.values()}
    selected = routers.left_out(selected, sizes, selection.fp8_fqns)
    expert_recipe = experts_models.by_name(recipe)
    expert_decisions = experts_selection.planned(mixtures, expert_recipe)
    ruled = linear_rules.apply(selection.rules, [*selected, *expert_decisions])
    decisions, expert_decisions = ruled[: len(selected)], ruled[len(selected) :]
    group_recipes = {
        d.path: grouped_arguments.check_recipe(d.recipe, d.path)
        for d in decisions
        if d.fp8 and d.path in grouped
    }
    expert_plans = experts_models.plan(mixtures, expert_recipe, expert_decisions)
    if shared:
        in_groups = [d for d in decisions if d.path in group_recipes]
        experts_selection.check_shared(mixtures, recipe, expert_decisions, in_groups)
    plan = ConversionPlan(
        recipe=recipe,
        linears=linears,
        grouped=grouped,
        mixtures=mixtures,
        decisions=decisions,
        expert_decisions=expert_decisions,
        group_recipes=group_recipes,
        expert_plans=expert_plans,
        expert_reasons=experts_selection.reasons(mixtures, expert_decisions, selection.rules),
        by_torchao=frozenset(),
    )
    if shared:
        return plan
    return dataclasses.replace(plan, by_torchao=_by_torchao(plan, selection))


def _by_torchao(plan: ConversionPlan, selection: Selection) -> frozenset[Recipe]:
    """The recipes whose linears are torchao's: those that it has, unless Triton kernels cast all
    their operands where the linears are, or, of linears without memory, on this machine's GPU."""
    kinds = plan.devices
    if kinds == {"meta"}:
        kinds = {"cuda" if torch.cuda.is_available() else "cpu"}
    kernels = all(kernel_choice.resolve(selection.kernels, torch.device(kind)) for kind in kinds)
    return frozenset(
        recipe
        for recipe in plan.recipes
        if torchao_linear.expresses(recipe) and not (kernels and casts_by_kernels(recipe))
    )


def _shapes(
    model: nn.Module, grouped: Mapping[str, grouped_linear.GroupedLinear]
) -> dict[str, tuple[int, int]]:
    """{name: [N, K]} of linears and grouped linears, in module order."""
    shapes = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            shapes[name] = (module.out_features, module.in_features)
        elif name in grouped:
            _, n, k = grouped[name].weight.shape
            shapes[name] = (n, k)
    return shapes


def _with_groups(
    decisions: Sequence[Decision], grouped: Mapping[str, grouped_linear.GroupedLinear]
) -> list[Decision]:
    """The decisions; grouped linears with each group's recipe (X-8)."""
    return [
        dataclasses.replace(
            d, recipe=grouped_linear.recipe_of(d.recipe), experts=len(grouped[d.path].weight)
        )
        if d.path in grouped
        else d
        for d in decisions
    ]


def _select(
    model: nn.Module, shapes: Mapping[str, tuple[int, int]], recipe: Recipe, selection: Selection
) -> list[Decision]:
    """``selection.linears.select``; its error also names what multiplies outside linears."""
    try:
        return linear_selection.select(
            shapes, recipe, filter_fqns=selection.filter_fqns, fp8_fqns=selection.fp8_fqns
        )
    except ValueError as error:
        others = reports.report(model).surprises
        if not others or "converts no linear" not in str(error):
            raise
        names = "; ".join(f"{row.path} ({row.kind}: {row.reason})" for row in others[:2])
        raise ValueError(
            f"{error} Of {len(others)} other modules with matrices the first are {names}."
        ) from None
