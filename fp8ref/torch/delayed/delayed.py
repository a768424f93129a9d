"""Delayed scaling (spec H): scales come from amax histories, updated once a step.

    model(x).sum().backward()  # reads scales; observes amaxes of input, weight and grad_output
    optimizer.step()
    delayed.update(model)      # rolls histories, changes scales, clears the observations

An observation (``seen``) merges by elementwise maximum. So microbatches, uses of a module and
recomputed forward passes may come in any order, and any number of times.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from fp8ref import formats
from fp8ref import recipe as recipes
from fp8ref.formats import Format
from fp8ref.recipe import Recipe, Role
from fp8ref.spec import support
from fp8ref.spec.delayed import DelayedScaling, by_name
from fp8ref.torch.delayed import rank_checks, state_checks, unset_scales
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
    not_finite = torch.where(finite, 0.0, 1.0).to(amax.dtype)
    return torch.stack([torch.where(finite, amax, 0.0), not_finite, torch.ones_like(amax)])


@torch.no_grad()
def merge_(seen: torch.Tensor, x: torch.Tensor) -> None:
    """Merge a tensor's observation into seen, float32 [3], in place (H-4). Raises as observe."""
    # An operator that returns nothing: a selective checkpoint that keeps every result would keep
    # seen itself, and refuse the next observation as a change of what it kept.
    torch._foreach_copy_([seen], [torch.maximum(seen, observe(x))])


def advance(
    state: DelayedState, seen: torch.Tensor, config: str | DelayedScaling, fmt: Format
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


def implemented(config: str | DelayedScaling) -> DelayedScaling:
    """The config, or the one of that name, if this backend implements it.

    It implements fp8ref's own ('delayed'), with any history_length, amax_compute, interval and
    margin.
    Raises:   ValueError: another config.
    """
    config = by_name(config)
    support.require("delayed scaling", "torch", config)
    return config


class RoleState(nn.Module):
    """Delayed scaling of one role of a linear: its state, and the current step's observation, seen.

    missed    optimizer steps since the last update, which ``state_checks`` counts.
    version   of the weight in the last forward pass in training; None if its step was counted
              since.
    idle      optimizer steps before the first update, while the linear was frozen.
    used      whether a pass has observed since the last update.
    updated   whether it was ever updated, loaded or told to forget.
    ahead     whether the last update came before the optimizer step that it belongs to.
    scaled    whether Python saw an update, or a state that was loaded, set its scale.
    first     the state of the linear that reads this one's input first, alone in a tuple, so that
              it is no submodule (``shared_inputs``); () if it is this one.
    notice    of the model that was converted: whether unset scales were warned of.
    path      its name in that model.
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

    def __init__(
        self, fmt: Format, config: DelayedScaling, device: torch.device, group: str | None = None
    ) -> None:
        """group: name of the process group whose ranks observe parts of one tensor (H-4)."""
        super().__init__()
        self.fmt, self.config, self.group = fmt, config, group
        for key, value in init(config)._asdict().items():
            self.register_buffer(key, value.to(device))
        self.register_buffer(
            "seen", torch.zeros(3, dtype=torch.float32, device=device), persistent=False
        )
        self.missed = self.idle = 0
        self.version: int | None = None
        self.first: tuple[RoleState, ...] = ()
        self.used = self.updated = self.scaled = self.checked = self.compared = False
        self.ahead = False
        self.notice, self.path = unset_scales.Notice(), ""

    @property
    def origin(self) -> "RoleState":
        """The state that passes read and observe."""
        return self.first[0] if self.first else self

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

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing, unexpected, errors
    ) -> None:
        """Load a state and clear its observation; checkpoints without FP8 change nothing."""
        names = {key: f"{prefix}{key}" for key in DelayedState._fields}
        loaded = {key: state_dict[name] for key, name in names.items() if name in state_dict}
        assigns = metadata.get("assign_to_params_buffers")
        # an assigned state may be on another device
        device = (loaded if assigns else {}).get("scale", self.seen).device
        if wrong := state_checks.wrong_values(loaded):
            errors.append(
                f"{prefix}{wrong} Load another checkpoint, or leave the states out and call "
                "delayed.calibrate."
            )
            return
        if not loaded and self.scale.is_meta and assigns:
            errors.append(
                f"{prefix}scale is on the meta device, and the checkpoint of a model without "
                "FP8 has no state to assign. Call model.to_empty(device=...) first, and load "
                "without assign=True."
            )
            return
        self.seen = torch.zeros_like(self.seen, device=device)
        needed = missing if loaded else []
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, needed, unexpected, errors
        )
        if not loaded:
            return
        self.missed, self.version = 0, None
        self.updated |= "scale" in loaded
        self.scaled = "step" in loaded and (loaded["step"].is_meta or bool(loaded["step"] > 0))


class RoleStates(nn.ModuleDict):
    """The states of one weight, by role. A checkpoint has all of them, or none."""

    def __init__(self, states: Mapping[str, RoleState]) -> None:
        super().__init__(states)
        unset_scales.register(self)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        unset_scales.register(self)

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing, unexpected, errors
    ) -> None:
        names = [f"{prefix}{role}.{key}" for role in self for key in DelayedState._fields]
        absent = [name for name in names if name not in state_dict]
        if absent and len(absent) < len(names):
            errors.append(
                "a checkpoint holds all states of a linear under delayed scaling, or none; "
                f"{absent[0]} is missing, and {len(names) - len(absent)} others are there. Save "
                "the whole model.state_dict(), or load convert.weights of the model that was "
                "saved, and call delayed.calibrate."
            )
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, missing, unexpected, errors
        )


def role_states(
    casts: Mapping[Role, tuple[Format, DelayedScaling]], device: torch.device, group: str | None
) -> RoleStates:
    """New states of the roles of ``casts``, which a process group's ranks share."""
    return RoleStates({role: RoleState(*cast, device, group) for role, cast in casts.items()})


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
    """Set the first scales of a model by forward passes, so that it can be evaluated before it is
    trained.

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


def _merge_ranks(role_states: Iterable[RoleState]) -> None:
    """Merge observations over ranks, one all-reduce per process group (H-4, P-2)."""
    by_group: dict[tuple[str, torch.device], list[RoleState]] = {}
    for state in role_states:
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
    for seen in _by_device([state.seen for state in (*role_states, *origins)]):
        torch._foreach_zero_(seen)


@torch.no_grad()
def forget_unless(model: nn.Module, flag: torch.Tensor) -> None:
    """Clear the observations since the last update unless a flag () on the device is true: the
    ``update`` after it then changes nothing, and the host has not waited."""
    role_states = [state for _, state in states(model)]
    for state in role_states:
        state.used = False  # as the host does not know
    for seen in _by_device([state.seen for state in role_states]):
        torch._foreach_mul_(seen, flag.float())


def _by_device(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    device_tensors: dict[torch.device, list[torch.Tensor]] = {}
    for x in tensors:
        device_tensors.setdefault(x.device, []).append(x)
    return device_tensors.values()
