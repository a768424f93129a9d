"""States of delayed scaling (H-2, H-4), which linears read and observe, and checkpoints hold."""

import functools
import itertools
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8ref.formats import Format
from fp8ref.recipe import Role
from fp8ref.spec import support
from fp8ref.spec.delayed import DelayedScaling, by_name
from fp8ref.torch.quantize import scaling


class DelayedState(NamedTuple):
    """States of any shape [...].

    scale         float32 [...].
    amax_history  float32 [..., history_length], newest first; 0 where nothing was observed yet.
    step          int64 [...]: observed updates so far.
    """

    scale: Tensor
    amax_history: Tensor
    step: Tensor


def init(config: str | DelayedScaling, shape: tuple[int, ...] = ()) -> DelayedState:
    """Scale 1, an empty history (H-2), of as many tensors as shape has; on the CPU.

    Raises as ``implemented``.
    """
    config = implemented(config)
    # whatever the caller's default dtype and device are
    floats = functools.partial(torch.full, dtype=torch.float32, device="cpu")
    step = torch.zeros(shape, dtype=torch.int64, device="cpu")
    return DelayedState(floats(shape, 1.0), floats((*shape, config.history_length), 0.0), step)


def observe(x: Tensor) -> Tensor:
    """The amax observation of a tensor, float32 [3]: amax (0 unless finite), not finite, seen (1).

    Raises:   ValueError: x empty, or not float32, float16 or bfloat16.
    """
    amax = scaling.amax(x)
    finite = amax.isfinite()
    not_finite = torch.where(finite, 0.0, 1.0).to(amax.dtype)
    return torch.stack([torch.where(finite, amax, 0.0), not_finite, torch.ones_like(amax)])


def merge_(seen: Tensor, x: Tensor) -> None:
    """Merge a tensor's observation into seen, float32 [3], in place (H-4). Raises as observe."""
    # An operator that returns nothing: a selective checkpoint that keeps every result would keep
    # seen itself, and refuse the next observation as a change of what it kept.
    torch._foreach_copy_([seen], [torch.maximum(seen, observe(x))])


def implemented(config: str | DelayedScaling) -> DelayedScaling:
    """The config, or the one of that name, if this backend implements it.

    It implements fp8ref's own ('delayed'), with any history_length, amax_compute, interval and
    margin.
    Raises:   ValueError: another config.
    """
    config = by_name(config)
    support.require("delayed scaling", "torch", config)
    return config


class Notice:
    """Of a model: whether it was warned of, or its scales were seen to be set.

    model   tells models apart in compiled programs, which models of one structure share; "" where
            no conversion made the states.
    """

    settled = False
    model = ""

    @classmethod
    def new_model(cls) -> "Notice":
        """A notice of a model that nobody was warned of."""
        notice = cls()
        notice.model = next(_names)
        return notice

    def __setstate__(self, kept: dict) -> None:  # of a copy, which is another model
        vars(self).update(kept)
        if self.model:
            self.model = next(_names)


_names = (f"model {number}" for number in itertools.count(1))


registered: weakref.WeakValueDictionary[int, "RoleStates"] = weakref.WeakValueDictionary()
"""The states of each linear and each attention, in the order in which they were made: a compiled
pass cannot read them from its module."""


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
    Checkpoints hold scale, amax_history and step, but not seen. ``.to`` a dtype changes none.
    """

    scale: Tensor
    amax_history: Tensor
    step: Tensor
    seen: Tensor

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
        self.notice, self.path = Notice(), ""

    @property
    def origin(self) -> "RoleState":
        """The state that passes read and observe."""
        return self.first[0] if self.first else self

    def reset(self) -> None:
        """Scale 1, an empty history, nothing seen."""
        for key, value in init(self.config)._asdict().items():
            getattr(self, key).copy_(value)
        self.seen.zero_()

    def observe(self, x: Tensor) -> None:
        """Merge a tensor into the current step's observation."""
        merge_(self.seen, x)

    def _apply(self, fn, recurse: bool = True):
        def moved(buffer: Tensor) -> Tensor:
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
        if wrong := _wrong_values(loaded):
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
        registered[id(self)] = self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        registered[id(self)] = self

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


def _wrong_values(state: Mapping[str, Tensor]) -> str:
    """The errors of a loaded state's values: "KEY is ..., got ..."; or ""."""
    for key, required in (
        ("scale", "positive"),
        ("amax_history", "at least 0"),
        ("step", "at least 0"),
    ):
        x = state.get(key)
        if x is None or x.is_meta or type(x) not in (Tensor, nn.Parameter):
            continue
        wrong = ~(x.isfinite() & (x > 0 if key == "scale" else x >= 0))
        if wrong.any():
            return f"{key} is finite and {required}; got {x[wrong].flatten()[0].item()}."
    return ""
