"""A projection of experts: a ``GroupedLinear``, as nn.Linear is of a linear (spec X).

    up = GroupedLinear(8, 128, 384)        # 8 experts, weight [8, 384, 128]
    y = up(rows, ends)                     # [M, 128] -> [M, 384], rows in groups that end at ends
    ft.convert(model, "rowwise")           # in FP8, as the model's linears

``convert`` puts it in FP8 by the grouped recipe that goes with the linears' (X-8). The module stays
the same, and so does its Parameter.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8ref.recipe import RECIPES, Recipe, Role
from fp8ref.selection import grouped as recipes
from fp8ref.selection.grouped import GroupedRecipe
from fp8ref.torch import delayed
from fp8ref.torch.delayed import state_checks as delayed_checks
from fp8ref.torch.delayed.role_states import role_states
from fp8ref.torch.experts import arguments, gemm, grouped
from fp8ref.torch.experts.operands import Groups
from fp8ref.torch.quantize.scaling import Quantized
from fp8ref.torch.tensors.local_part import local_part

__all__ = ["GroupedLinear", "grouped_linears", "recipe_of"]


class GroupedLinear(nn.Module):
    """Each group's rows times the weight of its expert; without bias.

    Shapes:   weight [E, N, K], not initialized: fill it, as by nn.init; rows [M, K] and int32 ends
              [E] -> [M, N], of rows' dtype.
    recipe    the grouped recipe; ``bf16`` until it is converted.
    states    by role, the states of delayed scaling (X-9).
    fqn       its name in the model that was converted, for errors.
    shared    name of the process group whose ranks have the same weights, and share their groups'
              amaxes (X-3).
    A weight that ``parallel.cut`` cuts is a DTensor, of which this rank multiplies its experts.
    """

    bias = None
    fqn: str = "a grouped linear"
    shared: str | None = None

    def __init__(
        self, experts: int, in_features: int, out_features: int, *, device=None, dtype=None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(experts, out_features, in_features, device=device, dtype=dtype)
        )
        self.states = nn.ModuleDict()
        self._take("bf16")

    def forward(
        self,
        rows: Tensor,
        ends: Tensor,
        *,
        input_codes: Quantized | None = None,
        grad_codes: grouped.Slot | None = None,
    ) -> Tensor:
        """rows [M, K] of groups that end at ends -> [M, N]; input_codes, grad_codes and what it
        raises as ``grouped.apply``."""
        delayed_checks.check_pass(self, self.states, rows, delayed.observes(self))
        exchange = grouped.Exchange(
            self.shared, isinstance(self.weight, DTensor), input_codes, grad_codes
        )
        return grouped.apply(
            rows,
            local_part(self.weight),
            ends,
            recipe=self._bound,
            states=self.states,
            observe=self.training,
            exchange=exchange,
            name=self.fqn,
        )

    def observe_rows(self, role: Role, rows: Tensor, groups: Groups) -> None:
        """Observe experts' input or gradient before it moves, in training, if delayed (X-14)."""
        training = self.training and (torch.is_grad_enabled() or role == "grad_output")
        if training and role in self.states:
            grouped.merge_(self.states[role].seen, rows, groups, True)  # type: ignore[arg-type]

    def convert(self, recipe: str | Recipe | GroupedRecipe, *, group: str | None = None) -> None:
        """Multiply by this recipe from now on, with new states of delayed scaling.

        group     name of the process group whose ranks share those states, and the amaxes of their
                  groups' rows.
        Raises:   ValueError: as ``arguments.check_recipe``.
        """
        checked = arguments.check_recipe(recipe)
        casts = delayed.casts(checked.recipe)
        states = role_states(casts, self.weight.device, group)
        self.states = states.train(self.training)
        self.shared = group if checked.recipe.fp8 and not checked.recipe.delayed else None
        self._take(checked)
        delayed_checks.watch(self)

    @property
    def in_fp8(self) -> int:
        """The number of parameters that are multiplied in FP8."""
        return self.weight.numel() if self.recipe.recipe.fp8 else 0

    def kernels(self) -> str:
        """What multiplies, for reports."""
        return gemm.kernels(self.recipe.recipe, self.weight.device)

    def _take(self, recipe: str | Recipe | GroupedRecipe) -> None:
        self._bound = grouped.bind(recipe)
        self.recipe = self._bound.recipe

    def __getstate__(self) -> dict:
        # whose class pickle cannot find
        return {key: value for key, value in vars(self).items() if key != "_bound"}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._take(self.recipe)
        delayed_checks.watch(self)

    def extra_repr(self) -> str:
        """Its sizes, and the recipe's name."""
        experts, n, k = self.weight.shape
        return f"experts={experts}, in_features={k}, out_features={n}, recipe={self.recipe.name}"


def grouped_linears(model: nn.Module) -> dict[str, GroupedLinear]:
    """The grouped linears of a model, by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, GroupedLinear)
    }


def recipe_of(recipe: Recipe) -> Recipe:
    """The grouped recipe for a recipe of linears (X-8); bf16 in high precision."""
    return recipes.grouped_recipe(recipe).recipe if recipe.fp8 else RECIPES["bf16"]
