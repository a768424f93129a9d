"""Tensor and sequence parallelism of a converted model, by DTensor (spec P-14 to P-17).

fp8ref's own linear moves what it needs by itself (``linear.cut``). Another linear takes one of
torch's parallel styles; torchao's, which gathers activations in FP8, if that means the same recipe.
Every other parameter becomes a replicated DTensor, so that an optimizer, a norm or fully_shard
finds parameters of one kind only.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

# defines all_gather_into_tensor of _c10d_functional
import torch.distributed._functional_collectives
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map_only
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
from torchao.float8.float8_tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

from fp8ref.recipe import Style
from fp8ref.selection import linears as linear_selection
from fp8ref.torch.distributed import tensor_parallel_checks
from fp8ref.torch.distributed.tensor_parallel_checks import check_linear
from fp8ref.torch.linear.cut import Cut, writable
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.tensors.local_part import local_part

__all__ = ["TensorPlan", "gathers_fp8", "parallelize"]

_ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_WHOLE, _TOKENS = Replicate(), Shard(1)  # placements of activations [B, T, ...]


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How tensor parallelism cuts a model, which holds it as its attribute ``tensor_plan``.

    styles     of linears, by pattern (spec R-3). Rowwise ones take what colwise ones give.
    blocks     classes whose colwise linears share one input, and how many further arguments they
               take, which are the same on all ranks.
    embedding  the class after which sequence parallelism cuts the tokens.
    norm       the class that runs on a rank's own tokens; ``last_norm`` names the one that gathers.
    """

    styles: Mapping[str, Style]
    blocks: Mapping[type[nn.Module], int]
    embedding: type[nn.Module]
    norm: type[nn.Module]
    last_norm: str


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    sequence: bool = False,
    plan: Mapping[str, Style] | None = None,
    amax_group: ProcessGroup | None = None,
) -> nn.Module:
    """Cut a model's linears over a mesh of one dim; replicate all else, from the first rank.

    sequence  sequence parallelism: cut the tokens between the linears too, from the embedding to
              the last norm. Only a model with a ``tensor_plan`` can.
    plan      the style of each linear, by pattern (spec R-3); by default that of the model's
              ``tensor_plan``.
    amax_group  the ranks of the mesh and of ``convert``'s amax_group together: they share the amax
                of
              what both cut. It is needed if ``convert`` was given one.
    Returns:  the model, changed in place. All ranks give the same tokens and get the same outputs.
    Order:    convert, parallelize, then fully_shard over another dim of the mesh.
    Raises:   ValueError, and nothing is changed: a mesh of several dims; a pattern that names no
              linear; a linear that DTensor cannot run; dims or heads that the ranks do not cut
              evenly; FP8 dims that are then not multiples of 16; parameters that are cut and
              shared, or sharded already; a block with one scale that is cut (P-5); amaxes that are
              shared along a batch, without amax_group; asynchronous tensor parallelism of fp8ref's
              own linear, or on CPUs. In the forward pass: a sequence that the ranks do not cut
              evenly.
    """
    ranks = tensor_parallel_checks.mesh_size(mesh)
    own: TensorPlan | None = getattr(model, "tensor_plan", None)
    _check_plan(model, own, plan, sequence)
    styles = _styles(model, plan if plan is not None else own.styles if own else {})
    tensor_parallel_checks.check_model(model, amax_group)
    tensor_parallel_checks.check_asynchronous(model, mesh)
    for name, style in styles.items():
        check_linear(name, model, style, ranks)
    if mesh.device_type == "cpu":
        gather_fp8_as_bytes()
    every = None if amax_group is None else amax_group.group_name
    between, planned = _TOKENS if sequence else _WHOLE, plan is not None
    _replace_parameters(model, mesh, styles, between, own, planned=planned, every=every)
    if own:
        model.register_forward_pre_hook(
            lambda _, args: (
                tensor_parallel_checks.check_length(args[0], ranks) if sequence else None
            )
        )
        # A tied lm_head is F.linear on an embedding: the model itself lays its output out.
        model.register_forward_hook(lambda _, args, out: _local(out))
    return model


def _check_plan(
    model: nn.Module, own: TensorPlan | None, plan: Mapping[str, Style] | None, sequence: bool
) -> None:
    """ValueError for a missing plan, one that cuts nothing, or options that need another."""
    if plan is None and own is None:
        raise ValueError(
            f"plan is required for a model without tensor_plan; got a {type(model).__name__}. Give "
            f"plan={{pattern: 'colwise' or 'rowwise'}}."
        )
    if sequence and (plan is not None or own is None):
        source = f"a {type(model).__name__}" + " with a plan" * (plan is not None)
        raise ValueError(
            f"sequence needs a model's own tensor_plan; got {source}. Leave sequence or plan out."
        )
    if plan is not None and not plan:
        raise ValueError(
            "a plan cuts at least one linear; got none. Name linears, or drop tensor parallelism."
        )


