"""Hooks for Flax linen: a module inside each layer, with its state in collection 'fp8_state'."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import struct, traverse_util
from jax import Array

from fp8ref.jax import delayed
from fp8ref.jax.distributed import explicit_sharding
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.flax import amax_observations, unset_scales
from fp8ref.jax.flax.amax_observations import SEEN, STATE
from fp8ref.jax.gemm import hardware
from fp8ref.jax.linear import contraction, linear
from fp8ref.jax.linear.contraction import Contraction
from fp8ref.recipe import RECIPES, Recipe, Role
from fp8ref.spec.hardware import Multiply


class LayerState(struct.PyTreeNode):
    """One hook's state, and the recipe it belongs to.

    model   in a loss of several models, the prefix of its keys: '0.' and so on.
    first   the layer beside its own whose state of the input it shares (``share_inputs``), or "".
    """

    roles: dict[Role, delayed.DelayedState | delayed.FlaxState]
    recipe: Recipe = struct.field(pytree_node=False)
    model: str = struct.field(pytree_node=False, default="")
    first: str = struct.field(pytree_node=False, default="")


class Hook(nn.Module):
    """A product of an input and a weight by a recipe, in a linen layer.

    first   as of its ``LayerState``.
    """

    recipe: Recipe
    multiply: Multiply | None = None
    placement: Placement | None = None
    first: str = ""


class Fp8DotGeneral(Hook):
    """``lax.dot_general`` by a recipe."""

    @nn.compact
    def __call__(
        self,
        x,
        w,
        dimension_numbers,
        precision=None,
        preferred_element_type=None,
        *,
        out_sharding=None,
    ) -> Array:
        dims = Contraction(dimension_numbers, preferred_element_type)
        use = functools.partial(contraction.dot_general, x, w, dims)
        return _contract(self, x, use, precision, out_sharding)


class Fp8Einsum(Hook):
    """``jnp.einsum`` by a recipe."""

    @nn.compact
    def __call__(
        self, subscripts, x, w, precision=None, preferred_element_type=None, *, out_sharding=None
    ) -> Array:
        dims = Contraction(subscripts, preferred_element_type)
        use = functools.partial(contraction.einsum, dims, x, w)
        return _contract(self, x, use, precision, out_sharding)


def linen_dot_general(
    recipe: str | Recipe, *, multiply: Multiply | None = None, placement: Placement | None = None
) -> functools.partial[Fp8DotGeneral]:
    """``dot_general_cls`` of nn.Dense, nn.DenseGeneral and their like; one serves many layers.

    Each layer gets its own hook.

    Shapes:   as lax.dot_general; the layer's kernel is the weight, its contracted dims K. Outputs
              have the operands' dtype.
    Order:    Flax promotes x and the kernel to one dtype, which the recipe then sees; the bias is
              added to the rounded output.
    multiply  simulated hardware in place of XLA's FP8 dots, as by ``hardware.simulating``; refuses
              layers with batch dims.
    placement of the linear on a mesh, as in ``linear.apply``; N are the kernel's output dims.
    Raises:   ValueError, naming the layer: as ``linear.apply``; a precision, which is the recipe's;
              under delayed scaling, a collection 'fp8_state' that a transformation does not pass
              on, or observations that would be lost in ``value_and_grad``.
    """
    return functools.partial(
        Fp8DotGeneral,
        recipe=_checked(recipe, "linen_dot_general"),
        multiply=multiply,
        placement=placement,
    )


def linen_einsum(
    recipe: str | Recipe, *, multiply: Multiply | None = None, placement: Placement | None = None
) -> Callable[[], Fp8Einsum]:
    """A hook for einsums, such as attention's: ``qk_attn_weights_einsum_cls`` and
    ``attn_weights_value_einsum_cls`` of nn.MultiHeadDotProductAttention.

    Shapes:   one contraction of two operands, as ``contraction.einsum`` takes it; the second one
              counts as the weight. Else as ``linen_dot_general``.
    Raises:   ValueError: as linen_dot_general; subscripts that are not one contraction.
    """
    return functools.partial(
        Fp8Einsum, recipe=_checked(recipe, "linen_einsum"), multiply=multiply, placement=placement
    )


class Einsum(nn.Einsum):
    """``nn.Einsum`` by a recipe: same fields and parameters, ``recipe`` and, as of
    linen_dot_general, ``multiply`` and ``placement``.

    Shapes:   by einsum_str: one contraction of the input and the kernel, as ``contraction.einsum``
              takes it.
    Raises:   ValueError: as linen_dot_general; subscripts that are not one contraction.
    """

    recipe: str | Recipe = dataclasses.field(kw_only=True)
    multiply: Multiply | None = dataclasses.field(default=None, kw_only=True)
    placement: Placement | None = dataclasses.field(default=None, kw_only=True)

    @nn.compact
    def __call__(self, inputs: Array, einsum_str: str | None = None) -> Array:
        subscripts = nn.merge_param("einsum_str", self.einsum_str, einsum_str)
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias = None
        if self.use_bias:
            shape, broadcast = self._get_bias_shape(subscripts, inputs, kernel)
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        op = Fp8Einsum(_checked(self.recipe, layer_name(self)), self.multiply, self.placement)
        y = op(subscripts, inputs, kernel, self.precision, self.preferred_element_type)
        return y if bias is None else y + bias.reshape(broadcast)


def layer_name(module: nn.Module) -> str:
    """A linen module's dotted path, or its class where it is the whole model."""
    return ".".join(module.path) or type(module).__name__


