"""From nn.Linear to FP8 and back: torchao's Float8Linear where that runs the recipe, else fp8ref's own ``layer.Linear``.

    model = convert(model, "delayed", filter_fqns=["lm_head"])  # an optimizer built before goes on
    ...                                                         # training
    model.save_pretrained(path, state_dict=weights(model))      # a transformers model, while it trains
    deconvert(model).save_pretrained(path)                      # and when it is done

A checkpoint to go on from holds the whole model.state_dict(), states of delayed scaling included.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_linear_utils import swap_linear_layers

from fp8ref import recipe as recipes
from fp8ref.recipe import Recipe
from fp8ref.torch import cpu, delayed, float8_config
from fp8ref.torch.layer import Linear, check_recipe
from fp8ref.torch.seen import is_compiled

__all__ = ["Linear", "convert", "deconvert", "weights"]
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
    """Replace the linears that SEMANTICS R-2 and R-4 choose, by torchao's Float8Linear, or by ``Linear``.

    amax_group  ranks that have parts of one batch, and take the amaxes of input and grad_output together (P-2, scope global; by ``Linear``).
                None: each its own, torchao's meaning.
    Keeps:    the very Parameters, tied ones tied: an optimizer built before the conversion trains the model as one built after it.
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
    _check_model(model, "Convert a model first, then {} it")
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


def deconvert(model: nn.Module) -> nn.Module:
    """The way back from ``convert``: every linear in FP8 becomes an nn.Linear of the same Parameters; states of delayed scaling go.

    Returns:  the model, changed in place (one linear in FP8: its replacement). A model without FP8 linears is left as it is.
    Raises:   ValueError, and nothing is changed: a model that is compiled or sharded; a linear in FP8 that was given hooks or another forward.
    """
    fp8 = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, Float8Linear | Linear)}
    if fp8:
        _check_model(model, "Deconvert a model before you {} it, or save weights(model) of it as it is")
    for name, linear in fp8.items():
        what = name or "the model"
        if lost := _lost(linear, (Float8Linear, Linear)):
            raise ValueError(f"{what} {lost}. Undo that first.")
        if type(linear.weight) is not nn.Parameter:
            raise ValueError(f"{what} has a weight that is a {type(linear.weight).__name__}. Deconvert a model before you shard it.")
    made = {linear: _plain(linear) for linear in fp8.values()}
    for name, linear in fp8.items():
        if not name:
            return made[linear]
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, made[linear])
    return model


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """model.state_dict() without the states of delayed scaling: that of the model that was converted, for those who load one."""
    states = {id(value) for _, state in delayed.states(model) for value in state.buffers()}
    # By identity: wrappers of modules change the names in a state_dict.
    left_out = {key for key, value in model.state_dict(keep_vars=True).items() if id(value) in states}
    return {key: value for key, value in model.state_dict().items() if key not in left_out}


def _plain(linear: nn.Linear) -> nn.Linear:
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    plain.weight, plain.bias = linear.weight, linear.bias
    return plain.train(linear.training)


def _check_model(model: nn.Module, remedy: str) -> None:
    """ValueError for a model that is compiled or sharded; remedy has a gap for the verb."""
    for name, module in model.named_modules():
        if is_compiled(module):
            raise ValueError(f"{name or 'the model'} is compiled. {remedy.format('compile')}.")
        if isinstance(module, FSDPModule):
            raise ValueError(f"{name or 'the model'} is sharded by fully_shard. {remedy.format('shard')}.")


def _lost(linear: nn.Linear, kinds: tuple[type[nn.Linear], ...]) -> str:
    """What of a linear its replacement would not have, beyond what its class, one of kinds, is replaced for; empty for nothing."""
    if type(linear) not in kinds:
        return f"is a {type(linear).__name__}, and its forward would be lost"
    if "forward" in vars(linear):
        return f"is a {type(linear).__name__} whose forward was replaced, which would be lost"
    if hooks := [key for key in _HOOKS if getattr(linear, key, None)]:
        return f"has {hooks[0].strip('_').replace('_', ' ')}, which would be dropped"
    held = {key for key, _ in (*linear.named_parameters(recurse=False), *linear.named_buffers(recurse=False), *linear.named_children())}
    more = sorted(held - {"weight", "bias"} - ({"states"} if isinstance(linear, Linear) else set()))
    return f"holds {', '.join(more)} beside weight and bias, which would be lost" if more else ""


def _check(name: str, linears: Mapping[str, nn.Linear]) -> None:
    """ValueError unless a linear can be replaced and nothing of it is lost."""
    linear = linears[name]
    what = name or "the model"
    if isinstance(linear, Float8Linear | Linear):
        raise ValueError(f"{what} is already FP8; convert a model once. To change its recipe, deconvert it first.")
    if lost := _lost(linear, (nn.Linear,)):
        raise ValueError(f"{what} {lost}. Name it in filter_fqns, or change it after the conversion.")
    others = [other for other, m in linears.items() if m is linear and other != name]
    if others:
        raise ValueError(f"{what} is the same module as {others[0]}, and only one of them would be converted. Name both in filter_fqns.")
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
