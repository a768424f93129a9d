"""A linear and what stands in its place: which can be replaced, what the replacement keeps, and what it would lose."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torchao.float8 import float8_linear

from fp8ref.recipe import ROLES
from fp8ref.torch.linear import Linear
from fp8ref.torch.torchao_linear import Float8Linear

FP8 = (Float8Linear, float8_linear.Float8Linear, Linear)
# What a module may carry that its replacement would not.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# What every nn.Linear has, and what one in FP8 has beside it.
_COMMON = frozenset(vars(nn.Linear(1, 1, device="meta")))
_OWN = {"recipe", "fqn", "fp8_gather", "group", "states", "_multiply", "config", "linear_mm_config"} | {
    f"scaling_type_{role}" for role in ROLES
}


def extras(linear: nn.Linear) -> dict[str, Any]:
    """The attributes that somebody gave a linear, such as a flag of its framework's."""
    known = _COMMON | _OWN if isinstance(linear, FP8) else _COMMON
    return {key: value for key, value in vars(linear).items() if key not in known}


def carry(old: nn.Linear, new: nn.Linear) -> None:
    """Give a replacement the mode and the attributes of what it replaces; the parameters it has."""
    vars(new).update(extras(old))
    new.train(old.training)


def lost(linear: nn.Linear, kinds: tuple[type[nn.Linear], ...]) -> str:
    """What of a linear its replacement would not have, beyond what its class, one of kinds, is replaced for; empty for nothing."""
    kind = type(linear).__name__
    if type(linear) not in kinds:
        return f"is a {kind}, and its forward would be lost"
    given = extras(linear)
    if replaced := [key for key in given if hasattr(type(linear), key)]:
        return f"is a {kind} whose {replaced[0]} was replaced, which would be lost"
    if bound := [key for key, value in given.items() if getattr(value, "__self__", None) is linear]:
        return f"has a method of its own, {bound[0]}, which would stay bound to it"
    if taken := [key for key in given if key in _OWN or any(hasattr(other, key) for other in FP8)]:
        return f"has an attribute {taken[0]}, by which a linear in FP8 means something else"
    if hooks := [key for key in _HOOKS if getattr(linear, key, None)]:
        return f"has {hooks[0].strip('_').replace('_', ' ')}, which would be dropped"
    held = {key for key, _ in (*linear.named_parameters(recurse=False), *linear.named_buffers(recurse=False), *linear.named_children())}
    more = sorted(held - {"weight", "bias"} - ({"states"} if isinstance(linear, Linear) else set()))
    return f"holds {', '.join(more)} beside weight and bias, which would be lost" if more else ""


def unusual(linear: nn.Linear) -> str:
    """Which of a linear's tensors is no plain nn.Parameter; empty for none."""
    for key in ("weight", "bias"):
        value = getattr(linear, key, None)
        if type(value) not in (nn.Parameter, FakeTensor) and not (key == "bias" and value is None):
            return f"has a {key} that is a {type(value).__name__}"
    return ""


def check(name: str, linears: Mapping[str, nn.Linear], parent: nn.Module | None) -> None:
    """ValueError unless a linear can be replaced by one in FP8, nothing of it is lost, and its parent calls it."""
    linear = linears[name]
    what = name or "the model"
    if isinstance(linear, FP8):
        raise ValueError(f"{what} is already FP8; convert a model once. To change its recipe, deconvert it first.")
    _check_called(name, parent)
    if isinstance(linear.weight, DTensor):
        raise ValueError(f"{what} is sharded already (its weight is a DTensor). Convert a model first, then parallelise it.")
    if type(linear) is nn.Linear and (found := unusual(linear)):
        raise ValueError(
            f"{what} {found}, and an nn.Parameter is converted. Convert before you shard, quantise or prune, or name it in filter_fqns."
        )
    if found := lost(linear, (nn.Linear,)):
        raise ValueError(f"{what} {found}. Name it in filter_fqns, or change it after the conversion.")
    others = [other for other, m in linears.items() if m is linear and other != name]
    if others:
        raise ValueError(f"{what} is the same module as {others[0]}, and only one of them would be converted. Name both in filter_fqns.")
    weight = linear.weight
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{what} has a weight of {weight.dtype}; FP8 is cast from float32, bfloat16 or float16. Cast the model first.")
    if weight.device.type == "cuda" and torch.version.cuda and (capability := torch.cuda.get_device_capability(weight.device)) < (8, 9):
        raise ValueError(
            f"{what} lies on {torch.cuda.get_device_name(weight.device)} of compute capability {capability[0]}.{capability[1]}; FP8 GEMMs need "
            "8.9 or later. Use recipe 'bf16'."
        )


def _check_called(name: str, parent: nn.Module | None) -> None:
    """ValueError for a linear whose parent, one of torch's, may read its weight in place of calling it."""
    key, forward = name.rpartition(".")[2], getattr(type(parent), "forward", None)
    if forward is nn.MultiheadAttention.forward:
        raise ValueError(f"{name} is never called: nn.MultiheadAttention reads its weight, without FP8. Name it in filter_fqns.")
    if forward is nn.TransformerEncoderLayer.forward and key in ("linear1", "linear2") and torch.backends.mha.get_fastpath_enabled():
        raise ValueError(
            f"{name} is not called in torch's fast path of nn.TransformerEncoderLayer (eval mode, no gradients), which reads its weight, without "
            "FP8. Call torch.backends.mha.set_fastpath_enabled(False) first, or name it in filter_fqns."
        )
