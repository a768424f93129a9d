"""Gradients summed over ranks in FP8, by one scale for all ranks (spec P-21, P-22, P-24).

    gradient_reduction.reduce_in_fp8(model)  # FSDP2, after fully_shard
    # DistributedDataParallel
    ddp.register_comm_hook(gradient_reduction.DDPState(), gradient_reduction.ddp_hook)

Ranks exchange codes by an all-to-all of uint8, which gloo and NCCL have, and each adds its piece of
all ranks' codes in float32, in rank order. ``reduce_scatter`` and ``all_reduce`` take one tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from fp8ref.spec import gradient_reduction
from fp8ref.spec.gradient_reduction import AutoScale, Result
from fp8ref.torch.distributed import fp8_exchange
from fp8ref.torch.distributed.fp8_exchange import GradientCast
from fp8ref.torch.quantize import cast as casts
from fp8ref.torch.quantize import scaling
from fp8ref.torch.quantize.scaling import Quantized

__all__ = [
    "E4M3",
    "DDPState",
    "FP8ReduceScatter",
    "GradientCast",
    "Reduced",
    "UnitReduceScatter",
    "accumulate",
    "all_reduce",
    "ddp_hook",
    "divisor_of",
    "next_mu",
    "reduce_in_fp8",
    "reduce_scatter",
    "reductions",
]

E4M3 = GradientCast()
"""e4m3fn, by torchao's scales of all ranks."""


class Reduced(NamedTuple):
    """The sum or mean over ranks: value float32, and the number of saturated elements of all ranks,
    int64 (), for ``next_mu``; None if nobody counted."""

    value: Tensor
    saturated: Tensor | None


