"""Convert a model to FP8 and back: swap nn.Linear for torchao's Float8Linear, or ``linear.Linear``.

It uses torchao's if plain operations cast, torchao supports the recipe and every rank scales with
its own amaxes; else fp8ref's own.

    model = convert(model, "delayed", filter_fqns=["lm_head"])  # an optimizer stays valid
    print(report(model))  # what is in FP8, what is not, and why
    ...
    model.save_pretrained(path, state_dict=weights(model))  # export during training
    deconvert(model).save_pretrained(path)                  # export after training

To resume training, save the whole model.state_dict(): it holds the states of delayed scaling too.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear_utils import swap_linear_layers

from fp8ref import recipe as recipes
from fp8ref.recipe import Recipe
from fp8ref.selection.rules import Rule
from fp8ref.spec.kernels import Choice
from fp8ref.torch import delayed
from fp8ref.torch.blocks import fuse as fusing
from fp8ref.torch.delayed.role_states import Notice
from fp8ref.torch.experts import layer as grouped_linear
from fp8ref.torch.experts import models as experts_models
from fp8ref.torch.gemm import gemm
from fp8ref.torch.linear import torchao_linear
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.linear.model_checks import check_model
from fp8ref.torch.linear.torchao_linear import Float8Linear
from fp8ref.torch.model import report as reports
from fp8ref.torch.model.conversion_plan import ConversionPlan, Selection, plan_conversion
from fp8ref.torch.model.convert_checks import (
    FP8_LINEARS,
    METHODS_OF,
    added_attributes,
    unusual_parameter,
    what_is_lost,
)

__all__ = ["Casting", "convert", "deconvert", "weights"]


class Casting(TypedDict, total=False):
    """What casts the operands of ``Linear``, to the same bits.

    kernels     Triton kernels on a GPU with FP8, else plain operations ("auto", the default); or
                one of them ("triton", "plain").
    fuse        True: where kernels cast, norms, SwiGLU and RoPE's gradient are computed in the pass
                that casts them for linears, in modules of the form of transformers' Llama, Qwen3
                and Mistral or torchtitan's Llama (``blocks.fuse``). The report says of each linear
                whether it is, or why not. False is the default.
    """

    kernels: Choice
    fuse: bool


@torch.inference_mode(False)  # states that inference mode made could not observe in training
def convert(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    filter_fqns: Sequence[str] = (),
    fp8_fqns: Sequence[str] = (),
    rules: Sequence[Rule] = (),
    amax_group: ProcessGroup | None = None,
    experts: bool = False,
    **casting: Unpack[Casting],
) -> nn.Module:
    """Replace the chosen linears (R-2, R-4) by torchao's Float8Linear, or by ``Linear`` where
    Triton kernels cast, amax_group is given or torchao cannot express the recipe; a
    ``GroupedLinear`` too, by the grouped recipe of its own (X-8).

    rules       change casts of single operands, one after the other (R-8): of linears, and of the
                weights of experts, by the names of their Parameters.
    amax_group  ranks that hold parts of one batch and share the amaxes of input and grad_output
                (P-2, scope global). Only ``Linear`` and ``GroupedLinear`` share amaxes. None: every
                rank uses its own, as torchao does. To round by seeds, all have equally many rows.
    experts     convert modules of experts too (X-11): of transformers and torchtitan, but those
                of filter_fqns. A router stays in high precision unless fp8_fqns names it: a linear
                below a name "router" or "gate" with an output for each expert.
    casting     kernels and fuse: what casts operands of ``Linear``, as of ``Casting``.
    Keeps:    the Parameter objects, tied ones tied, so an optimizer built before stays valid; and
              attributes that were added to a linear (R-5).
    Returns:  the model, changed in place (of one nn.Linear, another). 'bf16' changes nothing.
    Sets:     torch._inductor.config.emulate_precision_casts for the process, if a recipe rotates,
              or torchao's linears scale rows on another device than a CPU: compiled kernels then
              round where eager ones do, as torchtitan has them do (pytorch#150859).
              torch._inductor.config.cpp.simdlen, under delayed scaling on a CPU with AVX-512, to
              256: inductor (torch 2.13) stores wrong codes there where two scales cast one
              transposed tensor. Off a CPU, which casts inductor fuses (``fusion.install``).
    Logs:     a line, of logger fp8ref.torch: what is in FP8 and what is not (R-7); a warning where
              matrices are outside linears, such as experts'. ``report`` has all.
    Prints:   a short line at a terminal and in a notebook, unless this logger has a level.
    Raises:   ValueError, and nothing is changed: as ``selection.linears.select`` and
              ``selection.rules.apply``; a lazy module, which has no shape yet; a recipe that
              neither can run; a model that is compiled, sharded or FP8 already; a chosen linear of
              which something would be lost or that its parent does not call (R-5), registered under
              two names, on a GPU without FP8, or on a CPU whose torch lacks the recipe's GEMMs.
              With ``experts``: none that can be converted; rules by which no grouped linear runs;
              amax_group with dynamic scaling, as experts scale by their own rank's amaxes.
    """
    reports.check_shapes(model)
    if unknown := sorted(set(casting) - set(Casting.__annotations__)):
        raise TypeError(f"convert() got an unexpected keyword argument {unknown[0]!r}")
    kernels = casting.get("kernels", "auto")
    selection = Selection(
        filter_fqns=filter_fqns, fp8_fqns=fp8_fqns, rules=rules, experts=experts, kernels=kernels
    )
    plan = plan_conversion(model, recipes.by_name(recipe), selection, shared=amax_group is not None)
    kind = type(model).__name__
    if not plan.is_empty:
        plan.check(model)
        group = None if amax_group is None else amax_group.group_name
        model = _converted(model, plan, group, kernels)
        _keep_reasons(model, plan, fusing.fuse(model) if casting.get("fuse") else {})
    reports.log(model, kind, plan.recipe)
    return model


def _set_up_compilers(plan: ConversionPlan) -> None:
    """Set up what the process needs to run and compile the plan's recipes."""
    devices = plan.devices
    if "cpu" in devices:
        gemm.use_native_scaled_mm()
        if (
            any(recipe.delayed for recipe in plan.recipes)
            and torch._inductor.config.cpp.simdlen is None
            and torch.backends.cpu.get_cpu_capability() == "AVX512"
        ):
            # Linears that share an input cast it by a scale each. In one loop over a transposed
            # tile of bfloat16 inductor's code for 512 bits then stores wrong codes, NaN among them.
            torch._inductor.config.cpp.simdlen = 256
    if any(cast.rotation for recipe in plan.recipes for cast in recipe.casts):
        # Else a kernel casts rotated blocks that it has not rounded to bfloat16 (S-23).
        torch._inductor.config.emulate_precision_casts = True
    if devices != {"cpu"}:
        if any(spec.rowwise for recipe in plan.by_torchao for spec in recipe.gemms.values()):
            # Else a kernel that inductor fuses with a norm scales rows by amaxes of values that it
            # has not rounded, and casts become NaN (pytorch#150859).
            torch._inductor.config.emulate_precision_casts = True
        from fp8ref.torch.gemm import fusion  # here: inductor's scheduler takes seconds to import

        fusion.install()
    # Run for its side effect: torchao patches inductor's code for FP8 stores
    # (triton-lang/triton#11111).
    convert_to_float8_training(nn.Identity())


def _converted(
    model: nn.Module, plan: ConversionPlan, group: str | None, kernels: Choice
) -> nn.Module:
    """The model with the plan's modules in FP8. group: the ranks that share amaxes."""
    _set_up_compilers(plan)
    linear_recipes = plan.linear_recipes
    names = {linear: name for name, linear in plan.linears.items()}

    def in_fp8(linear: nn.Linear) -> nn.Linear:
        recipe = linear_recipes[names[linear]]
        if recipe not in plan.by_torchao:
            return Linear.of(linear, recipe, group, kernels)
        # torchao changes the parts of a config: each linear has a fresh one
        return Float8Linear.from_float(linear, config=torchao_linear.torchao_config(recipe))

    model = swap_linear_layers(
        model, in_fp8, module_filter_fn=lambda _, name: name in linear_recipes
    )
    for name, recipe in linear_recipes.items():
        converted = model.get_submodule(name)
        assert isinstance(converted, Float8Linear | Linear)
        converted.recipe, converted.fqn = recipe, name
        _carry(plan.linears[name], converted)
        kind = type(plan.linears[name])
        converted.__class__ = _with_methods(type(converted), kind)  # type: ignore[assignment, arg-type]
    experts_models.convert(plan.mixtures, plan.expert_plans, group)
    for name, grouped_recipe in plan.group_recipes.items():
        plan.grouped[name].fqn = name
        plan.grouped[name].convert(grouped_recipe, group=group)
    notice = Notice.new_model()
    for name, state in delayed.states(model):
        state.notice, state.path = notice, name
    return model


def _keep_reasons(model: nn.Module, plan: ConversionPlan, notes: Mapping[str, str]) -> None:
    """Keep with the model why its layers are in FP8 or not. notes: which are fused, or why not."""
    # of a linear that was converted before, the reason of then
    before = {
        name: reason
        for name, reason in vars(model).get(reports.REASONS, {}).items()
        if name not in plan.linear_recipes
    }
    reasons = {d.path: d.reason for d in plan.decisions} | before | dict(plan.expert_reasons)
    reasons |= {path: f"{reasons.get(path, 'converted')}; {note}" for path, note in notes.items()}
    vars(model)[reports.REASONS] = reasons


def deconvert(model: nn.Module) -> nn.Module:
    """Undo ``convert``: replace every FP8 linear by an nn.Linear of the same Parameters, and every
    FP8 module of experts by what it was.

    States of delayed scaling are dropped.

    Returns:  the model, changed in place (one linear in FP8: its replacement). A model without FP8
              linears is left as it is.
    Raises:   ValueError, and nothing is changed: a model that is compiled or sharded; a linear in
              FP8 that was given hooks or other methods.
    """
    reports.check_module(model)
    fp8 = {
        name: m
        for name, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, FP8_LINEARS)
    }
    mixtures = [m for m in model.modules() if isinstance(m, experts_models.Experts)]
    if fp8 or mixtures:
        check_model(model, "Deconvert a model before you {} it, or save weights(model)")
    for name, linear in fp8.items():
        label = name or "the model"
        if lost := what_is_lost(linear, FP8_LINEARS):
            raise ValueError(f"{label} {lost}. Undo that first.")
        if unusual := unusual_parameter(linear):
            raise ValueError(f"{label} {unusual}. Deconvert a model before you shard it.")
    for module in model.modules():
        vars(module).pop(reports.REASONS, None)
    fusing.unfuse(model)
    experts_models.deconvert(mixtures)
    for grouped in grouped_linear.grouped_linears(model).values():
        grouped.convert("bf16")
    plain_linears = {linear: _plain(linear) for linear in fp8.values()}
    for name, linear in fp8.items():
        if not name:
            return plain_linears[linear]
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, plain_linears[linear])
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return model.state_dict() without delayed scaling: the keys that it had before ``convert``.

    Raises:   ValueError: model is not an nn.Module.
    """
    reports.check_module(model)
    states = {id(value) for _, state in delayed.states(model) for value in state.buffers()}
    # By identity: wrappers of modules change the names in a state_dict.
    left_out = {
        key for key, value in model.state_dict(keep_vars=True).items() if id(value) in states
    }
    return {key: value for key, value in model.state_dict().items() if key not in left_out}


def _plain(linear: nn.Linear) -> nn.Linear:
    """An nn.Linear of an FP8 linear's own Parameters."""
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    plain.weight, plain.bias = linear.weight, linear.bias
    _carry(linear, plain)
    plain.__class__ = getattr(type(linear), METHODS_OF, nn.Linear)
    return plain


def _carry(old: nn.Linear, new: nn.Linear) -> None:
    """Copy training mode and added attributes to the replacement."""
    vars(new).update(added_attributes(old))
    new.train(old.training)


@functools.cache
def _with_methods(fp8: type[nn.Linear], kind: type[nn.Linear]) -> type[nn.Linear]:
    """The class of FP8 linears with a subclass's added methods (R-5)."""
    if kind is nn.Linear:
        return fp8
    names = {"__module__": fp8.__module__, METHODS_OF: kind, "__reduce__": _reduce}
    return type(fp8.__name__, (fp8, kind), names)


def _reduce(linear: nn.Linear) -> tuple:
    """Reduce for copy and pickle, as the class has no importable name."""
    fp8 = next(kind for kind in type(linear).__mro__ if kind in FP8_LINEARS)
    return _empty, (fp8, getattr(type(linear), METHODS_OF)), linear.__getstate__()


def _empty(fp8: type[nn.Linear], kind: type[nn.Linear]) -> nn.Linear:
    """An empty linear of ``_with_methods``'s class, for copy and pickle."""
    linear_class = _with_methods(fp8, kind)  # type: ignore[arg-type]
    return linear_class.__new__(linear_class)
