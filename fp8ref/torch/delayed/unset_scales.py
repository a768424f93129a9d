"""Notice an evaluation by scales of delayed scaling that no update has set (spec H-12).

Until a first update, a calibration or a checkpoint sets it, a scale is 1: small weights become
zeros and large inputs are clipped, without an error. A pass that observes nothing warns of it, once
a model. A training step does not: its first scales are 1 by H-2, and its update sets them.

Whether a scale is set, the device knows: its state's ``step`` is above 0. Python remembers what it
has seen (``scaled``), and else reads ``step`` once, as of a state that was loaded in place.
"""

import re
import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fp8ref.spec import delayed
from fp8ref.spec.attention import variants as attention
from fp8ref.torch.delayed import role_states
from fp8ref.torch.delayed.role_states import RoleState
from fp8ref.torch.tensors import linear_input

FORWARD = frozenset({"input", "weight", *attention.ROLES})
"""The roles whose scales a pass without gradients casts by."""

_CALIBRATE = "fp8ref.torch.delayed.calibrate(model, batches)"


def check(states: nn.ModuleDict, name: str) -> None:
    """Warn, once a model, of an eager pass that observes nothing and casts by unset scales."""
    forward = _forward(states)
    if all(state.scaled for state in forward):
        return
    notice = forward[0].notice
    if notice.settled or _within_function() or _busy(forward):
        return
    for state in forward:
        state.scaled = bool(state.step.item())
    if not all(state.scaled for state in forward):
        warnings.warn(delayed.unset_scales(name, _CALIBRATE), stacklevel=4)
        notice.settled = True  # after the warning, which may be an error that the next pass repeats


def check_traced(states: nn.ModuleDict) -> None:
    """``check`` of the whole model where dynamo traces such a pass.

    A model whose scales are all known to be set shares its programs with others. Another one has
    programs of its own: a guard on its name traces the pass, and so warns, of each model.
    """
    # A pass in training mode may be a reentrant checkpoint's, which training repeats.
    if states.training:
        return
    forward = _forward(states)
    if not all(state.scaled for state in forward):
        _check_model(forward[0].notice.model)


@torch._dynamo.assume_constant_result
def _check_model(model: str) -> None:
    """Run in Python while dynamo traces; changes notices only, which no guard reads."""
    forward = [
        state
        for states in list(role_states.registered.values())
        for state in _forward(states)
        if not (state.scaled or state.notice.settled) and state.notice.model == model
    ]
    # torch.export puts tensors without numbers in the place of states, and what it writes is for
    # good: there it counts that Python saw nothing set them.
    unread = _busy(forward)
    if unread and not torch.compiler.is_exporting():
        return

    def is_unset(state: RoleState) -> bool:
        return not state.step.is_meta and (unread or not state.step.item())

    if unset := next(filter(is_unset, forward), None):
        name = re.split(r"\.?\b(?:grouped_)?states\.", unset.path)[0]
        warnings.warn(delayed.unset_scales(linear_input.named(name), _CALIBRATE), stacklevel=2)
    for state in forward:
        state.notice.settled = True


def _forward(states: nn.ModuleDict) -> Sequence[RoleState]:
    """The states that a pass without gradients casts with."""
    return [state for role, state in states.items() if role in FORWARD]  # type: ignore[misc]


def _within_function() -> bool:
    """Whether a checkpoint reruns the pass inside an autograd.Function, without gradients."""
    frame = None if torch.is_grad_enabled() else sys._getframe(2)
    while frame is not None:
        if isinstance(frame.f_locals.get("ctx"), torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back
    return False


def _busy(states: Sequence[RoleState]) -> bool:
    """Whether a step cannot be read now: no values, or operators are recorded."""
    steps = [state.step for state in states]
    capturing = any(x.is_cuda for x in steps) and torch.cuda.is_current_stream_capturing()
    return (
        capturing
        or torch._C._len_torch_dispatch_stack() > 0
        or any(x.is_meta or type(x) is not Tensor for x in steps)
    )
