"""Convert, cut, compile and shard a model, in the one order that works (spec P-12).

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "fsdp"))
    model = parallelize(model, "tensorwise", mesh=mesh, blocks=model.layers)
    optimizer = torch.optim.AdamW(model.parameters())  # afterwards: fully_shard replaces parameters

1 convert; 2 tensor or expert parallelism; 3 checkpoint and 4 compile each block's forward; 5
fully_shard each block, then the model; 6 FP8 gather. The caller then builds the optimizer and loads
weights. Scales of amaxes are computed where a forward pass begins; delayed scaling needs
``delayed.update`` once a step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fp8ref import recipe as recipes
from fp8ref.recipe import Recipe, Style
from fp8ref.selection.rules import Rule
from fp8ref.torch.distributed import fsdp, gradient_reduction, tensor_parallel
from fp8ref.torch.experts import layer as grouped_linear
from fp8ref.torch.experts import parallel as expert_parallel
from fp8ref.torch.linear.model_checks import check_model, check_no_optimizer
from fp8ref.torch.model import checkpointing as checkpoints
from fp8ref.torch.model import convert, parallel_checks
from fp8ref.torch.model.checkpointing import Checkpointing, Operation
from fp8ref.torch.model.parallel_checks import check_copies

Compile = Literal["none", "block", "model"]
"""What torch.compile takes: nothing, each block's forward, or the whole model's."""

Scope = Literal["local", "global"]
"""Whose amaxes scale input and grad_output: each rank's own, or those of all ranks (P-2)."""

Source = Literal["compute", "master"]
"""What a gathered weight is cast from: its shard rounded to param_dtype, or its float32 master."""

AXES = ("data", "fsdp", "expert", "tensor")
"""The dims that a mesh may have, in order."""

CONTEXT = ("context", "cp", "context_parallel")
"""Names of a dim whose ranks share sequences: ``parallelize`` takes these ranks as fsdp."""


