"""Delayed scaling (spec H): scales come from amax histories, updated once a step.

    model(x).sum().backward()  # reads scales; observes amaxes of input, weight and grad_output
    optimizer.step()
    delayed.update(model)      # rolls histories, changes scales, clears the observations

An observation (``seen``) merges by elementwise maximum. So microbatches, uses of a module and
recomputed forward passes may come in any order, and any number of times.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from fp8ref import formats
from fp8ref import recipe as recipes
from fp8ref.delayed import DelayedScaling, by_name
from fp8ref.formats import Format
from fp8ref.recipe import Recipe, Role
from fp8ref.torch import delayed_checks, scaling


class DelayedState(NamedTuple):
    """States of any shape [...].

    scale         float32 [...].
    amax_history  float32 [..., history_length], newest first; 0 where nothing was observed yet.
    step          int64 [...]: observed updates so far.
    """

    scale: torch.Tensor
    amax_history: torch.Tensor
    step: torch.Tensor


def init(config: str | DelayedScaling, shape: tuple[int, ...] = ()) -> DelayedState:
    """Scale 1, an empty history (H-2), of as many tensors as shape has; on the CPU.

    Raises as ``implemented``.
    """
    config = implemented(config)
    # whatever the caller's default dtype and device are
    floats = functools.partial(torch.full, dtype=torch.float32, device="cpu")
    step = torch.zeros(shape, dtype=torch.int64, device="cpu")
    return DelayedState(floats(shape, 1.0), floats((*shape, config.history_length), 0.0), step)


def observe(x: torch.Tensor) -> torch.Tensor:
    """The amax observation of a tensor, float32 [3]: amax (0 unless finite), not finite, seen (1).

    Raises:   ValueError: x empty, or not float32, float16 or bfloat16.
    """
    amax = scaling.amax(x)
    finite = amax.isfinite()
    return torch.stack([torch.where(finite, amax, 0.0), torch.where(finite, 0.0, 1.0).to(amax.dtype), torch.ones_like(amax)])


@torch.no_grad()
def merge_(seen: torch.Tensor, x: torch.Tensor) -> None:
    """Merge a tensor's observation into seen, float32 [3], in place (H-4). Raises as observe."""
    # An operator that returns nothing: a selective checkpoint that keeps every result would keep seen itself, and refuse the next
    # observation as a change of what it kept.
    torch._foreach_copy_([seen], [torch.maximum(seen, observe(x))])


def advance(state: DelayedState, seen: torch.Tensor, config: str | DelayedScaling, fmt: Format) -> DelayedState:
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
    taken = (was_seen > 0) & (non_finite == 0)
    return DelayedState(
        torch.where(taken, scale, state.scale),
        torch.where(taken[..., None], history, state.amax_history),
        torch.where(taken, state.step + 1, state.step),
    )


def casts(recipe: str | Recipe) -> dict[Role, tuple[Format, DelayedScaling]]:
    """``recipe.delayed_casts``, of configs that this backend implements."""
    return {role: (fmt, implemented(config)) for role, (fmt, config) in recipes.delayed_casts(recipe).items()}


def implemented(config: str | DelayedScaling) -> DelayedScaling:
    """The config, or the one of that name, if this backend implements it.

    It implements fp8ref's own ('delayed'), with any history_length, amax_compute, interval and
    margin.
    Raises:   ValueError: another config.
    """
    config = by_name(config)
    if not config.keeps_histories_as_fp8ref:
        raise ValueError(
            "fp8ref.torch keeps histories as 'delayed' does, with any history_length, "
            f"amax_compute, interval or margin; got {config.name!r}. Use fp8ref.sim.delayed "
            "for it."
        )
    return config


