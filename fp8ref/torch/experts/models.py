"""Layers of experts in FP8: products of 3-dimensional weights become grouped linears (spec X-11).

``ft.convert(model, recipe, experts=True)`` changes the class of each module of experts that is
known here, and nothing else of it: its Parameters, hooks and keys stay. Known are

    transformers   classes of ``use_experts_implementation``: Mixtral's, Qwen3-MoE's and others';
                   Llama-4's
    torchtitan     GroupedExperts, by its method _grouped_mm; before it had one, by w1, w2 and w3

Router, activation, weighting and sum over a token's experts stay as they were.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8ref.recipe import Recipe
from fp8ref.selection import grouped as recipes
from fp8ref.selection.grouped import GroupedRecipe
from fp8ref.selection.linears import Decision
from fp8ref.torch import delayed
from fp8ref.torch.delayed import state_checks as delayed_checks
from fp8ref.torch.delayed.role_states import role_states
from fp8ref.torch.experts import arguments, gemm, grouped
from fp8ref.torch.tensors import linear_input
from fp8ref.torch.tensors.local_part import local_part

_METHODS_OF = "_fp8_experts_of"
"""The attribute of a class made here that holds the class of the module before."""

OWN = ("recipe", "fqn", "grouped_states", "of_weights", "_bound")
"""What a conversion adds to a module."""

NAMES = (("w1", "w2", "w3"), ("w1_EFD", "w2_EDF", "w3_EFD"))
"""The weights of torchtitan's GroupedExperts, of older and of newer ones: gate, down and up."""


