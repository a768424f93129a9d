"""Convert an existing Flax model, linen or NNX, to FP8; ``selection.linears.select`` picks the
layers (spec R-2, R-3)."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import Scope
from jax import lax

from fp8ref import recipe as recipes
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.flax import linen as linen_hooks
from fp8ref.jax.flax import nnx as nnx_hooks
from fp8ref.jax.flax import report as reports
from fp8ref.jax.flax import unset_scales
from fp8ref.jax.flax.grouped_linear import GroupedLinear, RaggedDot
from fp8ref.jax.linear import linear
from fp8ref.recipe import Recipe
from fp8ref.selection import grouped, routers
from fp8ref.selection import linears as linear_selection
from fp8ref.selection import rules as linear_rules
from fp8ref.selection.rules import Rule
from fp8ref.spec.hardware import Multiply

_logger = logging.getLogger("fp8ref.jax.flax")

Placements = Placement | Mapping[str, Placement] | Callable[[str], Placement | None]
"""What ``convert`` takes for placement."""


def convert(
    model,
    recipe: str | Recipe,
    *,
    filter_fqns: Sequence[str] = (),
    fp8_fqns: Sequence[str] = (),
    inputs: tuple | None = None,
    rngs: Any = None,
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
    have hooks wherever they are
              called. ``inputs``, arguments of its call (jax.ShapeDtypeStruct will do), show which
              those are, traced with ``rngs``. Under delayed scaling its init makes the state:
              {**variables, STATE: converted.init(rngs, *inputs)[STATE]}.
    multiply  simulated hardware of every hook, as in ``linen_dot_general``.
    placement of the linears on a mesh, as in ``linen_dot_general``: one for all of them; a mapping
              of patterns to placements, of which the first one that names a linear is its own; or a
              function of its path. A linear that gets None has none.
    rules     change casts of single operands (R-8), of NNX models.
    Logs:     one line by ``logging``, of logger fp8ref.jax.flax: what is in FP8 and what is not; a
              warning where matrices are outside linears, such as experts'. ``report`` has all.
    Patterns: as everywhere: runs of whole components of a layer's dotted path, or shell patterns
              (R-3).
    Raises:   ValueError: a pattern that names nothing, or a placement's that names no linear in
              FP8; nothing converted; a layer that has a hook
              or a precision already, or that takes no hook (linen's nn.Einsum); a converted linen
              model inside another or bound; in its call, a layer that ``inputs`` did not show.
    """
    recipe = linear.check_recipe(recipe, "convert")
    options = {"filter_fqns": filter_fqns, "fp8_fqns": fp8_fqns}
    if isinstance(model, nnx.Module):
        if inputs is not None or rngs is not None:
            raise ValueError(
                "inputs and rngs are for linen models, which show their layers when they are "
                "called. Leave both out for an NNX model."
            )
        return _convert_nnx(
            model, recipe, options, {"multiply": multiply, "placement": placement}, rules
        )
    if rules:
        raise ValueError(
            f"rules change casts of an NNX model; got a {type(model).__name__}. Leave them out, "
            "or convert to NNX."
        )
    if isinstance(model, nn.Module):
        if inputs is None:
            raise ValueError(
                "a linen model shows its layers when it is called: give arguments of "
                f"{type(model).__name__} as inputs=(x,)."
            )
        return _convert_linen(
            model, recipe, options, inputs, rngs, {"multiply": multiply, "placement": placement}
        )
    raise ValueError(f"convert takes a linen or an NNX module; got {type(model).__name__}.")


def _hook_options(chosen: Sequence[str], hook_options: Mapping) -> dict[str, dict]:
    """For each layer in FP8, the options of its hook: simulated hardware, placement."""
    placement = hook_options["placement"]
    if isinstance(placement, Mapping):
        for pattern in placement:
            if not any(linear_selection.matches(pattern, name) for name in chosen):
                raise ValueError(
                    "every pattern of placement names at least one linear in FP8 (R-3); "
                    f"{pattern!r} names none of: {linear_selection.listed(chosen)}."
                )
        placements = {
            name: next(
                (
                    placed
                    for pattern, placed in placement.items()
                    if linear_selection.matches(pattern, name)
                ),
                None,
            )
            for name in chosen
        }
    else:
        placements = {
            name: placement(name) if callable(placement) else placement for name in chosen
        }
    for name, placed in placements.items():
        if not isinstance(placed, Placement | None):
            raise ValueError(
                f"{name}: a placement is a sharding.Placement or None; got {type(placed).__name__}."
            )
    return {
        name: {"multiply": hook_options["multiply"], "placement": placed}
        for name, placed in placements.items()
    }


