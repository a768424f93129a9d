"""Notice misuse of delayed scaling: a missing ``delayed.update``, and ranks with separate states (spec H-4, H-12).

An optimizer step is seen by a hook on all optimizers, so that microbatches and recomputed forward
passes, after which no optimizer steps, count for nothing. Nothing here waits for a device, but for
copies of one weight and a part of its gradient at a model's first update on several ranks.
"""

import functools
import gc
import hashlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from fp8ref.torch import linear_input
from fp8ref.torch.local_part import local_part

MOST = 10
"""The optimizer steps without an update after which the next forward pass is refused."""

SAMPLE = 1024
"""The elements of a weight's gradient that ranks compare in the first update."""

_UNSET = (
    "scales by earlier steps under delayed scaling, and no update has set its scales: they are 1, and its casts may clip or underflow. "
    "Call fp8ref.torch.delayed.calibrate(model, batches) once before an evaluation, or load a checkpoint with the states."
)

_CALL = "Call fp8ref.torch.delayed.update(model) after each optimizer.step()"


class Notice:
    """Whether a model's evaluation before its first update was warned of."""

    said = False


class State(Protocol):
    """A ``delayed.RoleState``, which imports this module."""

    fmt: Format
    config: DelayedScaling
    group: str | None
    missed: int
    idle: int
    version: int | None
    used: bool
    updated: bool
    scaled: bool
    compared: bool
    notice: Notice
    scale: torch.Tensor
    step: torch.Tensor

    def buffers(self) -> Iterator[torch.Tensor]:
        """Its tensors."""
        ...


class Linear(Protocol):
    """A ``linear.Linear``, ``grouped_linear.GroupedLinear`` or ``experts.Experts``, which import this module."""

    fqn: str
    training: bool
    _parameters: dict[str, nn.Parameter | None]
    _modules: dict[str, nn.Module | None]

    @property
    def weight(self) -> torch.Tensor:
        """[N, K]; experts have other names."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its Parameters."""
        ...

    def __hash__(self) -> int: ...


_linears: weakref.WeakSet[Linear] = weakref.WeakSet()
_gradients: weakref.WeakKeyDictionary[Linear, torch.Tensor] = weakref.WeakKeyDictionary()
"""{linear: the first elements of its weight's gradient}, while ranks are to compare their scales."""
_evaluated: weakref.WeakSet[Linear] = weakref.WeakSet()
"""The linears whose last forward pass with gradients was in eval mode, and observed nothing."""
_untraced = False
"""Whether dynamo traced an optimizer step whole, which the hook after it does not count."""


