"""From nn.Linear to FP8 and back: torchao's Float8Linear where that runs the recipe, else fp8ref's own ``layer.Linear``.

    model = convert(model, "delayed", filter_fqns=["lm_head"])  # an optimizer built before goes on
    ...                                                         # training
    model.save_pretrained(path, state_dict=weights(model))      # a transformers model, while it trains
    deconvert(model).save_pretrained(path)                      # and when it is done

A checkpoint to go on from holds the whole model.state_dict(), states of delayed scaling included.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear_utils import swap_linear_layers

from fp8ref import recipe as recipes
from fp8ref.recipe import Recipe
from fp8ref.torch import delayed, gemm, module_swap, torchao_linear
from fp8ref.torch.linear import Linear, check_recipe
from fp8ref.torch.proof.records import is_compiled
from fp8ref.torch.torchao_linear import Float8Linear

__all__ = ["Linear", "check_model", "convert", "deconvert", "weights"]


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
    Keeps:    the very Parameters, tied ones tied: an optimizer built before the conversion trains the model as one built after it. And
              attributes that a linear was given (R-5).
    Returns:  the model, changed in place (a model that is itself one nn.Linear: its replacement). Recipe 'bf16' changes nothing.
    Raises:   ValueError, and nothing is changed: as ``fp8ref.recipe.plan``; a recipe that neither can run; a model that is compiled,
              sharded or FP8 already; a chosen linear of which something would be lost or that its parent does not call (R-5),
              registered under two names, on a GPU without FP8, or on a CPU whose torch lacks the recipe's GEMMs.
    """
    recipe = recipes.by_name(recipe)
    _check_module(model)
    linears = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    shapes = {name: (m.out_features, m.in_features) for name, m in linears.items()}
    chosen = [d.path for d in recipes.plan(shapes, recipe, filter_fqns=filter_fqns, fp8_fqns=fp8_fqns) if d.fp8]
    if not chosen:
        return model
    config = torchao_linear.torchao_config(recipe) if amax_group is None and torchao_linear.expresses(recipe) else None
    if config is None:
        check_recipe(recipe)
    check_model(model, "Convert a model first, then {} it")
    for name in chosen:
        module_swap.check(name, linears, model.get_submodule(name.rpartition(".")[0]) if name else None)
    if any(linears[name].weight.device.type == "cpu" for name in chosen):
        gemm.check_cpu(recipe)
        gemm.use_native_scaled_mm()
    convert_to_float8_training(nn.Identity())  # torchao then mends what inductor makes of FP8 stores (triton-lang/triton#11111)
    group = None if amax_group is None else amax_group.group_name

    def make(linear: nn.Linear) -> nn.Linear:
        return Linear.of(linear, recipe, group) if config is None else Float8Linear.from_float(linear, config=config)

    model = swap_linear_layers(model, make, module_filter_fn=lambda _, name: name in chosen)
    for name in chosen:
        made = model.get_submodule(name)
        assert isinstance(made, Float8Linear | Linear)
        made.recipe, made.fqn = recipe, name
        module_swap.carry(linears[name], made)
    return model


def deconvert(model: nn.Module) -> nn.Module:
    """The way back from ``convert``: every linear in FP8 becomes an nn.Linear of the same Parameters; states of delayed scaling go.

    Returns:  the model, changed in place (one linear in FP8: its replacement). A model without FP8 linears is left as it is.
    Raises:   ValueError, and nothing is changed: a model that is compiled or sharded; a linear in FP8 that was given hooks or other methods.
    """
    _check_module(model)
    fp8 = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, module_swap.FP8)}
    if fp8:
        check_model(model, "Deconvert a model before you {} it, or save weights(model) of it as it is")
    for name, linear in fp8.items():
        what = name or "the model"
        if lost := module_swap.lost(linear, module_swap.FP8):
            raise ValueError(f"{what} {lost}. Undo that first.")
        if unusual := module_swap.unusual(linear):
            raise ValueError(f"{what} {unusual}. Deconvert a model before you shard it.")
    made = {linear: _plain(linear) for linear in fp8.values()}
    for name, linear in fp8.items():
        if not name:
            return made[linear]
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, made[linear])
    return model


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """model.state_dict() without the states of delayed scaling: that of the model that was converted, for those who load one.

    Raises:   ValueError: no nn.Module.
    """
    _check_module(model)
    states = {id(value) for _, state in delayed.states(model) for value in state.buffers()}
    # By identity: wrappers of modules change the names in a state_dict.
    left_out = {key for key, value in model.state_dict(keep_vars=True).items() if id(value) in states}
    return {key: value for key, value in model.state_dict().items() if key not in left_out}


def _plain(linear: nn.Linear) -> nn.Linear:
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    plain.weight, plain.bias = linear.weight, linear.bias
    module_swap.carry(linear, plain)
    return plain


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"a model is an nn.Module; got a {type(model).__name__}. Give the module itself.")


def check_model(model: nn.Module, remedy: str) -> None:
    """ValueError for a model that is compiled or sharded; remedy has a gap for the verb."""
    for name, module in model.named_modules():
        if is_compiled(module):
            raise ValueError(f"{name or 'the model'} is compiled. {remedy.format('compile')}.")
        if isinstance(module, FSDPModule):
            raise ValueError(f"{name or 'the model'} is sharded by fully_shard. {remedy.format('shard')}.")
        if isinstance(module, FullyShardedDataParallel):  # which writes parameters into the modules that it knows
            raise ValueError(f"{name or 'the model'} is sharded by FullyShardedDataParallel. {remedy.format('shard')}.")
