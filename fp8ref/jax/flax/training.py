"""Train Flax models by delayed scaling: ``value_and_grad`` observes, ``update`` follows (H-9)."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import jax
from flax import nnx, traverse_util

from fp8ref.jax import delayed
from fp8ref.jax.flax import amax_observations
from fp8ref.jax.flax.amax_observations import SEEN, STATE, Observed
from fp8ref.jax.flax.linen import LayerState, collection, first_path, linen_states, state_collection
from fp8ref.jax.flax.nnx import Fp8State, Hook, Seen, hooks, layer_name, stateful
from fp8ref.recipe import Recipe

Model: TypeAlias = nnx.Module | Mapping | Sequence["Model"]
"""An NNX model, the variables of a linen model, or a tuple or list of models of one kind."""


def value_and_grad(
    loss_fn: Callable, *, has_aux: bool = False, wrt=nnx.Param, update: bool = False
) -> Callable:
    """A function of loss_fn's arguments, by position or name after the first, that returns (value,
    grads, seen): its value, its gradient, and what the step observed.

    NNX:      loss_fn(model, *args) -> loss, or (loss, aux) under has_aux; grads is the nnx.State of
              the model's variables that ``wrt`` filters, as of nnx.grad.
    linen:    loss_fn(variables, *args) -> loss, or (loss, aux) under has_aux; grads is of
              variables["params"]. A layer that runs twice, or in an nn.scan that shares weights,
              hands observations on, and so does one by whose output the loss has no gradient:
              then (loss, updated), or (loss, (updated, aux)), where updated is what
              apply(..., mutable=[SEEN]) returned. A second apply in one loss takes
              {**variables, **updated} of the first.
    Models:   a loss of several models, such as a GAN's, has a tuple or list of them as its first
              argument; grads is a tuple or list too, and so is linen's updated. All observe, a
              teacher too.
    wrt       a filter of variables, or nnx.DiffState(0, filter), as the model is argument 0.
    Returns:  value: loss, or (loss, aux); seen: an Observed, for ``merge`` and ``update``. Recipes
              without a state observe nothing, and neither does a model without FP8, such as one
              converted to 'bf16'.
    Transformations: jit, remat and vmap around the layers or the loss; scan over stacked layers,
                     their state and observations stacked
              too. In linen an nn.scan that shares weights carries SEEN, in variable_carry: refused
              by name otherwise.
    update    True: the states take the step's observations at once. Of an NNX model what is
              returned is (value, grads), as of nnx.value_and_grad; of a linen model (value, grads,
              variables), with the states after the step. It is for one call a step.
    Raises:   ValueError, at trace time: naming the layer, observations that would be lost, or a
              shared hook.
    """

    variables = _checked_filter(wrt)

    def run(model: Model, *args, **kwargs):
        is_nnx = _is_nnx(model)
        if is_nnx:
            results = _nnx_value_and_grad(loss_fn, model, args, kwargs, has_aux, variables)
        elif wrt is not nnx.Param:
            raise ValueError(
                f"wrt filters an NNX model's variables; got wrt={wrt!r} for linen, whose gradient "
                "is of variables['params']. Leave it out."
            )
        else:
            loss = functools.partial(loss_fn, **kwargs)
            results = _linen_value_and_grad(loss, model, args, has_aux)
        if not update:
            return results
        value, grads, seen = results
        after = (_advance if is_nnx else _updated_variables)(model, seen)
        return (value, grads) if is_nnx else (value, grads, after)

    return run


def _checked_filter(wrt):
    """The filter in ``wrt``; ValueError for anything else, or another argument's filter."""
    if isinstance(wrt, nnx.DiffState):
        if wrt.argnum != 0:
            raise ValueError(
                f"value_and_grad differentiates its first argument, 0; got wrt={wrt!r}. Pass "
                "several models as a tuple of them."
            )
        wrt = wrt.filter
    try:
        nnx.filterlib.to_predicate(wrt)
    except (TypeError, ValueError) as error:  # ValueError: Flax's message itself fails
        raise ValueError(
            f"wrt is a filter such as nnx.Param or nnx.DiffState(0, filter); got {wrt!r}."
        ) from error
    return wrt


def _is_model(value) -> bool:
    return isinstance(value, nnx.Module | Mapping)


def _is_nnx(model: Model) -> bool:
    """True for NNX, False for linen; ValueError for other models or both kinds."""
    models = [_checked_model(one) for one in jax.tree.leaves(model, is_leaf=_is_model)]
    kinds = {isinstance(one, nnx.Module) for one in models}
    if len(kinds) != 1:
        got = "none" if not kinds else "NNX models and linen variables together"
        raise ValueError(
            f"models of one loss are all of NNX, or all of linen; got {got}. Use nnx.bridge."
        )
    return kinds.pop()


