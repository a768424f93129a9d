"""What ``parallel.parallelize`` refuses by name, before a model is changed where that can be seen."""

import gc
import hashlib
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def options(**given: tuple[object, Any]) -> None:
    """ValueError for one that has another value than its Literal."""
    for name, (value, allowed) in given.items():
        if value not in get_args(allowed):
            raise ValueError(f"{name} is one of {', '.join(get_args(allowed))}; got {value!r}. Spell one of them.")


def modules(model: nn.Module, blocks: list[nn.Module], keep_dtype: list[nn.Module]) -> None:
    """ValueError unless blocks and keep_dtype are modules within the model, each there once."""
    named = [*blocks, *keep_dtype]
    if not set(model.modules()).difference([model]).issuperset(named):
        raise ValueError("blocks and keep_dtype are modules within the model. Name them by model.get_submodule.")
    names = {module: name for name, module in model.named_modules()}
    twice = [names[module] for i, module in enumerate(named) if module in named[:i]]
    if twice:
        raise ValueError(f"a module is one of blocks or of keep_dtype, once; {twice[0]} is named twice. Leave one out.")


def whole(model: nn.Module, keep_dtype: Sequence[nn.Module]) -> None:
    """ValueError unless one graph can be the model's forward: within it, FSDP2's hooks would be left out, and weights not gathered."""
    nested = [name or "the model" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    nested += [name for name, module in model.named_modules() if any(module is kept for kept in keep_dtype)]
    if nested:
        raise ValueError(
            f"compile='model' is of a model that fully_shard shards as one; {nested[0]} is, or with keep_dtype would be, sharded by itself. "
            "Use compile='block', or traced.shard, whose gathers are in the graph."
        )


def eager(unit: nn.Module, args: tuple) -> None:
    """ValueError where dynamo traces a unit's call: it would leave FSDP2's hooks out, and the weights as they are, in shards."""
    if torch.compiler.is_dynamo_compiling():
        raise ValueError("a fully_shard unit is called within a graph. Use parallelize(compile='block') or 'model', or traced.shard.")


def copies(model: nn.Module, mesh: DeviceMesh) -> None:
    """ValueError unless ranks along data, whose gradients are averaged, start from the same weights: nothing would make them equal."""
    shards = {name: _local(p.detach()) for name, p in model.named_parameters()}
    mine = {name: _digest(shard) for name, shard in shards.items() if not shard.is_meta}
    found: list = [None] * mesh.size(0)
    distributed.all_gather_object(found, mine, group=mesh.get_group("data"))
    apart = [name for name in mine if any(theirs[name] != mine[name] for theirs in found)]
    if apart:
        raise ValueError(
            f"copies of a model start from the same weights; {apart[0]} differs along data. Seed every rank alike, or load one checkpoint."
        )


def _digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data).hexdigest()


def check_none_holds(model: nn.Module) -> None:
    """ValueError if an optimizer holds a model's parameters, which are about to be replaced: it would train what nothing uses."""
    parameters = {id(p): name for name, p in model.named_parameters()}
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):
            held = [parameters[id(p)] for group in found.param_groups for p in group["params"] if id(p) in parameters]
            if held:
                raise ValueError(
                    f"an optimizer is built after a model is cut, which replaces parameters; a {type(found).__name__} already holds {held[0]}. "
                    "Build it afterwards."
                )


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
