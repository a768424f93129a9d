"""Delayed scaling (spec H): scales come from amax histories, updated once a step.

    model(x).sum().backward()  # reads scales; observes amaxes of input, weight and grad_output
    optimizer.step()
    delayed.update(model)      # rolls histories, changes scales, clears the observations

An observation (``seen``) merges by elementwise maximum. So microbatches, uses of a module and
recomputed forward passes may come in any order, and any number of times.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fp8ref import formats
from fp8ref import recipe as recipes
from fp8ref.formats import Format
from fp8ref.recipe import Recipe, Role
from fp8ref.spec.delayed import DelayedScaling
from fp8ref.torch.delayed import rank_checks
from fp8ref.torch.delayed.role_states import (
    DelayedState,
    RoleState,
    RoleStates,
    implemented,
    init,
    merge_,
    observe,
)
from fp8ref.torch.quantize import scaling

__all__ = [
    "DelayedState",
    "RoleState",
    "RoleStates",
    "advance",
    "calibrate",
    "calibrating",
    "casts",
    "forget",
    "forget_unless",
    "implemented",
    "init",
    "merge_",
    "observe",
    "observes",
    "states",
    "update",
]


def advance(
    state: DelayedState, seen: Tensor, config: str | DelayedScaling, fmt: Format
) -> DelayedState:
    """The state after an optimizer step, given the merged observation of the step (H-3, H-5, H-6).

    Shapes:   seen float32 [..., 3], merged by maximum, of the state's shape [...].
    Specials: a state that was not seen, or whose amax was not finite, is kept; a zero amax is
              recorded.
    Raises:   ValueError: as ``implemented``; a fmt that is not a Format.
    """
    formats.check(fmt)
    config = implemented(config)
    amax, non_finite, was_seen = seen.unbind(-1)
    history = torch.cat([amax[..., None], state.amax_history[..., :-1]], dim=-1)
    used = amax if config.amax_compute == "most_recent" else history.amax(dim=-1)
    limit = fmt.max * 2.0**-config.policy.margin
    # In float64, rounded once: torch computes number / tensor as number * (1 / tensor), which
    # rounds twice. A zero amax keeps the scale (te_delayed).
    scale = (limit / used.double()).float().clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where((state.step % config.interval == 0) & (used > 0), scale, state.scale)
    advances = (was_seen > 0) & (non_finite == 0)
    return DelayedState(
        torch.where(advances, scale, state.scale),
        torch.where(advances[..., None], history, state.amax_history),
        torch.where(advances, state.step + 1, state.step),
    )


def casts(recipe: str | Recipe) -> dict[Role, tuple[Format, DelayedScaling]]:
    """``recipe.delayed_casts``, of configs that this backend implements."""
    return {
        role: (fmt, implemented(config))
        for role, (fmt, config) in recipes.delayed_casts(recipe).items()
    }


def states(model: nn.Module) -> Iterator[tuple[str, RoleState]]:
    """The name and state of every role with delayed scaling.

    ValueError: model is not an nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"a model is an nn.Module; got a {type(model).__name__}. Give the module itself."
        )
    return ((name, m) for name, m in model.named_modules() if isinstance(m, RoleState))


_calibrating = False
"""Whether ``calibrate`` runs a model."""


def calibrating() -> bool:
    """Whether linears observe and multiply in high precision, for ``calibrate``."""
    return _calibrating


def observes(module: nn.Module) -> bool:
    """Whether a linear's pass observes: training with gradients, or ``calibrate``."""
    return _calibrating or (torch.is_grad_enabled() and module.training)


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable) -> None:
    """Set a model's first scales by forward passes, so that it can be evaluated untrained.

        model.load_state_dict(weights)  # of a model without FP8
        delayed.calibrate(model, batches)

    batches   a few typical inputs: of each a tensor, a tuple of arguments, or a mapping of named
              ones. Ranks that share states each give their own.
    Order:    the model runs in eval mode, its FP8 linears in high precision, and they observe input
              and weight; then ``update``. Observations since the last update are cleared first.
    Specials: grad_output is not observed: training begins with its first scale, 1 (H-2).
    Raises:   ValueError: no batch; a model without delayed scaling; weights that are gathered in
              FP8.
    """
    global _calibrating
    named = [state for _, state in states(model)]
    if not named:
        raise ValueError(
            "calibrate needs delayed scaling; the model has none. Convert it to 'delayed' first."
        )
    forget(model)
    modes = [(module, module.training) for module in model.modules()]
    ran = False
    try:
        _calibrating = True
        with torch.compiler.set_stance("force_eager"):
            model.eval()
            for batch in batches:
                _call(model, batch)
                ran = True
    except BaseException:
        forget(model)
        raise
    finally:
        _calibrating = False
        for module, training in modes:
            module.training = training
    if not ran:
        raise ValueError("calibrate takes at least one batch of the model's inputs; got none.")
    update(model)


