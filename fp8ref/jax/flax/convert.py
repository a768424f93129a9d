"""Convert an existing Flax model, linen or NNX, to FP8; ``selection.linears.select`` picks the
layers (spec R-2, R-3)."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import Scope
from jax import lax

from fp8ref import recipe as recipes
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.flax import linen as linen_hooks
from fp8ref.jax.flax import nnx as nnx_hooks
from fp8ref.jax.flax import report as reports
from fp8ref.jax.flax import unset_scales
from fp8ref.jax.flax.amax_observations import check_precision
from fp8ref.jax.flax.grouped_linear import GroupedLinear, RaggedDot
from fp8ref.jax.linear import linear
from fp8ref.recipe import Recipe
from fp8ref.selection import grouped, routers
from fp8ref.selection import linears as linear_selection
from fp8ref.selection import report as fp8_report
from fp8ref.selection import rules as linear_rules
from fp8ref.selection.rules import Rule
from fp8ref.shared import contexts
from fp8ref.spec.hardware import Multiply

__all__ = ["Inputs", "convert", "deconvert", "report"]

_logger = logging.getLogger("fp8ref.jax.flax")

Placements = Placement | Mapping[str, Placement] | Callable[[str], Placement | None]
"""What ``convert`` takes for placement."""


@dataclass(frozen=True)
class Inputs:
    """What shows the layers of a linen model: arguments of its call (jax.ShapeDtypeStruct will do),
    or the only one, and the rngs of its init."""

    args: Any
    rngs: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", _arguments(self.args))


def convert(
    model,
    recipe: str | Recipe,
    *,
    filter_fqns: Sequence[str] = (),
    fp8_fqns: Sequence[str] = (),
    inputs: Any = None,
    multiply: Multiply | None = None,
    placement: Placements | None = None,
    rules: Sequence[Rule] = (),
):
    """Put FP8 into the linears of a model, except those that filter_fqns names or whose dims are
    not multiples of 16.

    NNX:      every nnx.Linear, nnx.LinearGeneral and nnx.Einsum, stacks of them too, gets a hook;
              the model itself changes and is returned. A ``GroupedLinear`` gets one of the grouped
              recipe that goes with the linears' (X-8). A router of such a model stays in high
              precision (X-11): a linear below a name "router" or "gate" with an output for each
              expert, unless fp8_fqns names it.
    linen:    a new module of the same fields and parameters, whose nn.Dense and nn.DenseGeneral
              have hooks wherever they are called. ``inputs``, arguments of its call, the only one,
              or ``Inputs``, show which those are. Under delayed scaling its init makes the state:
              {**variables, STATE: converted.init(rngs, *inputs)[STATE]}.
    multiply  simulated hardware of every hook, as in ``linen_dot_general``.
    placement of the linears on a mesh, as in ``linen_dot_general``: one for all of them; a mapping
              of patterns to placements, of which the first one that names a linear is its own; or a
              function of its path. A linear that gets None has none.
    rules     change casts of single operands (R-8), of NNX models.
    Logs:     one line, of logger fp8ref.jax.flax: what is in FP8 and what is not; a warning where
              matrices are outside linears. ``report`` has all. A terminal or a notebook, where
              logging shows none, gets a short line, until you give this logger a level.
    Patterns: as everywhere: runs of whole components of a layer's dotted path, or shell patterns
              (R-3).
    Raises:   ValueError: a pattern that names nothing, or a placement's that names no linear in
              FP8; nothing converted; a layer that has a hook or a precision already, or that takes
              no hook (linen's nn.Einsum); a converted linen model inside another or bound; in its
              call, a layer that ``inputs`` did not show.
    """
    recipe = linear.check_recipe(recipe, "convert")
    choices = _Choices(recipe, filter_fqns, fp8_fqns, multiply, placement, rules)
    if isinstance(model, nnx.Module):
        if inputs is not None:
            raise ValueError("inputs are for linen models; got an NNX model. Leave them out.")
        return _convert_nnx(model, choices)
    if rules:
        raise ValueError(
            f"rules need an NNX model; got a {type(model).__name__}. Leave them out, or use NNX."
        )
    if not isinstance(model, nn.Module):
        raise ValueError(f"convert takes a linen or an NNX module; got {type(model).__name__}.")
    if inputs is None:
        raise ValueError(
            "a linen model needs inputs=(x,), the arguments of its call; got none for "
            f"{type(model).__name__}."
        )
    return _convert_linen(model, choices, inputs if isinstance(inputs, Inputs) else Inputs(inputs))


@dataclass(frozen=True)
class _Choices:
    """The options of a conversion."""

    recipe: Recipe
    filter_fqns: Sequence[str]
    fp8_fqns: Sequence[str]
    multiply: Multiply | None
    placement: Placements | None
    rules: Sequence[Rule]

    def select(self, dims: Mapping[str, tuple[int, int]]) -> list[linear_selection.Decision]:
        """A decision for each layer, of N and K by its path."""
        return linear_selection.select(
            dims, self.recipe, filter_fqns=self.filter_fqns, fp8_fqns=self.fp8_fqns
        )

    def placements(self, chosen: Sequence[str]) -> dict[str, Placement | None]:
        """The placement of each layer in FP8."""
        option, matches = self.placement, linear_selection.matches
        if isinstance(option, Mapping):
            for pattern in option:
                if not any(matches(pattern, name) for name in chosen):
                    raise ValueError(
                        f"placement pattern {pattern!r} matches no FP8 linear of: "
                        f"{linear_selection.listed(chosen)} (R-3)."
                    )
            placements = {
                name: next((v for pattern, v in option.items() if matches(pattern, name)), None)
                for name in chosen
            }
        else:
            placements = {name: option(name) if callable(option) else option for name in chosen}
        for name, placed in placements.items():
            if not isinstance(placed, Placement | None):
                raise ValueError(
                    f"{name}: placement is a sharding.Placement or None; got a "
                    f"{type(placed).__name__}."
                )
        return placements


_KINDS: dict[type, tuple[str, Callable | None, type[nnx_hooks.Hook]]] = {
    nnx.Linear: ("dot_general", lax.dot_general, nnx_hooks.DotGeneral),
    nnx.LinearGeneral: ("dot_general", None, nnx_hooks.DotGeneral),
    nnx.Einsum: ("einsum_op", jnp.einsum, nnx_hooks.EinsumOp),
    GroupedLinear: ("ragged_dot", lax.ragged_dot, RaggedDot),
}
"""{layer: the attribute that multiplies, what it is without a hook, and the hook}."""


def _kind(layer) -> type:
    return next(kind for kind in _KINDS if isinstance(layer, kind))


def _convert_nnx(model: nnx.Module, choices: _Choices) -> nnx.Module:
    """Put hooks into an NNX model's layers, after checking all of them."""
    nnx_hooks.hooks(model)  # refuses shared ones
    layers = _linears(model)
    selected = choices.select({name: _dims(name, layer) for name, layer in layers.items()})
    selected = [_refined(decision, layers[decision.path]) for decision in selected]
    experts = {d.experts for d in selected if d.fp8 and d.experts}
    plan = linear_rules.apply(choices.rules, routers.left_out(selected, experts, choices.fp8_fqns))
    chosen = [(decision, layers[decision.path]) for decision in plan if decision.fp8]
    _check_some(plan)
    for decision, layer in chosen:  # all of them, before the first one changes
        attribute, own, _ = _KINDS[_kind(layer)]
        hooks = [getattr(layer, attribute), getattr(layer, "dot_general_cls", None)]
        hooks_in_use = [hook for hook in hooks if hook not in (own, None)]
        _check_free(decision.path, hooks_in_use, getattr(layer, "precision", None))
        _check_dtype(decision.path, layer)
    placements = choices.placements([decision.path for decision, _ in chosen])
    # refuses what a hook does not take
    new_hooks = [
        _hook(decision, layer, choices.multiply, placements[decision.path])
        for decision, layer in chosen
    ]
    notice = unset_scales.Model()
    for (_, layer), hook in zip(chosen, new_hooks, strict=True):
        setattr(layer, _KINDS[_kind(layer)][0], nnx.data(hook))
        unset_scales.models[hook] = notice
    decisions = {decision.path: decision for decision in plan}
    dims = {path: decision.shape for path, decision in decisions.items()}
    _log(reports.nnx_report(model, None, dims, decisions), type(model).__name__)
    return model


def _hook(
    decision: linear_selection.Decision,
    layer,
    multiply: Multiply | None,
    placement: Placement | None,
) -> nnx_hooks.Hook:
    """What replaces a layer's own function, which it remembers."""
    (attribute, _, hook_class), shape = _KINDS[_kind(layer)], layer.kernel.get_value().shape
    stack = shape[: len(shape) - reports.kernel_ndim(layer)]
    hook = hook_class(decision.recipe, decision.path, stack, multiply, placement)
    hook.replaces = (getattr(layer, attribute),)
    return hook


def _refined(decision: linear_selection.Decision, layer) -> linear_selection.Decision:
    """The decision: experts get their number of kernels and grouped recipe (X-8); a layer whose
    call ignores its hook gets no FP8."""
    if decision.fp8 and _ignores_hook(layer):
        return _without_hook(decision)
    if not isinstance(layer, GroupedLinear):
        return decision
    recipe = grouped.grouped_recipe(decision.recipe).recipe if decision.fp8 else decision.recipe
    return dataclasses.replace(decision, experts=layer.experts, recipe=recipe)


def _without_hook(decision: linear_selection.Decision) -> linear_selection.Decision:
    return dataclasses.replace(decision, recipe=recipes.RECIPES["bf16"], reason=reports.OWN_CALL)


def _check_some(plan: Sequence[linear_selection.Decision]) -> None:
    """ValueError if the calls of all layers ignore their hooks."""
    if not any(decision.fp8 for decision in plan) and (
        own := [d.path for d in plan if d.reason == reports.OWN_CALL]
    ):
        raise ValueError(
            f"nothing to convert: {linear_selection.listed(own)} multiplies in its own __call__, "
            "without the hook. Call super().__call__, or self.dot_general (nnx.Einsum: "
            "self.einsum_op)."
        )


def _ignores_hook(layer) -> bool:
    """Whether the layer's own __call__ of one input never runs the hook: traced to find out; False
    if it cannot be."""
    kind = _kind(layer)
    if kind is GroupedLinear or type(layer).__call__ is kind.__call__:
        return False
    graph, state = nnx.split(layer)
    ran: list[bool] = []

    def noted(function: Callable) -> Callable:
        def call(*args, **kwargs):
            ran.append(True)
            return function(*args, **kwargs)

        return call

    def call(state, x):
        copy, attribute = nnx.merge(graph, state), _KINDS[kind][0]
        setattr(copy, attribute, nnx.static(noted(getattr(copy, attribute) or lax.dot_general)))
        return jax.tree.leaves(copy(x))

    # an integer, or several; an einsum's operand may have any dims
    dims = np.atleast_1d(getattr(layer, "in_features", ()))
    try:
        jax.eval_shape(call, state, jax.ShapeDtypeStruct((16, *map(int, dims)), jnp.float32))
    except Exception:  # another signature or other shapes: whatever somebody's own call raises
        return False
    return not ran


_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def _check_dtype(name: str, layer) -> None:
    """ValueError for a layer's dtype that no recipe casts from."""
    dtype = layer.dtype or layer.kernel.get_value().dtype
    if dtype not in _DTYPES:
        which = "dtype" if layer.dtype else "param_dtype"
        raise ValueError(
            f"{name}: FP8 is cast from float32, bfloat16 or float16; got "
            f"{which}={jnp.dtype(dtype).name}. Keep parameters in one of these."
        )


def _log(report: reports.Report, name: str) -> None:
    """Log the conversion in a line; warn of products outside linears."""
    see, rank = "fp8ref.jax.flax.report(model)", jax.process_index
    fp8_report.announce(report, _logger, name, warns=report.surprising, see=see, rank=rank)


def _arguments(inputs) -> tuple:
    """The arguments of a call: of a tuple or list its elements, of anything else itself."""
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def report(model, inputs=None) -> reports.Report:
    """What of a model runs in FP8, what does not and why; print it as a table.

    NNX:      any model. ``inputs``, a tuple of arguments of its call (jax.ShapeDtypeStruct will
              do) or the only one, show multiplications, layers that are never called, and products
              without a layer.
    linen:    a converted model, by the inputs of its conversion.
    Raises:   ValueError: a linen module that is not converted, or with inputs.
    """
    if isinstance(model, Converted):
        if inputs is not None:
            raise ValueError(
                "a linen model is reported by the inputs of its conversion; got others. Call "
                "report(model)."
            )
        return model.fp8_conversion.report
    if not isinstance(model, nnx.Module):
        raise ValueError(
            f"report takes an NNX model, or a converted linen model; got {type(model).__name__}. "
            "Convert it first."
        )
    args = None if inputs is None else _arguments(inputs)
    return reports.nnx_report(
        model, args, {name: _dims(name, layer) for name, layer in _linears(model).items()}
    )


def deconvert(model):
    """The model without FP8, with the bits that it had before ``convert``.

    NNX:      every hook that convert put in is removed, with its state, and the layer's own
              function is back; parameters stay as they are now. The model itself changes and is
              returned.
    linen:    the original module, with the fields that the converted one has. Its variables are
              {"params": variables["params"]} and the model's other collections, without
              'fp8_state'.
    Specials: an NNX model without hooks, such as one converted to 'bf16', is returned as it is.
    Raises:   ValueError: a hook that convert did not put in, naming it; a linen module that is not
              converted.
    """
    if isinstance(model, Converted):
        return model.fp8_conversion.original(**_fields(model))
    if not isinstance(model, nnx.Module):
        raise ValueError(
            f"deconvert takes what convert returned; got {type(model).__name__}. Remove a linen "
            "model's own hooks by hand."
        )
    hooks = nnx_hooks.hooks(model)
    layers = {
        id(hook): layer
        for _, layer in nnx.iter_graph(model, graph=True)
        if isinstance(layer, nnx.Module)
        for hook in vars(layer).values()
    }
    for path, hook in hooks.items():
        if not hook.replaces:
            raise ValueError(
                f"{path}: this hook is not convert's; its original is unknown. Remove it by hand."
            )
    for path, hook in hooks.items():
        setattr(layers[id(hook)], path.rpartition(".")[-1], nnx.static(hook.replaces[0]))
    return model


def _linears(model: nnx.Module) -> dict[str, Any]:
    """The layers of an NNX model that take hooks, by path."""
    return {
        ".".join(map(str, path)) or type(model).__name__: layer
        for path, layer in nnx.iter_graph(model, graph=True)
        if isinstance(layer, tuple(_KINDS))
    }


def _dims(name: str, layer) -> tuple[int, int]:
    if isinstance(layer, nnx.Einsum):
        return _einsum_dims(name, layer.einsum_str, layer.kernel_shape)
    if isinstance(layer, nnx.Linear | GroupedLinear):
        return layer.out_features, layer.in_features
    return math.prod(layer.out_features), math.prod(layer.in_features)


def _einsum_dims(name: str, subscripts: str, shape: Sequence[int]) -> tuple[int, int]:
    """N and K of an einsum's kernel: products of its output and contracted letters."""
    operands, _, out = subscripts.replace(" ", "").partition("->")
    x_letters, _, w_letters = operands.partition(",")
    if "." in w_letters or len(w_letters) != len(shape):
        raise ValueError(
            f"{name}: an einsum has a letter for each kernel dim {shape}; got {subscripts!r}."
        )
    sizes = dict(zip(w_letters, shape, strict=True))
    n = [size for letter, size in sizes.items() if letter in out and letter not in x_letters]
    return math.prod(n), math.prod(size for letter, size in sizes.items() if letter not in out)


def _convert_linen(model: nn.Module, choices: _Choices, inputs: Inputs) -> nn.Module:
    """A linen module with hooks in its linears. Its init is traced to record them, as linen names
    layers only when called, and again with hooks, to raise early."""
    if isinstance(model, Converted):
        raise ValueError(
            f"{type(model).__name__} is converted already. Convert the original model once."
        )
    layers, modules = _recorded(model, inputs)
    plan = choices.select({name: dims for name, (_, dims) in layers.items()})
    for decision in plan:
        layer = layers[decision.path][0]
        if decision.fp8 and isinstance(layer, nn.Einsum):
            raise ValueError(
                f"{decision.path}: linen's nn.Einsum has no hook. Use fj.flax.Einsum(..., "
                "recipe=...), or name it in filter_fqns."
            )
        if decision.fp8:
            hooks = [h for h in (layer.dot_general, layer.dot_general_cls) if h is not None]
            _check_free(decision.path, hooks, layer.precision)
    placements = choices.placements([decision.path for decision in plan if decision.fp8])
    hook_of: dict[str, functools.partial | None] = {decision.path: None for decision in plan}
    for path, placement in placements.items():
        recipe = next(decision.recipe for decision in plan if decision.path == path)
        hook_of[path] = linen_hooks.linen_dot_general(
            recipe, multiply=choices.multiply, placement=placement
        )
    fp8_model = converted(model, hook_of)
    # What a call refuses is refused here.
    ran: set[str] = set()

    def note(call, args, kwargs, context):
        if isinstance(context.module, linen_hooks.Hook):
            ran.add(linen_hooks.layer_name(context.module.parent))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jaxpr, variables = jax.make_jaxpr(lambda: _init(fp8_model, inputs), return_shape=True)()
    plan = [_without_hook(d) if d.fp8 and d.path not in ran else d for d in plan]
    _check_some(plan)
    report = reports.linen_report(
        modules,
        variables.get("params", {}),
        {decision.path: decision for decision in plan},
        jaxpr.jaxpr,
    )
    type(fp8_model).fp8_conversion = Conversion(type(model), hook_of, report)
    _log(report, type(model).__name__)
    return fp8_model


def _init(module: nn.Module, inputs: Inputs):
    def array(v):
        return jnp.zeros(v.shape, v.dtype) if isinstance(v, jax.ShapeDtypeStruct) else v

    rngs = jax.random.key(0) if inputs.rngs is None else inputs.rngs
    return module.init(rngs, *jax.tree.map(array, inputs.args))


def _recorded(
    model: nn.Module, inputs: Inputs
) -> tuple[dict[str, tuple[nn.Module, tuple[int, int]]], dict[str, nn.Module]]:
    """The linears that a model's init calls, with N and K, and all modules."""
    layers: dict[str, tuple[nn.Module, tuple[int, int]]] = {}
    modules: dict[str, nn.Module] = {}

    def record(call, args, kwargs, context):
        module = context.module
        name = linen_hooks.layer_name(module)
        modules.setdefault(name, module)
        if _is_linear_call(context):
            layers[name] = module.clone(parent=None), _linen_dims(name, module, *args, **kwargs)
        return call(*args, **kwargs)

    # Shapes are enough to name layers and dims: nothing is computed.
    with nn.intercept_methods(record):
        jax.eval_shape(lambda: _init(model, inputs))
    return layers, modules


def _is_linear_call(context) -> bool:
    """Whether a layer that takes a hook is called; fj.flax.Einsum has its recipe already."""
    layer = context.module
    return (
        context.method_name == "__call__"
        and isinstance(layer, nn.Dense | nn.DenseGeneral | nn.Einsum)
        and not isinstance(layer, linen_hooks.Einsum)
    )


def _linen_dims(name: str, layer: nn.Module, x, *args, **kwargs) -> tuple[int, int]:
    if isinstance(layer, nn.Einsum):
        return _einsum_dims(name, layer.einsum_str or kwargs.get("einsum_str", *args), layer.shape)
    if isinstance(layer, nn.Dense):
        return layer.features, jnp.shape(x)[-1]
    features, axes = (
        (v,) if isinstance(v, int) else tuple(v) for v in (layer.features, layer.axis)
    )
    return math.prod(features), math.prod(jnp.shape(x)[axis] for axis in axes)


def _check_free(name: str, hooks: list, precision) -> None:
    if hooks:
        raise ValueError(
            f"{name} has a hook already, {type(hooks[0]).__name__}. Remove it, or use filter_fqns."
        )
    check_precision(name, precision, ", or name it in filter_fqns")


class Conversion(NamedTuple):
    """Of a converted linen class: the original one, each layer's hook, and the report."""

    original: type
    hook_of: Mapping[str, functools.partial | None]
    report: reports.Report


class Converted:
    """The base of converted linen classes."""

    fp8_conversion: Conversion


def converted(model: nn.Module, hook_of: Mapping[str, Callable | None]) -> nn.Module:
    """A copy of model; its class runs init and apply with hooks."""
    original = type(model)
    members = _members(original, _interceptor(hook_of))
    members |= {"__module__": original.__module__, "__doc__": original.__doc__}
    return type(original.__name__, (original, Converted), members)(**_fields(model))


def _interceptor(hook_of: Mapping[str, Callable | None]) -> Callable:
    """An interceptor that makes a layer's call with its hook."""

    def intercept(call, args, kwargs, context):
        if not _is_linear_call(context):
            return call(*args, **kwargs)
        layer = context.module
        name = linen_hooks.layer_name(layer)
        if name not in hook_of:
            raise ValueError(
                f"{name} is not among the layers that inputs called: {', '.join(hook_of)}. Pass "
                "inputs that call every layer."
            )
        if hook_of[name] is None:
            return call(*args, **kwargs)
        # Modules are frozen, but this copy is bound for this call; it is restored below.
        object.__setattr__(layer, "dot_general_cls", hook_of[name])
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(layer, "dot_general_cls", None)

    return intercept


def _members(original: type, intercept: Callable) -> dict[str, Any]:
    """Methods of a converted class: init and apply intercept calls; others are refused."""
    inside: ContextVar[bool] = ContextVar("fp8ref_jax_flax_inside", default=False)

    def intercepted(name: str):
        def method(self, *args, **kwargs):
            with contexts.setting(inside, True), nn.intercept_methods(intercept):
                return getattr(original, name)(self, *args, **kwargs)

        return method

    def refused(self, *args, **kwargs):
        raise ValueError(
            f"a converted {original.__name__} runs with its own init and apply only; use these."
        )

    def post_init(self):
        original.__post_init__(self)  # type: ignore[attr-defined]
        if isinstance(self.parent, nn.Module):
            raise ValueError(
                f"a converted {original.__name__} is a whole model; got it inside "
                f"{type(self.parent).__name__}. Convert that."
            )
        if isinstance(self.parent, Scope) and not inside.get():  # as by nn.apply
            refused(self)

    return {
        "apply": intercepted("apply"),
        "init_with_output": intercepted("init_with_output"),
        "__post_init__": post_init,
        "bind": refused,
        "tabulate": refused,
    }


def _fields(model: nn.Module) -> dict:
    """A linen module's fields except its parent."""
    return {
        name: getattr(model, name)
        for name, field in model.__dataclass_fields__.items()
        if field.init and name != "parent"
    }
