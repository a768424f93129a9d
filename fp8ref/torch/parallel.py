"""A model in FP8 on one device or a mesh of them: every step of it, in the one order that works (SEMANTICS P-12).

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "fsdp"))
    model = parallelize(model, "tensorwise", mesh=mesh, blocks=model.layers)
    optimizer = torch.optim.AdamW(model.parameters())       # after it: fully_shard replaces parameters

1 convert; 2 tensor parallelism; of each block's forward, 3 checkpointing and 4 torch.compile; 5 fully_shard each block, then the model;
6 FP8 gather; then the caller's optimizer, and loading. Scales need no step of their own: they are computed where a forward pass begins.
"""

import functools
import gc
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
from fp8ref.torch import gather, linear, reduction, tensor

Checkpointing = Literal["none", "selective", "full"]
Compile = Literal["none", "block", "model"]
AXES = ("data", "fsdp", "tensor")
_aten = torch.ops.aten
# What selective checkpointing keeps: the results of matrix products and attention, which cost most to make again.
KEPT = {
    _aten.mm.default,
    _aten._scaled_mm.default,
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
    amax_scope: Literal["local", "global"] = "local",
    sequence: bool = False,
    tensor_plan: Mapping[str, tensor.Style] | None = None,
    checkpointing: Checkpointing = "none",
    compile: Compile = "none",
    compile_backend: str | Callable = "inductor",
    gather_fp8: bool = True,
    precompute_scales: bool = True,
    fp8_from: Literal["compute", "master"] = "compute",
    ordered_reduction: bool = False,
    param_dtype: torch.dtype = torch.bfloat16,
    keep_dtype: Iterable[nn.Module] = (),
) -> nn.Module:
    """Convert, checkpoint, compile and shard a model, in place.

    mesh        of dims named data (copies of the weights), fsdp (parts of them) and tensor (parts of every linear), in this order, data
                only with fsdp; None: one device.
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
    Raises:     ValueError, before anything is changed: as ``linear.convert``; blocks that are not the model's; a mesh of other dims; an
                optimizer that was built before; delayed scaling of scope local; under compile='model', modules that are, or by keep_dtype
                would be, sharded by themselves. As ``gather.gather_in_fp8``, after the model was sharded.
    """
    recipe, blocks, keep_dtype = recipes.by_name(recipe), list(blocks), list(keep_dtype)
    within = set(model.modules()) - {model}
    if not within.issuperset([*blocks, *keep_dtype]):
        raise ValueError("blocks and keep_dtype are modules within the model. Name them by model.get_submodule.")
    batch, tensor_mesh = (None, None) if mesh is None else _parts(mesh)
    if compile == "model":
        _check_whole(model, keep_dtype if batch is not None else [])
    if mesh is not None:
        _check_optimizers(model)
    if batch is not None and ordered_reduction and batch.ndim == 2 and batch.size(0) > 2:
        raise ValueError(
            f"ordered_reduction adds over fsdp in rank order, and over at most 2 along data; got {batch.size(0)}. Make data 1 or 2."
        )
    if batch is not None and amax_scope == "local" and recipes.delayed_casts(recipe):
        raise ValueError(f"recipe {recipe.name!r} keeps one state for all ranks, of amaxes of all; got amax_scope='local'. Use 'global'.")
    group = _group(batch) if batch is not None and amax_scope == "global" and recipe.fp8 else None
    model = linear.convert(model, recipe, filter_fqns=filter_fqns, fp8_fqns=fp8_fqns, amax_group=group)
    if tensor_mesh is not None:
        tensor.parallelize(model, tensor_mesh, sequence=sequence, plan=tensor_plan)
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
    if ordered_reduction:
        reduction.order(model)
    if gather_fp8 and recipe.fp8 and recipe.serves_both("weight"):
        gather.gather_in_fp8(model, dtype=param_dtype if fp8_from == "compute" else torch.float32, precompute=precompute_scales)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(_check_eager, prepend=True)  # before all other hooks, of which dynamo leaves some out
    return model


def _check_whole(model: nn.Module, keep_dtype: Sequence[nn.Module]) -> None:
    """ValueError unless one graph can be the model's forward: within it, FSDP2's hooks would be left out, and weights not gathered."""
    nested = [name or "the model" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    nested += [name for name, module in model.named_modules() if any(module is kept for kept in keep_dtype)]
    if nested:
        raise ValueError(
            f"compile='model' is of a model that fully_shard shards as one; {nested[0]} is, or with keep_dtype would be, sharded by itself. "
            "Use compile='block', or traced.shard, whose gathers are in the graph."
        )


def _check_eager(unit: nn.Module, args: tuple) -> None:
    """ValueError where dynamo traces a unit's call: it would leave FSDP2's hooks out, and the weights as they are, in shards."""
    if torch.compiler.is_dynamo_compiling():
        raise ValueError("a fully_shard unit is called within a graph. Use parallelize(compile='block') or 'model', or traced.shard.")


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


def _check_optimizers(model: nn.Module) -> None:
    """ValueError if an optimizer holds parameters that fully_shard is about to replace: it would train what nothing uses."""
    parameters = {id(p): name for name, p in model.named_parameters()}
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):
            held = [parameters[id(p)] for group in found.param_groups for p in group["params"] if id(p) in parameters]
            if held:
                raise ValueError(
                    f"an optimizer is built after parallelize, which replaces parameters; a {type(found).__name__} already holds {held[0]}. "
                    "Build it afterwards."
                )


def _checkpointed(forward: Callable, how: Checkpointing) -> Callable:
    if how == "none":
        return forward

    def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)} if how == "selective" else {}
    return functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **options)