def linen_states(variables: Mapping) -> dict[tuple[str, ...], LayerState]:
    """The state of every hook, by the path of the hook; that of an input which several share in
    each. ValueError, naming the layer, where the one that has it has no state."""
    flat = traverse_util.flatten_dict(variables.get(STATE, {}))
    states = {path[:-1]: layer for path, layer in flat.items()}

    def whole(path: tuple[str, ...], layer: LayerState) -> LayerState:
        if not layer.first:
            return layer
        first = states.get(first_path(path, layer))
        if first is None:
            raise ValueError(
                f"{'.'.join(path[:-1])}: it shares the state of {layer.first}'s input, of which "
                "these variables have none. Init it by inputs that call every layer."
            )
        return layer.replace(roles={**layer.roles, "input": first.roles["input"]})

    return {path: whole(path, layer) for path, layer in states.items()}


def state_collection(states: Mapping[tuple[str, ...], LayerState]) -> dict:
    """Linen's collection of these states: what several hooks share is in the first one's."""
    own = {
        path: layer.replace(roles=_without_input(layer.roles)) if layer.first else layer
        for path, layer in states.items()
    }
    return collection(own, "state")


def first_path(path: tuple[str, ...], layer: LayerState) -> tuple[str, ...]:
    """The path of the hook that has the state of a hook's input: its own, or another one's."""
    return (*path[:-2], layer.first, path[-1]) if layer.first else path


def _without_input(roles: Mapping) -> dict:
    return {role: state for role, state in roles.items() if role != "input"}


def collection(values_by_path: Mapping[tuple[str, ...], Any], name: str) -> dict:
    """A linen collection with one variable, of this name, for each hook."""
    return traverse_util.unflatten_dict(
        {(*path, name): value for path, value in values_by_path.items()}
    )


def _checked(recipe: str | Recipe, name: str) -> Recipe:
    """The recipe, if this backend runs it and keeps its histories."""
    checked = linear.check_recipe(recipe, name)
    delayed.keeps_state(checked)  # refuses delayed scaling that this backend does not implement
    return checked


def _contract(hook: Hook, x: Array, use: Callable, precision, out_sharding) -> Array:
    """Run ``use``, a contraction of x, with the hook's state; pass observations on in SEEN."""
    recipe = hook.recipe
    layer = hook.parent if isinstance(hook.parent, nn.Module) else hook
    name = ".".join(hook.path[:-1]) or type(layer).__name__
    amax_observations.check_precision(name, precision)
    # init makes parameters, and may do so on one device.
    on_one_device = hook.is_initializing() and jax.typeof(x).sharding.mesh.empty
    placement = explicit_sharding.joined(None if on_one_device else hook.placement, out_sharding)
    use = functools.partial(use, recipe=recipe, placement=placement, name=name)
    with hardware.simulating(hook.multiply):
        return _threaded(hook, x, use, recipe, name)


