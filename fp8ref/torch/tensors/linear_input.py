"""Check the input of an FP8 linear, and cast it under torch.autocast as F.linear does (L-7)."""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils import parametrize
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.torch.quantize import cast
from fp8ref.torch.tensors.local_part import local_part

KINDS = frozenset(
    kind
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
    if torch.amp.is_autocast_available(kind)
)
"""Kinds of device for which torch.autocast is available."""


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of linears under torch.autocast on x's device; None outside of autocast."""
    # looked up among KINDS, since dynamo of torch 2.11 does not trace is_autocast_available
    kind = x.device.type
    if kind in KINDS and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


class Named(Protocol):
    """A linear with its name.

    Only errors read the name: a compiled graph that read it would be of that linear only.
    """

    fqn: str
    weight: Tensor


def checked_input(x: Tensor, linear: Named) -> Tensor:
    """Check the input x [..., K] of a linear, and cast it to the autocast dtype if there is one.

    Raises:   ValueError: another K; another device; x not float32, float16 or bfloat16; forward
              mode or a transform of torch.func (L-8).
    """
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{_name(linear)} takes a torch.Tensor; got {type(x).__name__}. Use torch.as_tensor."
        )
    if not torch.compiler.is_compiling():
        check_transforms(_name(linear), x, linear.weight)
    w = _rank_weight(linear, x)
    if x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{_name(linear)} takes x [..., K] and w [N, K] with one K; got {tuple(x.shape)} and "
            f"{tuple(w.shape)}."
        )
    if x.dtype not in cast.HIGH_PRECISION:
        raise ValueError(
            f"{_name(linear)} takes float32, float16 or bfloat16; got {x.dtype}. Use .float()."
        )
    if x.device != w.device:
        raise ValueError(
            f"{_name(linear)} takes x on its weight's device; got {x.device} and {w.device}."
        )
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


def check_transforms(
    name: str, *tensors: Tensor, otherwise: str = "keep it in high precision by filter_fqns"
) -> None:
    """ValueError where torch.func transforms a pass of FP8, or one of its tensors has a derivative
    in forward mode: torch's error would name no layer. In a compiled graph nothing is checked."""
    if torch.compiler.is_compiling():
        return
    plain = (
        [t for t in tensors if type(t) in (Tensor, torch.nn.Parameter)]
        if forward_ad._current_level >= 0
        else []
    )
    if torch._C._are_functorch_transforms_active():
        transform = "a transform of torch.func (grad, vmap, jvp, jacrev, ...)"
    elif any(forward_ad.unpack_dual(t).tangent is not None for t in plain):
        transform = "forward mode"
    else:
        return
    raise ValueError(
        f"{name} has a backward pass of its own, for torch.autograd only; got {transform}. Use "
        f"loss.backward() or torch.autograd.grad, or {otherwise} (L-8)."
    )


def weight(linear: Named, x: Tensor) -> Tensor:
    """A linear's weight in the dtype of an input x that ``checked_input`` returned.

    A weight gathered as codes is left as it is. Of a DTensor it is this rank's part.

    Raises:   ValueError: outside of autocast, another dtype than the input's.
    """
    w = _rank_weight(linear, x)
    if w.dtype == x.dtype:
        return w
    if autocast_dtype(x) is None:
        raise ValueError(
            f"x and w of {_name(linear)} have one dtype; got {x.dtype} and {w.dtype}. Cast one, or "
            "use torch.autocast."
        )
    return w if isinstance(w, Float8TrainingTensor) else w.to(x.dtype)


def in_high_precision(x: Tensor, w: Tensor) -> Tensor:
    """x [..., K] @ w.T [K, N] without FP8: of no tokens (L-9), whose gradients are then zeros."""
    return functional.linear(
        x, w.to_original_precision() if isinstance(w, Float8TrainingTensor) else w
    )


def calibrated(x: Tensor, w: Tensor, fqn: str) -> Tensor:
    """x [..., K] @ w.T [K, N] in high precision, for ``delayed.calibrate``.

    ValueError: w is gathered in FP8.
    """
    if isinstance(w, Float8TrainingTensor):
        raise ValueError(
            f"calibrate needs high-precision weights; {named(fqn)} gathers FP8. Calibrate before "
            "you shard, or use gather_fp8=False."
        )
    return in_high_precision(x, w)


def _rank_weight(linear: Named, x: Tensor) -> Tensor:
    """The weight as it is multiplied; for a plain x this rank's part of it."""
    w = linear.weight
    return w if isinstance(x, DTensor) else local_part(w)


def _name(linear: Named) -> str:
    return named(linear.fqn)


def named(fqn: str) -> str:
    """A linear's name in errors: "3" alone, as nn.Sequential names its parts, would read as a
    number of linears.
    """
    if any(c.isalpha() for c in fqn):
        return fqn
    if fqn:
        return f"linear {fqn}"
    return "a linear in FP8"


def without_autocast(pass_: Callable) -> Callable:
    """Wrap a forward or backward pass (ctx, tensor, ...): autocast changes no dtype in it."""

    @functools.wraps(pass_)
    def run(ctx, x: Tensor, *more):
        if autocast_dtype(x) is None:
            return pass_(ctx, x, *more)
        with torch.autocast(x.device.type, enabled=False):
            return pass_(ctx, x, *more)

    return run


def weight_once(forward: Callable) -> Callable:
    """Wrap a forward pass (linear, input): a parametrized weight, as of spectral_norm, is computed
    once in it when it runs eagerly."""

    @functools.wraps(forward)
    def run(linear, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or "parametrizations" not in linear._modules:
            return forward(linear, input)
        with parametrize.cached():
            return forward(linear, input)

    return run
