"""From nn.Linear to FP8: torchao's Float8Linear where that runs the recipe, else fp8ref's own ``layer.Linear``."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_linear_utils import swap_linear_layers

from fp8ref import recipe as recipes
from fp8ref.recipe import Recipe
from fp8ref.torch import cpu, float8_config
from fp8ref.torch.layer import Linear, check_recipe

__all__ = ["Linear", "convert"]
# What a module may carry that its replacement would not.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def convert(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    filter_fqns: Sequence[str] = (),
    fp8_fqns: Sequence[str] = (),
    amax_group: ProcessGroup | None = None,
) -> nn.Module:
    """Replace the linears that SEMANTICS R-2 chooses, keeping their parameters: by torchao's Float8Linear, or by ``Linear``.

    amax_group  ranks that have parts of one batch, and take the amaxes of input and grad_output together (P-2, scope global; by ``Linear``).
                None: each its own, torchao's meaning.
    Returns:  the model, changed in place (a model that is itself one nn.Linear: its replacement). Recipe 'bf16' changes nothing.
    Raises:   ValueError, and nothing is changed: as ``fp8ref.recipe.plan``; a recipe that neither can run; a model that is compiled,
              sharded or FP8 already; a chosen linear that is a subclass of nn.Linear or whose forward was replaced, that has hooks,
              registered under two names, or on a GPU without FP8.
    """
    recipe = recipes.by_name(recipe)
    linears = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    shapes = {name: (m.out_features, m.in_features) for name, m in linears.items()}
    chosen = [d.path for d in recipes.plan(shapes, recipe, filter_fqns=filter_fqns, fp8_fqns=fp8_fqns) if d.fp8]
    if not chosen:
        return model
    config = float8_config.torchao_config(recipe) if amax_group is None and float8_config.expresses(recipe) else None
    if config is None:
        check_recipe(recipe)
    _check_model(model)
    for name in chosen:
        _check(name, linears)
    if any(linears[name].weight.device.type == "cpu" for name in chosen):
        cpu.use_native_scaled_mm()
    if config is not None:
        model = convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    else:
        convert_to_float8_training(nn.Identity())  # torchao then mends what inductor makes of FP8 stores (triton-lang/triton#11111)
        group = None if amax_group is None else amax_group.group_name
        model = swap_linear_layers(model, lambda m: Linear.of(m, recipe, group), module_filter_fn=lambda _, name: name in chosen)
    for name in chosen:
        made = model.get_submodule(name)
        made.train(linears[name].training)  # torchao's are in training mode
        made.recipe = recipe  # type: ignore[assignment]
    return model


def _check_model(model: nn.Module) -> None:
    """ValueError for what is done before conversion and belongs after it."""
    for name, module in model.named_modules():
        if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
            raise ValueError(f"{name or 'the model'} is compiled. Convert a model first, then compile it.")
        if isinstance(module, FSDPModule):
            raise ValueError(f"{name or 'the model'} is sharded by fully_shard. Convert a model first, then shard it.")


def _check(name: str, linears: Mapping[str, nn.Linear]) -> None:
    """ValueError unless a linear can be replaced and nothing of it is lost."""
    linear = linears[name]
    what = name or "the model"
    if isinstance(linear, Float8Linear | Linear):
        raise ValueError(f"{what} is already FP8; convert a model once. Build it afresh to change its recipe.")
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        kind = f"a {type(linear).__name__}" if type(linear) is not nn.Linear else "an nn.Linear whose forward was replaced"
        raise ValueError(f"{what} is {kind}, and its forward would be lost. Name it in filter_fqns.")
    others = [other for other, m in linears.items() if m is linear and other != name]
    if others:
        raise ValueError(f"{what} is the same module as {others[0]}, and only one of them would be converted. Name both in filter_fqns.")
    hooks = [key for key in _HOOKS if getattr(linear, key, None)]
    if hooks:
        raise ValueError(f"{what} has {hooks[0].strip('_').replace('_', ' ')}, which would be dropped. Register them after the conversion.")
    more = {key for key, _ in (*linear.named_parameters(), *linear.named_buffers(), *linear.named_children())} - {"weight", "bias"}
    if more:
        raise ValueError(f"{what} holds {', '.join(sorted(more))} beside weight and bias, which would be lost. Name it in filter_fqns.")
    weight = linear.weight
    if isinstance(weight, DTensor):
        raise ValueError(f"{what} is sharded already (its weight is a DTensor). Convert a model first, then parallelise it.")
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{what} has a weight of {weight.dtype}; FP8 is cast from float32, bfloat16 or float16. Cast the model first.")
    if weight.device.type == "cuda" and torch.version.cuda and (capability := torch.cuda.get_device_capability(weight.device)) < (8, 9):
        raise ValueError(
            f"{what} lies on {torch.cuda.get_device_name(weight.device)} of compute capability {capability[0]}.{capability[1]}; FP8 GEMMs need "
            "8.9 or later. Use recipe 'bf16'."
        )
