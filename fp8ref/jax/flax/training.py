"""Train a Flax model under delayed scaling: ``value_and_grad`` with observations, ``update`` of the
state (spec H-9)."""

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
from flax import nnx, traverse_util

from fp8ref.jax import delayed
from fp8ref.jax.flax import amax_observations
from fp8ref.jax.flax.amax_observations import SEEN, STATE, Observed
from fp8ref.jax.flax.linen import collection, linen_states
from fp8ref.jax.flax.nnx import Fp8State, Hook, Seen, hooks, layer_name

Model: TypeAlias = nnx.Module | Mapping
"""An NNX model, or the variables of a linen model."""


def value_and_grad(loss_fn: Callable, *, has_aux: bool = False, wrt=nnx.Param, update: bool = False) -> Callable:
    """A function of loss_fn's arguments, by position or name after the first, that returns (value, grads, seen): its value, its
    gradient, and what the step observed.

    NNX:      loss_fn(model, *args) -> loss, or (loss, aux) under has_aux; grads is the nnx.State of
              the model's variables that ``wrt`` filters, as of nnx.grad.
    linen:    loss_fn(variables, *args) -> loss, or (loss, aux) under has_aux; grads is of
              variables["params"]. A layer that runs twice, or in an nn.scan that shares weights,
              hands observations on, and so does one by whose output the loss has no gradient:
              then (loss, updated), or (loss, (updated, aux)), where updated is what
              apply(..., mutable=[SEEN]) returned. A second apply in one loss takes
              {**variables, **updated} of the first.
    Returns:  value: loss, or (loss, aux); seen: an Observed, for ``merge`` and ``update``. Recipes
              without a state observe nothing, and neither does a model without FP8, such as one
              converted to 'bf16'.
    Transformations: jit, remat and vmap around the layers or the loss; scan over stacked layers,
                     their state and observations stacked
              too. In linen an nn.scan that shares weights carries SEEN, in variable_carry: refused
              by name otherwise.
    update    True: the states take the step's observations at once. Of an NNX model what is returned
              is (value, grads), as of nnx.value_and_grad; of a linen model (value, grads, variables),
              with the states after the step. It is for one call a step.
    Raises:   ValueError, at trace time: naming the layer, observations that would be lost, or a
              shared hook.
    """

    def run(model: Model, *args, **kwargs):
        if isinstance(model, nnx.Module):
            value, grads, seen = _of_nnx(loss_fn, model, args, kwargs, has_aux, wrt)
            if not update:
                return value, grads, seen
            _advance(model, seen)
            return value, grads
        if wrt is not nnx.Param:
            raise ValueError(
                f"wrt filters the variables of an NNX model; got wrt={wrt!r} for linen, whose "
                "gradient is of variables['params']. Leave it out."
            )
        value, grads, seen = _of_linen(functools.partial(loss_fn, **kwargs), _variables(model), args, has_aux)
        return (value, grads, _of_variables(model, seen)) if update else (value, grads, seen)

    return run


def update(model: Model, seen: Observed):
    """The state after an optimizer step, from the step's observations: call it once a step, inside
    jit or not.

    Returns:  linen: variables with a new 'fp8_state'; NNX: None, as the model itself changes.
    Specials: the state of a layer stays if it was not used, or its amax is not finite (H-5).
    Raises:   ValueError, at trace time: seen that is not of ``value_and_grad``; naming the layer,
              observations that are missing.
    """
    amax_observations.check(seen)
    return _advance(model, seen) if isinstance(model, nnx.Module) else _of_variables(_variables(model), seen)


def _of_variables(model: Mapping, seen: Observed) -> dict:
    """``update`` of a linen model's variables."""
    layers = linen_states(model)
    amax_observations.same_layers({_key(path): layer for path, layer in layers.items()}, seen.layers, "update")
    after = {
        path: layer.replace(roles=delayed.update(layer.roles, seen.layers[_key(path)], recipe=layer.recipe))
        for path, layer in layers.items()
    }
    return {**model, STATE: collection(after, "state")} if after else dict(model)