class Experts(nn.Module):
    """Experts whose products are grouped linears: a base of the classes made here, never alone.

    recipe           the grouped recipe.
    fqn              the module's name in the model, for errors.
    grouped_states   by weight and role, its states of delayed scaling (X-9).
    of_weights       by weight, the grouped recipes that rules changed (R-8).
    """

    recipe: GroupedRecipe
    fqn: str
    grouped_states: nn.ModuleDict
    of_weights: dict[str, GroupedRecipe]
    _bound: dict[str, grouped.Bound]

    def product(self, key: str, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        """x [M, K] times the weight w [E, N, K] of that name, group by group."""
        states = dict(self.grouped_states.items()).get(key)
        assert states is None or isinstance(states, nn.ModuleDict)
        bound = self._bound.get(key, self._bound[""])
        delayed_checks.check_pass(self, states, x, delayed.observes(self))
        return grouped.apply(
            x, w, ends, recipe=bound, states=states, observe=self.training, name=f"{self.fqn}.{key}"
        )

    @property
    def grouped_recipes(self) -> dict[str, GroupedRecipe]:
        """By weight, its grouped recipe."""
        return {key: self.of_weights.get(key, self.recipe) for key in weights_of(self)}

    @property
    def in_fp8(self) -> int:
        """The number of parameters that are multiplied in FP8."""
        recipes_of = self.grouped_recipes
        return sum(p.numel() for key, p in weights_of(self).items() if recipes_of[key].recipe.fp8)

    @property
    def recipes_in_fp8(self) -> str:
        """Of the recipes that multiply in FP8, for reports."""
        return ", ".join(dict.fromkeys(recipe.name for recipe in self._in_fp8()))

    def kernels(self) -> str:
        """What multiplies in FP8, for reports."""
        device = next(self.parameters(recurse=False)).device
        used = (gemm.kernels(recipe.recipe, device) for recipe in self._in_fp8())
        return "; ".join(dict.fromkeys(used))

    def _in_fp8(self) -> list[GroupedRecipe]:
        return [recipe for recipe in self.grouped_recipes.values() if recipe.recipe.fp8]

    def __reduce__(self) -> tuple:
        kept = {key: value for key, value in vars(self).items() if key != "_bound"}
        kind = next(kind for kind in type(self).__mro__ if kind in KINDS)
        return _empty, (kind, getattr(type(self), _METHODS_OF)), kept

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        vars(self)["_bound"] = _bound(self.recipe, self.of_weights)
        delayed_checks.watch(self)

    def extra_repr(self) -> str:
        """What the module prints, and the recipe; each weight's, where rules changed one."""
        named = (
            {key: recipe.name for key, recipe in self.grouped_recipes.items()}
            if self.of_weights
            else {"recipe": self.recipe.name}
        )
        parts = [super().extra_repr(), *(f"{key}={name}" for key, name in named.items())]
        return ", ".join(filter(None, parts))


class OfTransformers(Experts):
    """The forward pass of transformers' experts, as its ``grouped_mm``."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    down_proj: nn.Parameter
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Outputs [T, H] of tokens [T, H], which top_k_index [T, k] sends to experts and
        top_k_weights [T, k] weights.

        An index of num_experts or more is of an expert elsewhere: its rows are in no group.
        """
        tokens, choices = top_k_index.shape
        chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
        ends = torch.searchsorted(
            chosen, torch.arange(self.num_experts, device=chosen.device), right=True, out_int32=True
        )
        present = chosen.clamp(max=self.num_experts - 1)
        rows = hidden_states[order // choices]  # [T k, H]
        if linear_input.autocast_dtype(rows) is None:
            rows = rows.to(self.down_proj.dtype)
        rows = self._project("gate_up_proj" if self.has_gate else "up_proj", rows, ends, present)
        rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
        rows = self._project("down_proj", rows, ends, present)
        if self.has_post_expert_norm:
            rows = self.post_expert_norm(rows)
        weights = top_k_weights.reshape(-1)[order].masked_fill(chosen >= self.num_experts, 0)
        weighted = rows * weights[:, None]
        back = torch.empty_like(order).index_copy(
            0, order, torch.arange(len(order), device=order.device)
        )
        return weighted[back].view(tokens, choices, -1).sum(dim=1).to(hidden_states.dtype)

    def _project(self, key: str, rows: Tensor, ends: Tensor, present: Tensor) -> Tensor:
        """rows [M, K] times a projection, plus its bias if any."""
        w = getattr(self, key)
        out = self.product(key, rows, w.mT if self.is_transposed else w, ends)
        if self.has_bias:
            return out + getattr(self, f"{key}_bias")[present].to(out.dtype)
        return out


class OfSortedRows(Experts):
    """transformers' Llama-4 experts: equal numbers of rows, sorted by expert."""

    is_transposed = True
    num_experts: int
    hidden_size: int
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    act_fn: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Outputs [E T, H] of rows [E T, H], T of each expert."""
        rows = hidden_states.reshape(-1, self.hidden_size)
        ends = torch.arange(1, self.num_experts + 1, device=rows.device, dtype=torch.int32) * (
            len(rows) // self.num_experts
        )
        gate, up = self.product("gate_up_proj", rows, self.gate_up_proj.mT, ends).chunk(2, dim=-1)
        return self.product("down_proj", up * self.act_fn(gate), self.down_proj.mT, ends)


class ByMethod(Experts):
    """torchtitan's GroupedExperts that multiply by a method of their own."""

    def _grouped_mm(self, *, A: Tensor, weight_EOI: Tensor, offs: Tensor) -> Tensor:
        """A [M, K] times weight_EOI [E, N, K]."""
        return self.product("_grouped_mm", A, weight_EOI.to(A.dtype), offs)


class ByWeights(Experts):
    """torchtitan's GroupedExperts before: silu(x w1) * (x w3), times w2, in bfloat16."""

    def _run(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Outputs [M, D] of rows [M, D], by rows per expert; zeros beyond them."""
        first, second, third = next(names for names in NAMES if hasattr(self, names[0]))
        ends = num_tokens_per_expert.cumsum(0).to(torch.int32)

        def product(key: str, x: Tensor) -> Tensor:
            w = getattr(self, key)
            return self.product(key, x, local_part(w).bfloat16(), ends)

        rows = x.bfloat16()
        return product(
            second, functional.silu(product(first, rows)) * product(third, rows)
        ).type_as(x)


class ByForward(ByWeights):
    """Those whose forward pass takes rows that are sorted already."""

    forward = ByWeights._run


class ByExpertsForward(ByWeights):
    """Those that dispatch tokens themselves."""

    _experts_forward = ByWeights._run


KINDS = (OfTransformers, OfSortedRows, ByMethod, ByForward, ByExpertsForward)
"""How modules of experts are converted."""


def kind_of(module: nn.Module) -> type[Experts] | None:
    """How a module of experts is converted; None of any other module."""
    if isinstance(module, Experts):
        return None
    if all(
        hasattr(module, key)
        for key in (
            "has_gate",
            "has_bias",
            "is_transposed",
            "has_post_expert_norm",
            "num_experts",
            "down_proj",
        )
    ):
        return OfTransformers
    if not weights_of(module) or not hasattr(module, "num_experts"):
        return None
    if (
        set(weights_of(module)) == {"gate_up_proj", "down_proj"}
        and hasattr(module, "act_fn")
        and type(module).__name__ == "Llama4TextExperts"
    ):
        return OfSortedRows
    if callable(getattr(module, "_grouped_mm", None)):
        return ByMethod
    if any(all(hasattr(module, key) for key in names) for names in NAMES):
        return ByExpertsForward if hasattr(module, "_experts_forward") else ByForward
    return None


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a module of experts, by name: its parameters of 3 dims."""
    return {key: p for key, p in module.named_parameters(recurse=False) if p.ndim == 3}


def shapes_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """[N, K] of each weight of a module of experts, by name; some modules keep [E, K, N]."""
    transposed = getattr(module, "is_transposed", kind_of(module) is OfSortedRows)
    shapes = {key: tuple(p.shape[1:]) for key, p in weights_of(module).items()}
    return {key: (k, n) if transposed else (n, k) for key, (n, k) in shapes.items()}


def convertible_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of experts that can be converted, by name."""
    return {name: module for name, module in model.named_modules() if kind_of(module) is not None}


class Plan(NamedTuple):
    """How one module of experts will multiply: its grouped recipe, those of weights that rules
    changed, and what ``grouped.apply`` takes."""

    recipe: GroupedRecipe
    of_weights: dict[str, GroupedRecipe]
    bound: dict[str, grouped.Bound]


def plan(
    chosen: Mapping[str, nn.Module], recipe: GroupedRecipe, decisions: Iterable[Decision] = ()
) -> dict[str, Plan]:
    """How modules of experts will multiply, by name; nothing of them changes.

    decisions of their weights, after rules: recipes that are other ones.
    Raises:   ValueError, naming the weight: a recipe that no grouped linear runs.
    """
    changed = {
        d.path: arguments.check_recipe(d.recipe, d.path)
        for d in decisions
        if d.recipe != recipe.recipe
    }
    plans = {}
    for name, module in chosen.items():
        paths = {key: f"{name}.{key}" for key in weights_of(module)}
        weight_recipes = {key: changed[path] for key, path in paths.items() if path in changed}
        plans[name] = Plan(recipe, weight_recipes, _bound(recipe, weight_recipes))
    return plans


def convert(
    chosen: Mapping[str, nn.Module], plans: Mapping[str, Plan], group: str | None = None
) -> None:
    """Have modules of experts, which were checked, multiply as planned.

    group     name of the process group whose ranks share the states of delayed scaling.
    """
    for name, module in chosen.items():
        recipe, weight_recipes, bound = plans[name]
        kind = kind_of(module)
        assert kind is not None
        device = next(module.parameters(recurse=False)).device
        states = {
            key: role_states(casts, device, group)
            for key in weights_of(module)
            if (casts := delayed.casts(weight_recipes.get(key, recipe).recipe))
        }
        module.grouped_states = nn.ModuleDict(states).train(module.training)
        vars(module).update(recipe=recipe, fqn=name, of_weights=weight_recipes, _bound=bound)
        module.__class__ = _made(kind, type(module))  # type: ignore[arg-type]
        delayed_checks.watch(module)


def deconvert(modules: Iterable[nn.Module]) -> None:
    """Undo ``convert`` of modules that are Experts. States of delayed scaling are dropped."""
    for module in modules:
        del module.grouped_states
        for key in OWN:
            vars(module).pop(key, None)
        module.__class__ = getattr(type(module), _METHODS_OF)


def by_name(recipe: str | Recipe) -> GroupedRecipe:
    """The grouped recipe for a recipe of linears: torchao's for ``rowwise``."""
    if isinstance(recipe, str):
        return recipes.by_name(recipe)
    return recipes.grouped_recipe(recipe)


def _bound(
    recipe: GroupedRecipe, weight_recipes: Mapping[str, GroupedRecipe]
) -> dict[str, grouped.Bound]:
    """Arguments of ``grouped.apply`` for weights that rules changed; under "" for all others."""
    return {"": grouped.bind(recipe)} | {
        key: grouped.bind(own) for key, own in weight_recipes.items()
    }


@functools.cache
def _made(kind: type[Experts], of: type[nn.Module]) -> type[nn.Module]:
    """A module's class in FP8: its own, with the products of kind."""
    return type(of.__name__, (kind, of), {"__module__": of.__module__, _METHODS_OF: of})


def _empty(kind: type[Experts], of: type[nn.Module]) -> nn.Module:
    """An empty module of ``_made``'s class, for copy and pickle."""
    experts_class = _made(kind, of)  # type: ignore[arg-type]
    return experts_class.__new__(experts_class)