def _convert_nnx(
    model: nnx.Module,
    recipe: Recipe,
    options: Mapping,
    hook_options: Mapping,
    rules: Sequence[Rule],
) -> nnx.Module:
    """Put hooks into an NNX model's layers, after all of them were checked."""
    # Called for its check.
    nnx_hooks.hooks(model)  # refuses shared ones
    layers = _linears(model)
    selected = linear_selection.select(
        {name: _dims(name, layer) for name, layer in layers.items()}, recipe, **options
    )
    selected = [_refined(decision, layers[decision.path]) for decision in selected]
    selected = routers.left_out(
        selected, {d.experts for d in selected if d.fp8 and d.experts}, options["fp8_fqns"]
    )
    plan = linear_rules.apply(rules, selected)
    chosen = [(decision, layers[decision.path]) for decision in plan if decision.fp8]
    _check_some(plan)
    for decision, layer in chosen:  # all of them, before the first one changes
        free = {
            nnx.Linear: lax.dot_general,
            nnx.LinearGeneral: None,
            nnx.Einsum: jnp.einsum,
            GroupedLinear: lax.ragged_dot,
        }
        hooks = [getattr(layer, _attribute(layer)), getattr(layer, "dot_general_cls", None)]
        hooks_in_use = [
            hook
            for hook in hooks
            if hook not in (next(v for k, v in free.items() if isinstance(layer, k)), None)
        ]
        _check_free(decision.path, hooks_in_use, getattr(layer, "precision", None))
        _check_dtype(decision.path, layer)
    by_layer = _hook_options([decision.path for decision, _ in chosen], hook_options)
    # refuses what a hook does not take
    new_hooks = [_hook(decision, layer, by_layer[decision.path]) for decision, layer in chosen]
    notice = unset_scales.Model()
    for (_, layer), hook in zip(chosen, new_hooks, strict=True):
        setattr(layer, _attribute(layer), nnx.data(hook))
        unset_scales.models[hook] = notice
    decisions = {decision.path: decision for decision in plan}
    _log(
        reports.nnx_report(
            model, None, {path: decision.shape for path, decision in decisions.items()}, decisions
        ),
        type(model).__name__,
    )
    return model


def _hook(decision: linear_selection.Decision, layer, options: Mapping) -> nnx_hooks.Hook:
    """What takes the place of a layer's own function, which it remembers."""
    attribute, kernel = _attribute(layer), layer.kernel.get_value()
    kind = {"einsum_op": nnx_hooks.EinsumOp, "ragged_dot": RaggedDot}.get(
        attribute, nnx_hooks.DotGeneral
    )
    hook = kind(
        decision.recipe,
        decision.path,
        kernel.shape[: kernel.ndim - reports.kernel_ndim(layer)],
        **options,
    )
    hook.replaces = (getattr(layer, attribute),)
    return hook


def _refined(decision: linear_selection.Decision, layer) -> linear_selection.Decision:
    """A decision with the number of its kernels and the recipe of grouped linears (X-8), if it is
    of experts; without FP8, if the layer's call does not use its hook."""
    if decision.fp8 and _ignores_hook(layer):
        return _without_hook(decision)
    if not isinstance(layer, GroupedLinear):
        return decision
    recipe = grouped.grouped_recipe(decision.recipe).recipe if decision.fp8 else decision.recipe
    return dataclasses.replace(decision, experts=layer.experts, recipe=recipe)


def _without_hook(decision: linear_selection.Decision) -> linear_selection.Decision:
    return dataclasses.replace(decision, recipe=recipes.RECIPES["bf16"], reason=reports.OWN_CALL)