def parallelize(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    mesh: DeviceMesh | None = None,
    blocks: Iterable[nn.Module] = (),
    filter_fqns: Sequence[str] = (),
    fp8_fqns: Sequence[str] = (),
    rules: Sequence[Rule] = (),
    amax_scope: Scope = "local",
    sequence: bool = False,
    tensor_plan: Mapping[str, Style] | None = None,
    checkpointing: Checkpointing = "none",
    keep: Iterable[Operation | Callable] = checkpoints.EVERY,
    compile: Compile = "none",
    compile_backend: str | Callable = "inductor",
    gather_fp8: bool = True,
    precompute_scales: bool = True,
    fp8_from: Source = "compute",
    ordered_reduction: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype = torch.bfloat16,
    keep_dtype: Iterable[nn.Module] = (),
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
    amax_scope  whose amaxes scale input and grad_output: each rank's own, as in torchao (local), or
                all ranks' (global, P-2; the trainer's default). Under global every converted linear
                is fp8ref's own ``linear.Linear``. Delayed scaling keeps one state for all ranks,
                and needs global.
    sequence, tensor_plan
                as sequence and plan of ``tensor_parallel.parallelize``.
    checkpointing, keep
                ``full`` keeps a block's inputs and recomputes the rest in the backward pass;
                ``selective`` also keeps the results of ``keep``: names of
                ``checkpointing.OPERATORS``, or operators of torch.
    compile, compile_backend
                torch.compile of each ``block``'s forward, or of the whole ``model``'s, without
                graph breaks. The whole model is gathered in one piece: FSDP2 gathers in hooks,
                which no graph contains (``compiled_fsdp`` gathers in the graph).
    gather_fp8, precompute_scales, fp8_from
                gather weights in FP8, as ``fsdp.gather_in_fp8``: from shards rounded to param_dtype
                (compute), or from the masters (master).
    ordered_reduction
                sum gradients in rank order, on any backend (P-13).
    reduce_dtype
                gradients are summed over ranks in it: float32 or bfloat16. float8_e4m3fn: weights
                of linears are exchanged in FP8 and summed in float32 (P-25), all else in float32.
    param_dtype parameters are rounded to it as they are gathered; gradients are made in it.
    keep_dtype  modules, such as an embedding table, whose parameters are not rounded.
    Ranks       start from the same weights, as FSDP2 requires; along data it is checked.
    Raises:     ValueError, before anything is changed: as ``convert.convert`` and
                ``tensor_parallel.parallelize``; an unknown value of an option; blocks that are not
                the model's, or named twice; a mesh of other dims; a model that is compiled or
                sharded already; an optimizer that was built before; delayed scaling of scope local;
                a cache of keys and values (transformers' use_cache) under checkpointing;
                full checkpointing and compile of blocks that tensor cuts; under compile='model',
                modules that are, or by keep_dtype would be, sharded by themselves; modules that
                share a parameter and would be sharded apart, and what else fully_shard refuses; as
                ``fsdp.gather_in_fp8``; copies along data with different weights.
    """
    recipe, blocks, keep_dtype = recipes.by_name(recipe), list(blocks), list(keep_dtype)
    if reduce_dtype not in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        raise ValueError(
            "reduce_dtype is torch.float32, torch.bfloat16 or torch.float8_e4m3fn; got "
            f"{reduce_dtype}."
        )
    parallel_checks.check_values(
        amax_scope=(amax_scope, Scope),
        checkpointing=(checkpointing, Checkpointing),
        compile=(compile, Compile),
        fp8_from=(fp8_from, Source),
    )
    parallel_checks.check_modules(model, blocks, keep_dtype)
    parallel_checks.check_blocks(blocks, checkpointing, compile)
    keep = checkpoints.check(checkpointing, keep)
    if checkpointing != "none":
        parallel_checks.check_no_cache(model)
    batch, by_tensor = (None, None) if mesh is None else _parts(mesh)
    if compile == "model":
        parallel_checks.check_one_graph(model, keep_dtype if batch is not None else [])
    check_model(model, "Parallelize a model once, and before you {} it")
    if sequence or tensor_plan is not None:
        parallel_checks.check_tensor_dim(mesh)
    if by_tensor is not None and compile != "none" and checkpointing == "full":
        # AOTAutograd of torch 2.13 keeps the DeviceMesh among saved tensors: an AssertionError
        raise ValueError(
            "torch cannot compile blocks that tensor parallelism cuts and that are recomputed "
            f"whole; got checkpointing 'full' and compile {compile!r}. Use checkpointing "
            "'selective' or 'none'."
        )
    if mesh is not None:
        if rules:
            raise ValueError(
                f"rules are for one device; got a mesh of {mesh.size()}. Leave them out, or "
                "give mesh None."
            )
        check_no_optimizer(model)
    apart = _apart(mesh)
    if batch is not None:
        parallel_checks.check_batch(recipe, batch, amax_scope, ordered_reduction)
    if reduce_dtype == torch.float8_e4m3fn:
        parallel_checks.check_fp8_gradients(batch)
    units = [] if compile == "model" else blocks
    if batch is not None:
        parallel_checks.check_units(model, [*keep_dtype, *units])
        if batch.ndim == 2:
            check_copies(model, batch)
    if apart is not None:
        expert_parallel.check(model, apart)

    # 1 convert
    group = amax_group(mesh, amax_scope) if recipe.fp8 else None
    model = convert.convert(
        model, recipe, filter_fqns=filter_fqns, fp8_fqns=fp8_fqns, rules=rules, amax_group=group
    )
    gathers_fp8 = gather_fp8 and recipe.fp8 and recipe.serves_both("weight") and batch is not None
    if gathers_fp8:
        _check_weights(model)
    # 2 expert parallelism, and tensor parallelism, of whole linears
    experts: list[nn.Module] = []
    if apart is not None:
        assert mesh is not None
        experts = expert_parallel.cut(model, apart)
        share_groups(model, mesh, amax_scope)
    if by_tensor is not None:
        assert mesh is not None
        every = mesh._flatten("ranks").get_group() if group is not None else None
        _cut_linears(model, recipe, by_tensor, sequence, tensor_plan, every)
    # 3 checkpointing, and 4 torch.compile around it
    for block in blocks:
        block.forward = checkpoints.checkpointed(block.forward, checkpointing, keep)
    _compile_forwards(model, blocks, compile, compile_backend)
    if batch is None:
        return model
    # 5 fully_shard, around compiled forwards
    summed = torch.float32 if reduce_dtype == torch.float8_e4m3fn else reduce_dtype
    if experts:
        assert mesh is not None
        _shard_experts(experts, mesh, param_dtype, summed)
    _shard(model, units, keep_dtype, batch, param_dtype, summed)
    if ordered_reduction:
        fsdp.sum_in_rank_order(model)
    if reduce_dtype == torch.float8_e4m3fn:
        gradient_reduction.reduce_in_fp8(model)
    # 6 FP8 gather, of units that exist
    if gathers_fp8:
        fsdp.gather_in_fp8(
            model,
            dtype=param_dtype if fp8_from == "compute" else None,
            precompute=precompute_scales,
        )
    else:
        # gather_in_fp8 recovers by itself.
        model.register_forward_pre_hook(fsdp.recover, prepend=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Before all other hooks, some of which dynamo leaves out.
            module.register_forward_pre_hook(parallel_checks.refuse_tracing, prepend=True)
    return model


def _check_weights(model: nn.Module) -> None:
    """As ``fsdp.check_weights``, of a model that was just converted.

    If it is refused, the conversion is undone.
    """
    try:
        fsdp.check_weights(model)
    except ValueError:
        convert.deconvert(model)
        raise


def _cut_linears(
    model: nn.Module,
    recipe: Recipe,
    mesh: DeviceMesh,
    sequence: bool,
    plan: Mapping[str, Style] | None,
    amax_group: ProcessGroup | None,
) -> None:
    """Tensor parallelism of a converted model. If it is refused, the conversion is undone."""
    try:
        tensor_parallel.parallelize(
            model, mesh, sequence=sequence, plan=plan, amax_group=amax_group
        )
    except ValueError:
        if recipe.fp8:  # under 'bf16' nothing was converted: FP8 linears, if any, are the caller's
            convert.deconvert(model)
        raise


def _compile_forwards(
    model: nn.Module, blocks: Sequence[nn.Module], compile: Compile, backend: str | Callable
) -> None:
    """Compile forward methods, not modules: FSDP2's hooks, which dynamo skips, stay around them."""
    for module in {"none": (), "block": blocks, "model": (model,)}[compile]:
        module.forward = torch.compile(module.forward, fullgraph=True, backend=backend)


def _shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    keep_dtype: Sequence[nn.Module],
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> None:
    """fully_shard modules of keep_dtype, then blocks, then the model."""
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    as_is = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for module in keep_dtype:
        # A tied embedding table is used again after its own forward, so it stays gathered.
        fully_shard(module, mesh=mesh, mp_policy=as_is, reshard_after_forward=False)
    for module in (*blocks, model):
        # Reshard the model too: weights that an evaluation left gathered would be those of that
        # time.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def _parts(mesh: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return two meshes: the ranks that split the batch, and those that split each linear; None for
    a single rank.

    A single copy has no dim data: FSDP2 would all-reduce each block's gradients within one rank, by
    a mean that it says NCCL may get wrong there.
    """
    names = mesh.mesh_dim_names or ()
    if context := [name for name in names if name in CONTEXT]:
        raise ValueError(
            "ranks that share sequences share the batch, and are of fsdp; got a dim named "
            f"{context[0]}. Flatten it and those of the batch into one: mesh._flatten('fsdp'), "
            "and run steps inside torch's context_parallel (P-26)."
        )
    ordered = tuple(axis for axis in AXES if axis in names)
    if not names or names != ordered or ({"data", "expert"} & set(names) and "fsdp" not in names):
        raise ValueError(
            f"mesh has dims named {', '.join(AXES)}, in this order, data and expert only with "
            f"fsdp; got {names}. Name them in init_device_mesh."
        )
    shared = _shared(mesh)
    batch = mesh[shared] if shared else None
    if "expert" in names:  # weights other than experts' are sharded over both
        shards = mesh[("fsdp", "expert")]._flatten("shards")
        batch = DeviceMesh._concatenate([mesh["data"], shards]) if "data" in shared else shards
    by_tensor = mesh["tensor"] if "tensor" in names else None
    return (batch if batch is not None and batch.size() > 1 else None), (
        by_tensor if by_tensor is not None and by_tensor.size() > 1 else None
    )


def _shared(mesh: DeviceMesh) -> tuple[str, ...]:
    """The dims of a mesh over which FSDP2 shards and copies: fsdp, and data where there are
    copies.
    """
    names = mesh.mesh_dim_names or ()
    return tuple(
        axis
        for axis in ("data", "fsdp")
        if axis in names and (axis == "fsdp" or mesh[axis].size() > 1)
    )


def _apart(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The ranks that have different experts; None of a mesh without such."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return (
        mesh["expert"]
        if mesh is not None and "expert" in names and mesh["expert"].size() > 1
        else None
    )


def _same_experts(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that have this rank's experts, of data and fsdp."""
    return mesh[_shared(mesh)]


def share_groups(model: nn.Module, mesh: DeviceMesh, amax_scope: Scope) -> None:
    """Have grouped linears share amaxes of their groups' rows with the ranks that have the same
    experts (X-13): states of delayed scaling they share with all."""
    same = _same_experts(mesh)
    group = same.get_group() if same.ndim == 1 else same._flatten("same_experts").get_group()
    for linear in grouped_linear.grouped_linears(model).values():
        if linear.shared is not None:
            linear.shared = group.group_name if same.size() > 1 else None


def _shard_experts(
    experts: Sequence[nn.Module],
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> None:
    """fully_shard experts over the ranks that have the same ones. Their gradients hold rows of all
    ranks, so the mean over a batch is their sum over all ranks' number."""
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    same, ranks = (
        _same_experts(mesh),
        mesh.size() // mesh["tensor"].size()
        if "tensor" in (mesh.mesh_dim_names or ())
        else mesh.size(),
    )
    for module in experts:
        unit = fully_shard(module, mesh=same, mp_policy=policy, reshard_after_forward=True)
        unit.set_gradient_divide_factor(float(ranks))
        # gloo has no sum that divides first; of one shard FSDP2 (torch 2.13) divides before any
        # sum, and would divide again.
        unit.set_force_sum_reduction_for_comms(same.size(-1) > 1)


def amax_group(mesh: DeviceMesh | None, amax_scope: Scope) -> ProcessGroup | None:
    """The ranks that share amaxes: under global all that share a batch, of data, fsdp and expert
    together; None for each its own.

    mesh      as of ``parallelize``.
    """
    batch = None if mesh is None or amax_scope == "local" else _parts(mesh)[0]
    if batch is None:
        return None
    if batch.ndim == 1:
        return batch.get_group()
    assert mesh is not None
    return (
        mesh[tuple(axis for axis in AXES[:-1] if axis in (mesh.mesh_dim_names or ()))]
        ._flatten("batch")
        .get_group()
    )