@torch.no_grad()
def reduce_scatter(
    g: Tensor,
    group: ProcessGroup | None = None,
    cast: GradientCast = E4M3,
    *,
    mu: Tensor | float = 1.0,
    mean: bool = True,
    result: Result = "float32",
    count: bool = False,
) -> Reduced:
    """Sum g over the ranks of a group, exchanged as codes, and leave each its rows.

    group     None: all ranks.
    count     count saturated elements, by one more pass over g and one more all-reduce.
    Shapes:   g float32, float16 or bfloat16 [n, ...]; value float32 [ceil(n / ranks), ...]: rank
              i's rows, P-1's ``ceil``, filled with zeros where they are fewer. mu a number or
              float32 ().
    Order:    merged amax; scale; cast; all-to-all; acc = acc + code_r in float32, r ascending;
              RN32(acc * scale_inv), as ``sim.gradient_reduction.reduce``.
    Specials: an Inf or NaN on any rank makes the value NaN on all.
    Raises:   ValueError: a g without dims or elements; an unknown result; mu out of range.
    Source:   spec P-21.
    """
    if not g.ndim:
        raise ValueError(
            "a reduce-scatter splits the first dim; got a gradient without dims. Use all_reduce."
        )
    group = fp8_exchange.group_of(group)
    rows = -(-len(g) // group.size())
    padded = functional.pad(g, (*[0] * (2 * g.ndim - 1), rows * group.size() - len(g)))
    total, _, factor, saturated = fp8_exchange.sum_piece(
        padded, g, group, cast, mu, mean, result, count
    )
    return Reduced((total * factor).view(rows, *g.shape[1:]), saturated)


@torch.no_grad()
def all_reduce(
    g: Tensor,
    group: ProcessGroup | None = None,
    cast: GradientCast = E4M3,
    *,
    mu: Tensor | float = 1.0,
    mean: bool = True,
    result: Result = "float32",
    count: bool = False,
) -> Reduced:
    """As ``reduce_scatter``, of g of any shape; then all ranks gather the whole value.

    Float32 sums are gathered, four bytes an element; under result ``codes`` their codes, one byte.
    Raises:   as reduce_scatter.
    """
    group = fp8_exchange.group_of(group)
    padded = functional.pad(g.reshape(-1), (0, -g.numel() % group.size()))
    total, codes, factor, saturated = fp8_exchange.sum_piece(
        padded, g, group, cast, mu, mean, result, count
    )
    whole = fp8_exchange.gathered(total if codes is None else codes, group)
    if codes is not None:
        whole = casts.decode(whole, cast.fmt)
    return Reduced((whole * factor)[: g.numel()].view(g.shape), saturated)


def next_mu(
    mu: Tensor, saturated: Tensor | None, elements: int, auto: AutoScale = gradient_reduction.AUTO
) -> Tensor:
    """mu of the next step, float32 (), from the saturated elements of this one (spec P-22).

    Raises:   ValueError: a sum whose saturated elements nobody counted.
    """
    if saturated is None:
        raise ValueError(
            "mu needs the number of saturated elements; got None. Pass count=True to the reduction."
        )
    mu = torch.where(saturated > auto.allowed(elements), mu * 0.5, mu * float(auto.growth))
    return mu.clamp(gradient_reduction.MU_MIN, gradient_reduction.MU_MAX)


@torch.no_grad()
def accumulate(
    total: Quantized | None,
    g: Tensor,
    cast: GradientCast = E4M3,
    *,
    group: ProcessGroup | None = None,
) -> Quantized:
    """Add the gradient of a microbatch to a sum that is kept in FP8.

    total     the sum so far; None before the first microbatch.
    group     ranks that hold pieces of the gradient: its amax is that of all. None: one rank.
    Shapes:   g float32, float16 or bfloat16; codes native float8 of its shape, scales ().
    Order:    RN32(RN32(code * scale_inv) + f32(g)); amax; scale; codes.
    Specials: an Inf or NaN makes every code NaN, from then on.
    Raises:   ValueError: as reduce_scatter; a g of another shape.
    Source:   spec P-24.
    """
    value = casts.to_f32(g)
    if total is not None:
        if total.codes.shape != g.shape:
            raise ValueError(
                f"microbatches have gradients of one shape, {tuple(total.codes.shape)}; got "
                f"{tuple(g.shape)}."
            )
        value = casts.decode(total.codes, cast.fmt) * total.scale_inv + value
    amax = scaling.amax(value)
    scale = cast.scale(amax if group is None else scaling.merge_amax(amax, group.group_name), 1.0)
    codes = scaling.quantize_blocks(value, scale, cast.fmt)
    return Quantized(codes, scale, scale.reciprocal(), cast.fmt, "tensorwise", -1)


class UnitReduceScatter:
    """A reduce-scatter for FSDP2's ``set_custom_reduce_scatter``, of the gradients of a unit."""

    def __init__(self, unit: FSDPModule) -> None:
        self.unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2, not initialized."""
        return torch.empty(*size, dtype=dtype, device=device)


class FP8ReduceScatter(UnitReduceScatter):
    """A reduce-scatter for FSDP2's ``set_custom_reduce_scatter``, in FP8 for weights of linears.

    Other parameters of the unit, such as norms and biases, are summed in float32, in rank order,
    and travel in the same all-to-all.
    factors   mu float32 [weights], and int64 [weights] to which the elements that each cast
              saturates are added; None: mu is 1.
    Order:    one all-reduce of amaxes for the unit, one all-to-all; each tensor as
              ``reduce_scatter``.
    """

    factors: tuple[Tensor, Tensor] | None = None

    def __init__(self, unit: FSDPModule, cast: GradientCast) -> None:
        super().__init__(unit)
        self.cast = cast

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> None:
        rows = input_tensor.view(group.size(), -1)
        sizes, narrow = self._parameters(rows.shape[1])
        divisor = divisor_of(self.unit, group, op)
        total = fp8_exchange.sums(
            rows.split(sizes, dim=1), narrow, group, self.cast, divisor, self.factors
        )
        torch.cat(total, out=output_tensor)

    def weights(self) -> list:
        """FSDP2's records of the weights that are reduced in FP8, in the order of ``factors``."""
        return [p for p in self._with_gradients() if _is_linear_weight(p)]

    def _with_gradients(self) -> list:
        return [p for p in params(self.unit) if p.sharded_param.requires_grad]

    def _parameters(self, elements: int) -> tuple[list[int], list[bool]]:
        """The shard's elements of each parameter with gradients, and whether it is a linear's
        weight. ValueError unless they add up to what FSDP2 reduces."""
        reduced = self._with_gradients()
        sizes = [math.prod(p.padded_sharded_param_size) for p in reduced]
        if sum(sizes) != elements:
            names = ", ".join(p._param_fqn or p._module_info.param_name for p in reduced)
            raise ValueError(
                "FP8 gradients need every parameter of an FSDP2 unit in the loss; a shard of "
                f"{names} has {sum(sizes)} elements, its gradients {elements}. Use all of them, or "
                "freeze the rest."
            )
        return sizes, [_is_linear_weight(p) for p in reduced]


def reduce_in_fp8(model: nn.Module, cast: GradientCast = E4M3) -> list[nn.Module]:
    """Have a model's fully_shard units reduce gradients of linears' weights in FP8 (P-21, P-25).

    Gradients that FSDP2 widens to ``reduce_dtype`` float32 are cast, so keep it.
    Returns:    the units; units without a linear's weight reduce as before.
    Raises:     ValueError: no unit, or none with a linear; a unit with copies along another mesh
                dim; another reduce_dtype than float32; as ``reduce_scatter``.
    """
    units = [
        m
        for m in model.modules()
        if isinstance(m, FSDPModule) and any(_is_linear_weight(p) for p in params(m))
    ]
    if not units:
        raise ValueError(
            "FP8 gradients need units with linears; the model has none. Call fully_shard first."
        )
    for unit in units:
        copied = (g._all_reduce_process_group for g in param_groups(unit) if g._is_hsdp)
        if any(group.size() > 1 for group in copied):
            raise ValueError(
                "FP8 gradients need a mesh of one dim: FSDP2's all-reduce over copies has no hook. "
                "Shard over all ranks."
            )
        if others := {p.mp_policy.reduce_dtype for p in params(unit)} - {torch.float32}:
            raise ValueError(
                f"FP8 gradients are cast from float32; got reduce_dtype {others.pop()}. Use "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)."
            )
    for unit in units:
        unit.set_custom_reduce_scatter(FP8ReduceScatter(unit, cast))  # type: ignore[arg-type]
    return units  # type: ignore[return-value]