def _call(model: nn.Module, batch) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


@torch.no_grad()
def update(model: nn.Module, *, before_step: bool = False) -> None:
    """Roll a model's histories by the observed amaxes, compute new scales, clear observations.

    Call it once after each optimizer step. If the step was skipped, call ``forget`` instead. Ranks
    that share states (``RoleState.group``) all call it: an all-reduce merges their observations
    (H-4).
    before_step  whether the optimizer's step follows. The scales are the same, and the kernel of
                 ``states.AdamW`` casts weights by them (``linear.cast_once``).
    Specials: as advance: a role that was not seen, or whose amax was not finite, keeps its state
              (H-5).
    Raises:   ValueError, at a model's first update on several ranks: ranks that train one model
              with states of their own, or DistributedDataParallel that broadcasts states (H-12).
    """
    named = list(states(model))
    if sharing := [state for _, state in named if state.first]:
        torch._foreach_copy_([s.seen for s in sharing], [s.origin.seen for s in sharing])
    held = {id(state) for _, state in named}
    for state in sharing:  # by itself from now on, if the first linear was replaced
        state.first = state.first if id(state.origin) in held else ()
    compares = rank_checks.several_ranks()
    unchecked = [(name, state) for name, state in named if compares and not state.checked]
    if unchecked:
        rank_checks.check_ranks(model, unchecked)
    _merge_ranks([state for _, state in named])
    alike: dict[tuple[Format, DelayedScaling, torch.device], list[RoleState]] = {}
    for _, state in named:
        alike.setdefault((state.fmt, state.config, state.scale.device), []).append(state)
    for (fmt, config, _), group in alike.items():
        before = DelayedState(
            *(torch.stack([getattr(s, key) for s in group]) for key in DelayedState._fields)
        )
        after = advance(before, torch.stack([s.seen for s in group]), config, fmt)
        for key, values in after._asdict().items():
            torch._foreach_copy_([getattr(s, key) for s in group], list(values.unbind()))
    for _, state in named:
        state.scaled |= state.used
    forget(model)
    for _, state in named:
        state.ahead = before_step
    uncompared = [(name, state) for name, state in named if compares and not state.compared]
    if uncompared and rank_checks.check_copies(model, uncompared):
        for _, state in uncompared:
            state.compared = True
    for _, state in unchecked:
        state.checked = True


def _merge_ranks(states: Iterable[RoleState]) -> None:
    """Merge observations over ranks, one all-reduce per process group (H-4, P-2)."""
    by_group: dict[tuple[str, torch.device], list[RoleState]] = {}
    for state in states:
        if state.group is not None:
            by_group.setdefault((state.group, state.scale.device), []).append(state)
    for (group, _), members in by_group.items():
        merged = scaling.all_reduce_max(torch.stack([s.seen for s in members]), group)
        torch._foreach_copy_([s.seen for s in members], list(merged.unbind()))


@torch.no_grad()
def forget(model: nn.Module) -> None:
    """Clear the observations since the last update."""
    role_states = [state for _, state in states(model)]
    for state in role_states:
        state.missed, state.version, state.used, state.updated = 0, None, False, True
        state.ahead = False
    origins = [state.origin for state in role_states if state.first]
    if role_states:
        torch._foreach_zero_([state.seen for state in (*role_states, *origins)])


@torch.no_grad()
def forget_unless(model: nn.Module, flag: Tensor) -> None:
    """Clear the observations since the last update unless a flag () on the device is true: the
    ``update`` after it then changes nothing, and the host has not waited."""
    role_states = [state for _, state in states(model)]
    for state in role_states:
        state.used = False  # as the host does not know
    if role_states:
        torch._foreach_mul_([state.seen for state in role_states], flag.float())