def _replace_parameters(
    model: nn.Module,
    mesh: DeviceMesh,
    styles: Mapping[str, Style],
    between: Placement,
    own: TensorPlan | None,
    *,
    planned: bool,
    every: str | None,
) -> None:
    """Cut the linears of styles; replicate all other parameters. between: placement of tokens
    between linears. own: the model's tensor_plan, whose blocks cast an input once unless planned by
    the user."""
    replicated: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if name in styles:
            _cut(module, mesh, styles[name], between, every)
        elif own and not planned and type(module) in own.blocks:
            columns = [
                child
                for child, _ in module.named_children()
                if styles.get(f"{name}.{child}") == "colwise"
            ]
            _share_input(module, mesh, between, columns, own.blocks[type(module)])
        elif any(True for _ in module.parameters(recurse=False)):
            _replicate(module, mesh, replicated)
            if isinstance(module, Linear):
                module.share(Cut(style=None, mesh=mesh, between=between), every)
            elif own:
                _lay_out_own(own, name, module, mesh, between)
            else:
                _lay_out(module, mesh, _WHOLE, _WHOLE)
            if isinstance(module, nn.Linear) and not isinstance(module, Linear):
                _stand_in_for_no_tokens(module)


def _styles(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    linears = [
        name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)
    ]
    styles: dict[str, Style] = {}
    for pattern, style in plan.items():
        if style not in get_args(Style):
            raise ValueError(
                f"plan styles are {' and '.join(get_args(Style))}; got {style!r} for {pattern!r}."
            )
        named = [name for name in linears if linear_selection.matches(pattern, name)]
        if not named:
            raise ValueError(
                f"plan pattern {pattern!r} matches none of: "
                f"{linear_selection.listed(linears) or 'none'}."
            )
        for name in named:
            if styles.setdefault(name, style) != style:
                raise ValueError(
                    f"a linear has one style; {name} has {styles[name]} and, by {pattern!r}, "
                    f"{style}. Make the patterns disjoint."
                )
    return styles


def gathers_fp8(module: nn.Module) -> bool:
    """Whether torchao's Float8 parallel styles compute what this linear's config means.

    The styles ignore the config: they cast input and grad_output tensorwise, the input to e4m3,
    without rounding scales to powers of two. They also sum a bias's gradient from codes. A linear
    that means anything else takes torch's plain styles, and casts by its config after the gather.
    """
    if not isinstance(module, Float8Linear) or module.bias is not None:
        return False
    config = module.config
    casts = [cast for name, cast in vars(config).items() if name.startswith("cast_config_")]
    return (
        config.cast_config_input.target_dtype == torch.float8_e4m3fn
        and not config.round_scales_to_power_of_2
        and all(
            c.scaling_type is ScalingType.DYNAMIC
            and c.scaling_granularity is ScalingGranularity.TENSORWISE
            for c in casts
        )
    )


def _cut(
    linear: nn.Module, mesh: DeviceMesh, style: Style, between: Placement, every: str | None
) -> None:
    """Cut one linear [N, K]: colwise cuts N, rowwise cuts K."""
    if isinstance(linear, Linear):
        cut = Cut(style=style, mesh=mesh, between=between)
        cut.replace_parameters(linear)
        linear.share(cut, every)
        return
    styles: tuple = ColwiseParallel, RowwiseParallel
    if gathers_fp8(linear):
        styles = Float8ColwiseParallel, Float8RowwiseParallel
    chosen = styles[0]() if style == "colwise" else styles[1](output_layouts=between)
    parallelize_module(linear, mesh, chosen)
    linear.register_forward_hook(lambda _, args, out: writable(out))
    _stand_in_for_no_tokens(linear, mesh.size() if style == "rowwise" and between.is_shard() else 1)