def _check_some(plan: Sequence[linear_selection.Decision]) -> None:
    """ValueError if no layer is left in FP8, because their calls do not use their hooks."""
    if not any(decision.fp8 for decision in plan) and (
        own := [d.path for d in plan if d.reason == reports.OWN_CALL]
    ):
        raise ValueError(
            f"nothing to convert: {linear_selection.listed(own)} multiplies in a __call__ of "
            "its own without the layer's hook. Call super().__call__, or self.dot_general "
            "(nnx.Einsum: self.einsum_op), in it."
        )


def _ignores_hook(layer) -> bool:
    """True if the layer's class has a __call__ of its own that takes one input, as Flax's, and
    never runs the hook: it is traced. A call that cannot be traced so may run it."""
    flax_class = next(kind for kind in type(layer).__mro__ if kind in _OF_FLAX)
    if isinstance(layer, GroupedLinear) or type(layer).__call__ is flax_class.__call__:
        return False
    graph, state = nnx.split(layer)
    ran: list[bool] = []

    def noted(function: Callable) -> Callable:
        def call(*args, **kwargs):
            ran.append(True)
            return function(*args, **kwargs)

        return call

    def call(state, x):
        copy, attribute = nnx.merge(graph, state), _attribute(layer)
        setattr(copy, attribute, nnx.static(noted(getattr(copy, attribute) or lax.dot_general)))
        return jax.tree.leaves(copy(x))

    dims = (
        (layer.in_features,)
        if isinstance(layer, nnx.Linear)
        else layer.in_features
        if isinstance(layer, nnx.LinearGeneral)
        else ()
    )
    try:
        jax.eval_shape(call, state, jax.ShapeDtypeStruct((16, *dims), jnp.float32))
    except Exception:  # another signature or other shapes: whatever somebody's own call raises
        return False
    return not ran


_OF_FLAX = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, GroupedLinear)
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def _check_dtype(name: str, layer) -> None:
    """ValueError if a layer multiplies in a dtype that no recipe casts from."""
    dtype = layer.dtype or layer.kernel.get_value().dtype
    if dtype not in _DTYPES:
        which = "dtype" if layer.dtype else "param_dtype"
        raise ValueError(
            f"{name}: a recipe casts to FP8 from float32, bfloat16 or float16; got "
            f"{which}={jnp.dtype(dtype).name}. Keep parameters in one of these: the recipe "
            "makes the FP8 copies."
        )


def _log(report: reports.Report, name: str) -> None:
    """One line: what a conversion did, a warning where it left out what is no linear."""
    _logger.log(
        logging.WARNING if report.surprising else logging.INFO,
        "convert: %s: %s",
        name,
        report.summary(),
    )


