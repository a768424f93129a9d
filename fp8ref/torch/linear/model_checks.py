"""Checks of a model before it is converted or cut: compiled, sharded, held by an optimizer."""

import gc

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or its forward, went through torch.compile."""
    forward = vars(module).get("forward")
    return (
        isinstance(module, OptimizedModule)
        or module._compiled_call_impl is not None
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def check_model(model: nn.Module, remedy: str) -> None:
    """ValueError for a model that is compiled or sharded; remedy has a gap for the verb."""
    for name, module in model.named_modules():
        if is_compiled(module):
            raise ValueError(f"{name or 'the model'} is compiled. {remedy.format('compile')}.")
        # FSDP1 writes parameters into the modules that it has wrapped.
        wrapped = isinstance(module, FullyShardedDataParallel)
        if wrapped or isinstance(module, FSDPModule):
            by = "FullyShardedDataParallel" if wrapped else "fully_shard"
            raise ValueError(f"{name or 'the model'} is sharded by {by}. {remedy.format('shard')}.")


def check_no_optimizer(model: nn.Module) -> None:
    """ValueError if an optimizer holds a model's parameters, which are about to be replaced."""
    parameters = {id(p): name for name, p in model.named_parameters()}
    # Nothing links a parameter to its optimizer, so every live object is looked at. isinstance
    # would read __class__ of each, which a proxy computes; its type is enough.
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.optim.Optimizer):
            held = [
                parameters[id(p)]
                for group in candidate.param_groups
                for p in group["params"]
                if id(p) in parameters
            ]
            if held:
                raise ValueError(
                    f"optimizers are built after a model is cut; a {type(candidate).__name__} "
                    f"already holds {held[0]}. Build it afterwards."
                )
