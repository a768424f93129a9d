"""Tensor and sequence parallelism of a converted model, by DTensor (SEMANTICS P-14 to P-17).

Linears take torch's styles, or torchao's where those mean the recipe and then gather in FP8. Every other parameter becomes a replicated DTensor, so
that what runs over all parameters (an optimizer, a norm, fully_shard) finds one kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

from fp8ref.recipe import matches
from fp8ref.torch import gloo, tensor_checks

Style = Literal["colwise", "rowwise"]
_WHOLE, _TOKENS = Replicate(), Shard(1)  # of [B, T, ...]


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How a model's modules are cut over a tensor-parallel mesh. A model states its own as its attribute ``tensor_plan``.

    styles     patterns (SEMANTICS R-3) of linears; a rowwise linear takes what colwise ones give.
    blocks     classes whose colwise linears take one input, and how many further arguments of theirs are the same on all ranks.
    embedding  the class after which sequence parallelism cuts the tokens.
    norm       the class that runs on a rank's own tokens; the one called ``last_norm`` gathers them.
    """

    styles: Mapping[str, Style]
    blocks: Mapping[type[nn.Module], int]
    embedding: type[nn.Module]
    norm: type[nn.Module]
    last_norm: str


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False, plan: Mapping[str, Style] | None = None) -> nn.Module:
    """Cut a model's linears over a mesh of one dim; other parameters become whole on every rank. Values are those of its first rank.

    sequence  cut the tokens between the linears too, from the embedding to the last norm; of a model with a ``tensor_plan`` only.
    plan      patterns (SEMANTICS R-3) of linears, by default those of the model's ``tensor_plan``; a rowwise one takes what colwise ones give.
    Returns:  the model, changed in place. It takes the same tokens on all ranks and gives the same whole outputs.
    Order:    convert, parallelize, then fully_shard over another dim of the mesh.
    Raises:   ValueError, and nothing is changed: a mesh of several dims; a pattern that names no linear; a linear that DTensor cannot run, dims or heads
              that the ranks do not cut evenly, FP8 dims that are then no multiples of 16; parameters that are cut and shared, or sharded already.
              In the forward pass: a sequence that the ranks do not cut evenly.
    """
    ranks = tensor_checks.mesh_size(mesh)
    own: TensorPlan | None = getattr(model, "tensor_plan", None)
    if plan is None and own is None:
        raise ValueError(
            f"only a model with a tensor_plan, such as the trainer's Llama, has a plan of its own; got a {type(model).__name__}. "
            "Give plan={pattern: 'colwise' or 'rowwise'}."
        )
    if sequence and (plan is not None or own is None):
        what = f"a {type(model).__name__}" + " with a plan" * (plan is not None)
        raise ValueError(
            f"sequence cuts the tokens of a model with a tensor_plan, such as the trainer's Llama; got {what}. Leave sequence or the plan out."
        )
    if plan is not None and not plan:
        raise ValueError("a plan cuts one linear at least; got none. Name linears in it, or leave tensor parallelism out.")
    styles = _styles(model, plan if plan is not None else own.styles if own else {})
    tensor_checks.model(model)
    for name, style in styles.items():
        tensor_checks.linear(name, model, style, ranks)
    if mesh.device_type == "cpu":
        gloo.gather_fp8_as_bytes()
    between: Placement = _TOKENS if sequence else _WHOLE
    replicated: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if name in styles:
            _cut(module, mesh, styles[name], between)
        elif own and plan is None and type(module) in own.blocks:
            columns = [child for child, _ in module.named_children() if styles.get(f"{name}.{child}") == "colwise"]
            _share_input(module, mesh, between, columns, own.blocks[type(module)])
        elif any(True for _ in module.parameters(recurse=False)):
            _replicate(module, mesh, replicated)
            if own:
                _lay_out_own(own, name, module, mesh, between)
            else:
                _lay_out(module, mesh, _WHOLE, _WHOLE)
    if own:
        model.register_forward_pre_hook(lambda _, args: tensor_checks.length(args[0], ranks) if sequence else None)
        model.register_forward_hook(lambda _, args, out: _local(out))  # a tied lm_head is no module of its own
    return model