def _stand_in_for_no_tokens(linear: nn.Module, parts: int = 1) -> None:
    """Let a linear under DTensor take an input without tokens (L-9): zeros run instead. DTensor
    reshapes no empty tensor (2.13), and torchao's styles take its amax. Call it after the style has
    set its hooks; parts: pieces of the output's second dim."""
    shape: list[int] = []  # of the output of the pass that runs, without N, if it has no tokens

    def entering(_, args):
        shape.clear()  # of a pass that failed
        if not args or args[0].numel() or args[0].ndim < 1:
            return None
        x = local_part(args[0])
        shape.extend(size // parts if dim == 1 else size for dim, size in enumerate(x.shape[:-1]))
        # two dims of tokens, the second of which sequence parallelism cuts; kernels take 16 rows
        zeros = x.new_zeros(1, 16, x.shape[-1])
        return torch.cat([x.reshape(0, 16, x.shape[-1]), zeros]), *args[1:]

    def leaving(_, args, out):
        if not shape:
            return None
        empty = writable(out[:0].reshape(*shape, out.shape[-1]))
        shape.clear()
        return empty

    linear.register_forward_pre_hook(entering, prepend=True)
    linear.register_forward_hook(leaving)


class _PrepareFloat8Input(PrepareFloat8ModuleInput):
    """torchao's; an input without tokens, which has no amax, stays in high precision."""

    def _prepare_input_arg(self, input, mesh, input_layout, desired_layout):
        empty = input_layout is not None and input.numel() == 0
        style = PrepareModuleInput if empty else PrepareFloat8ModuleInput
        return style._prepare_input_arg(self, input, mesh, input_layout, desired_layout)


def _share_input(
    block: nn.Module, mesh: DeviceMesh, between: Placement, columns: Sequence[str], same: int
) -> None:
    """Cast and gather a block's x once for colwise linears. same: whole arguments on all ranks."""
    others = (None,) * same  # plain tensors, such as rotary tables: left as they are
    before, after = (between, *others), (_WHOLE, *others)
    # gemm_observer then takes x at the block, before it is cast.
    block.shares_input = True  # type: ignore[assignment]
    style: PrepareModuleInput
    if all(gathers_fp8(block.get_submodule(name)) for name in columns):
        style = _PrepareFloat8Input(
            input_layouts=before, desired_input_layouts=after, fwd_config_submodule_fqn=columns[0]
        )
    else:  # some linears take x in high precision: FP8 ones cast it after the gather
        style = PrepareModuleInput(input_layouts=before, desired_input_layouts=after)
    parallelize_module(block, mesh, style)


def _replicate(
    module: nn.Module, mesh: DeviceMesh, replicated: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Replicate a module's direct parameters as DTensors; shared ones stay shared."""
    for key, p in list(module.named_parameters(recurse=False)):
        if p not in replicated:
            replicated[p] = nn.Parameter(
                distribute_tensor(p.detach(), mesh, [_WHOLE]), requires_grad=p.requires_grad
            )
        module.register_parameter(key, replicated[p])


def _lay_out_own(
    plan: TensorPlan, name: str, module: nn.Module, mesh: DeviceMesh, between: Placement
) -> None:
    """Lay out a module by plan: the embedding splits the tokens, the last norm gathers them."""
    if isinstance(module, plan.embedding):
        _lay_out(module, mesh, _WHOLE, between)
    elif isinstance(module, plan.norm):
        last = name == plan.last_norm
        _lay_out(module, mesh, between, _WHOLE if last else between, local=not last)
        weight = module.get_parameter("weight")
        # each rank has the gradient of its own tokens: the whole one is their sum
        if weight.requires_grad:
            weight.register_hook(lambda g: g.redistribute(placements=[_WHOLE]))
    else:
        _lay_out(module, mesh, _WHOLE, _WHOLE)


def _lay_out(
    module: nn.Module, mesh: DeviceMesh, before: Placement, after: Placement, *, local: bool = True
) -> None:
    """Run a replicated module on DTensors: inputs ``before``, outputs ``after``."""

    def entering(_, args, kwargs):
        def lay(x: Tensor) -> DTensor:
            if isinstance(x, DTensor):
                return x
            return DTensor.from_local(x, mesh, [before], run_check=False)

        return tree_map_only(Tensor, lay, (args, kwargs))

    def leaving(_, args, out):
        out = tree_map_only(DTensor, lambda x: x.redistribute(placements=[after]), out)
        return tree_map_only(DTensor, _local, out) if local else out

    module.register_forward_pre_hook(entering, with_kwargs=True)
    module.register_forward_hook(leaving)


def _local(x: Tensor) -> Tensor:
    return writable(local_part(x)) if isinstance(x, DTensor) else x


@functools.cache
def gather_fp8_as_bytes() -> None:
    """Make torchao's all-gather of FP8 tensors move uint8 on a CPU, in this process. Idempotent.

    gloo knows no FP8 type ("Invalid scalar type"). NCCL does, and GPUs are left alone.
    """
    # torchao's handler is replaced, not the operator. A Python kernel of the operator would enter
    # gloo holding the interpreter lock; gloo's threads wait for that lock to free tensors: a
    # deadlock.
    theirs = FLOAT8_OPS_TABLE[_ALL_GATHER]

    def gather(op, args, kwargs=None):
        def as_bytes(codes: Tensor, *rest, **named) -> Tensor:
            # Viewing the result is safe before it is waited for: wait_tensor goes by storage.
            return op(codes.view(torch.uint8), *rest, **named).view(codes.dtype)

        return theirs(as_bytes if args[0].device.type == "cpu" else op, args, kwargs or {})

    FLOAT8_OPS_TABLE[_ALL_GATHER] = gather
