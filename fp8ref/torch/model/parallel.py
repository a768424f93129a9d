"""Convert, cut, compile and shard a model, in the one order that works (spec P-12).

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "fsdp"))
    model = parallelize(
        model,
        "delayed",
        mesh=mesh,
        blocks=model.layers,
        parallelism=Parallelism(amax_scope="global", compile="block"),
    )
    optimizer = torch.optim.AdamW(model.parameters())  # afterwards: fully_shard replaces parameters

1 convert; 2 tensor or expert parallelism; 3 checkpoint and 4 compile each block's forward; 5
fully_shard each block, then the model; 6 FP8 gather. The caller then builds the optimizer and loads
weights. Scales of amaxes are computed where a forward pass begins; delayed scaling needs
``delayed.update`` once a step.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fp8ref import recipe as recipes
from fp8ref.recipe import Recipe
from fp8ref.selection.rules import Rule
from fp8ref.torch.distributed import fsdp, gradient_reduction, tensor_parallel
from fp8ref.torch.experts import layer as grouped_linear
from fp8ref.torch.experts import parallel as expert_parallel
from fp8ref.torch.model import checkpointing as checkpoints
from fp8ref.torch.model import convert, parallel_checks
from fp8ref.torch.model.parallel_checks import check_copies
from fp8ref.torch.model.parallelism import AXES, Parallelism, Ranks, Scope, same_experts

__all__ = ["Parallelism", "amax_group", "check_copies", "parallelize", "share_groups"]

DEFAULTS = Parallelism()
"""Each rank's own amaxes; no checkpointing, no torch.compile; weights gathered in FP8."""


def parallelize(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    mesh: DeviceMesh | None = None,
    blocks: Iterable[nn.Module] = (),
    filter_fqns: Sequence[str] = (),
    fp8_fqns: Sequence[str] = (),
    rules: Sequence[Rule] = (),
    parallelism: Parallelism = DEFAULTS,
) -> nn.Module:
    """Convert, checkpoint, compile and shard a model, in place.

    mesh        of dims named data (copies of the weights), fsdp (shards of them), expert (experts
                of their own, and shards of all other weights) and tensor (parts of every linear),
                in this order, data and expert only with fsdp. None: one device. Ranks of torch's
                context_parallel are of fsdp (P-26).
    model       may be on the meta device: give it memory (``to_empty``) and load its weights
                afterwards.
    blocks      its modules that are checkpointed, compiled and gathered one at a time.
    filter_fqns, fp8_fqns, rules
                as ``convert.convert``; rules on one device alone.
    parallelism amax scope, tensor parallelism, checkpointing, torch.compile and FSDP2's options.
    Ranks       start from the same weights, as FSDP2 requires; along data it is checked.
    Raises:     ValueError, before anything is changed: as ``convert.convert`` and
                ``parallel_checks.check``.
    """
    recipe, blocks = recipes.by_name(recipe), list(blocks)
    ranks = parallel_checks.check(model, recipe, mesh, blocks, rules, parallelism)
    # 1 convert
    group = amax_group(mesh, parallelism.amax_scope) if recipe.fp8 else None
    model = convert.convert(
        model,
        recipe,
        filter_fqns=filter_fqns,
        fp8_fqns=fp8_fqns,
        rules=rules,
        amax_group=group,
        kernels=parallelism.kernels,
    )
    gathers_fp8 = (
        parallelism.gather_fp8 and recipe.fp8 and recipe.serves_both("weight") and bool(ranks.batch)
    )
    try:
        if gathers_fp8:
            fsdp.check_weights(model)
        # 2 expert parallelism, and tensor parallelism, of whole linears
        experts = _cut(model, ranks, group, parallelism)
    except ValueError:
        if recipe.fp8:  # under 'bf16' nothing was converted: FP8 linears are the caller's
            convert.deconvert(model)
        raise
    # 3 checkpointing, and 4 torch.compile around it
    _wrap_forwards(model, blocks, parallelism)
    if ranks.batch is not None:
        # 5 fully_shard, around compiled forwards, and 6 FP8 gather, of units that exist
        _shard(model, [] if parallelism.compile == "model" else blocks, experts, ranks, parallelism)
        _gather(model, gathers_fp8, parallelism)
    return model


def _cut(
    model: nn.Module, ranks: Ranks, group: ProcessGroup | None, parallelism: Parallelism
) -> list[nn.Module]:
    """Expert and tensor parallelism; returns experts. group: ranks sharing a batch's amaxes."""
    experts: list[nn.Module] = []
    if ranks.experts is not None:
        assert ranks.whole is not None
        experts = expert_parallel.cut(model, ranks.experts)
        share_groups(model, ranks.whole)
    if ranks.tensor is not None:
        assert ranks.whole is not None
        tensor_parallel.parallelize(
            model,
            ranks.tensor,
            sequence=parallelism.sequence,
            plan=parallelism.tensor_plan,
            amax_group=ranks.whole._flatten("ranks").get_group() if group is not None else None,
        )
    return experts