def watch(linear: Linear) -> None:
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
    """What runs after a step of any optimizer.

    In a compiled step of torch's own optimizers dynamo comes to it with an empty graph, since torch
    breaks graphs around their arithmetic, and leaves it to Python. A step that dynamo traces whole
    stays whole: ``check`` then compares the versions of weights.
    """
    # Wrapped here, since that imports dynamo.
    count, traced_alone = torch.compiler.disable(_count_step), torch.compiler.assume_constant_result(_traced_alone)

    def stepped(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if not torch.compiler.is_compiling() or traced_alone():
            count(optimizer)

    return stepped


def _traced_alone() -> bool:
    """Called by dynamo while it traces the hook: whether a break here splits no arithmetic."""
    global _untraced
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tx = InstructionTranslator.current_tx()
    alone = not tx.one_graph and not tx.output.count_calls()
    _untraced |= not alone
    return alone


def _count_step(optimizer: torch.optim.Optimizer) -> None:
    """Count a step for the linears whose weights an optimizer has."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    evaluated: Linear | None = None
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
        _sample(linear)
        version = sum(p._version for p in weights)
        for state in _states(linear):
            # An optimizer of several parts passes by those without gradients, as where they train in turns.
            if stepped or state.version not in (None, version):
                state.missed += 1
                state.version = None
    if evaluated is not None:
        warnings.warn(
            f"delayed scaling observes amaxes in training mode; an optimizer step took gradients of {linear_input.named(evaluated.fqn)} that eval mode "
            "computed, and its scales do not change. Call model.train() before the forward passes of training.",
            stacklevel=2,
        )


def _weights(linear: Linear) -> list[torch.Tensor]:
    """What an optimizer trains of a linear's weight: the weight, or what pruning or a parametrization computes it of."""
    own, bias = linear._parameters.get("weight"), linear._parameters.get("bias")
    return [p for p in linear.parameters() if p is not bias] or [linear.weight] if own is None else [own]


def _sample(linear: Linear) -> None:
    """Keep elements of a gradient for ``check_copies``, which runs after gradients are cleared."""
    grad = _weights(linear)[0].grad
    if (
        grad is not None
        and grad.ndim == 2
        and several_ranks()
        and any(state.group is None and not state.compared for state in _states(linear))
    ):
        _gradients[linear] = local_part(grad).detach().reshape(-1)[:SAMPLE].clone()


def check_pass(linear: Linear, states: nn.ModuleDict | None, observes: bool) -> None:
    """``check`` in a forward pass with gradients, and the notice of ``check_scales`` in one that observes nothing."""
    if not states:
        return
    if torch.compiler.is_compiling():
        if not observes and not linear.training and not all(state.scaled or state.used for state in states.values()):
            check_compiled_scales()
        return
    if torch.is_grad_enabled():
        check(linear)
    if not observes:
        check_scales(states.values(), linear.fqn)  # type: ignore[arg-type]


def check(linear: Linear) -> None:
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


def _judge(linear: Linear) -> None:
    """Warn or raise by what a linear's states have missed."""
    frozen, missed = not any(p.requires_grad for p in _weights(linear)), 0
    for state in _states(linear):
        if not state.used:
            state.used = True
        missed = max(missed, state.missed, state.idle if frozen and not state.updated else 0)
    if missed >= MOST:
        raise ValueError(
            f"delayed scaling computes scales in delayed.update; {linear_input.named(linear.fqn)} had {missed} optimizer steps without one, and its "
            f"scales have not changed. {_CALL}, or delayed.forget after a step that is not taken."
        )
    if missed:
        warnings.warn(
            f"delayed scaling computes scales in delayed.update, and an optimizer step was taken without one. {_CALL}; after {MOST} steps "
            "without it a forward pass raises an error.",
            stacklevel=2,
        )


def check_scales(states: Iterable[State], name: str) -> None:
    """Warn, once a model, of a pass that observes nothing and casts by scales that no update has set.

    Not between a first pass that observes and its update. Their tensors are read once, where Python
    does not know: a state may have been loaded in place.
    """
    unset = [state for state in states if not (state.scaled or state.used)]
    if not unset or unset[0].notice.said or _within_function() or _busy(unset[0].step):
        return
    if unset[0].step.item():
        for state in unset:
            state.scaled = True
        return
    unset[0].notice.said = True
    warnings.warn(f"{linear_input.named(name)} {_UNSET}", stacklevel=4)


@torch._dynamo.assume_constant_result
def check_compiled_scales() -> None:
    """The warning of ``check_scales``, where dynamo traces a pass: a graph is of several linears."""
    warnings.warn(f"a compiled linear {_UNSET}", stacklevel=2)


def _within_function() -> bool:
    """Whether a checkpoint, reentrant ones among them, runs the pass in the forward pass of an autograd.Function, without gradients."""
    frame = None if torch.is_grad_enabled() else sys._getframe(2)
    while frame is not None:
        if isinstance(frame.f_locals.get("ctx"), torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back
    return False


def _busy(x: torch.Tensor) -> bool:
    """Whether a tensor cannot be read now: it has no values, or operators are recorded."""
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return x.is_meta or type(x) is not torch.Tensor or capturing or torch._C._len_torch_dispatch_stack() > 0


def wrong_values(state: Mapping[str, torch.Tensor]) -> str:
    """What is wrong with values of a state that is loaded: "KEY is ..., got ..."; "" if nothing is."""
    for key, required in (("scale", "positive"), ("amax_history", "at least 0"), ("step", "at least 0")):
        x = state.get(key)
        if x is None or x.is_meta or type(x) not in (torch.Tensor, nn.Parameter):
            continue
        wrong = ~(x.isfinite() & (x > 0 if key == "scale" else x >= 0))
        if wrong.any():
            return f"{key} is finite and {required}; got {x[wrong].flatten()[0].item()}."
    return ""


def check_ranks(model: nn.Module, named: Sequence[tuple[str, State]]) -> None:
    """Refuse, at a model's first update, ranks that train one model and do not share its states.

    Raises:   ValueError: a model that is sharded, or copied by DistributedDataParallel, with states
              of one rank; one whose DistributedDataParallel broadcasts states, which would replace
              observations; a stage of a pipeline that learned its shapes by a pass of its own.
    """
    names = {id(value): name for name, state in named for value in state.buffers()}
    for stage in _stages_that_ran():
        if found := next((names[id(value)] for value in stage.buffers() if id(value) in names), None):
            raise ValueError(
                "torch.distributed.pipelining learned the shapes of a stage by a pass on memory without values, before the first microbatch, "
                f"and {found} observed it. Give PipelineStage input_args and output_args, whose requires_grad is that of training, and "
                "convert the model anew."
            )
    alone = next((name for name, state in named if state.group is None), None)
    linears = [model.get_submodule(path) for name, _ in named if (path := _linear(name)) is not None]
    # torch's replicate gives DistributedDataParallel the parameters alone
    known = names.keys() | {id(getattr(linear, "weight", None)) for linear in linears}
    for wrapper in _wrappers(model):
        if isinstance(wrapper, DistributedDataParallel) and wrapper.broadcast_buffers:
            for buffer in wrapper.modules_buffers:
                if id(buffer) in names:
                    raise ValueError(
                        f"each rank observes amaxes by itself until delayed.update; DistributedDataParallel broadcasts {names[id(buffer)]} "
                        "before forward passes. Give it broadcast_buffers=False (forward_sync_buffers=False in torch 2.13), and "
                        "convert.convert its process group as amax_group."
                    )
        held = [*wrapper.parameters(), *wrapper.buffers()]
        copied = not isinstance(wrapper, DistributedDataParallel) or any(id(value) in known for value in held)
        if copied and alone:
            raise _separate(alone)
    if alone and any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in model.parameters()):
        raise _separate(alone)


def check_copies(model: nn.Module, named: Sequence[tuple[str, State]]) -> bool:
    """Refuse ranks with equal weights and gradients and other scales, after a model's first update;
    return whether they were compared.

    The first rank of equal weights writes its scales to the store of the process group; others
    compare theirs with it. No rank waits for another. Ranks with equal weights may train other
    models, such as the stages of a pipeline in a step with learning rate 0: their gradients differ.
    Gradients of 0 show nothing, and the next update compares. States outside of a linear belong to no
    weight, and are not compared.

    Raises:   ValueError: another rank of equal weights and gradients has other scales.
    """
    alone = [(name, state) for name, state in named if state.group is None and not state.scale.is_meta]
    paths = {name: path for name, _ in alone if (path := _linear(name)) is not None}
    alone = [(name, state) for name, state in alone if name in paths]
    if not alone:
        return True
    linears = dict.fromkeys(paths.values())
    samples = {path: _gradients.get(model.get_submodule(path)) for path in linears}  # type: ignore[call-overload]
    sampled = {path: sample for path, sample in samples.items() if sample is not None}
    path = next((path for path, sample in sampled.items() if sample.any()), None)
    if path is None and sampled:
        return False
    path = path or next(iter(linears))  # no optimizer was seen: weights alone are compared
    weight = model.get_submodule(path).weight
    assert isinstance(weight, torch.Tensor)
    about = repr([path, *((name, state.fmt, state.config) for name, state in alone)])
    values = [weight.detach(), *([sampled[path]] if sampled else [])]
    key = "fp8ref/delayed/" + hashlib.sha256((about + "".join(map(_digest, values))).encode()).hexdigest()
    scales = _digest(torch.stack([state.scale for _, state in alone]))
    first = _get_default_store().compare_set(key, "", scales)
    if (first.decode() if isinstance(first, bytes) else first) != scales:
        raise _separate(alone[0][0])
    for path in sampled:
        del _gradients[model.get_submodule(path)]  # type: ignore[arg-type]
    return True


def _linear(name: str) -> str | None:
    """The path of the linear whose state has this name; None for a state outside of a linear."""
    head, found, _ = f".{name}".rpartition(".states.")
    return head[1:] if found else None


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


def _stages_that_ran() -> Iterable[nn.Module]:
    """The modules of a pipeline's stages that ran, with gradients, to learn shapes (torch 2.13)."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None:
        return
    for found in gc.get_objects():
        if issubclass(type(found), pipelining._PipelineStageBase) and found.has_backward:
            mode = getattr(found, "_inference_mode", None)
            if mode is not None and mode.name == "DYNAMIC":
                yield found.submod


def _mesh_size(unit: FSDPModule) -> int:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return max((group.mesh_info.mesh.size() for group in groups if group), default=1)


def _states(linear: Linear) -> Iterable[State]:
    """Its states by role; of experts those of all weights."""
    own, grouped = linear._modules.get("states"), linear._modules.get("grouped_states")
    each = [own] if own is not None else [] if grouped is None else grouped.children()
    return [state for states in each for state in states.children()]  # type: ignore[misc]


def _digest(x: torch.Tensor) -> str:
    return hashlib.sha256(local_part(x).contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data).hexdigest()
