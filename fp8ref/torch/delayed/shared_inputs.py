"""Linears that read one tensor: under delayed scaling they observe it once, and cast it by one
scale, so that equal casts merge.

    shared_inputs.share(model, {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"})

Each linear keeps a state of its own, for checkpoints; states of one tensor stay equal.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fp8ref.shared.errors import require
from fp8ref.torch.delayed.role_states import DelayedState, RoleState, RoleStates

__all__ = ["check", "share"]


def share(model: nn.Module, readers: Mapping[str, str]) -> None:
    """Have linears observe and scale an input by the state of another linear that reads it too.

    readers   {name of a linear in its parent: that of the first linear there that reads its input}.
              Of two whose casts or groups of ranks differ, each keeps to its own state.
    Raises:   ValueError: as ``check``.
    """
    inputs = {name: state for name, module in model.named_modules() if (state := _input(module))}
    for name, state in inputs.items():
        parent, dot, last = name.rpartition(".")
        first = inputs.get(f"{parent}{dot}{readers[last]}") if last in readers else None
        if first is not None and _kind(first) == _kind(state):
            state.first = (first,)
    check(model)


def check(model: nn.Module) -> None:
    """ValueError unless states of one input are equal, as in runs; those without memory pass."""
    for name, module in model.named_modules():
        state = _input(module)
        if state is None or state.origin is state:
            continue
        if state.scale.is_meta or type(state.scale) is not Tensor:  # a compiler's
            continue
        for key in DelayedState._fields:
            mine, first = getattr(state, key), getattr(state.origin, key)
            require(
                torch.equal(mine, first.to(mine.device)),
                f"linears that read one tensor have equal states of it; the {key} of {name} is "
                "another than that of the first. Load states that a run has saved.",
            )


def _input(module: nn.Module) -> RoleState | None:
    """A linear's state of its input, if it keeps one."""
    states = getattr(module, "states", None)
    if not isinstance(states, RoleStates) or "input" not in states:
        return None
    state = states["input"]
    assert isinstance(state, RoleState)
    return state


def _kind(state: RoleState) -> tuple:
    return state.fmt, state.config, state.group
