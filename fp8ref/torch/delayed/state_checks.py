"""Notice optimizer steps without ``delayed.update`` (spec H-12).

An optimizer step is seen by a hook on all optimizers, so that microbatches and recomputed forward
passes, after which no optimizer steps, count for nothing. Nothing here waits for a device.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8ref.torch.delayed import rank_checks, unset_scales
from fp8ref.torch.delayed.role_states import RoleState
from fp8ref.torch.tensors import linear_input

MOST = 10
"""The optimizer steps without an update after which the next forward pass is refused."""

_CALL = "Call fp8ref.torch.delayed.update(model) after each optimizer.step()"


_linears: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The linears whose last forward pass with gradients was in eval mode, and observed nothing."""
_untraced = False
"""Whether dynamo traced an optimizer step whole, which the hook after it does not count."""


def watch(linear: nn.Module) -> None:
    """Count the optimizer steps of a linear's weight that no update follows, if it keeps states."""
    if any(True for _ in _states(linear)):
        _linears.add(linear)
        _count_steps()


def unwatch(model: nn.Module) -> None:
    """Count no optimizer steps of a model's linears: other models train the same weights too."""
    _linears.difference_update(_linears & set(model.modules()))


@functools.cache
def _count_steps() -> None:
    register_optimizer_step_post_hook(_hook())


def _hook() -> Callable[[torch.optim.Optimizer, tuple, dict], None]:
    """A hook after any optimizer's step. In compiled steps torch breaks graphs around its own
    optimizers' arithmetic, so Python runs it. A step that dynamo traces whole stays whole:
    ``check`` then compares weight versions."""
    # Wrapped here, since that imports dynamo.
    count = torch.compiler.disable(_count_step)
    traced_alone = torch.compiler.assume_constant_result(_traced_alone)

    def stepped(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if not torch.compiler.is_compiling() or traced_alone():
            count(optimizer)

    return stepped


def _traced_alone() -> bool:
    """Dynamo calls this while it traces the hook: whether a break splits no arithmetic."""
    global _untraced
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tx = InstructionTranslator.current_tx()
    alone = not tx.one_graph and not tx.output.count_calls()
    _untraced |= not alone
    return alone


def _count_step(optimizer: torch.optim.Optimizer) -> None:
    """Count a step for the linears whose weights an optimizer has."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    evaluated: nn.Module | None = None
    for linear in list(_linears):
        weights = _weights(linear)
        if not any(p.requires_grad for p in weights):
            # Whose step it is, nothing says. A frozen linear that was updated once may be another
            # model's, which this step does not train.
            for state in _states(linear):
                state.idle += state.used and not state.updated
            continue
        if not any(id(p) in held for p in weights):
            continue
        stepped = any(p.grad is not None for p in weights)
        if linear.training and stepped:
            _judge(linear)  # a compiled forward pass does not check
        elif linear in _evaluated and stepped:
            evaluated = evaluated or linear
        states = list(_states(linear))
        rank_checks.sample(linear, weights[0], states)
        version = sum(p._version for p in weights)
        for state in states:
            # Of a gradient that no eager pass computed: a compiled one observed.
            state.used |= linear.training and stepped and state.version is None
            if state.ahead and stepped:  # this step's update came before it
                state.scaled |= state.used
                state.used = state.ahead = False
                continue
            # An optimizer's parts pass by those without gradients, as where they take turns.
            if stepped or state.version not in (None, version):
                state.missed += 1
                state.version = None
    if evaluated is not None:
        warnings.warn(
            "delayed scaling observes amaxes in training mode; an optimizer step took gradients of "
            f"{_name(evaluated)} that eval mode computed, and its scales do not "
            "change. Call model.train() first.",
            stacklevel=2,
        )


def _weights(linear: nn.Module) -> list[Tensor]:
    """What an optimizer trains of a linear's weight, also if pruned or parametrized."""
    own, bias = linear._parameters.get("weight"), linear._parameters.get("bias")
    if own is None:
        return [p for p in linear.parameters() if p is not bias] or [linear.weight]  # type: ignore[list-item]
    return [own]


def check_pass(linear: nn.Module, states: nn.ModuleDict | None, x: Tensor, observes: bool) -> None:
    """``check`` in a pass of x with gradients, else ``unset_scales.check``."""
    if not states:
        return
    if torch.compiler.is_compiling():
        if not observes:
            unset_scales.check_traced(states)
        return
    if torch.is_grad_enabled():
        check(linear)
    if torch.is_tensor(x) and not x.numel():  # nothing is cast, nor observed
        return
    if not observes:
        unset_scales.check(states, _name(linear))
        return
    for role, state in states.items():
        # grad_output is observed in the backward pass, which a calibration has not
        if not state.used and (role in unset_scales.FORWARD or torch.is_grad_enabled()):
            state.used = True  # type: ignore[assignment]


def check(linear: nn.Module) -> None:
    """Warn of an optimizer step that no update followed; called in a forward pass with gradients.

    Raises:   ValueError: there were MOST of them.
    """
    if not linear.training:
        _evaluated.add(linear)
        return
    _evaluated.discard(linear)
    weights = _weights(linear)
    version = sum(p._version for p in weights) if any(p.requires_grad for p in weights) else None
    for state in _states(linear):
        # Every step that changes a weight in place raises its version, a compiled step too.
        state.missed += _untraced and state.version is not None and state.version != version
        if state.version != version:
            state.version = version
    _judge(linear)


def _judge(linear: nn.Module) -> None:
    """Warn or raise for the updates that a linear's states missed."""
    frozen, missed = not any(p.requires_grad for p in _weights(linear)), 0
    for state in _states(linear):
        missed = max(missed, state.missed, state.idle if frozen and not state.updated else 0)
    if missed >= MOST:
        raise ValueError(
            f"delayed scaling computes scales in delayed.update; {_name(linear)} "
            f"had {missed} optimizer steps without one. {_CALL}, or delayed.forget after a skipped "
            "step."
        )
    if missed:
        warnings.warn(
            "delayed scaling computes scales in delayed.update; an optimizer step was taken "
            f"without one. {_CALL}; after {MOST} steps a forward pass raises an error.",
            stacklevel=2,
        )


def _name(linear: nn.Module) -> str:
    return linear_input.named(str(linear.fqn))


def _states(linear: nn.Module) -> Iterable[RoleState]:
    """The states by role; for experts those of all weights."""
    own, grouped = linear._modules.get("states"), linear._modules.get("grouped_states")
    each = [own] if own is not None else [] if grouped is None else grouped.children()
    return [state for states in each for state in states.children()]  # type: ignore[misc]