def _checked_model(model) -> nnx.Module | Mapping:
    if not (isinstance(model, nnx.Module) or (isinstance(model, Mapping) and "params" in model)):
        got = type(model).__name__
        if isinstance(model, Mapping):
            got = f"collections {', '.join(map(str, model))}"
        raise ValueError(
            "the first argument is an NNX model, linen variables with 'params', or a tuple or list "
            f"of these; got {got}."
        )
    return model


def _by_prefix(tree, is_leaf: Callable[[Any], bool]) -> dict[str, Any]:
    """Leaves by model: key '' for one, '0.' and so on for a tuple or list."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {
        f"{jax.tree_util.keystr(path, simple=True, separator='.')}.".removeprefix("."): leaf
        for path, leaf in leaves
    }


def _like(model: Model, leaves: Sequence) -> Any:
    return jax.tree.unflatten(jax.tree.structure(model, is_leaf=_is_model), leaves)


def _states(model: Model) -> dict[str, LayerState]:
    """The state of every hook of linen models, by observation key."""
    models = _by_prefix(model, _is_model)
    return {
        prefix + _key(path): layer
        for prefix, variables in models.items()
        for path, layer in linen_states(variables).items()
    }


def update(model: Model, seen: Observed):
    """The state after an optimizer step, from its observations: call it once, in jit or not.

    model     or the tuple or list that ``value_and_grad`` got.
    Returns:  linen: variables with a new 'fp8_state'; NNX: None, as the model itself changes.
    Specials: the state of a layer stays if it was not used, or its amax is not finite (H-5).
    Raises:   ValueError, at trace time: seen that is not of ``value_and_grad``; naming the layer,
              observations that are missing.
    """
    amax_observations.check(seen)
    return _advance(model, seen) if _is_nnx(model) else _updated_variables(model, seen)


def _updated_variables(model: Model, seen: Observed):
    """``update`` for the variables of linen models."""
    amax_observations.same_layers(_states(model), seen.layers, "update")

    def after(prefix: str, variables: Mapping) -> dict:
        states = linen_states(variables)
        observed = _by_input(
            {path: seen.layers[prefix + _key(path)] for path in states},
            {path: first_path(path, layer) for path, layer in states.items()},
        )
        layers = {
            path: layer.replace(
                roles=delayed.update(layer.roles, observed[path], recipe=layer.recipe)
            )
            for path, layer in states.items()
        }
        if layers:
            return {**variables, STATE: state_collection(layers)}
        return dict(variables)

    return _like(
        model, [after(prefix, tree) for prefix, tree in _by_prefix(model, _is_model).items()]
    )


def unseen(model: Model) -> Observed:
    """Empty observations, to merge others into: the first carry of a scan over microbatches.

    Raises:   ValueError: neither an NNX model nor a linen model's variables.
    """
    if _is_nnx(model):
        return Observed(layers={path: _unseen_by(hook) for path, hook in stateful(model).items()})
    return Observed(
        layers={key: _unseen(layer.recipe, layer.roles) for key, layer in _states(model).items()}
    )


def unset_layers(model: Model) -> list[str]:
    """The layers whose scales no update, calibration or checkpoint has set: ask it before an
    evaluation under jit, which cannot warn. Raises as ``unseen``.
    """
    if _is_nnx(model):
        layers = stateful(model).items()
        return [layer_name(path, model) for path, hook in layers if delayed.unset(hook.roles())]
    return [
        key.rpartition(".")[0] or key
        for key, layer in _states(model).items()
        if delayed.unset(layer.roles)
    ]


def _advance(model: Model, seen: Observed) -> None:
    """``update`` for an NNX model."""
    layers = stateful(model)
    amax_observations.same_layers(layers, seen.layers, "update")
    inputs = {path: hook if hook.shared is None else hook.shared for path, hook in layers.items()}
    observed = _by_input(seen.layers, {path: id(state) for path, state in inputs.items()})
    after = {  # of all, before the first one changes a state that others share
        path: delayed.update(hook.roles(), observed[path], recipe=hook.recipe)
        for path, hook in layers.items()
    }
    for path, hook in layers.items():
        hook.keep(after[path])


def _by_input(layers: Mapping, inputs: Mapping[Any, Hashable]) -> dict[Any, delayed.Seen]:
    """Observations by path; those of an input merged over all layers that share its state (H-4).

    inputs   what stands for the state of each layer's input.
    """
    sharing: dict[Hashable, list] = {}
    for path, seen in layers.items():
        inputs_seen = {role: observed for role, observed in seen.items() if role == "input"}
        sharing.setdefault(inputs[path], []).append(inputs_seen)
    return {
        path: {**seen, **delayed.merge(*sharing[inputs[path]])} for path, seen in layers.items()
    }


def _nnx_value_and_grad(
    loss_fn: Callable, model: Model, args: tuple, kwargs: dict, has_aux: bool, wrt
):
    """(value, grads, seen) of NNX models. Each hook's ``Seen`` variable holds observations of input
    and weight; its gradient those of grad_output."""
    every = hooks(model)
    names = {path: hook.name for path, hook in every.items()}
    keeping = {path: hook for path, hook in every.items() if hook.state is not None}
    try:
        for path, hook in every.items():
            hook.name = layer_name(path, model)
        for hook in keeping.values():
            hook.seen = nnx.data(Seen(_unseen_by(hook)))
        with amax_observations.observing() as observers:
            watched = _watched(loss_fn, observers.names)
            differentiated = nnx.DiffState(0, nnx.Any(nnx.All(wrt, nnx.Not(Fp8State)), Seen))
            # graph: also where Flax treats modules as trees (nnx.set_graph_mode, set_graph_updates)
            differentiate = nnx.value_and_grad(
                watched, argnums=differentiated, has_aux=has_aux, graph=True, graph_updates=True
            )
            value, both = differentiate(model, *args, **kwargs)
        forward = {path: hook.seen.get_value() for path, hook in keeping.items()}
    finally:
        for path, hook in every.items():
            hook.name, hook.seen = names[path], nnx.data(None)
    # The gradient by Seen variables carries the observations of grad_output.
    states = _by_prefix(both, lambda value: isinstance(value, nnx.State))
    split = {prefix: nnx.split_state(state, Seen, ...) for prefix, state in states.items()}
    later = {
        prefix + ".".join(map(str, path[:-1])): variable.get_value()
        for prefix, (backward, _) in split.items()
        for path, variable in nnx.to_flat_state(backward)
    }
    grads = _like(model, [rest for _, rest in split.values()])
    layers = {path: delayed.merge(seen, later[path]) for path, seen in forward.items()}
    return value, grads, Observed(layers=layers)


def _watched(loss_fn: Callable, observers: set[str]) -> Callable:
    """loss_fn; ValueError if a transformation dropped a layer's observations, as nnx.scan does for
    layers that it broadcasts."""

    # nnx.value_and_grad reads from the signature where arguments by name go
    @functools.wraps(loss_fn)
    def watched(model: Model, *args):
        # A layer that ran but whose Seen is unchanged was a copy: its changes were dropped.
        before = {
            path: hook.seen.get_value()
            for path, hook in hooks(model).items()
            if hook.seen is not None
        }
        out = loss_fn(model, *args)
        for path, hook in hooks(model).items():
            if (
                path in before
                and hook.name in observers
                and all(v is before[path][role] for role, v in hook.seen.get_value().items())
            ):
                raise ValueError(
                    f"{hook.name}: observations are lost in a transformation that shares the "
                    "layer, such as nnx.scan with it under in_axes=None. Use nnx.Carry for the "
                    "layer."
                )
        return out

    return watched


def _linen_value_and_grad(loss_fn: Callable, model: Model, args: tuple, has_aux: bool):
    """(value, grads, seen) of linen models; SEEN is an argument, as in ``_nnx_value_and_grad``."""
    models, start = _by_prefix(model, _is_model), unseen(model).layers

    def variables(prefix: str, params, seen) -> dict:
        """One model's variables in the loss.

        Its states say whose they are, for the keys of observations.
        """
        states = {
            path: layer.replace(model=prefix)
            for path, layer in linen_states(models[prefix]).items()
        }
        # without a state empty: apply returns it if it is mutable
        observed = {path: seen[prefix + _key(path)] for path in states}
        return {
            **models[prefix],
            **({STATE: state_collection(states)} if states else {}),
            "params": params,
            SEEN: collection(observed, "seen"),
        }

    def of(params, seen):
        loss, updated, aux = _parts(
            loss_fn(_like(model, [variables(key, params[key], seen) for key in models]), *args),
            has_aux,
            model,
        )
        if not has_aux:
            _check_others(updated)
        return loss, (_linen_seen(updated, start, observers.threaded), aux)

    with amax_observations.observing() as observers, _scans_named():
        differentiated = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)
        all_params = {prefix: tree["params"] for prefix, tree in models.items()}
        (loss, (forward, aux)), (grads, backward) = differentiated(all_params, dict(start))
    if lost := sorted(observers.given.keys() - observers.delivered - observers.threaded):
        raise ValueError(
            f"{', '.join(lost)}: observations come out with the gradient; the loss has none "
            "through this layer (unused, stop_gradient or argmax). Use apply(..., "
            f"mutable=[{SEEN!r}]), and return (loss, updated)."
        )
    # backward has all observations of a layer that leaves SEEN as it is
    layers = {
        path: delayed.merge(seen, forward[path]) if path in forward else seen
        for path, seen in backward.items()
    }
    grads = _like(model, [grads[prefix] for prefix in models])
    return ((loss, aux) if has_aux else loss), grads, Observed(layers=layers)


def _check_others(updated: Mapping[str, Mapping]) -> None:
    """ValueError for collections of apply that the loss drops."""
    if others := [name for tree in updated.values() for name in tree if name != SEEN]:
        observed = any(SEEN in tree for tree in updated.values())
        raise ValueError(
            f"collections {', '.join(others)} would be lost. Return them as aux with has_aux=True: "
            f"(loss, {'(updated, updated)' if observed else 'updated'})."
        )


@contextmanager
def _scans_named() -> Iterator[None]:
    """Reword errors of an nn.scan that passes no observations on."""
    try:
        yield
    except ValueError as error:
        if "broadcasted variable has a data dependency" not in str(error):
            raise
        raise ValueError(
            f"an nn.scan that shares weights cannot broadcast {SEEN!r}; got it in "
            f"variable_broadcast. Broadcast 'params' and {STATE!r}; name {SEEN!r} in "
            "variable_carry."
        ) from error
    except TypeError as error:
        if "scan body function carry" not in str(error) or SEEN not in str(error):
            raise
        raise ValueError(
            f"an nn.scan that carries {SEEN!r} needs it mutable. Use apply(..., "
            f"mutable=[{SEEN!r}]), and return (loss, updated)."
        ) from error


def _parts(out, has_aux: bool, model: Model) -> tuple:
    """(loss, updated, aux) from a linen loss_fn's result; updated by prefix, {} if it has none."""
    if not has_aux:
        pair = isinstance(out, tuple) and len(out) == 2
        return (out[0], _collections(out[1], model), None) if pair else (out, {}, None)
    loss, aux = out
    # Another mapping in a pair is the caller's own.
    pair = isinstance(aux, tuple) and len(aux) == 2
    if pair and any(
        isinstance(leaf, Mapping) and SEEN in leaf
        for leaf in jax.tree.leaves(aux[0], is_leaf=_is_model)
    ):
        return loss, _collections(aux[0], model), aux[1]
    return loss, {}, aux


