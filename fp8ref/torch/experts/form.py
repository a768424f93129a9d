"""How a module of experts multiplies, apart, so that ``switch`` can change it (spec X-16)."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8ref.torch.delayed import state_checks as delayed_checks
from fp8ref.torch.experts.models import OWN


class Form(NamedTuple):
    """How a module multiplies its experts: its class and what a conversion added."""

    kind: type[nn.Module]
    added: Mapping[str, Any]
    states: nn.ModuleDict | None


def form_of(module: nn.Module) -> Form:
    """That of a module, converted or not."""
    return Form(
        type(module),
        {key: vars(module)[key] for key in OWN if key in vars(module)},
        module._modules.get("grouped_states"),  # type: ignore[arg-type]
    )


def take(module: nn.Module, form: Form) -> None:
    """Have a module of experts multiply in another form from now on.

    It stays what it is to hooks, optimizers and FSDP2.
    """
    module._modules.pop("grouped_states", None)
    for key in OWN:
        vars(module).pop(key, None)
    vars(module).update(form.added)
    if form.states is not None:
        module.grouped_states = form.states.train(module.training)
        delayed_checks.watch(module)
    unit = isinstance(module, FSDPModule) and not issubclass(form.kind, FSDPModule)
    module.__class__ = _unit(form.kind, type(module)) if unit else form.kind  # type: ignore[arg-type]


@functools.cache
def _unit(kind: type[nn.Module], of: type[nn.Module]) -> type[nn.Module]:
    """The class of an FSDP2 unit of class ``of`` that multiplies as kind."""
    return type(
        f"FSDP{kind.__name__}", (FSDPModule, kind), {"__deepcopy__": vars(of)["__deepcopy__"]}
    )
