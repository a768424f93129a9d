"""What a linear would lose by ``convert`` or ``deconvert``, and which linears cannot become FP8."""

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torchao.float8 import float8_linear

from fp8ref.recipe import ROLES
from fp8ref.shared import package_data
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.linear.torchao_linear import Float8Linear
from fp8ref.torch.model import report as reports

FP8_LINEARS = (Float8Linear, float8_linear.Float8Linear, Linear)
"""The classes of FP8 linears: torchao's, fp8ref's subclass of it, and fp8ref's own."""

METHODS_OF = "_fp8ref_methods_of"
"""The attribute of a class made by ``convert`` that holds the subclass of nn.Linear."""

_ATTRIBUTES = package_data.tables(__file__, "attributes")
# Attributes of nn.Linear, and those that an FP8 linear adds. Others are of the user or a framework.
_COMMON = frozenset(vars(nn.Linear(1, 1, device="meta")))
_OWN = {*_ATTRIBUTES["own"], reports.REASONS} | {f"scaling_type_{role}" for role in ROLES}


def added_attributes(linear: nn.Linear) -> dict[str, Any]:
    """The attributes that the user or a framework added to a linear, such as _is_hf_initialized."""
    own_names = _COMMON | _OWN if isinstance(linear, FP8_LINEARS) else _COMMON
    return {key: value for key, value in vars(linear).items() if key not in own_names}


def _changes(kind: type[nn.Linear]) -> list[str]:
    """What a subclass of nn.Linear replaces: weight, bias, or a method of FP8_LINEARS."""
    ours = {
        key
        for fp8 in FP8_LINEARS
        for key, value in vars(fp8).items()
        if callable(value) or isinstance(value, classmethod)
    }
    names = {"weight", "bias", *ours} - {"__init__"}
    return sorted(
        key for key in names if getattr(kind, key, None) is not getattr(nn.Linear, key, None)
    )


def what_is_lost(linear: nn.Linear, kinds: tuple[type[nn.Linear], ...]) -> str:
    """Say what a replacement would lose of a linear, or nothing ("").

    kinds     the classes that may be replaced: their own forward is the part that a swap is meant
              to change.
    """
    kind = type(linear).__name__
    if parametrize.is_parametrized(linear):
        return f"has a parametrized {', '.join(linear.parametrizations)}, which would be lost"  # type: ignore[arg-type]
    # a class that ``convert`` made, of an FP8 linear and a subclass, may be undone
    replaceable = type(linear) in kinds or hasattr(type(linear), METHODS_OF)
    if not replaceable and (nn.Linear not in kinds or _changes(type(linear))):
        return f"is a {kind}, and its forward would be lost"
    added = added_attributes(linear)
    base = next(cls for cls in (*FP8_LINEARS, nn.Linear) if isinstance(linear, cls))
    if replaced := [key for key in added if hasattr(base, key)]:
        return f"is a {kind} whose {replaced[0]} was replaced, which would be lost"
    if bound := [key for key, value in added.items() if getattr(value, "__self__", None) is linear]:
        return f"has a method of its own, {bound[0]}, which would stay bound to it"
    if clashes := [
        key for key in added if key in _OWN or any(hasattr(other, key) for other in FP8_LINEARS)
    ]:
        return f"has an attribute {clashes[0]}, which has another meaning in an FP8 linear"
    if hooks := [key for key in _ATTRIBUTES["hooks"] if getattr(linear, key, None)]:
        return f"has {hooks[0].strip('_').replace('_', ' ')}, which would be dropped"
    kinds_held = linear._parameters, linear._buffers, linear._modules
    held = {key for each in kinds_held for key, value in each.items() if value is not None}
    own = {"states", "input_guess", "weight_guess", "keys"} if isinstance(linear, Linear) else set()
    more = sorted(held - {"weight", "bias"} - own)
    if more:
        return f"holds {', '.join(more)} next to weight and bias, which would be lost"
    return ""