def _collections(updated, model: Model) -> dict[str, Mapping]:
    """What apply returned for each linen model, by prefix."""
    models_returned = _by_prefix(updated, _is_model)
    if models_returned.keys() == _by_prefix(model, _is_model).keys() and all(
        isinstance(leaf, Mapping) for leaf in models_returned.values()
    ):
        return models_returned
    got = jax.tree.map(
        lambda leaf: type(leaf).__name__,
        updated,
        is_leaf=lambda leaf: leaf is None or _is_model(leaf),
    )
    raise ValueError(
        f"{', '.join(unseen(model).layers) or 'value_and_grad'}: a linen loss_fn returns (loss, "
        f"updated), updated from apply(..., mutable=[{SEEN!r}]), a tuple of them for a tuple of "
        f"models, or the loss alone; got {got}."
    )


def _linen_seen(
    updated: Mapping[str, Mapping], expected: Mapping, threaded: set[str]
) -> Mapping[str, delayed.Seen]:
    """The observations that a linen loss returned, by hook; ValueError if threaded ones miss."""
    seen: dict[str, dict] = {}
    for prefix, variables in updated.items():
        for path, value in traverse_util.flatten_dict(variables.get(SEEN, {})).items():
            seen.setdefault(prefix + _key(path[:-2]), {})[path[-1]] = value
    amax_observations.same_layers(
        {path: observed for path, observed in expected.items() if path in threaded or path in seen},
        seen,
        "value_and_grad",
    )
    return seen


def _key(path: tuple[str, ...]) -> str:
    return ".".join(path)


def _unseen_by(hook: Hook) -> delayed.Seen:
    return _unseen(hook.recipe, hook.roles())


def _unseen(recipe: Recipe, roles: delayed.State) -> delayed.Seen:
    """Empty observations of one layer, or of a stack."""
    first, *_ = roles.values()
    return delayed.unseen(recipe, first.stored.shape)
