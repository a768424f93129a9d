"""Sharding whose collectives compile with the model into one graph (spec P-18).

    ft.convert(model, "tensorwise")
    model = compiled_fsdp.shard(model, mesh.get_group())
    step = torch.compile(model, fullgraph=True)  # then build the optimizer, of model.parameters()

FSDP2 gathers in hooks, which no graph contains. Here collectives are nodes of the graph, which a
compiler may move and overlap. Gathered weights, or codes, stay in memory until the backward pass.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
)

from fp8ref.formats import Format
from fp8ref.recipe import CastSpec
from fp8ref.torch import delayed
from fp8ref.torch.delayed.role_states import RoleState
from fp8ref.torch.distributed.fp8_gather import check_unshared
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.linear.model_checks import check_no_optimizer, is_compiled
from fp8ref.torch.quantize import scales, scaling

__all__ = ["Sharded", "shard"]

_c10d = torch.ops._c10d_functional  # defined by what scaling imports


def shard(
    model: nn.Module,
    group: ProcessGroup,
    *,
    param_dtype: torch.dtype = torch.bfloat16,
    gather_fp8: bool = True,
) -> "Sharded":
    """Shard a model's parameters, float32 masters, along their first dim over a group's ranks.

    A call gathers them.

    param_dtype   shards are rounded to it before they are gathered or cast to FP8. Gradients have
                  it, and are reduced in float32.
    gather_fp8    gather a weight as FP8 codes if one scale serves both its GEMMs; all others in
                  param_dtype.
    Returns:      the model in a ``Sharded``. Its parameters are replaced: build the optimizer
                  afterwards.
    Raises:       ValueError, before anything is changed: a model that is compiled or sharded
                  already; a parameter that is not float32, or whose first dim the ranks do not
                  divide; an optimizer that was built before; with gather_fp8, nothing to gather in
                  FP8, or an FP8 weight that another module shares; delayed scaling without a
                  process group.
    """
    for name, module in model.named_modules():
        if is_compiled(module) or isinstance(module, FSDPModule):
            raise ValueError(
                f"{name or 'the model'} is compiled or sharded already. Call compiled_fsdp.shard "
                "first."
            )
    for name, p in model.named_parameters():
        if p.dtype != torch.float32 or p.ndim == 0 or p.shape[0] % group.size():
            raise ValueError(
                f"masters are float32, split evenly over {group.size()} ranks; got {name}, "
                f"{p.dtype} {tuple(p.shape)}. Pad it, or use fully_shard."
            )
    for name, state in delayed.states(model):
        if state.group is None:
            raise ValueError(
                f"ranks share the states of delayed scaling; {name} is of this rank alone. Pass "
                "their process group to linear.convert as amax_group."
            )
    check_no_optimizer(model)
    weights = _in_fp8(model, group, param_dtype) if gather_fp8 else {}
    if gather_fp8 and not weights:
        raise ValueError(
            "an FP8 gather needs one scale for both GEMMs of a weight; the model has no such "
            "linear. Use gather_fp8=False."
        )
    return Sharded(model, group, param_dtype, weights)


class Sharded(nn.Module):
    """A model whose parameters are shards [N / ranks, ...]; a call runs it on the whole ones."""

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup,
        dtype: torch.dtype,
        weights: "dict[str, _Weight]",
    ) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype
        self.group, self.ranks = group.group_name, group.size()
        self._fp8 = weights
        self._in_dtype = _gather(self.group, self.ranks, dtype)
        cut: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
        for module in model.modules():
            for key, p in module._parameters.items():
                if p is not None and p not in cut:
                    cut[p] = nn.Parameter(
                        p.detach().chunk(self.ranks)[group.rank()].clone(),
                        requires_grad=p.requires_grad,
                    )
                module._parameters[key] = None if p is None else cut[p]

    def forward(self, *args, **kwargs):
        """Run the model on whole parameters. Every rank calls it."""
        shards = dict(self.model.named_parameters())
        scale = self._scales(shards)
        if torch.is_grad_enabled():
            for name, weight in self._fp8.items():
                if weight.state is not None and weight.linear.training:
                    weight.state.observe(shards[name].to(self.dtype))
        whole = {
            name: self._fp8[name].gather.apply(p, scale[name])
            if name in self._fp8
            else self._in_dtype.apply(p)
            for name, p in shards.items()
        }
        return torch.func.functional_call(self.model, whole, args, kwargs)

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """The whole masters by their names in the model. Every rank calls it."""
        return {
            name: _all_gather(p.detach(), self.group, self.ranks)
            for name, p in self.model.named_parameters()
        }

    @torch.no_grad()
    def _scales(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The scale, float32 (), of each FP8 weight: its delayed state's, or all-reduced (P-3)."""
        weight_scales, alike = {}, {}  # type: ignore[var-annotated]
        for name, weight in self._fp8.items():
            if weight.state is None:
                alike.setdefault(weight.spec, []).append(name)
            else:
                weight_scales[name] = weight.state.scale.clone()
        for spec, names in alike.items():
            amaxes = [scaling.amax(shards[name].to(self.dtype)) for name in names]
            amax = scaling.merge_amax(torch.stack(amaxes), self.group)
            each = scales.scale_from_amax(amax, spec.fmt, spec.policy).unbind()
            weight_scales.update(zip(names, each, strict=True))
        return weight_scales