def unusual_parameter(linear: nn.Linear) -> str:
    """Say which of a linear's tensors is not a plain nn.Parameter, or nothing ("")."""
    for key in ("weight", "bias"):
        value = getattr(linear, key, None)
        if type(value) not in (nn.Parameter, FakeTensor) and not (key == "bias" and value is None):
            return f"has a {key} that is a {type(value).__name__}"
    return ""


def check_linear(name: str, linears: Mapping[str, nn.Linear], parent: nn.Module | None) -> None:
    """ValueError unless a linear can become FP8: nothing of it is lost, and its parent calls it."""
    linear = linears[name]
    label = name or "the model"
    if isinstance(linear, FP8_LINEARS):
        raise ValueError(
            f"{label} is already FP8; convert a model once. To change its recipe, deconvert it."
        )
    _check_called(name, parent)
    if isinstance(linear.weight, DTensor):
        raise ValueError(
            f"{label} is sharded already (its weight is a DTensor). Convert a model first."
        )
    if type(linear) is nn.Linear and (problem := unusual_parameter(linear)):
        raise ValueError(
            f"{label} {problem}; convert takes an nn.Parameter. Convert before you shard, quantize "
            "or prune, or use filter_fqns."
        )
    if problem := what_is_lost(linear, (nn.Linear,)):
        raise ValueError(
            f"{label} {problem}. Name it in filter_fqns, or change it after the conversion."
        )
    others = [other for other, m in linears.items() if m is linear and other != name]
    if others:
        raise ValueError(
            f"{label} is the same module as {others[0]}, and only one would be converted. Name "
            "both in filter_fqns."
        )
    weight = linear.weight
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{label} is {weight.dtype}; FP8 is cast from float32, bfloat16 or float16. Cast it."
        )
    device = device_of(weight)
    if (
        device.type == "cuda"
        and torch.version.cuda
        and (capability := torch.cuda.get_device_capability(device)) < (8, 9)
    ):
        raise ValueError(
            f"{label} lies on {torch.cuda.get_device_name(device)} of compute capability "
            f"{capability[0]}.{capability[1]}; FP8 GEMMs need 8.9 or later. Use recipe 'bf16'."
        )


def device_of(weight: Tensor) -> torch.device:
    """Where a weight's linear multiplies: for the meta device the accelerator, if there is one."""
    if not weight.is_meta:
        return weight.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _check_called(name: str, parent: nn.Module | None) -> None:
    """ValueError for a linear of a torch module that reads its weight instead of calling it."""
    key = name.rpartition(".")[2]
    if _runs_forward_of(nn.MultiheadAttention, parent, key):
        raise ValueError(
            f"{name} is never called: nn.MultiheadAttention reads its weight. Use filter_fqns."
        )
    fast = key in ("linear1", "linear2") and torch.backends.mha.get_fastpath_enabled()
    if fast and _runs_forward_of(nn.TransformerEncoderLayer, parent, key):
        raise ValueError(
            f"{name} is not called in torch's fast path of nn.TransformerEncoderLayer, which reads "
            "its weight. Call torch.backends.mha.set_fastpath_enabled(False) first, or use "
            "filter_fqns."
        )


def _runs_forward_of(base: type[nn.Module], module: nn.Module | None, key: str) -> bool:
    """Whether a module runs the forward of torch's class base, and nothing else may call its linear
    key. A subclass's forward does so if it calls ``super().forward`` or base.forward. A method that
    base lacks, or that forward, may call the linear if its code has the linear's name."""
    if not isinstance(module, base):
        return False
    kinds = type(module).__mro__[: type(module).__mro__.index(base)]
    own = [
        value
        for kind in kinds
        for name, value in vars(kind).items()
        if name == "forward" or not hasattr(base, name)
    ]
    if not any("forward" in vars(kind) for kind in kinds):
        return True
    names = [_names(getattr(value, "__code__", None)) for value in own]
    return any(
        {"super", base.__name__} & code_names and "forward" in code_names for code_names in names
    ) and not any(key in code_names for code_names in names)


def _names(code: types.CodeType | None) -> set[str]:
    """The names in code and in functions inside it; none for other objects."""
    if code is None:
        return set()
    return set(code.co_names).union(
        *(_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    )
