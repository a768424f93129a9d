"""FSDP2 with FP8: all-gather weights as codes, reduce gradients in rank order (P-6, P-11, P-13).

    ft.convert(model, "tensorwise")
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    fsdp.gather_in_fp8(model, dtype=torch.bfloat16)  # then build the optimizer

Parameters stay the plain shards that FSDP2 makes: optimizers, checkpoints and clipping see no FP8.
``fp8_gather`` is the gather of one weight; here are those of a model, and when they happen.
"""

import functools
import sys
from types import FrameType

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, UnshardHandle
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear

from fp8ref.recipe import CastSpec
from fp8ref.torch.distributed.fp8_gather import FP8Gather, check_unshared, compute_scales
from fp8ref.torch.distributed.gradient_reduction import (
    UnitReduceScatter,
    divisor_of,
    param_groups,
    params,
)
from fp8ref.torch.linear.linear import Linear

__all__ = [
    "OrderedReduceScatter",
    "check_weights",
    "gather_in_fp8",
    "keep_reduced_dtype",
    "recover",
    "sum_in_rank_order",
]


def gather_in_fp8(
    model: nn.Module, *, dtype: torch.dtype | None, precompute: bool = True
) -> list[FP8Gather]:
    """Make FSDP2 gather weights in FP8, of a model that was converted and sharded.

    A weight whose one scale serves both its GEMMs is gathered in FP8. Any other, with rowwise or
    block scales or in FP8 in one GEMM only, is gathered in the dtype of the mixed precision.

    dtype       the dtype that shards are rounded to before the cast. ``param_dtype`` of the mixed
                precision: the codes are those that the linear would make of the gathered weight,
                and no bit of training changes. None, the masters' dtype: one rounding less, and
                other codes, of about one float32 weight in thirty.
    precompute  compute the scales of all weights where a forward pass begins, from the weights as
                they are then, by one all-reduce for each set of ranks that shards alike. Else each
                gather computes its weight's scale.
    Returns:    the FP8Gather of each weight.
    Raises:     ValueError: nothing to gather in FP8; a weight that is not sharded by fully_shard
                along its first dim, that another module shares, or whose mixed precision is of
                another dtype; resharding to another mesh after the forward pass; shards that
                FSDP2's CPUOffloadPolicy keeps off the device; delayed scaling without a process
                group.
    """
    gathers = [
        FP8Gather(name, linear, spec, dtype or linear.weight.dtype, precomputed=precompute)
        for name, (linear, spec) in check_weights(model).items()
    ]
    for g in gathers:
        _check(g)
    units = {
        name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)
    }
    for name, unit in units.items():
        _check_unit(name, unit)
    for g in gathers:
        g.attach()
        g.linear.fp8_gather = g
    forward = _Forward(gathers)
    for unit in units.values():
        forward.register(unit)
    return gathers


def check_weights(model: nn.Module) -> dict[str, tuple[Float8Linear | Linear, CastSpec]]:
    """A converted model's linears whose weights are gathered in FP8, and their casts, by name.

    ValueError: there is none; one whose weight another module shares.
    """
    linears = {
        name: (linear, spec)
        for name, linear in model.named_modules()
        if isinstance(linear, Float8Linear | Linear)
        and linear.recipe.serves_both("weight")
        and (spec := linear.recipe.output.b) is not None
    }
    if not linears:
        raise ValueError(
            "an FP8 gather needs one scale for both GEMMs of a weight; the model has no such "
            "linear. Use another recipe."
        )
    check_unshared(model, linears)
    return linears


class _Forward:
    """Hooks at the start of a forward pass: recover, reshard, compute scales, observe weights.
    outermost: the unit that runs; as no hook reports a pass ended by KeyboardInterrupt, units check
    the stack. observed: gathers observed in this pass, but not without gradients: checkpointing
    runs such a pass again."""

    def __init__(self, gathers: list[FP8Gather]) -> None:
        self.gathers = gathers
        self.stateful = [g for g in gathers if g.state is not None]
        self.outermost: nn.Module | None = None
        self.observed: set[FP8Gather] = set()

    def register(self, unit: FSDPModule) -> None:
        assert isinstance(unit, nn.Module)
        # begin runs before FSDP2's own hook, which gathers. end is always called: a failed forward
        # pass is over too. Dynamo leaves both out, as it does FSDP2's: a block that was compiled
        # before it was sharded calls them around its graph.
        unit.register_forward_pre_hook(torch._dynamo.disable(self.begin), prepend=True)
        unit.register_forward_hook(torch._dynamo.disable(self.end), always_call=True)
        unshard = functools.partial(self.unshard, unit)
        unit.unshard = torch._dynamo.disable(unshard)  # type: ignore[method-assign]

    def unshard(self, unit: FSDPModule, async_op: bool = False) -> UnshardHandle | None:
        """As FSDP2's. Outside of a pass, the scales are of the weights as they are."""
        passed = self.outermost if torch._C._current_graph_task_id() == -1 else None
        if passed is not None and not _runs(passed):
            self.end(passed, (), None)
        return FSDPModule.unshard(unit, async_op)

    def begin(self, unit: nn.Module, args: tuple) -> None:
        if torch._C._current_graph_task_id() != -1:
            # In the backward pass checkpointed blocks run again, by the scales of the forward pass.
            self._observe(unit)
            return
        if self.outermost not in (None, unit) and _runs(self.outermost):
            return
        self.outermost, self.observed = unit, set()
        recover(unit, args)
        within = set(unit.modules())
        gathers = [g for g in self.gathers if g.linear in within]
        for inner in within:
            # A forward pass without a backward one leaves weights gathered, which are stale by now.
            if isinstance(inner, FSDPModule):
                inner.reshard()
        if not all(isinstance(g.linear.weight, DTensor) for g in gathers):
            # Resharding left the shards gathered: an interrupted forward pass holds weights.
            assert isinstance(unit, FSDPModule)
            _start_afresh(unit)
        for g in gathers:
            g.attach()
            g.in_pass = True
        # of kept codes, those whose weights were loaded, or changed otherwise, since the last step
        compute_scales([g for g in gathers if (not g.fresh if g.keeps_codes else g.precomputed)])
        self._observe(unit)

    def end(self, unit: nn.Module, args: tuple, output: object) -> None:
        if unit is self.outermost:
            self.outermost = None
            for g in self.gathers:
                g.in_pass = False

    def _observe(self, unit: nn.Module) -> None:
        """Observe a unit's weights for delayed scaling, once per pass with gradients."""
        if not self.stateful or not torch.is_grad_enabled():
            return
        within = set(unit.modules())
        for g in self.stateful:
            if g.linear in within and g.linear.training and g not in self.observed:
                self.observed.add(g)
                if g.shard.numel():
                    assert g.state is not None
                    g.state.observe(g.shard.to(g.dtype))