class RoleState(nn.Module):
    """Delayed scaling of one role of a linear: its state, and the current step's observation, seen.

    missed    optimizer steps since the last update, which ``delayed_checks`` counts.
    version   of the weight in the last forward pass in training; None if its step was counted since.
    idle      optimizer steps before the first update, while the linear was frozen.
    used      whether a forward pass has observed.
    updated   whether it was ever updated, loaded or told to forget.
    checked, compared
              whether an update has checked that ranks share the state, and compared its scale with
              theirs.
    Checkpoints hold scale, amax_history and step, but not seen. ``.to`` another dtype changes none
    of them.
    """

    scale: torch.Tensor
    amax_history: torch.Tensor
    step: torch.Tensor
    seen: torch.Tensor

    def __init__(self, fmt: Format, config: DelayedScaling, device: torch.device, group: str | None = None) -> None:
        """group: name of the process group whose ranks observe parts of one tensor (H-4)."""
        super().__init__()
        self.fmt, self.config, self.group = fmt, config, group
        for key, value in init(config)._asdict().items():
            self.register_buffer(key, value.to(device))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float32, device=device), persistent=False)
        self.missed = self.idle = 0
        self.version: int | None = None
        self.used = self.updated = self.checked = self.compared = False

    def reset(self) -> None:
        """Scale 1, an empty history, nothing seen."""
        for key, value in init(self.config)._asdict().items():
            getattr(self, key).copy_(value)
        self.seen.zero_()

    def observe(self, x: torch.Tensor) -> None:
        """Merge a tensor into the current step's observation."""
        merge_(self.seen, x)

    def _apply(self, fn, recurse: bool = True):
        def moved(buffer: torch.Tensor) -> torch.Tensor:
            # Moved as int32: model.bfloat16() would round a float, and a scale is never rounded.
            if not buffer.is_floating_point():
                return fn(buffer)
            return fn(buffer.view(torch.int32)).view(torch.float32)

        absent = self.seen.is_meta
        super()._apply(moved, recurse)
        if absent and not self.seen.is_meta:  # ``to_empty`` gave it memory
            self.reset()
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        """Load a state, and clear the observation, which belongs to a step of the state before."""
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        # an assigned state may be on another device
        self.seen = torch.zeros_like(self.seen, device=self.scale.device)
        self.missed, self.version = 0, None
        self.updated |= f"{prefix}scale" in state_dict


def states(model: nn.Module) -> Iterator[tuple[str, RoleState]]:
    """The name and state of every role with delayed scaling. ValueError: model is not an nn.Module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"a model is an nn.Module; got a {type(model).__name__}. Give the module itself.")
    return ((name, m) for name, m in model.named_modules() if isinstance(m, RoleState))


@torch.no_grad()
def update(model: nn.Module) -> None:
    """Roll a model's histories by the observed amaxes, compute new scales, clear observations.

    Call it once after each optimizer step. If the step was skipped, call ``forget`` instead. Ranks
    that share states (``RoleState.group``) all call it: an all-reduce merges their observations
    (H-4).
    Specials: as advance: a role that was not seen, or whose amax was not finite, keeps its state
              (H-5).
    Raises:   ValueError, at a model's first update on several ranks: ranks that train one model with
              states of their own, or DistributedDataParallel that broadcasts states (H-12).
    """
    named = list(states(model))
    unchecked = [(name, state) for name, state in named if not state.checked] if delayed_checks.several_ranks() else []
    if unchecked:
        delayed_checks.check_ranks(model, unchecked)
    _merge_ranks([state for _, state in named])
    alike: dict[tuple[Format, DelayedScaling, torch.device], list[RoleState]] = {}
    for _, state in named:
        alike.setdefault((state.fmt, state.config, state.scale.device), []).append(state)
    for (fmt, config, _), group in alike.items():
        before = DelayedState(*(torch.stack([getattr(s, key) for s in group]) for key in DelayedState._fields))
        after = advance(before, torch.stack([s.seen for s in group]), config, fmt)
        for key, values in after._asdict().items():
            torch._foreach_copy_([getattr(s, key) for s in group], list(values.unbind()))
    forget(model)
    uncompared = [(name, state) for name, state in named if not state.compared] if delayed_checks.several_ranks() else []
    if uncompared and delayed_checks.check_copies(model, uncompared):
        for _, state in uncompared:
            state.compared = True
    for _, state in unchecked:
        state.checked = True


def _merge_ranks(found: Iterable[RoleState]) -> None:
    """Merge observations over ranks, by one all-reduce for each process group (H-4, P-2)."""
    by_group: dict[tuple[str, torch.device], list[RoleState]] = {}
    for state in found:
        if state.group is not None:
            by_group.setdefault((state.group, state.scale.device), []).append(state)
    for (group, _), members in by_group.items():
        merged = scaling.all_reduce_max(torch.stack([s.seen for s in members]), group)
        torch._foreach_copy_([s.seen for s in members], list(merged.unbind()))


@torch.no_grad()
def forget(model: nn.Module) -> None:
    """Clear the observations since the last update."""
    found = [state for _, state in states(model)]
    for state in found:
        state.missed, state.version, state.updated = 0, None, True
    for seen in _by_device([state.seen for state in found]):
        torch._foreach_zero_(seen)


@torch.no_grad()
def forget_unless(model: nn.Module, taken: torch.Tensor) -> None:
    """Clear the observations since the last update unless a flag () on the device is true: the
    ``update`` after it then changes nothing, and the host has not waited."""
    for seen in _by_device([state.seen for _, state in states(model)]):
        torch._foreach_mul_(seen, taken.float())


def _by_device(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Tensors in lists of one device."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for x in tensors:
        found.setdefault(x.device, []).append(x)
    return found.values()