def report(model, inputs: tuple | None = None) -> reports.Report:
    """What of a model runs in FP8, what does not and why; print it as a table.

    NNX:      any model. ``inputs``, arguments of its call (jax.ShapeDtypeStruct will do), show
              multiplications, layers that are never called, and products without a layer.
    linen:    a converted model, by the inputs of its conversion.
    Raises:   ValueError: a linen module that is not converted, or with inputs.
    """
    if isinstance(model, _Converted) and inputs is None:
        return model._report
    if not isinstance(model, nnx.Module):
        raise ValueError(
            "report takes an NNX model, or without inputs a linen model that convert returned; "
            f"got {type(model).__name__}. Convert it first."
        )
    return reports.nnx_report(
        model, inputs, {name: _dims(name, layer) for name, layer in _linears(model).items()}
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
    if isinstance(model, _Converted):
        return model._original(**_fields(model))
    if not isinstance(model, nnx.Module):
        raise ValueError(
            f"deconvert takes what convert returned; got {type(model).__name__}. Write a linen "
            "model's own hooks out by hand."
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
                f"{path}: convert did not put this hook in, so what it replaced is not known. "
                "Remove it by hand."
            )
    for path, hook in hooks.items():
        setattr(layers[id(hook)], path.rpartition(".")[-1], nnx.static(hook.replaces[0]))
    return model


def _linears(model: nnx.Module) -> dict[str, Any]:
    """The layers of an NNX model that take hooks, by their paths."""
    return {
        ".".join(map(str, path)) or type(model).__name__: layer
        for path, layer in nnx.iter_graph(model, graph=True)
        if isinstance(layer, nnx.Linear | nnx.LinearGeneral | nnx.Einsum | GroupedLinear)
    }


def _attribute(layer) -> str:
    """The attribute of an NNX layer that holds its hook."""
    return (
        "einsum_op"
        if isinstance(layer, nnx.Einsum)
        else "ragged_dot"
        if isinstance(layer, GroupedLinear)
        else "dot_general"
    )


def _dims(name: str, layer) -> tuple[int, int]:
    """N and K of an NNX layer's weight."""
    if isinstance(layer, nnx.Einsum):
        return _einsum_dims(name, layer.einsum_str, layer.kernel_shape)
    if isinstance(layer, nnx.Linear | GroupedLinear):
        return layer.out_features, layer.in_features
    return math.prod(layer.out_features), math.prod(layer.in_features)


def _einsum_dims(name: str, subscripts: str, shape: Sequence[int]) -> tuple[int, int]:
    """N and K of an einsum's kernel: the product of its output letters and of its contracted
    ones."""
    operands, _, out = subscripts.replace(" ", "").partition("->")
    x_letters, _, w_letters = operands.partition(",")
    if "." in w_letters or len(w_letters) != len(shape):
        raise ValueError(
            f"{name}: an einsum names every dim of its kernel, of shape {tuple(shape)}; got "
            f"{subscripts!r}. Write them out."
        )
    sizes = dict(zip(w_letters, shape, strict=True))
    return (
        math.prod(
            size for letter, size in sizes.items() if letter in out and letter not in x_letters
        ),
        math.prod(size for letter, size in sizes.items() if letter not in out),
    )


def _convert_linen(
    model: nn.Module, recipe: Recipe, options: Mapping, inputs: tuple, rngs, hook_options: Mapping
) -> nn.Module:
    """A linen module with hooks in its linears.

    A linen module names its layers only when it is called. So its init is traced once to record
    them, and once more with hooks, to raise here what a call would refuse.
    """
    if isinstance(model, _Converted):
        raise ValueError(
            f"{type(model).__name__} is converted already; convert the original model, once."
        )
    rngs = jax.random.key(0) if rngs is None else rngs

    def init(module: nn.Module):
        return module.init(
            rngs,
            *jax.tree.map(
                lambda v: jnp.zeros(v.shape, v.dtype) if isinstance(v, jax.ShapeDtypeStruct) else v,
                inputs,
            ),
        )

    layers: dict[str, tuple[nn.Module, tuple[int, int]]] = {}
    modules: dict[str, nn.Module] = {}

    def record(call, args, kwargs, context):
        modules.setdefault(linen_hooks.layer_name(context.module), context.module)
        if _is_linear_call(context):
            name = linen_hooks.layer_name(context.module)
            layers[name] = (
                context.module.clone(parent=None),
                _linen_dims(name, context.module, *args, **kwargs),
            )
        return call(*args, **kwargs)

    # Shapes are enough to name layers and dims: nothing is computed.
    with nn.intercept_methods(record):
        jax.eval_shape(lambda: init(model))
    plan = linear_selection.select(
        {name: dims for name, (_, dims) in layers.items()}, recipe, **options
    )
    for decision in plan:
        layer = layers[decision.path][0]
        if decision.fp8 and isinstance(layer, nn.Einsum):
            raise ValueError(
                f"{decision.path}: linen's nn.Einsum takes no hook. Write it as "
                "fj.flax.Einsum(..., recipe=...), or name it in filter_fqns."
            )
        if decision.fp8:
            _check_free(
                decision.path,
                [hook for hook in (layer.dot_general, layer.dot_general_cls) if hook is not None],
                layer.precision,
            )
    by_layer = _hook_options([decision.path for decision in plan if decision.fp8], hook_options)
    hooks = {
        d.path: linen_hooks.linen_dot_general(d.recipe, **by_layer[d.path]) if d.fp8 else None
        for d in plan
    }
    converted = _converted(model, hooks)
    # What a call refuses is refused here.
    ran: set[str] = set()

    def note(call, args, kwargs, context):
        if isinstance(context.module, linen_hooks.Fp8DotGeneral):
            ran.add(linen_hooks.layer_name(context.module.parent))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jaxpr, variables = jax.make_jaxpr(lambda: init(converted), return_shape=True)()
    plan = [
        _without_hook(decision) if decision.fp8 and decision.path not in ran else decision
        for decision in plan
    ]
    _check_some(plan)
    layer_recipes = {decision.path: decision.recipe for decision in plan}
    report = reports.linen_report(
        modules,
        variables.get("params", {}),
        {decision.path: decision for decision in plan},
        layer_recipes,
        jaxpr.jaxpr,
    )
    type(converted)._report = report
    _log(report, type(model).__name__)
    return converted


def _is_linear_call(context) -> bool:
    """True if the call is of a layer that takes a hook; fj.flax.Einsum has its recipe already."""
    layer = context.module
    return (
        context.method_name == "__call__"
        and isinstance(layer, nn.Dense | nn.DenseGeneral | nn.Einsum)
        and not isinstance(layer, linen_hooks.Einsum)
    )


def _linen_dims(name: str, layer: nn.Module, x, *args, **kwargs) -> tuple[int, int]:
    """N and K of a linen layer's weight, from its fields and its input."""
    if isinstance(layer, nn.Einsum):
        return _einsum_dims(name, layer.einsum_str or kwargs.get("einsum_str", *args), layer.shape)
    if isinstance(layer, nn.Dense):
        return layer.features, jnp.shape(x)[-1]
    features, axes = (
        (v,) if isinstance(v, int) else tuple(v) for v in (layer.features, layer.axis)
    )
    return math.prod(features), math.prod(jnp.shape(x)[axis] for axis in axes)


def _check_free(name: str, hooks: list, precision) -> None:
    """ValueError if a layer has a hook or a precision already."""
    if hooks:
        raise ValueError(
            f"{name} has a hook already, of {type(hooks[0]).__name__}: a layer is converted "
            "once. Name it in filter_fqns, or remove its hook."
        )
    if precision is not None:
        raise ValueError(
            f"{name}: a recipe says how its GEMMs accumulate; got precision={precision!r}. "
            "Leave it out, or name the layer in filter_fqns."
        )


class _Converted:
    """The mark of a converted linen module's class, which knows the original one."""

    _original: type
    _report: reports.Report


def _converted(model: nn.Module, hooks: Mapping[str, Callable | None]) -> nn.Module:
    """A copy of model whose class runs init and apply with hooks in its linears."""

    def intercept(call, args, kwargs, context):
        if not _is_linear_call(context):
            return call(*args, **kwargs)
        layer = context.module
        name = linen_hooks.layer_name(layer)
        if name not in hooks:
            raise ValueError(
                f"{name} is not among the layers that convert's inputs called: "
                f"{', '.join(hooks)}. Give inputs that call every layer."
            )
        if hooks[name] is None:
            return call(*args, **kwargs)
        # Modules are frozen, but this is the copy that is bound for this call; it is restored
        # below.
        object.__setattr__(layer, "dot_general_cls", hooks[name])
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(layer, "dot_general_cls", None)

    original = type(model)

    inside: ContextVar[bool] = ContextVar("fp8ref_jax_flax_inside", default=False)

    def intercepted(name: str):
        def method(self, *args, **kwargs):
            token = inside.set(True)
            try:
                with nn.intercept_methods(intercept):
                    return getattr(original, name)(self, *args, **kwargs)
            finally:
                inside.reset(token)

        return method

    def refused(self, *args, **kwargs):
        raise ValueError(
            f"a converted {original.__name__} runs by its own init and apply; elsewhere its "
            "layers would have no hooks. Use these."
        )

    def post_init(self):
        original.__post_init__(self)
        if isinstance(self.parent, nn.Module):
            raise ValueError(
                f"a converted {original.__name__} is a whole model; got it inside "
                f"{type(self.parent).__name__}. Convert that."
            )
        if isinstance(self.parent, Scope) and not inside.get():  # as by nn.apply
            refused(self)

    members = {
        "apply": intercepted("apply"),
        "init_with_output": intercepted("init_with_output"),
        "__post_init__": post_init,
    }
    members |= {"bind": refused, "tabulate": refused, "_original": original}
    cls = type(
        original.__name__,
        (original, _Converted),
        {**members, "__module__": original.__module__, "__doc__": original.__doc__},
    )
    return cls(**_fields(model))


def _fields(model: nn.Module) -> dict:
    """The fields of a linen module, other than its parent."""
    return {
        name: getattr(model, name)
        for name, field in model.__dataclass_fields__.items()
        if field.init and name != "parent"
    }