def _runs(module: nn.Module | None) -> bool:
    """Whether this thread is inside a call of the module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module:
            return True
        frame = frame.f_back
    return False


def recover(unit: nn.Module, args: tuple) -> None:
    """Forward pre-hook of a model's outermost unit: discard a backward pass that an error ended.

    Without it, FSDP2 would reduce no gradient from then on.
    Raises:   RuntimeError: torch before 2.13, which cannot discard it.
    """
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    if (
        state._state_ctx.post_backward_final_callback_queued
        and torch._C._current_graph_task_id() == -1
        and state._is_root
    ):
        _start_afresh(unit)


def _start_afresh(unit: FSDPModule) -> None:
    """Reset FSDP2 after an unfinished iteration. RuntimeError: torch before 2.13."""
    assert isinstance(unit, nn.Module)
    if not hasattr(unit, "reset_iter_state"):
        raise RuntimeError(
            "an iteration stopped early, and torch before 2.13 cannot reset it. Build the model "
            "again, or use torch 2.13."
        )
    unit.reset_iter_state()
    for module in unit.modules():
        if isinstance(module, FSDPModule):
            for p in params(module):
                if hasattr(p, "_unsharded_param"):
                    # the reset keeps it, and the next gradient would be added
                    p._unsharded_param.grad = None


def _check(g: FP8Gather) -> None:
    """ValueError unless a linear's weight can be gathered in FP8."""
    weight = g.linear.weight
    if not isinstance(weight, DTensor):
        raise ValueError(
            f"{g.name}.weight is not sharded. Call fully_shard on the modules around it first."
        )
    if g.state is not None and g.state.group is None:
        raise ValueError(
            f"ranks share the delayed states of {g.name}. Pass amax_group to convert.convert."
        )


def _check_unit(name: str, unit: FSDPModule) -> None:
    """ValueError for a unit that FSDP2 would refuse during a step."""
    for group in param_groups(unit):
        if group.post_forward_mesh_info not in (None, group.mesh_info):
            raise ValueError(
                f"FSDP2 cannot reshard FP8 weights to a smaller mesh; {name or 'the model'} has an "
                "integer reshard_after_forward. Use True or False."
            )
        # FSDP2 copies a host's shard to the device, and asks the copy for the shard's hooks.
        offloads = isinstance(group.offload_policy, CPUOffloadPolicy)
        if offloads and group.device.type != "cpu":
            raise ValueError(
                f"FP8 weights are cast on their shards' device; {name or 'the model'} has a "
                f"CPUOffloadPolicy and trains on {group.device.type}. Drop the policy or "
                "gather_in_fp8."
            )


def keep_reduced_dtype(model: nn.Module) -> None:
    """Have FSDP2 leave gradients in their reduced dtype, which it would round to narrower shards'.

    Set ``grad_dtype`` of the parameters too. Call it once the shards have their memory: FSDP2 is
    initialized, as a first forward pass would do it.
    """
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nn.Module)
    for module in model.modules():
        gather = getattr(module, "fp8_gather", None)
        if isinstance(gather, FP8Gather):
            gather.attach()  # FSDP2 looks for hooks on shards while it is initialized
    model._get_fsdp_state()._lazy_init()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                group._orig_dtype = group.mp_policy.reduce_dtype or group._orig_dtype


class OrderedReduceScatter(UnitReduceScatter):
    """A reduce-scatter for FSDP2's ``set_custom_reduce_scatter`` that adds in rank order.

    Order:    all-to-all; acc = acc + g_r for ascending ranks r, each sum rounded to the dtype of
              the gradients, FSDP2's reduce_dtype; for an average, divided by the number of ranks,
              or by the factor of ``set_gradient_divide_factor``.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> None:
        parts = torch.empty_like(input_tensor)
        distributed.all_to_all_single(parts, input_tensor, group=group)
        first, *others = parts.view(group.size(), -1).unbind()
        output_tensor.copy_(first)
        for part in others:
            output_tensor += part
        divisor = divisor_of(self.unit, group, op)
        if divisor != 1:
            output_tensor /= divisor


def sum_in_rank_order(model: nn.Module) -> None:
    """Have every fully_shard unit of a model sum its gradients in rank order."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(OrderedReduceScatter(module))  # type: ignore[arg-type]