def _wrap_forwards(model: nn.Module, blocks: Sequence[nn.Module], parallelism: Parallelism) -> None:
    """Checkpoint and compile forward methods: FSDP2's hooks, unknown to dynamo, stay outside."""
    for block in blocks:
        block.forward = checkpoints.checkpointed(
            block.forward, parallelism.checkpointing, parallelism.keep
        )
    compiled = {"none": (), "block": blocks, "model": (model,)}[parallelism.compile]
    mode = "reduce-overhead" if parallelism.cuda_graphs else None
    for module in compiled:
        module.forward = torch.compile(
            module.forward, fullgraph=True, backend=parallelism.compile_backend, mode=mode
        )
    if parallelism.cuda_graphs:
        model.register_forward_pre_hook(_begin_replay, prepend=True)


def _begin_replay(*_: object) -> None:
    """Forward pre-hook: this pass may write over the results of the last one."""
    torch.compiler.cudagraph_mark_step_begin()


def _shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    ranks: Ranks,
    parallelism: Parallelism,
) -> None:
    """fully_shard experts, modules of keep_dtype, blocks, then the model."""
    sum_dtype = parallelism.sum_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=parallelism.param_dtype, reduce_dtype=sum_dtype, cast_forward_inputs=False
    )
    as_is = MixedPrecisionPolicy(reduce_dtype=sum_dtype, cast_forward_inputs=False)
    if experts:
        assert ranks.whole is not None
        _shard_experts(experts, ranks.whole, policy)
    for module in parallelism.keep_dtype:
        # A tied embedding table is used again after its own forward, so it stays gathered.
        fully_shard(module, mesh=ranks.batch, mp_policy=as_is, reshard_after_forward=False)
    for module in (*blocks, model):
        # Reshard the model too: weights gathered in an evaluation would be of that time.
        fully_shard(module, mesh=ranks.batch, mp_policy=policy, reshard_after_forward=True)
    if parallelism.ordered_reduction:
        fsdp.sum_in_rank_order(model)
    if parallelism.reduces_fp8:
        gradient_reduction.reduce_in_fp8(model)


def _shard_experts(
    experts: Sequence[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> None:
    """fully_shard experts over ranks with the same ones. Their gradients have all ranks' rows, so
    the mean over a batch divides by all ranks."""
    same, ranks = same_experts(mesh), mesh.size()
    if "tensor" in (mesh.mesh_dim_names or ()):
        ranks //= mesh["tensor"].size()
    for module in experts:
        unit = fully_shard(module, mesh=same, mp_policy=policy, reshard_after_forward=True)
        unit.set_gradient_divide_factor(float(ranks))
        # gloo has no sum that divides first; of one shard FSDP2 (torch 2.13) would divide twice.
        unit.set_force_sum_reduction_for_comms(same.size(-1) > 1)


def _gather(model: nn.Module, fp8: bool, parallelism: Parallelism) -> None:
    """Gather the weights of linears in FP8, if asked for."""
    if fp8:
        dtype = parallelism.param_dtype if parallelism.fp8_from == "compute" else None
        fsdp.gather_in_fp8(model, dtype=dtype, precompute=parallelism.precompute_scales)
    else:
        # gather_in_fp8 recovers by itself.
        model.register_forward_pre_hook(fsdp.recover, prepend=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Before all other hooks, some of which dynamo leaves out.
            module.register_forward_pre_hook(parallel_checks.refuse_tracing, prepend=True)


def share_groups(model: nn.Module, mesh: DeviceMesh) -> None:
    """Have grouped linears share amaxes of their groups' rows with the ranks that have the same
    experts (X-13): states of delayed scaling they share with all."""
    same = same_experts(mesh)
    group = same.get_group() if same.ndim == 1 else same._flatten("same_experts").get_group()
    for linear in grouped_linear.grouped_linears(model).values():
        if linear.shared is not None:
            linear.shared = group.group_name if same.size() > 1 else None


def amax_group(mesh: DeviceMesh | None, amax_scope: Scope) -> ProcessGroup | None:
    """The ranks that share amaxes: under global all that share a batch, of data, fsdp and expert
    together; None for each its own.

    mesh      as of ``parallelize``.
    """
    batch = None if amax_scope == "local" else Ranks.of(mesh).batch
    if batch is None:
        return None
    if batch.ndim == 1:
        return batch.get_group()
    assert mesh is not None
    shared = tuple(axis for axis in AXES[:-1] if axis in (mesh.mesh_dim_names or ()))
    return mesh[shared]._flatten("batch").get_group()
