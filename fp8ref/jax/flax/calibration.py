"""The first scales of a Flax model under delayed scaling, before it is evaluated."""

import functools
from collections.abc import Callable, Iterable, Mapping

from flax import nnx, traverse_util

from fp8ref.jax.flax import amax_observations
from fp8ref.jax.flax.amax_observations import SEEN, Observed
from fp8ref.jax.flax.linen import collection
from fp8ref.jax.flax.nnx import Seen, stateful
from fp8ref.jax.flax.training import unseen, update


def calibrate(model: nnx.Module | Mapping, batches: Iterable, *, apply: Callable | None = None):
    """Set the first scales of a model by forward passes, so that it can be evaluated before it is
    trained.

        fj.flax.calibrate(model, batches)                                   # NNX
        variables = fj.flax.calibrate(variables, batches, apply=net.apply)  # linen

    batches   a few typical inputs: of each an array, a tuple of arguments, or a mapping of named
              ones.
    apply     linen's: called with the variables, a batch and mutable=[SEEN].
    Order:    hooks multiply in high precision, and observe input and weight; then ``update``.
    Returns:  as ``update``.
    Specials: grad_output is not observed: training begins with its first scale, 1 (H-2). An NNX
    model
              runs in its present mode: call model.eval() before.
    Raises:   ValueError: no batch; a model without delayed scaling; linen without apply.
    """
    begun, batches = unseen(model).layers, list(batches)
    if not begun:
        raise ValueError(
            "calibrate needs delayed scaling; the model has none. Convert it to 'delayed' first."
        )
    if not batches:
        raise ValueError("calibrate takes at least one batch of the model's inputs; got none.")
    if isinstance(model, nnx.Module):
        return update(model, Observed(layers=_nnx_seen(model, begun, batches)))
    if apply is None:
        raise ValueError("calibrate needs a linen model's apply; got none. Pass apply=net.apply.")
    seen = collection({tuple(path.split(".")): blank for path, blank in begun.items()}, "seen")
    with amax_observations.observing(), amax_observations.calibration(True):
        for batch in batches:
            run = functools.partial(apply, {**model, SEEN: seen}, mutable=[SEEN])
            seen = _called(run, batch)[1][SEEN]
    layers: dict[str, dict] = {}
    for path, observed in traverse_util.flatten_dict(seen).items():
        layers.setdefault(".".join(path[:-2]), {})[path[-1]] = observed
    return update(model, Observed(layers=layers))


def _nnx_seen(model: nnx.Module, begun: Mapping, batches: list) -> dict:
    layers = stateful(model)
    try:
        for path, hook in layers.items():
            hook.seen = nnx.data(Seen(dict(begun[path])))
        with amax_observations.observing(), amax_observations.calibration(True):
            for batch in batches:
                _called(model, batch)
        return {path: hook.seen.get_value() for path, hook in layers.items()}
    finally:
        for hook in layers.values():
            hook.seen = nnx.data(None)


def _called(run: Callable, batch):
    """run(batch), whose arguments are by position or by name."""
    if isinstance(batch, Mapping):
        return run(**batch)
    return run(*batch) if isinstance(batch, tuple | list) else run(batch)
