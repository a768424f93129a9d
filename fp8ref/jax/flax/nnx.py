"""Hooks for Flax NNX: a module in each layer, its state in Variables of type ``Fp8State``."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import errors, nnx
from jax import Array

from fp8ref.jax import delayed
from fp8ref.jax.distributed import explicit_sharding
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.flax import amax_observations, unset_scales
from fp8ref.jax.gemm import hardware
from fp8ref.jax.linear import contraction, linear
from fp8ref.jax.linear.contraction import Contraction
from fp8ref.recipe import RECIPES, Recipe
from fp8ref.spec.hardware import Multiply


class Fp8State(nnx.Variable):
    """A hook's state, {role: DelayedState}; nothing differentiates or optimizes it."""


class Seen(Fp8State):
    """The amax observations of a hook, there only while ``value_and_grad`` runs.

    A filter of Fp8State takes it too, so that nnx.StateAxes stacks both or none.
    """


class Hook(nnx.Module):
    """The hook of one layer: its recipe; its placement and its simulated hardware, or None; under
    delayed scaling its state.

    replaces  (the function that ``convert`` put it in place of,), or empty.
    shared    None, or the Variable of the state of its input, {"input": DelayedState}, which other
              hooks have too (``share_inputs``); ``state`` then lacks it.
    """

    def __init__(
        self,
        recipe: str | Recipe,
        name: str,
        stack: tuple[int, ...] = (),
        multiply: Multiply | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.recipe = linear.check_recipe(recipe, name)
        self.name = name
        self.multiply = multiply
        self.placement = placement
        self.replaces: tuple = ()
        self.state = nnx.data(
            Fp8State(delayed.init(self.recipe, stack)) if delayed.keeps_state(self.recipe) else None
        )
        self.shared = nnx.data(None)
        self.seen = nnx.data(None)

    def roles(self) -> dict:
        """The state of each role."""
        shared = {} if self.shared is None else self.shared.get_value()
        return {**self.state.get_value(), **shared}

    def keep(self, roles: delayed.State) -> None:
        """Set the state of each role."""
        for variable in (self.state, self.shared):
            if variable is not None:
                variable.set_value({role: roles[role] for role in variable.get_value()})

    def share(self, first: "Hook") -> None:
        """Share the state of the input with another hook, as it has it."""
        roles = first.roles()
        if first.shared is None:
            first.shared = Fp8State({"input": roles.pop("input")})
            first.state.set_value(roles)
        self.shared = first.shared
        self.state.set_value({k: v for k, v in self.state.get_value().items() if k != "input"})

    def _contract(self, use: Callable, precision, out_sharding) -> Array:
        amax_observations.check_precision(self.name, precision)
        placement = explicit_sharding.joined(self.placement, out_sharding)
        use = functools.partial(use, recipe=self.recipe, placement=placement, name=self.name)
        with hardware.simulating(self.multiply):
            return self._threaded(use)

    def _threaded(self, use: functools.partial) -> Array:
        """The product, with the hook's state if any, and its observations."""
        if self.state is None:
            if amax_observations.calibrating():
                return self._in_high_precision(use)
            return use()[0]
        state = self.roles()
        if stack := max(jnp.shape(role_state.stored) for role_state in state.values()):
            raise ValueError(
                f"{self.name}: a layer has one state; got a stack of {list(stack)} layers. Name "
                f"fj.flax.Fp8State: nnx.StateAxes({{(nnx.Param, fj.flax.Fp8State): 0, ...: None}})."
            )
        if self.seen is None:
            remedy = (
                "Give value_and_grad all models of the loss as its first argument, "
                "value_and_grad(loss_fn)((model, other), ...), and keep hooks as attributes of "
                "their layers."
            )
            seen = amax_observations.unobserved(self.recipe, self.name, remedy)
            y = use(state=state, seen=seen)[0]
            evaluated = unset_scales.notice(
                state, self.name, lambda: unset_scales.models.get(self, Hook)
            )
            return amax_observations.warned(y, self.recipe, self.name, evaluated)
        if amax_observations.calibrating():
            self.seen.set_value(amax_observations.observed(self.seen.get_value(), use.args))
            return self._in_high_precision(use)
        y, after = use(state=state, seen=self.seen.get_value())
        try:
            # NNX refuses to change a Variable of another trace: the layer was closed over, and its
            # observation cannot leave.
            self.seen.set_value(after)
        except errors.TraceContextError as error:
            raise ValueError(
                f"{self.name}: observations cannot leave a transformation that closes over the "
                "layer. Use nnx.scan, nnx.remat and the like, with the layer as an argument."
            ) from error
        if observers := amax_observations.observers():
            observers.names.add(self.name)
        return y

    def _in_high_precision(self, use: Callable) -> Array:
        return use(recipe=RECIPES["bf16"])[0]


class DotGeneral(Hook):
    """``lax.dot_general`` of an input and a weight by a recipe, as a hook of one NNX layer."""

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
        return self._contract(use, precision, out_sharding)


class EinsumOp(Hook):
    """``jnp.einsum`` of an input and a weight by a recipe, as a hook of one nnx.Einsum."""

    def __call__(
        self, subscripts, x, w, *, precision=None, preferred_element_type=None, out_sharding=None
    ) -> Array:
        dims = Contraction(subscripts, preferred_element_type)
        use = functools.partial(contraction.einsum, dims, x, w)
        return self._contract(use, precision, out_sharding)


def nnx_dot_general(
    recipe: str | Recipe,
    *,
    name: str = "dot_general",
    multiply: Multiply | None = None,
    placement: Placement | None = None,
) -> DotGeneral:
    """``dot_general`` of an nnx.Linear or nnx.LinearGeneral: one each, for the layer's state.

    Shapes:   as ``linen_dot_general``, and so are the order, multiply and placement; outputs may
              have the layer's preferred_element_type, and its out_sharding is added.
    Raises:   ValueError, naming the layer (in ``value_and_grad`` by its path): as ``linear.apply``;
              a precision, which is the recipe's. ``value_and_grad``, ``update`` and ``convert``
              refuse one hook in several layers.
    """
    return DotGeneral(recipe, name, multiply=multiply, placement=placement)


def nnx_einsum(
    recipe: str | Recipe,
    *,
    name: str = "einsum",
    multiply: Multiply | None = None,
    placement: Placement | None = None,
) -> EinsumOp:
    """``einsum_op`` of one nnx.Einsum, otherwise as nnx_dot_general; subscripts as
    ``contraction.einsum``."""
    return EinsumOp(recipe, name, multiply=multiply, placement=placement)


def hooks(model: nnx.Module) -> dict[str, Hook]:
    """All hooks of a model, by their dotted paths.

    Raises:   ValueError: a hook that several layers share.
    """
    hooks_by_path: dict[str, Hook] = {}
    owners: dict[int, str] = {}
    # every node once, so that a shared layer owns its hook once
    for path, node in nnx.iter_graph(model, graph=True):
        if not isinstance(node, nnx.Module):
            continue
        for key, hook in vars(node).items():
            if not isinstance(hook, Hook):
                continue
            own = ".".join(map(str, (*path, key)))
            if id(hook) in owners:
                raise ValueError(
                    f"a layer has its own hook; {owners[id(hook)]} and {own} share one. Call "
                    "nnx_dot_general or nnx_einsum for each."
                )
            owners[id(hook)], hooks_by_path[own] = own, hook
    return hooks_by_path


def stateful(model: nnx.Module) -> dict[str, Hook]:
    """Those of ``hooks`` that keep a state."""
    return {path: hook for path, hook in hooks(model).items() if hook.state is not None}


def layer_name(path: str, model: nnx.Module) -> str:
    """The layer that a hook at this path serves."""
    return path.rpartition(".")[0] or type(model).__name__
