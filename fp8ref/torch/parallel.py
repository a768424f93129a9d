"""A model in FP8 on one device or a mesh of them: every step of it, in the one order that works (SEMANTICS P-12).

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "fsdp"))
    model = parallelize(model, "tensorwise", mesh=mesh, blocks=model.layers)
    optimizer = torch.optim.AdamW(model.parameters())       # after it: fully_shard replaces parameters

1 convert; 2 tensor parallelism; of each block's forward, 3 checkpointing and 4 torch.compile; 5 fully_shard each block, then the model;
6 FP8 gather; then the caller's optimizer, and loading. Scales need no step of their own: they are computed where a forward pass begins.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8ref import recipe as recipes
from fp8ref.recipe import Recipe
from fp8ref.torch import block_gemm, convert, fsdp, hardware, parallel_checks, reduction, tensor_parallel

Checkpointing = Literal["none", "selective", "full"]
Compile = Literal["none", "block", "model"]
Scope = Literal["local", "global"]
Source = Literal["compute", "master"]
AXES = ("data", "fsdp", "tensor")
_aten = torch.ops.aten
# What selective checkpointing keeps: the results of matrix products and attention, which cost most to make again.
KEPT = {
    _aten.mm.default,
    _aten._scaled_mm.default,
    block_gemm.OPERATOR,
    hardware.OPERATOR,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def parallelize(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    mesh: DeviceMesh | None = None,
    blocks: Iterable[nn.Module] = (),
    filter_fqns: Sequence[str] = (),
    fp8_fqns: Sequence[str] = (),
    amax_scope: Scope = "local",
    sequence: bool = False,
    tensor_plan: Mapping[str, tensor_parallel.Style] | None = None,
    checkpointing: Checkpointing = "none",
    compile: Compile = "none",
    compile_backend: str | Callable = "inductor",
    gather_fp8: bool = True,
    precompute_scales: bool = True,
    fp8_from: Source = "compute",
    ordered_reduction: bool = False,
    param_dtype: torch.dtype = torch.bfloat16,
    keep_dtype: Iterable[nn.Module] = (),
) -> nn.Module:
    """Convert, checkpoint, compile and shard a model, in place.

    mesh        of dims named data (copies of the weights), fsdp (parts of them) and tensor (parts of every linear), in this order, data
                only with fsdp; None: one device.
    model       may lie on the meta device: give it memory (``to_empty``) and load its weights afterwards.
    blocks      the modules of it that are checkpointed, compiled and gathered one at a time.
    filter_fqns, fp8_fqns
                as ``linear.convert``.
    amax_scope  whose amaxes scale input and grad_output: each rank's own, torchao's meaning, or all ranks' (P-2). Delayed scaling keeps one
                state for all ranks, so takes ``global``.
    sequence, tensor_plan
                as ``tensor.parallelize``.
    checkpointing
                ``full`` keeps a block's inputs and runs it again in the backward pass; ``selective`` keeps the results of KEPT too.
    compile, compile_backend
                by torch.compile, without graph breaks: each ``block``'s forward, or the whole ``model``'s, which is then gathered in one
                piece: FSDP2 gathers in hooks, which no graph contains (``traced`` gathers in the graph).
    gather_fp8, precompute_scales, fp8_from
                weights in FP8, as ``gather.gather_in_fp8``; fp8_from: from shards rounded to param_dtype, or from the masters.
    ordered_reduction
                gradients are summed in rank order, whatever the backend does (P-13).
    param_dtype what parameters are rounded to as they are gathered; gradients are reduced in float32.
    keep_dtype  modules of it, such as an embedding table, whose parameters are used as they are.
    Ranks       start from the same weights, as FSDP2 asks; along data that is looked at.
    Raises:     ValueError, before anything is changed: as ``linear.convert`` and ``tensor.parallelize``; an option of another value; blocks
                that are not the model's, or named twice; a mesh of other dims; a model that is compiled or sharded already; an optimizer
                that was built before; delayed scaling of scope local; under compile='model', modules that are, or by keep_dtype would be,
                sharded by themselves. As ``gather.gather_in_fp8``, and of copies with other weights, after the model was sharded.
    """
    recipe, blocks, keep_dtype = recipes.by_name(recipe), list(blocks), list(keep_dtype)
    parallel_checks.options(
        amax_scope=(amax_scope, Scope),
        checkpointing=(checkpointing, Checkpointing),
        compile=(compile, Compile),
        fp8_from=(fp8_from, Source),
    )
    parallel_checks.modules(model, blocks, keep_dtype)
    if not blocks and (checkpointing != "none" or compile == "block"):
        raise ValueError(
            f"checkpointing and compile='block' are of blocks; got {checkpointing!r} and {compile!r} without any. Name blocks."
        )
    batch, tensor_mesh = (None, None) if mesh is None else _parts(mesh)
    if compile == "model":
        parallel_checks.whole(model, keep_dtype if batch is not None else [])
    convert.check_model(model, "Parallelise a model first, then {} it; and once")
    if (sequence or tensor_plan is not None) and (mesh is None or "tensor" not in (mesh.mesh_dim_names or ())):
        raise ValueError(
            "sequence and tensor_plan cut linears over a mesh with a dim named tensor; there is none. Add it, or leave them out."
        )
    if mesh is not None:
        parallel_checks.check_none_holds(model)
    if batch is not None and ordered_reduction and batch.ndim == 2 and batch.size(0) > 2:
        raise ValueError(
            f"ordered_reduction adds over fsdp in rank order, and over at most 2 along data; got {batch.size(0)}. Make data 1 or 2."
        )
    if batch is not None and amax_scope == "local" and recipes.delayed_casts(recipe):
        raise ValueError(f"recipe {recipe.name!r} keeps one state for all ranks, of amaxes of all; got amax_scope='local'. Use 'global'.")
    group = _group(batch) if batch is not None and amax_scope == "global" and recipe.fp8 else None
    model = convert.convert(model, recipe, filter_fqns=filter_fqns, fp8_fqns=fp8_fqns, amax_group=group)
    if tensor_mesh is not None:
        try:
            tensor_parallel.parallelize(model, tensor_mesh, sequence=sequence, plan=tensor_plan)
        except ValueError:
            if recipe.fp8:  # otherwise what is FP8 was so before
                convert.deconvert(model)
            raise
    for block in blocks:
        forward = _checkpointed(block.forward, checkpointing)
        if compile == "block":
            forward = torch.compile(forward, fullgraph=True, backend=compile_backend)
        block.forward = forward  # within FSDP2's hooks, which dynamo would skip
    if compile == "model":
        model.forward = torch.compile(model.forward, fullgraph=True, backend=compile_backend)
    if batch is None:
        return model
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    as_is = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in keep_dtype:
        fully_shard(module, mesh=batch, mp_policy=as_is, reshard_after_forward=False)  # a tied table is used again after its own forward
    for module in (model,) if compile == "model" else (*blocks, model):
        # The model too: what stays gathered after an evaluation would be the weights as they were then.
        fully_shard(module, mesh=batch, mp_policy=policy, reshard_after_forward=True)
    if batch.ndim == 2:
        parallel_checks.copies(model, batch)
    if ordered_reduction:
        reduction.order(model)
    if gather_fp8 and recipe.fp8 and recipe.serves_both("weight"):
        fsdp.gather_in_fp8(model, dtype=param_dtype if fp8_from == "compute" else None, precompute=precompute_scales)
    else:
        model.register_forward_pre_hook(fsdp.recover, prepend=True)  # as an FP8 gather does where a forward pass begins
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(parallel_checks.eager, prepend=True)  # before all other hooks, of which dynamo leaves some out
    return model


def _parts(mesh: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Of a mesh, the ranks that share a batch and those that share a linear; None where it is one rank."""
    names = mesh.mesh_dim_names or ()
    if not names or names != tuple(axis for axis in AXES if axis in names) or ("data" in names and "fsdp" not in names):
        raise ValueError(
            f"mesh has dims named {', '.join(AXES)}, in this order, data only with fsdp; got {names}. Name them in init_device_mesh."
        )
    shared = tuple(axis for axis in ("data", "fsdp") if axis in names)
    batch = mesh[shared] if shared else None
    by_tensor = mesh["tensor"] if "tensor" in names else None
    return (batch if batch is not None and batch.size() > 1 else None), (
        by_tensor if by_tensor is not None and by_tensor.size() > 1 else None
    )


def _group(batch: DeviceMesh) -> ProcessGroup:
    return batch.get_group() if batch.ndim == 1 else batch._flatten("batch").get_group()


def _checkpointed(forward: Callable, how: Checkpointing) -> Callable:
    if how == "none":
        return forward

    def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)} if how == "selective" else {}
    return functools.partial(checkpoint, forward, use_reentrant=False, **options)
