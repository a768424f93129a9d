"""Weights that FSDP2 gathers in FP8 (SEMANTICS P-6, P-11).

    linear.convert(model, "tensorwise")
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    gather.gather_in_fp8(model, dtype=torch.bfloat16)     # then build the optimizer

Parameters stay the plain shards that FSDP2 makes of them: optimizers, checkpoints and clipping meet no FP8. What FSDP2 asks of a shard
that is gathered in a way of its own, ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, is set on the shard itself.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

from fp8ref.recipe import CastSpec, Recipe
from fp8ref.torch import cast, scales, scaling
from fp8ref.torch.linear import Linear


class FP8Gather:
    """One linear's weight: every shard is cast by the scale of the whole, and codes are gathered, one byte an element.

    scale       float32 (), of the forward pass under way and its backward pass.
    moved       the dtype of what FSDP2 last gathered of it, once it has.
    shard       this rank's rows [n, K] of the master, also while the whole weight is gathered; n may be 0.
    """

    def __init__(self, name: str, linear: Float8Linear | Linear, spec: CastSpec, dtype: torch.dtype, *, precomputed: bool) -> None:
        self.name, self.linear, self.spec, self.dtype, self.precomputed = name, linear, spec, dtype, precomputed
        self.state = linear.state("weight") if isinstance(linear, Linear) else None
        self.scale: torch.Tensor | None = None
        self.moved: torch.dtype | None = None
        self.shard = torch.empty(0)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups over whose ranks the weight is cut."""
        weight = self.linear.weight
        assert isinstance(weight, DTensor)
        mesh = weight.device_mesh
        return tuple(mesh.get_group(i).group_name for i, placement in enumerate(weight.placements) if not placement.is_replicate())

    def attach(self) -> None:
        """Have FSDP2 ask this object: it looks for these names on the shard, also on one that has been replaced since."""
        weight = self.linear.weight
        assert isinstance(weight, DTensor)
        self.shard = weight._local_tensor
        self.shard.fsdp_pre_all_gather = self.before  # type: ignore[attr-defined]
        self.shard.fsdp_post_all_gather = self.after  # type: ignore[attr-defined]

    def before(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor, int]]:
        """What is gathered: codes as uint8, for gloo moves no float8, and FSDP2 moves mixed dtypes as bytes anyway. And what ``after`` gets.

        Rows are padded to ceil(N / ranks), as FSDP2 pads: shards of unequal length gather too.
        Raises:   ValueError: mixed precision of another dtype than ``dtype``; a weight that is cut along another dim than the first.
        """
        master, compute = self.shard.dtype, mp_policy.param_dtype or self.shard.dtype
        if self.dtype not in (master, compute):
            raise ValueError(
                f"shards are cast to FP8 from the compute dtype, {compute}, or from the masters', {master}; {self.name} was to be from "
                f"{self.dtype}. Give gather_in_fp8 the param_dtype of the mixed precision."
            )
        if self.shard.shape[1:] != outer_size[1:]:
            raise ValueError(f"fully_shard cuts a weight that is gathered in FP8 along its first dim; {self.name}.weight is cut otherwise.")
        if not self.precomputed or self.scale is None:  # None where the caller gathers before any forward pass
            compute_scales([self])
        assert self.scale is not None
        shard = self.shard.to(self.dtype)
        codes = scaling.quantize_with(shard, self.scale, self.spec.fmt).codes.view(torch.uint8) if shard.numel() else shard.to(torch.uint8)
        rows = -(-outer_size[0] // mesh.size())
        return (functional.pad(codes, (0, 0, 0, rows - len(codes))),), (self.scale, outer_size[0])

    def after(
        self,
        gathered: tuple[torch.Tensor],
        metadata: tuple[torch.Tensor, int],
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[Float8TrainingTensor, tuple] | None:
        """The whole weight as torchao's FP8 tensor; where that is there already (out) its codes are new, and its scale is set."""
        (codes,), (scale, rows) = gathered, metadata
        self.moved = codes.dtype
        if out is not None:
            whole = out._local_tensor if isinstance(out, DTensor) else out
            whole._scale = scale  # type: ignore[attr-defined]
            return None
        config = getattr(self.linear, "linear_mm_config", None)  # torchao's multiplication asks the tensor for it
        return Float8TrainingTensor(
            codes.view(cast.DTYPES[self.spec.fmt.name])[:rows], scale, param_dtype, config, GemmInputRole.WEIGHT
        ), ()


def gather_in_fp8(model: nn.Module, *, dtype: torch.dtype | None, precompute: bool = True) -> list[FP8Gather]:
    """From now on, FSDP2 gathers the weights of a sharded, converted model's linears in FP8, where one scale serves both their GEMMs.

    dtype       what shards are rounded to before they are cast. The compute dtype, ``param_dtype`` of the mixed precision: the codes
                are those that the linear would make of the gathered weight, and no bit of training changes. Or the masters', which
                None is: one rounding less, and other codes (of one float32 weight in thirty or so).
    precompute  the scales of all weights are computed where a forward pass begins, by one all-reduce for each set of ranks that cut them
                alike: of the weights as they are then, whoever wrote them. Otherwise at every gather, by one of each weight's own.
    Returns:    what gathers each of them. Linears that scale by rows or blocks are gathered as before.
    Raises:     ValueError: nothing to gather in FP8; a weight that is not sharded by fully_shard along its first dim, that another module
                shares, whose mixed precision is of another dtype; resharding to another mesh after the forward pass; delayed scaling
                without a process group.
    """
    gathers = [
        FP8Gather(name, linear, spec, dtype or linear.weight.dtype, precomputed=precompute)
        for name, linear in model.named_modules()
        if isinstance(linear, Float8Linear | Linear) and (spec := _one_cast(linear.recipe)) is not None
    ]
    if not gathers:
        raise ValueError(
            "an FP8 gather is of linears whose weight has one scale for both GEMMs, and the model has none. Convert it by such a recipe."
        )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for g in gathers:
        _check(g, [name for name in names[id(g.linear.weight)] if name != f"{g.name}.weight"])
    units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    for name, unit in units.items():
        _check_unit(name, unit)
    for g in gathers:
        g.attach()
        g.linear.fp8_gather = g
    forward = _Forward(gathers)
    for unit in units.values():
        forward.watch(unit)
    return gathers


@torch.no_grad()
def compute_scales(gathers: Iterable[FP8Gather]) -> None:
    """Scales of whole weights from every rank's shards, one all-reduce for those that are cut over the same ranks (P-3)."""
    alike: dict[tuple, list[FP8Gather]] = {}
    for g in gathers:
        if g.state is not None:
            g.scale = g.state.scale.clone()
        else:
            alike.setdefault((g.groups, g.dtype, g.spec, g.shard.device), []).append(g)
    for (groups, dtype, spec, device), members in alike.items():
        amax = torch.zeros(len(members), device=device)
        held = [i for i, g in enumerate(members) if g.shard.numel()]
        if held:
            amax[held] = torch.stack(torch._foreach_norm([members[i].shard for i in held], math.inf)).float()
        for group in groups:
            amax = scaling.merge_amax(amax, group)
        # Rounding is monotonic: the amax of the rounded shard is the rounded amax.
        scale = scales.scale_from_amax(amax.to(dtype).float(), spec.fmt, spec.policy)
        for g, of_one in zip(members, scale.unbind(), strict=True):
            g.scale = of_one


class _Forward:
    """What happens where a forward pass begins, for the FSDP unit that was called and all within it.

    outermost   the unit under way. A call of it is a beginning even so: an interrupt leaves no hook that would say the end.
    observed    whose shards the pass under way has observed: one without gradients that is run again with them has not.
    """

    def __init__(self, gathers: list[FP8Gather]) -> None:
        self.gathers = gathers
        self.stateful = [g for g in gathers if g.state is not None]
        self.outermost: nn.Module | None = None
        self.observed: set[FP8Gather] = set()

    def watch(self, unit: FSDPModule) -> None:
        assert isinstance(unit, nn.Module)
        # Before FSDP2's own hook, which gathers; always after it, for a forward pass that failed is over too.
        unit.register_forward_pre_hook(self.begin, prepend=True)
        unit.register_forward_hook(self.end, always_call=True)

    def begin(self, unit: nn.Module, args: tuple) -> None:
        if torch._C._current_graph_task_id() != -1:  # checkpointed blocks run again in the backward pass, by the same scales
            self._observe(unit)
            return
        if self.outermost not in (None, unit):
            return
        self.outermost, self.observed = unit, set()
        recover(unit, args)
        within = set(unit.modules())
        gathers = [g for g in self.gathers if g.linear in within]
        for inner in within:
            # What a forward pass without a backward one left gathered is of weights as they were then.
            if isinstance(inner, FSDPModule):
                inner.reshard()
        if not all(isinstance(g.linear.weight, DTensor) for g in gathers):  # an interrupted forward pass keeps what it had gathered
            assert isinstance(unit, FSDPModule)
            _start_afresh(unit)
        for g in gathers:
            g.attach()
        compute_scales(g for g in gathers if g.precomputed)
        self._observe(unit)

    def end(self, unit: nn.Module, args: tuple, output: object) -> None:
        if unit is self.outermost:
            self.outermost = None

    def _observe(self, unit: nn.Module) -> None:
        """Weights within a unit, by delayed scaling's states, in a pass that takes gradients; what it has observed already is left."""
        if not self.stateful or not torch.is_grad_enabled():
            return
        within = set(unit.modules())
        for g in self.stateful:
            if g.linear in within and g.linear.training and g not in self.observed:
                self.observed.add(g)
                if g.shard.numel():
                    assert g.state is not None
                    g.state.see(g.shard.to(g.dtype))


def recover(unit: nn.Module, args: tuple) -> None:
    """Before a forward pass of a model's outermost unit: lets go of a backward pass that an error ended, after which FSDP2 reduces no gradient.

    Raises:   RuntimeError: a torch before 2.13, which cannot.
    """
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    if state._state_ctx.post_backward_final_callback_queued and torch._C._current_graph_task_id() == -1 and state._is_root:
        _start_afresh(unit)


def _start_afresh(unit: FSDPModule) -> None:
    assert isinstance(unit, nn.Module)
    if not hasattr(unit, "reset_iter_state"):
        raise RuntimeError("an iteration was left in its middle, which torch 2.13 lets go of. Build the model again, or use that.")
    unit.reset_iter_state()
    for module in unit.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for p in group.fsdp_params:
                    if hasattr(p, "_unsharded_param"):
                        p._unsharded_param.grad = None  # which a reset leaves, to be added to the next


def _one_cast(recipe: Recipe) -> CastSpec | None:
    """How a weight is cast, if one cast serves both its GEMMs."""
    return recipe.output.b if recipe.serves_both("weight") else None


def _check(g: FP8Gather, sharers: list[str]) -> None:
    """ValueError unless a linear's weight can be gathered in FP8."""
    weight = g.linear.weight
    if sharers:
        raise ValueError(
            f"{g.name}.weight is {sharers[0]} too, which would become FP8. Untie them, or keep {g.name} in high precision by filter_fqns."
        )
    if not isinstance(weight, DTensor):
        raise ValueError(f"{g.name}.weight is not sharded. Call fully_shard on the modules around it first.")
    if g.state is not None and g.state.group is None:
        raise ValueError(
            f"ranks share the states of {g.name}, which scales by its past. Give linear.convert their process group, amax_group."
        )


def _check_unit(name: str, unit: FSDPModule) -> None:
    """ValueError for what FSDP2 refuses of such weights in the middle of a step."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        if group and group.post_forward_mesh_info not in (None, group.mesh_info):
            raise ValueError(
                f"weights gathered in FP8 are not resharded to a smaller mesh after the forward pass (FSDP2 cannot); {name or 'the model'} "
                "has an integer reshard_after_forward. Use True or False."
            )


class OrderedReduceScatter:
    """What FSDP2's ``set_custom_reduce_scatter`` takes: all-to-all, then ``acc = RN32(acc + g_r)`` in ascending rank order.

    Where an average is asked for, the sum is divided by the number of ranks.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for FSDP2, of no particular values."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, op: ReduceOp, async_op: bool = False
    ) -> None:
        parts = torch.empty_like(input_tensor)
        distributed.all_to_all_single(parts, input_tensor, group=group)
        first, *others = parts.view(group.size(), -1).unbind()
        output_tensor.copy_(first)
        for part in others:
            output_tensor += part
        if op == ReduceOp.AVG:
            output_tensor /= group.size()


def sum_in_rank_order(model: nn.Module) -> None:
    """Have every fully_shard unit of a model sum its gradients in rank order."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(OrderedReduceScatter())  # type: ignore[arg-type]
