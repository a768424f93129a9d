"""Notice misuse of delayed scaling: a missing ``delayed.update``, and ranks with separate states (SEMANTICS H-4, H-12).

An optimizer step is seen by a hook on all optimizers, so that microbatches and recomputed forward
passes, after which no optimizer steps, count for nothing. Nothing here waits for a device, but for
one copy at a model's first update on several ranks.
"""

import functools
import gc
import hashlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import distributed, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8ref.delayed import DelayedScaling
from fp8ref.formats import Format

MOST = 10
"""The optimizer steps without an update after which the next forward pass is refused."""

_CALL = "Call fp8ref.torch.delayed.update(model) after each optimizer.step()"


class State(Protocol):
    """A ``delayed.RoleState``, which imports this module."""

    fmt: Format
    config: DelayedScaling
    group: str | None
    missed: int
    scale: torch.Tensor

    def buffers(self) -> Iterator[torch.Tensor]:
        """Its tensors."""
        ...


class Linear(Protocol):
    """A ``linear.Linear``, which imports this module."""

    fqn: str
    training: bool
    states: nn.ModuleDict

    @property
    def weight(self) -> torch.Tensor:
        """[N, K]."""
        ...

    def __hash__(self) -> int: ...


_linears: weakref.WeakSet[Linear] = weakref.WeakSet()


def watch(linear: Linear) -> None:
    """Count the optimizer steps of a linear's weight that no update follows, if it keeps states."""
    if linear.states:
        _linears.add(linear)
        _count_steps()


def unwatch(model: nn.Module) -> None:
    """Count no optimizer steps of a model's linears: other models train the same weights too."""
    _linears.difference_update(_linears & set(model.modules()))


@functools.cache
def _count_steps() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Hook after a step of any optimizer."""
    if torch.compiler.is_compiling():
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for linear in list(_linears):
        if id(linear.weight) not in held:
            continue
        if linear.training and linear.weight.grad is not None:
            check(linear)  # a compiled forward pass does not check
        for state in _states(linear):
            state.missed += 1


def check(linear: Linear) -> None:
    """Warn of an optimizer step that no update followed.

    Raises:   ValueError: there were MOST of them.
    """
    missed = max((state.missed for state in _states(linear)), default=0)
    if missed >= MOST:
        raise ValueError(
            f"delayed scaling computes scales in delayed.update; {linear.fqn or 'a linear'} had {missed} optimizer steps without one, and its "
            f"scales have not changed. {_CALL}, or delayed.forget after a step that is not taken."
        )
    if missed:
        warnings.warn(
            f"delayed scaling computes scales in delayed.update, and an optimizer step was taken without one. {_CALL}; after {MOST} steps "
            "without it a forward pass raises an error.",
            stacklevel=2,
        )


def check_ranks(model: nn.Module, named: Sequence[tuple[str, State]]) -> None:
    """Refuse, at a model's first update, ranks that train one model and do not share its states.

    Raises:   ValueError: a model that is sharded, or copied by DistributedDataParallel, with states
              of one rank; one whose DistributedDataParallel broadcasts states, which would replace
              observations.
    """
    names = {id(value): name for name, state in named for value in state.buffers()}
    alone = next((name for name, state in named if state.group is None), None)
    for wrapper in _wrappers(model):
        if isinstance(wrapper, DistributedDataParallel) and wrapper.broadcast_buffers:
            for buffer in wrapper.modules_buffers:
                if id(buffer) in names:
                    raise ValueError(
                        f"each rank observes amaxes by itself until delayed.update; DistributedDataParallel broadcasts {names[id(buffer)]} "
                        "before forward passes. Give it broadcast_buffers=False, and convert.convert its process group as amax_group."
                    )
        copied = not isinstance(wrapper, DistributedDataParallel) or any(id(value) in names for value in wrapper.module.buffers())
        if copied and alone:
            raise _separate(alone)
    if alone and any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in model.parameters()):
        raise _separate(alone)


def check_copies(model: nn.Module, named: Sequence[tuple[str, State]]) -> None:
    """Refuse ranks with equal weights and other scales, after a model's first update.

    The first rank of equal weights writes its scales to the store of the process group; others
    compare theirs with it. No rank waits for another.

    Raises:   ValueError: another rank of equal weights has other scales.
    """
    alone = [(name, state) for name, state in named if state.group is None and not state.scale.is_meta]
    if not alone:
        return
    name, _ = alone[0]
    weight = model.get_submodule(name.rpartition(".states.")[0]).weight
    assert isinstance(weight, torch.Tensor)
    about = repr([(name, state.fmt, state.config) for name, state in alone]).encode()
    scales = _digest(torch.stack([state.scale for _, state in alone]))
    key = "fp8ref/delayed/" + hashlib.sha256(about + _digest(weight.detach()).encode()).hexdigest()
    first = _get_default_store().compare_set(key, "", scales)
    if (first.decode() if isinstance(first, bytes) else first) != scales:
        raise _separate(name)


def several_ranks() -> bool:
    """Whether this process is one of several of a torch.distributed job."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _separate(name: str) -> ValueError:
    return ValueError(
        f"ranks that train one model share the states of delayed scaling; {name} is of this rank alone. Pass their process group to "
        "convert.convert as amax_group."
    )


def _wrappers(model: nn.Module) -> Iterable[nn.Module]:
    """What shards or copies a model over several ranks: its own units, and every live
    DistributedDataParallel, which a model does not know."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) or (isinstance(module, FSDPModule) and _mesh_size(module) > 1):
            yield module
    for found in gc.get_objects():
        # isinstance would read __class__ of each, which a proxy computes
        if issubclass(type(found), DistributedDataParallel):
            yield found


def _mesh_size(unit: FSDPModule) -> int:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return max((group.mesh_info.mesh.size() for group in groups if group), default=1)


def _states(linear: Linear) -> Iterable[State]:
    return linear.states.values()  # type: ignore[return-value]


def _digest(x: torch.Tensor) -> str:
    x = x.to_local() if isinstance(x, DTensor) else x
    return hashlib.sha256(x.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data).hexdigest()