def _styles(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """The style of each linear that the plan names, by name."""
    linears = [name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)]
    found: dict[str, Style] = {}
    for pattern, style in plan.items():
        if style not in get_args(Style):
            raise ValueError(f"a plan's styles are {' and '.join(get_args(Style))}; got {style!r} for {pattern!r}.")
        named = [name for name in linears if matches(pattern, name)]
        if not named:
            raise ValueError(
                f"plan pattern {pattern!r} names none of the linears: {', '.join(linears) or 'there are none'}. Spell one of them."
            )
        for name in named:
            if found.setdefault(name, style) != style:
                raise ValueError(f"{name} is to be both {found[name]} and {style}, the second by {pattern!r}. Make the patterns disjoint.")
    return found


def gathers_fp8(module: nn.Module) -> bool:
    """Whether torchao's Float8 styles mean this linear's config. They cast input and grad_output tensorwise with no power of two, the input to e4m3,
    whatever the config says, and sum a bias's gradient from codes; any other linear takes the plain styles, and casts by its config after the gather."""
    if not isinstance(module, Float8Linear) or module.bias is not None:
        return False
    config = module.config
    roles = ("input", "weight", "grad_output", "input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight")
    casts = [getattr(config, f"cast_config_{role}") for role in roles]
    return (
        config.cast_config_input.target_dtype == torch.float8_e4m3fn
        and not config.round_scales_to_power_of_2
        and all(c.scaling_type is ScalingType.DYNAMIC and c.scaling_granularity is ScalingGranularity.TENSORWISE for c in casts)
    )


def _cut(linear: nn.Module, mesh: DeviceMesh, style: Style, between: Placement) -> None:
    if style == "colwise":
        parallelize_module(linear, mesh, (Float8ColwiseParallel if gathers_fp8(linear) else ColwiseParallel)())
    else:
        parallelize_module(linear, mesh, (Float8RowwiseParallel if gathers_fp8(linear) else RowwiseParallel)(output_layouts=between))


def _share_input(block: nn.Module, mesh: DeviceMesh, between: Placement, columns: Sequence[str], same: int) -> None:
    """One cast, one gather and one reduction of the gradient for all the column-parallel linears of x; same: further arguments, whole everywhere."""
    others = (None,) * same  # such as rotary tables: plain tensors
    before, after = (between, *others), (_WHOLE, *others)
    block.shares_input = True  # type: ignore[assignment]  # gemm_observer then takes x from here, before it is cast
    if all(gathers_fp8(block.get_submodule(name)) for name in columns):
        style = PrepareFloat8ModuleInput(input_layouts=before, desired_input_layouts=after, fwd_config_submodule_fqn=columns[0])
    else:  # some take x in high precision: they share it, and those in FP8 cast the whole of it
        style = PrepareModuleInput(input_layouts=before, desired_input_layouts=after)
    parallelize_module(block, mesh, style)


def _replicate(module: nn.Module, mesh: DeviceMesh, replicated: dict[nn.Parameter, nn.Parameter]) -> None:
    """Parameters of a module's own as whole DTensors; one that several modules share stays one."""
    for key, p in list(module.named_parameters(recurse=False)):
        if p not in replicated:
            replicated[p] = nn.Parameter(distribute_tensor(p.detach(), mesh, [_WHOLE]), requires_grad=p.requires_grad)
        module.register_parameter(key, replicated[p])


def _lay_out_own(plan: TensorPlan, name: str, module: nn.Module, mesh: DeviceMesh, between: Placement) -> None:
    """What a plan has between the linears: the embedding cuts the tokens, the last norm gathers them."""
    if isinstance(module, plan.embedding):
        _lay_out(module, mesh, _WHOLE, between)
    elif isinstance(module, plan.norm):
        last = name == plan.last_norm
        _lay_out(module, mesh, between, _WHOLE if last else between, local=not last)
        weight = module.get_parameter("weight")
        if weight.requires_grad:  # a sum over the tokens of all ranks
            weight.register_hook(lambda g: g.redistribute(placements=[_WHOLE]))
    else:
        _lay_out(module, mesh, _WHOLE, _WHOLE)


def _lay_out(module: nn.Module, mesh: DeviceMesh, before: Placement, after: Placement, *, local: bool = True) -> None:
    """Run a module of replicated parameters on DTensors: plain inputs lie as before, outputs as after."""

    def entering(_, args, kwargs):
        def lay(x: torch.Tensor) -> DTensor:
            return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [before], run_check=False)

        return tree_map_only(torch.Tensor, lay, (args, kwargs))

    def leaving(_, args, out):
        out = tree_map_only(DTensor, lambda x: x.redistribute(placements=[after]), out)
        return tree_map_only(DTensor, _local, out) if local else out

    module.register_forward_pre_hook(entering, with_kwargs=True)
    module.register_forward_hook(leaving)


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
