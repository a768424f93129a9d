"""Delayed scaling of attention (spec A-12, A-19): a state for each tensor that has one scale.

states = attention_delayed.states("cudnn", device)  # an nn.ModuleDict, of a module of yours
o = attention_delayed.apply(q, k, v, states=states, variant="cudnn")
...
delayed.update(model)  # rolls them with those of linears
"""

import torch
from torch import Tensor, nn

from fp8ref.spec.attention import delayed as attention_delayed
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask, Variant
from fp8ref.spec.delayed import DELAYED, DelayedScaling
from fp8ref.torch import delayed
from fp8ref.torch.attention import attention
from fp8ref.torch.attention.attention import RoleScales
from fp8ref.torch.attention.operands.inputs import Pair
from fp8ref.torch.delayed import unset_scales
from fp8ref.torch.delayed.role_states import RoleState

__all__ = ["apply", "states"]


def states(
    variant: str | Variant,
    device: torch.device | str,
    group: str | None = None,
    config: DelayedScaling = DELAYED["delayed"],
) -> nn.ModuleDict:
    """A state for each role of a variant.

    group     name of the process group whose ranks have other sequences or heads of the same
              tensors (H-4).
    Raises:   ValueError: a variant without such roles; histories that this backend does not keep.
    """
    casts = attention_delayed.casts(data.by_name(variant), delayed.implemented(config))
    place = torch.device(device), group
    states = {role: RoleState(fmt, scaling, *place) for role, (fmt, scaling) in casts.items()}
    return delayed.RoleStates(states)


def apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    states: nn.ModuleDict,
    variant: str | Variant | Call,
    mask: Mask | None = None,
    documents: Pair = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``attention.apply`` by the scales of these states, which observe in training a pass that is
    differentiated (A-19): gradients are enabled, and one of q, k and v requires its own.

    Raises:   ValueError: as ``attention.apply``; states of another variant.
    """
    resolved = variant.variant if isinstance(variant, Call) else data.by_name(variant)
    roles = attention_delayed.roles(resolved)
    if set(states or {}) != set(roles):
        raise ValueError(
            f"variant {resolved.name!r} has states of {', '.join(roles) or 'no role'}; got "
            f"{', '.join(states or ()) or 'none'}. Use attention_delayed.states."
        )
    kept = {role: state for role, state in states.items() if isinstance(state, RoleState)}
    return attention.apply(
        q,
        k,
        v,
        variant=variant,
        mask=mask,
        documents=documents,
        scales=_role_scales(states, kept, any(x.requires_grad for x in (q, k, v))),
        sinks=sinks,
    )


def _role_scales(
    states: nn.ModuleDict, kept: dict[str, RoleState], differentiable: bool
) -> RoleScales:
    """A call's scales, and the observations that it merges into."""
    if delayed.calibrating():
        # by amaxes of its own, so that those of scores and outputs are not of casts by unset scales
        for role in data.ROLES:
            kept[role].used = True
        return RoleScales({}, {role: kept[role].seen for role in data.ROLES})
    if not (differentiable and torch.is_grad_enabled() and states.training):
        if torch.compiler.is_compiling():
            unset_scales.check_traced(states)
        else:
            unset_scales.check(states, "attention")
        return RoleScales({role: kept[role].scale for role in data.ROLES}, {})
    for state in kept.values():
        state.used = True
    scales = {role: state.scale for role, state in kept.items()}
    return RoleScales(scales, {role: state.seen for role, state in kept.items()})