class _Weight(NamedTuple):
    """The FP8 gather of one weight: gather.apply(shard, scale) -> the whole weight."""

    linear: Float8Linear | Linear
    spec: CastSpec
    gather: type[torch.autograd.Function]

    @property
    def state(self) -> RoleState | None:
        return self.linear.state("weight") if isinstance(self.linear, Linear) else None


def _in_fp8(model: nn.Module, group: ProcessGroup, dtype: torch.dtype) -> dict[str, _Weight]:
    """The weights to gather in FP8, by name; ValueError for one that cannot be."""
    weights = {}
    for name, linear in model.named_modules():
        if isinstance(linear, Float8Linear | Linear) and linear.recipe.serves_both("weight"):
            check_unshared(model, [name])
            spec, config = linear.recipe.output.b, getattr(linear, "linear_mm_config", None)
            assert spec is not None
            gather = _gather_fp8(group.group_name, group.size(), dtype, spec.fmt, config)
            weights[f"{name}.weight".lstrip(".")] = _Weight(linear, spec, gather)
    return weights


@functools.lru_cache(maxsize=256)
def _gather(group: str, ranks: int, dtype: torch.dtype) -> type[torch.autograd.Function]:
    """shard float32 [n, ...] -> [n * ranks, ...] in dtype; backward: the shard of the mean
    gradient. One class per set of constants, as a compiled graph passes tensors only; dynamo of
    torch 2.11 needs the class, not its apply."""

    @torch._dynamo.allow_in_graph
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shard: Tensor) -> Tensor:
            return _all_gather(shard.to(dtype), group, ranks)

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            return _mean_of_ranks(grad, group, ranks)

    return Gather


@functools.lru_cache(maxsize=256)
def _gather_fp8(
    group: str, ranks: int, dtype: torch.dtype, fmt: Format, config: LinearMMConfig | None
) -> type[torch.autograd.Function]:
    """``_gather`` of FP8 codes, moved as uint8, since gloo has no FP8. config: torchao's
    LinearMMConfig; None for ``linear.Linear``."""

    @torch._dynamo.allow_in_graph
    class GatherFP8(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shard: Tensor, scale: Tensor) -> Float8TrainingTensor:
            codes = scaling.quantize_with(shard.to(dtype), scale, fmt).codes
            whole = _all_gather(codes.view(torch.uint8), group, ranks).view(codes.dtype)
            return Float8TrainingTensor(whole, scale, dtype, config, GemmInputRole.WEIGHT)

        @staticmethod
        def backward(ctx, grad: Tensor):
            return _mean_of_ranks(grad, group, ranks), None

    return GatherFP8


def _all_gather(x: Tensor, group: str, ranks: int) -> Tensor:
    """Every rank's x [n, ...], in rank order: [n * ranks, ...]."""
    return _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), ranks, group))


def _mean_of_ranks(grad: Tensor, group: str, ranks: int) -> Tensor:
    """This rank's rows of the mean gradient, float32: the backend's sum / ranks."""
    own = _c10d.reduce_scatter_tensor(grad.float().contiguous(), "sum", ranks, group)
    return _c10d.wait_tensor(own) / ranks
