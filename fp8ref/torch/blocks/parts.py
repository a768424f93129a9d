"""Parts of a Llama block as one function each: a norm and the linears that read it, SwiGLU's MLP.

    if parts.fuses(h, [q_proj, k_proj, v_proj]):
        _, (q, k, v) = parts.projections(h, [q_proj, k_proj, v_proj], norm=norm, tables=(cos, sin))
        ...
        h, y = parts.mlp(h, [gate_proj, up_proj, down_proj], residual=attention_output, norm=norm)

Outputs, gradients and observations are those of the separate modules. Where kernels are on
(``fp8ref.torch.kernels``), norm, SwiGLU and the gradients of SwiGLU and RoPE write their codes in
both orders in the pass that computes them, and never their values (spec M-11).
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.torch import delayed
from fp8ref.torch.blocks.functions import Tables, numbered
from fp8ref.torch.blocks.operations import Norm
from fp8ref.torch.linear.cut import writable
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.linear.passes import zero_row
from fp8ref.torch.linear.spec import Spec
from fp8ref.torch.tensors import linear_input

__all__ = ["NormModule", "any_hooked", "fuses", "hooked", "mlp", "projections", "unlike", "why_not"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NormModule(Protocol):
    """A norm: its constants, and its weight [K]."""

    @property
    def constants(self) -> Norm:
        """Its eps, and where it rounds."""
        ...

    @property
    def weight(self) -> Tensor:
        """[K]."""
        ...


def projections(
    h: Tensor,
    linears: Sequence[nn.Linear],
    *,
    residual: Tensor | None = None,
    norm: NormModule | None = None,
    tables: Tables | None = None,
    rotated: int = 2,
    form: str = "halves",
) -> tuple[Tensor, list[Tensor]]:
    """h + residual, and the outputs [..., N] of linears that read its norm.

    Shapes:   h and residual [..., K]; with tables h is [B, T, K].
    Order:    the sum, the norm and each output are rounded to h's dtype (M-3); then the first
              ``rotated`` outputs are rotated by tables [T, D], and rounded, in a form of
              ``kernels.rotary``; tables of "pairs" are [T, D / 2]. Outputs are then [B, T, H, D].
    residual, norm, tables
              None: not added, normalized or rotated.
    """
    constants = False, False, rotated if tables else 0, form
    s, *outputs = _apply(h, linears, residual, norm, tables or (None, None), constants)
    return (h if residual is None else s), outputs


def mlp(
    h: Tensor,
    linears: Sequence[nn.Linear],
    *,
    residual: Tensor | None = None,
    norm: NormModule | None = None,
    twice: bool = False,
) -> tuple[Tensor, Tensor]:
    """h + residual, and down(silu(gate) * up) of its norm, of h's shape.

    linears   gate [N, K], up [N, K], down [K, N].
    twice     whether silu(gate) is rounded before it is multiplied by up, as transformers and
              torchtitan do; else only the product is (M-3).
    """
    s, output = _apply(h, linears, residual, norm, (None, None), (True, twice, 0, "halves"))
    return (h if residual is None else s), output


def fuses(h: Tensor, linears: Sequence[nn.Linear], others: Sequence[nn.Module] = ()) -> bool:
    """Whether kernels cast these linears' operands, and nothing keeps them apart (``why_not``).

    Logs:     the reason, at level INFO of logger fp8ref.torch, the first time that it applies.
    """
    for each in linears:
        if not isinstance(each, Linear) or not _kernels_cast(each.spec_number, h.device):
            return False
    reason = why_not(h, linears, others)
    if reason and not torch.compiler.is_compiling():
        _log(reason)
    return not reason


@functools.lru_cache(maxsize=256)
def _log(reason: str) -> None:
    """Log a reason the first time that it applies."""
    logging.getLogger("fp8ref.torch").info("blocks run module by module: %s", reason)


@torch.compiler.assume_constant_result
def _kernels_cast(number: int, device: torch.device) -> bool:
    return Spec.numbered(number).runs_kernels(device)


def why_not(h: Tensor, linears: Sequence[nn.Module], others: Sequence[nn.Module] = ()) -> str:
    """Why these linears run as modules of their own in a pass of h, or nothing ("").

    others    modules whose work a part would do, without calling them: a norm, an MLP.
    """
    if delayed.calibrating():
        return "delayed.calibrate runs the linears in high precision"
    merges = any(each.groups.every for each in linears if isinstance(each, Linear))
    if not h.numel() and not merges:
        return "there are no tokens (L-9)"
    if linear_input.autocast_dtype(h) is not None:
        return "torch.autocast is enabled"
    if any_hooked():
        return "hooks of all modules are registered"
    if any(map(hooked, (*linears, *others))):
        return "modules have hooks"
    if any(each.training != linears[0].training for each in linears):
        return "some linears are in training mode, others are not"
    for each in linears:
        if reason := unlike(each) or _unlike_input(each, h):
            return reason
    return ""


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks of its passes, which a part would not call."""
    return any(getattr(module, hooks) for hooks in _HOOKS)


def any_hooked() -> bool:
    """Whether hooks of all modules are registered."""
    return any(getattr(torch_module, f"_global{hooks}") for hooks in _HOOKS)


def unlike(linear: nn.Module) -> str:
    """Why a linear cannot be a part's, or nothing."""
    if type(linear).forward is not Linear.forward or "forward" in vars(linear):
        return f"a linear is a {type(linear).__name__}, not fp8ref's own"
    assert isinstance(linear, Linear)
    if linear.bias is not None:
        return "a linear has a bias"
    if linear.cut is not None:
        return "tensor-parallel ranks share the linears"
    if "parametrizations" in linear._modules:
        return "a linear's weight is parametrized"
    return ""


def _unlike_input(linear: nn.Module, h: Tensor) -> str:
    weight = linear.weight
    if not isinstance(weight, Float8TrainingTensor) and weight.dtype != h.dtype:
        return f"a weight is {weight.dtype} and the input {h.dtype}"
    return ""


def _apply(
    h: Tensor,
    linears: Sequence[nn.Linear],
    residual: Tensor | None,
    norm: NormModule | None,
    tables: Sequence[Tensor | None],
    constants: tuple[bool, bool, int, str],
) -> Sequence[Any]:
    """h + residual and the outputs of a part. constants: its mlp, twice, rotated and form."""
    linear_input.check_transforms("a part of a block in FP8", h)
    eps, norm_twice = (norm.constants.eps, norm.constants.twice) if norm else (None, False)
    if eps == 0 and not h.numel():
        eps = 1.0  # by 0 a row of zeros would be NaN, and the amaxes of all ranks
    numbers = tuple(linear.spec_number for linear in linears)
    function, weight = numbered(numbers, eps, norm_twice, *constants), norm.weight if norm else None
    tensors = [x for linear in linears for x in linear.tensors(h)]  # type: ignore[operator]
    if h.numel():
        return function.apply(h, residual, weight, *tables, *tensors)
    # Other ranks merge the amaxes of their parts (L-9): a row of zeros runs.
    one = residual if residual is None else zero_row(residual)[None]
    ends = [table if table is None else table.new_zeros(1, table.shape[-1]) for table in tables]
    results = function.apply(zero_row(h)[None], one, weight, *ends, *tensors)  # [1, 1, ...]
    return [
        y if y is None else writable(y[0, :0].reshape(*h.shape[:-1], *y.shape[2:])) for y in results
    ]