def unseen(model: Model) -> Observed:
    """Empty observations, to merge others into: the first carry of a scan over microbatches.

    Raises:   ValueError: neither an NNX model nor a linen model's variables.
    """
    if isinstance(model, nnx.Module):
        return Observed(layers={path: _unseen_by(hook) for path, hook in hooks(model).items() if hook.state is not None})
    return Observed(layers={_key(path): _unseen(layer.recipe, layer.roles) for path, layer in linen_states(_variables(model)).items()})


def _advance(model: nnx.Module, seen: Observed) -> None:
    """``update`` of an NNX model."""
    of_hooks = {path: hook for path, hook in hooks(model).items() if hook.state is not None}
    amax_observations.same_layers(of_hooks, seen.layers, "update")
    for path, hook in of_hooks.items():
        hook.state.set_value(delayed.update(hook.state.get_value(), seen.layers[path], recipe=hook.recipe))


def _of_nnx(loss_fn: Callable, model: nnx.Module, args: tuple, kwargs: dict, has_aux: bool, wrt):
    """(value, grads, seen) of an NNX model.

    Each hook with a state gets a ``Seen`` variable for the call. Its forward value holds
    observations of input and weight, its gradient those of grad_output.
    """
    every = hooks(model)
    names = {path: hook.name for path, hook in every.items()}
    stateful = {path: hook for path, hook in every.items() if hook.state is not None}
    try:
        for path, hook in every.items():
            hook.name = layer_name(path, model)
        for hook in stateful.values():
            hook.seen = nnx.data(Seen(_unseen_by(hook)))
        with amax_observations.observing() as observers:
            watched = _watched(loss_fn, observers.names)
            differentiated = nnx.DiffState(0, nnx.Any(nnx.All(wrt, nnx.Not(Fp8State)), Seen))
            # also where Flax is set to treat modules as trees (nnx.set_graph_mode, set_graph_updates)
            as_graph: dict = {"argnums": differentiated, "has_aux": has_aux, "graph": True, "graph_updates": True}
            value, both = nnx.value_and_grad(watched, **as_graph)(model, *args, **kwargs)
        forward = {path: hook.seen.get_value() for path, hook in stateful.items()}
    finally:
        for path, hook in every.items():
            hook.name, hook.seen = names[path], nnx.data(None)
    # The gradient by Seen variables carries the observations of grad_output.
    backward, grads = nnx.split_state(both, Seen, ...)
    of_path = {".".join(map(str, path[:-1])): variable.get_value() for path, variable in nnx.to_flat_state(backward)}
    return value, grads, Observed(layers={path: delayed.merge(forward[path], of_path[path]) for path in forward})


def _watched(loss_fn: Callable, observers: set[str]) -> Callable:
    """loss_fn; ValueError, naming the layer, if a transformation dropped its observations.

    nnx.scan drops changes to a layer that it broadcasts.
    """

    @functools.wraps(loss_fn)  # nnx.value_and_grad reads from its signature where arguments by name go
    def watched(model: nnx.Module, *args):
        # A layer that ran but whose Seen is unchanged was a copy: its changes were dropped.
        before = {path: hook.seen.get_value() for path, hook in hooks(model).items() if hook.seen is not None}
        out = loss_fn(model, *args)
        for path, hook in hooks(model).items():
            if path in before and hook.name in observers and all(v is before[path][role] for role, v in hook.seen.get_value().items()):
                raise ValueError(
                    f"{hook.name}: the observations of this layer are lost in a transformation "
                    "that shares it and returns no changes, such as nnx.scan with the layer "
                    "under in_axes=None. Let nnx.scan carry the layer (nnx.Carry)."
                )
        return out

    return watched