def reductions(model: nn.Module) -> list[FP8ReduceScatter]:
    """What ``reduce_in_fp8`` set on the units of a model, in the order of its modules."""
    units = (m for m in model.modules() if isinstance(m, FSDPModule))
    return [
        reduction
        for unit in units
        for group in param_groups(unit)
        if isinstance(reduction := group._reduce_scatter_comm, FP8ReduceScatter)
    ]


@dataclass(frozen=True, kw_only=True)
class DDPState:
    """What ``ddp_hook`` reads: ranks, cast, and parameters whose gradients stay float32.

    keep      beside these, parameters of fewer than two dims stay float32.
    """

    group: ProcessGroup | None = None
    cast: GradientCast = E4M3
    keep: frozenset[nn.Parameter] = frozenset()


@torch.no_grad()
def ddp_hook(state: DDPState, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook of DistributedDataParallel: the mean of each gradient, as
    ``all_reduce``, by one all-reduce of amaxes, one all-to-all and one gather of float32 sums a
    bucket."""
    group = fp8_exchange.group_of(state.group)
    grads = bucket.gradients()
    pieces = [
        functional.pad(g.reshape(-1), (0, -g.numel() % group.size())).view(group.size(), -1)
        for g in grads
    ]
    narrow = [p.ndim > 1 and p not in state.keep for p in bucket.parameters()]
    total = fp8_exchange.sums(pieces, narrow, group, state.cast, group.size())
    whole = fp8_exchange.gathered(torch.cat(total), group).view(group.size(), -1)
    for g, part in zip(grads, whole.split([len(t) for t in total], dim=1), strict=True):
        g.copy_(part.reshape(-1)[: g.numel()].view(g.shape))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def divisor_of(unit: FSDPModule, group: ProcessGroup, op: ReduceOp) -> float:
    """What the sum of a unit's gradients is divided by: FSDP2 names the factor of
    ``set_gradient_divide_factor`` in an operation that does not tell it."""
    if op == ReduceOp.SUM:  # FSDP2 divides by itself, if at all
        return 1
    if op == ReduceOp.AVG:
        return group.size()
    (factor,) = {param_group.gradient_divide_factor for param_group in param_groups(unit)}
    return factor


def params(unit: FSDPModule) -> list:
    """FSDP2's records of a unit's parameters, in reduction order."""
    return [p for group in param_groups(unit) for p in group.fsdp_params]


def param_groups(unit: FSDPModule) -> list:
    """FSDP2's parameter groups of a unit; at most one before torch 2.13."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(filter(None, [state._fsdp_param_group] if groups is None else groups))


def _is_linear_weight(param) -> bool:
    """Whether a parameter is one linear's weight, shared with no other module."""
    info = param._module_info
    return (
        isinstance(info.module, nn.Linear)
        and info.param_name == "weight"
        and not info.shared_modules
    )
