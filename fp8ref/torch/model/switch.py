"""Several recipes of one model, of which one runs (spec T-9).

    twin = ft.convert(copy_on_meta, "bf16")                       # neither sharded nor compiled
    switch = Switch(model, "tensorwise", {"bf16": twin})          # model: converted, perhaps
    sharded
    ...
    switch.to("bf16")                                             # between two optimizer steps

The linears of all recipes share their Parameters, so that optimizers, FSDP2 and checkpoints notice
no switch. A module of experts stays where it is, and changes how it multiplies: with a twin that
was converted without ``experts=True`` as its library does. States of delayed scaling wait while
other recipes run.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8ref.torch import delayed
from fp8ref.torch.delayed import state_checks as delayed_checks
from fp8ref.torch.delayed.role_states import RoleState
from fp8ref.torch.experts.layer import GroupedLinear
from fp8ref.torch.experts.models import OWN, Experts
from fp8ref.torch.linear.linear import Linear

__all__ = ["Switch"]


class Switch:
    """The linears and experts of a model by recipe.

    recipe    the one that runs.
    """

    def __init__(self, model: nn.Module, recipe: str, twins: Mapping[str, nn.Module]) -> None:
        """model: in recipe, with memory (``to_empty``); FSDP2 gathers its weights in their dtype.
        twins: the same model by further recipe, only converted, on the meta device; gives its
        linears and forms of experts. Raises:   ValueError: a weight that FSDP2 gathers in FP8."""
        self.model, self.recipe = model, recipe
        mine = {
            name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | GroupedLinear)
        }
        self._linears = {recipe: mine}
        self._states: dict[str, RoleState] = dict(delayed.states(model))
        gathered = [name for name, linear in mine.items() if hasattr(linear, "fp8_gather")]
        if twins and gathered:
            raise ValueError(
                f"a switchable model gathers weights in high precision; {gathered[0]} is gathered "
                "in FP8. Use gather_fp8=False: the bits are the same."
            )
        modules = [item for each in (model, *twins.values()) for item in each.named_modules()]
        self._forms = {
            name: {recipe: Form.of(model.get_submodule(name))}
            for name in sorted({name for name, m in modules if isinstance(m, Experts)})
        }
        for other, twin in twins.items():
            self._linears[other] = {
                name: self._sharing(name, twin.get_submodule(name), linear)
                for name, linear in mine.items()
            }
            for name, forms in self._forms.items():
                forms[other] = Form.of(twin.get_submodule(name))
                device = next(model.get_submodule(name).parameters(recurse=False)).device
                for key, states in (forms[other].states or {}).items():
                    assert isinstance(states, nn.ModuleDict)
                    self._share(f"{name}.grouped_states.{key}", states, device)

    def to(self, recipe: str) -> None:
        """Compute in another recipe from now on; observations that no update took are forgotten.

        Raises:   ValueError: a recipe that the model was not given.
        """
        if recipe not in self._linears:
            raise ValueError(
                f"a model switches to a recipe that it was made with, {', '.join(self._linears)}; "
                f"got {recipe!r}."
            )
        delayed.forget(self.model)
        for name, linear in self._linears[recipe].items():
            path, _, key = name.rpartition(".")
            parent = self.model.get_submodule(path)
            delayed_checks.unwatch(getattr(parent, key))
            setattr(parent, key, linear.train(self.model.training))
            if isinstance(linear, Linear | GroupedLinear):
                delayed_checks.watch(linear)
        for name, forms in self._forms.items():
            forms[recipe].give(self.model.get_submodule(name))
        delayed.forget(self.model)  # steps of other recipes are not missing updates
        self.recipe = recipe

    def states(self) -> Iterator[tuple[str, RoleState]]:
        """As ``delayed.states`` of the model, of all recipes."""
        yield from self._states.items()

    def _sharing(
        self, name: str, linear: nn.Module, mine: nn.Linear | GroupedLinear
    ) -> nn.Linear | GroupedLinear:
        """A twin's linear with the model's own Parameters and one state per role."""
        assert isinstance(linear, nn.Linear | GroupedLinear)
        delayed_checks.unwatch(linear)
        # The dict itself: FSDP2 puts whole weights and shards into that of the module it first saw.
        vars(linear)["_parameters"] = vars(mine)["_parameters"]
        if isinstance(linear, Linear | GroupedLinear):
            self._share(f"{name}.states", linear.states, mine.weight.device)
        return linear

    def _share(self, name: str, states: nn.ModuleDict, device: torch.device) -> None:
        """Put each role's one state in the place of a twin's, whose path is name."""
        for role, state in states.items():
            assert isinstance(state, RoleState)
            key = f"{name}.{role}"
            if key not in self._states:
                self._states[key] = state.to_empty(device=device)
            states[role] = self._states[key]


class Form(NamedTuple):
    """How a module multiplies its experts: its class and what a conversion added (spec X-16)."""

    kind: type[nn.Module]
    added: Mapping[str, Any]
    states: nn.ModuleDict | None

    @classmethod
    def of(cls, module: nn.Module) -> "Form":
        """That of a module, converted or not."""
        added = {key: vars(module)[key] for key in OWN if key in vars(module)}
        return cls(type(module), added, module._modules.get("grouped_states"))  # type: ignore[arg-type]

    def give(self, module: nn.Module) -> None:
        """Have a module of experts multiply in this form from now on.

        It stays what it is to hooks, optimizers and FSDP2.
        """
        module._modules.pop("grouped_states", None)
        for key in OWN:
            vars(module).pop(key, None)
        vars(module).update(self.added)
        if self.states is not None:
            module.grouped_states = self.states.train(module.training)
            delayed_checks.watch(module)
        unit = isinstance(module, FSDPModule) and not issubclass(self.kind, FSDPModule)
        module.__class__ = _unit(self.kind, type(module)) if unit else self.kind  # type: ignore[arg-type]


@functools.cache
def _unit(kind: type[nn.Module], of: type[nn.Module]) -> type[nn.Module]:
    """The class of an FSDP2 unit of class ``of`` that multiplies as kind."""
    return type(
        f"FSDP{kind.__name__}", (FSDPModule, kind), {"__deepcopy__": vars(of)["__deepcopy__"]}
    )