def _threaded(hook: Hook, x: Array, use: functools.partial, recipe: Recipe, name: str) -> Array:
    """The hook's product, with its state if any, and its observations."""
    if not delayed.keeps_state(recipe):
        return use(recipe=RECIPES["bf16"] if amax_observations.calibrating() else recipe)[0]
    if not hook.has_variable(STATE, "state") and not hook.is_mutable_collection(STATE):
        raise ValueError(
            f"{name}: recipe {recipe.name!r} needs a state in collection {STATE!r}; got none. Pass "
            f"the variables of init or fj.flax.convert to apply; name {STATE!r} and {SEEN!r} next "
            "to 'params' in nn.scan and nn.vmap. Use nn.RNN(cell, variable_broadcast=('params', "
            f"{STATE!r}), variable_carry={SEEN!r})."
        )
    state: LayerState = hook.variable(STATE, "state", functools.partial(_begun, hook)).value
    roles = _shared(hook, state, name)
    if state.recipe != recipe:
        raise ValueError(
            f"{name}: this state is for recipe {state.recipe.name!r}; got recipe {recipe.name!r}."
        )
    # value_and_grad passes SEEN in; apply(mutable=[SEEN]) lets it out, or else the gradient by it.
    observers, path = amax_observations.observers(), state.model + ".".join(hook.path)
    if hook.has_variable(SEEN, "seen") and hook.is_mutable_collection(SEEN):
        seen = hook.variable(SEEN, "seen")
        if amax_observations.calibrating():
            seen.value = amax_observations.observed(seen.value, use.args)
            return use(recipe=RECIPES["bf16"])[0]
        y, seen.value = use(state=roles, seen=seen.value)
        if observers:
            observers.threaded.add(path)
        return y
    if hook.has_variable(SEEN, "seen") and observers:
        passed = hook.get_variable(SEEN, "seen")
        _check_once(passed, observers.given.setdefault(path, []), name)
        if not x.size:  # nothing is observed of no tokens, and so nothing lost
            observers.delivered.add(path)
        return amax_observations.by_gradient(*use(state=roles, seen=passed), path)
    remedy = (
        f"Name {SEEN!r} in variable_axes of nn.scan and nn.vmap, or in variable_carry of an "
        f"nn.scan that shares weights, with apply(..., mutable=[{SEEN!r}]). Give a loss of "
        "several models the variables of all as its first argument: value_and_grad(loss_fn)((a, "
        "b), ...)."
    )
    y = use(state=roles, seen=amax_observations.unobserved(recipe, name, remedy))[0]
    evaluated = None
    if not hook.is_initializing():
        evaluated = unset_scales.notice(roles, name, lambda: _first_history(hook))
    return amax_observations.warned(y, recipe, name, evaluated)


def _begun(hook: Hook) -> LayerState:
    roles = delayed.init(hook.recipe)
    roles = _without_input(roles) if hook.first else roles
    return LayerState(roles=roles, recipe=hook.recipe, first=hook.first)


def _shared(hook: Hook, state: LayerState, name: str) -> Mapping:
    """The states of a hook's roles; ValueError, naming the layer, if it cannot read one of them."""
    if not hook.first:
        return state.roles
    assert hook.scope is not None
    assert hook.scope.parent is not None
    beside = hook.scope.parent.parent
    states = {} if beside is None else beside.variables().get(STATE, {})
    shared = states.get(hook.first, {}).get(hook.name, {}).get("state")
    if shared is None and hook.is_initializing():  # all begin alike
        return delayed.init(hook.recipe)
    if shared is None:
        raise ValueError(
            f"{name}: it shares the state of {hook.first}'s input, but sees no {hook.first} beside "
            "it. Transform the module that has both, or leave it out of share_inputs."
        )
    return {**state.roles, "input": shared.roles["input"]}


def _first_history(hook: nn.Module) -> Any:
    """An array that stands for a model: all layers' states have it, and updates change it."""
    return next(
        leaf for leaf in jax.tree.leaves(hook.scope.root.variables()[STATE]) if jax.numpy.ndim(leaf)
    )


def _check_once(seen: delayed.Seen, before: list, name: str) -> None:
    """ValueError if the layer merged into these observations before: gradients would add up."""
    (first, *_) = jax.tree.leaves(seen)
    if any(first is other for other in before):
        raise ValueError(
            f"{name}: a layer that runs twice needs collection {SEEN!r} to be mutable. Use "
            f"apply(..., mutable=[{SEEN!r}]), and return (loss, updated); name {SEEN!r} in "
            "variable_carry of an nn.scan that shares weights."
        )
    before.append(first)
