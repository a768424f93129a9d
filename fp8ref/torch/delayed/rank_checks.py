"""Ranks that train one model share the states of delayed scaling (spec H-12).

The first update of a model refuses ranks that do not. It reads what shards or copies the model, and
else compares ranks with equal weights and gradients. Nothing here waits for a device, but for
copies of one weight and a part of its gradient in that update.
"""

import gc
import hashlib
import sys
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8ref.torch.delayed.role_states import RoleState
from fp8ref.torch.tensors.local_part import digest, local_part

SAMPLE = 1024
"""The elements of a weight's gradient that ranks compare in the first update."""


_gradients: weakref.WeakKeyDictionary[object, Tensor] = weakref.WeakKeyDictionary()
"""{linear: the first elements of its weight's gradient}, while ranks are to compare their scales.
"""


def sample(linear: object, weight: Tensor, states: Iterable[RoleState]) -> None:
    """Keep elements of a gradient for ``check_copies``, which runs after gradients are cleared."""
    grad = weight.grad
    if grad is None or grad.ndim != 2 or not several_ranks():
        return
    # A Partial gradient is one rank's term of a sum: elements that ranks could compare need a
    # collective, for which an optimizer step is no place. check_ranks refuses such a weight anyway.
    if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
        return
    if any(state.group is None and not state.compared for state in states):
        _gradients[linear] = local_part(grad).detach().reshape(-1)[:SAMPLE].clone()


def check_ranks(model: nn.Module, named: Sequence[tuple[str, RoleState]]) -> None:
    """Refuse, at a model's first update, ranks that train one model and do not share its states.

    Raises:   ValueError: a model that is sharded, or copied by DistributedDataParallel, with states
              of one rank; one whose DistributedDataParallel broadcasts states, which would replace
              observations; a stage of a pipeline that learned its shapes by a pass of its own.
    """
    names = {id(value): name for name, state in named for value in state.buffers()}
    for stage in _stages_that_ran():
        if buffer_name := next(
            (names[id(value)] for value in stage.buffers() if id(value) in names), None
        ):
            raise ValueError(
                "torch.distributed.pipelining learned a stage's shapes by a pass without values, "
                f"and {buffer_name} observed it. Give PipelineStage input_args and output_args "
                "with the requires_grad of training, and convert the model anew."
            )
    alone = next((name for name, state in named if state.group is None), None)
    linears = [
        model.get_submodule(path) for name, _ in named if (path := _linear(name)) is not None
    ]
    # torch's replicate gives DistributedDataParallel the parameters alone
    value_ids = names.keys() | {id(getattr(linear, "weight", None)) for linear in linears}
    for wrapper in _wrappers(model):
        if isinstance(wrapper, DistributedDataParallel) and wrapper.broadcast_buffers:
            for buffer in wrapper.modules_buffers:
                if id(buffer) in names:
                    raise ValueError(
                        "each rank observes its own amaxes until delayed.update; "
                        f"DistributedDataParallel broadcasts {names[id(buffer)]} before. Use "
                        "broadcast_buffers=False (torch 2.13: forward_sync_buffers=False), and "
                        "convert with amax_group."
                    )
        held = [*wrapper.parameters(), *wrapper.buffers()]
        copied = not isinstance(wrapper, DistributedDataParallel) or any(
            id(value) in value_ids for value in held
        )
        if copied and alone:
            raise _separate(alone)
    if alone and any(
        isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in model.parameters()
    ):
        raise _separate(alone)


def check_copies(model: nn.Module, named: Sequence[tuple[str, RoleState]]) -> bool:
    """Refuse ranks with equal weights and gradients and other scales, after a model's first update;
    return whether they were compared.

    The first rank of equal weights writes its scales to the store of the process group; others
    compare theirs with it. No rank waits for another. Ranks with equal weights may train other
    models, such as the stages of a pipeline in a step with learning rate 0: their gradients differ.
    Gradients of 0 show nothing, and the next update compares. States outside of a linear belong to
    no weight, and are not compared.

    Raises:   ValueError: another rank of equal weights and gradients has other scales.
    """
    alone = [
        (name, state) for name, state in named if state.group is None and not state.scale.is_meta
    ]
    paths = {name: path for name, _ in alone if (path := _linear(name)) is not None}
    alone = [(name, state) for name, state in alone if name in paths]
    if not alone:
        return True
    linears = dict.fromkeys(paths.values())
    samples = {path: _gradients.get(model.get_submodule(path)) for path in linears}
    sampled = {path: sample for path, sample in samples.items() if sample is not None}
    path = next((path for path, sample in sampled.items() if sample.any()), None)
    if path is None and sampled:
        return False
    path = path or next(iter(linears))  # no optimizer was seen: weights alone are compared
    weight = model.get_submodule(path).weight
    assert isinstance(weight, Tensor)
    about = repr([path, *((name, state.fmt, state.config) for name, state in alone)])
    values = [weight.detach(), *([sampled[path]] if sampled else [])]
    compared = bytes(about + "".join(map(digest, values)), "utf-8")
    key = f"fp8ref/delayed/{hashlib.sha256(compared).hexdigest()}"
    scales = digest(torch.stack([state.scale for _, state in alone]))
    if _get_default_store().compare_set(key, "", scales).decode() != scales:
        raise _separate(alone[0][0])
    for path in sampled:
        del _gradients[model.get_submodule(path)]
    return True


def _linear(name: str) -> str | None:
    """The path of the linear that has this state, or None."""
    head, separator, _ = f".{name}".rpartition(".states.")
    return head[1:] if separator else None


def several_ranks() -> bool:
    """Whether this process is one of several of a torch.distributed job."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _separate(name: str) -> ValueError:
    return ValueError(
        f"ranks that train one model share the states of delayed scaling; {name} is of this "
        "rank alone. Pass their process group to convert.convert as amax_group."
    )


def _wrappers(model: nn.Module) -> Iterable[nn.Module]:
    """What shards or copies a model: its own units, and every live DistributedDataParallel."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) or (
            isinstance(module, FSDPModule) and _mesh_size(module) > 1
        ):
            yield module
    for candidate in gc.get_objects():
        # isinstance would read __class__ of each, which a proxy computes
        if issubclass(type(candidate), DistributedDataParallel):
            yield candidate


def _stages_that_ran() -> Iterable[nn.Module]:
    """The modules of pipeline stages that ran, with gradients, to learn shapes (torch 2.13)."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None:
        return
    for candidate in gc.get_objects():
        if issubclass(type(candidate), pipelining._PipelineStageBase) and candidate.has_backward:
            mode = getattr(candidate, "_inference_mode", None)
            if mode is not None and mode.name == "DYNAMIC":
                yield candidate.submod


def _mesh_size(unit: FSDPModule) -> int:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return max((group.mesh_info.mesh.size() for group in groups if group), default=1)