def _of_linen(loss_fn: Callable, variables: Mapping, args: tuple, has_aux: bool):
    """(value, grads, seen) of a linen model; collection SEEN is an argument, as ``_of_nnx``'s Seen
    variables are."""
    rest = {name: collection for name, collection in variables.items() if name not in ("params", SEEN)}
    start, paths = unseen(variables).layers, linen_states(variables)

    def of(params, seen):
        given = collection({path: seen[_key(path)] for path in paths}, "seen")  # without a state empty: apply returns it if it is mutable
        loss, updated, aux = _parts(loss_fn({"params": params, **rest, SEEN: given}, *args), has_aux)
        seen = _linen_seen(updated, start, observers.threaded)
        if not has_aux and (others := [name for name in updated if name != SEEN]):
            raise ValueError(
                f"collections {', '.join(others)} would be lost. Return them as aux, under has_aux=True: (loss, "
                f"{'(updated, updated)' if SEEN in updated else 'updated'})."
            )
        return loss, (seen, aux)

    with amax_observations.observing() as observers:
        try:
            differentiated = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)
            (loss, (forward, aux)), (grads, backward) = differentiated(variables["params"], dict(start))
        except ValueError as error:
            if "broadcasted variable has a data dependency" not in str(error):
                raise
            raise ValueError(
                f"an nn.scan that shares its layers' weights cannot broadcast {SEEN!r}, which every use changes; got it in "
                f"variable_broadcast. Broadcast 'params' and {STATE!r}, and name {SEEN!r} in variable_carry."
            ) from error
        except TypeError as error:
            if "scan body function carry" not in str(error) or SEEN not in str(error):
                raise
            raise ValueError(
                f"an nn.scan that carries {SEEN!r} hands observations from use to use; got an apply that does not let it change. "
                f"Call apply(..., mutable=[{SEEN!r}]), and return (loss, updated)."
            ) from error
    if lost := [path for path in observers.given if path not in observers.delivered | observers.threaded]:
        raise ValueError(
            f"{', '.join(lost)}: observations come out with the gradient, and the loss has none by the output of this layer, which is unused or "
            f"behind stop_gradient or argmax. Call apply(..., mutable=[{SEEN!r}]), and return (loss, updated)."
        )
    # backward has all observations of a layer that leaves SEEN as it is
    seen = Observed(layers={path: delayed.merge(backward[path], *([forward[path]] if path in forward else [])) for path in start})
    return ((loss, aux) if has_aux else loss), grads, seen


def _parts(out, has_aux: bool) -> tuple:
    """(loss, updated, aux) of what a linen loss_fn returned; updated is {} where it returned none."""
    if not has_aux:
        return (*out, None) if isinstance(out, tuple) and len(out) == 2 else (out, {}, None)
    loss, aux = out
    # Another mapping in a pair is the caller's own.
    with_updated = isinstance(aux, tuple) and len(aux) == 2 and isinstance(aux[0], Mapping) and SEEN in aux[0]
    return (loss, *aux) if with_updated else (loss, {}, aux)


def _variables(model) -> Mapping:
    """model, if it is a linen model's variables; ValueError otherwise."""
    if not isinstance(model, Mapping) or "params" not in model:
        got = f"collections {', '.join(model)}" if isinstance(model, Mapping) else type(model).__name__
        raise ValueError(f"the first argument is an NNX model, or a linen model's variables with 'params'; got {got}.")
    return model


def _linen_seen(updated, expected: Mapping, threaded: set[str]) -> Mapping[str, delayed.Seen]:
    """The observations in the collections that a linen loss returned, by path of the hook;
    ValueError if those of a hook that changed them are missing."""
    if not isinstance(updated, Mapping) or (threaded and SEEN not in updated):
        got = f"collections {', '.join(updated)}" if isinstance(updated, Mapping) else type(updated).__name__
        raise ValueError(
            f"{', '.join(expected) or 'value_and_grad'}: a linen loss_fn returns (loss, updated), where updated is what apply(..., mutable="
            f"[{SEEN!r}]) returned, or the loss alone of an apply without it; got {got}."
        )
    seen: dict[str, dict] = {}
    for path, value in traverse_util.flatten_dict(updated.get(SEEN, {})).items():
        seen.setdefault(_key(path[:-2]), {})[path[-1]] = value
    amax_observations.same_layers({path: one for path, one in expected.items() if path in threaded or path in seen}, seen, "value_and_grad")
    return seen


def _key(path: tuple[str, ...]) -> str:
    return ".".join(path)


def _unseen_by(hook: Hook) -> delayed.Seen:
    return _unseen(hook.recipe, hook.state.get_value())


def _unseen(recipe, roles: Mapping) -> delayed.Seen:
    """Empty observations of the roles that have a state, of the state's shape."""
    return {role: blank for role, of_role in roles.items() for blank in [delayed.unseen(recipe, of_role.stored.shape)[role]]}
