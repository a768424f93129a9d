"""Delayed scaling in JAX (SEMANTICS H): a state that is read during a step, observations that a step emits, one update after it.

    state, seen = delayed.init(recipe), delayed.unseen(recipe)        # of one linear

    def loss(params, seen):                                          # seen is threaded: every use takes it and gives it on
        y, seen = linear.apply(x, params, recipe=recipe, state=state, seen=seen)
        return (y ** 2).sum(), seen

    (_, forward), (grads, backward) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(w, seen)
    state = delayed.update(state, delayed.merge(forward, backward), recipe=recipe)

The forward value of ``seen`` carries what was observed of input and weight; grad_output is known in the backward pass only, and
comes out as the gradient by seen. Merging is a maximum of each entry, so that uses, microbatches and shards come in any order.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8ref import recipe as recipes
from fp8ref.delayed import DELAYED, DelayedScaling
from fp8ref.formats import Format
from fp8ref.jax import cast, scaling
from fp8ref.jax import scales as scale_rules
from fp8ref.recipe import Recipe, Role

Seen = Mapping[Role, jax.Array]  # float32 [..., 3] a role: amax, non_finite and seen, flags 0 or 1


class DelayedState(NamedTuple):
    """One linear's one tensor, or any shape [...] of them.

    stored        float32 [...]: the scale.
    amax_history  float32 [..., history_length], newest first; 0 where nothing was observed yet.
    step          int32 [...]: observed updates so far.
    """

    stored: jax.Array
    amax_history: jax.Array
    step: jax.Array


class FlaxState(NamedTuple):
    """The same under policy ``flax``, whose stored is scale_inv: a type of its own, so that neither is taken for the other."""

    stored: jax.Array
    amax_history: jax.Array
    step: jax.Array


State = Mapping[Role, DelayedState | FlaxState]


def init(recipe: str | Recipe, shape: tuple[int, ...] = ()) -> dict[Role, DelayedState | FlaxState]:
    """A state for each role that recipe scales by its past: scale 1, an empty history (H-2); of any other recipe none.

    shape:    of a stack of layers, say.
    Raises:   ValueError: an unknown recipe, or histories that this backend does not keep (``implemented``).
    """
    return {
        role: kind(config)(
            jnp.ones(shape, jnp.float32), jnp.zeros((*shape, config.history_length), jnp.float32), jnp.zeros(shape, jnp.int32)
        )
        for role, (_, config) in _casts(recipe).items()
    }


def kind(config: DelayedScaling) -> type[DelayedState | FlaxState]:
    """The type of a config's states."""
    return FlaxState if config.policy.stored == "scale_inv" else DelayedState


def unseen(recipe: str | Recipe, shape: tuple[int, ...] = ()) -> dict[Role, jax.Array]:
    """Observations of nothing: what a step starts from, float32 [*shape, 3] a role. Raises as init."""
    return {role: jnp.zeros((*shape, 3), jnp.float32) for role in _casts(recipe)}


def observe(x: jax.Array, *, over: tuple[str, ...] = ()) -> jax.Array:
    """float32 [3] of a tensor, and of those along the mesh axes ``over``: its amax (0 unless finite), whether it is not finite, and 1, for seen.

    Raises:   ValueError: x empty, or not float32, float16 or bfloat16.
    """
    amax = scaling.amax(x, over=over)
    finite = jnp.isfinite(amax)
    return jnp.stack([jnp.where(finite, amax, 0.0), jnp.where(finite, 0.0, 1.0), jnp.float32(1)])


def larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """The elementwise maximum of float32 magnitudes, by their bits: XLA on a CPU takes subnormals for zero."""
    return cast.from_magnitude_bits(jnp.maximum(cast.magnitude_bits(a), cast.magnitude_bits(b)), jnp.float32)


def merge(*observations: Seen) -> dict[Role, jax.Array]:
    """One observation of several (H-4): the maximum of amaxes and of flags, in any order and grouping.

    Raises:   ValueError: none given; observations of different roles.
    """
    if not observations:
        raise ValueError("merge takes at least one observation; got none. unseen(recipe) is that of nothing.")
    first, *others = observations
    merged = dict(first)
    for other in others:
        if set(other) != set(merged):
            raise ValueError(f"observations of one recipe merge; got roles {', '.join(merged)} and {', '.join(other)}.")
        merged = {role: larger(merged[role], other[role]) for role in merged}
    return merged


@jax.custom_batching.custom_vmap
def over_batch(observed: jax.Array, given: jax.Array) -> jax.Array:
    """observed itself; under a vmap in which ``given``, what the layer was handed, has no axis, the largest along observed's.

    So the examples of a batch merge as microbatches do, where vmap's own gradient by an operand without the axis is a sum.
    """
    del given
    return observed


@over_batch.def_vmap
def _over_batch(axis_size: int, batched: list[bool], observed: jax.Array, given: jax.Array):
    del axis_size
    of_observed, of_given = batched
    merges = of_observed and not of_given
    return over_batch(_largest(observed, axis=0) if merges else observed, given), of_observed and of_given


def keeps_state(recipe: str | Recipe) -> bool:
    """Whether a recipe scales by past amaxes."""
    return bool(_casts(recipe))


def update(state: State, seen: Seen, *, recipe: str | Recipe) -> dict[Role, DelayedState | FlaxState]:
    """The state after an optimizer step, given all that was observed in it (H-3, H-5, H-6): call it once a step.

    Shapes:   seen as ``unseen(recipe, shape)``, of the state's shape.
    Specials: a role not seen, or flagged as not finite, keeps its state; a zero amax is recorded. A flag above 1 is a sum, of uses that
              were each given the same seen instead of that of the one before: its amax is lost, and under jit its scale becomes NaN.
    Raises:   ValueError: roles or shapes of another recipe; outside jit, a flag above 1.
    """
    casts = _casts(recipe)
    check(state, seen, recipe, "update")
    for role, observed in seen.items():
        if not isinstance(observed, jax.core.Tracer) and bool((np.asarray(observed)[..., 1:] > 1).any()):
            raise ValueError(
                f"update: observations of {role} were summed, and their largest amax is lost; its flags are {np.asarray(observed)[..., 1:]}, not 0 "
                "or 1. Give every use of a layer the seen of the use before it, and carry it through scans."
            )
    return {role: _advance(state[role], seen[role], *casts[role]) for role in state}


def scales(state: State, recipe: str | Recipe) -> dict[Role, jax.Array]:
    """What each role is multiplied by in the coming step (H-1), or under policy ``flax`` divided by: float32 of the state's shape, a constant
    of its gradients."""
    casts = _casts(recipe)
    return {role: lax.stop_gradient(_used(of_role, *casts[role])) for role, of_role in state.items()}


def check(state: State | None, seen: Seen | None, recipe: str | Recipe, name: str) -> None:
    """ValueError, naming the layer, unless state and seen are of this recipe, the state of a kind that this backend implements."""
    recipe = recipes.by_name(recipe)
    casts = _casts(recipe)
    if not casts:
        if state or seen:
            raise ValueError(f"{name}: recipe {recipe.name!r} keeps no state and observes nothing; got state={state!r}, seen={seen!r}.")
        return
    if state is None or seen is None:
        missing = " and ".join(key for key, value in (("state", state), ("seen", seen)) if value is None)
        raise ValueError(
            f"{name}: recipe {recipe.name!r} scales by past amaxes and takes a state and seen; {missing} is None. "
            f"Start with delayed.init({recipe.name!r}) and delayed.unseen({recipe.name!r})."
        )
    for key, given in (("state", state), ("seen", seen)):
        if not isinstance(given, Mapping) or set(given) != set(casts):
            got = ", ".join(given) if isinstance(given, Mapping) else type(given).__name__
            raise ValueError(f"{name}: {key} of recipe {recipe.name!r} has the roles {', '.join(casts)}; got {got}. Make it by its recipe.")
    for role, (_, config) in casts.items():
        if not isinstance(state[role], kind(config)):
            raise ValueError(
                f"{name}: the {role} state of recipe {recipe.name!r} is a {kind(config).__name__}; got {type(state[role]).__name__}. A state goes "
                "with the recipe it was made for."
            )
        shape, observed = jnp.shape(state[role].stored), jnp.shape(seen[role])
        history = jnp.shape(state[role].amax_history)
        if history != (*shape, config.history_length):
            raise ValueError(
                f"{name}: the {role} state of recipe {recipe.name!r} has an amax_history of shape {(*shape, config.history_length)}; "
                f"got {history}. A state goes with the recipe it was made for."
            )
        if observed != (*shape, 3):
            raise ValueError(f"{name}: seen of {role} has shape {(*shape, 3)}, beside its state; got {observed}.")


def implemented(config: DelayedScaling) -> DelayedScaling:
    """The config, if this backend implements it: fp8ref's own, with history, interval, ``most_recent`` and margin of one's choice; or
    flax's, with any history, but for what it makes of a layer used again or not at all (H-10): reuse ``max``, unused ``keep``.

    Raises:   ValueError: any other.
    """
    flax = dataclasses.replace(DELAYED["flax"], name=config.name, history_length=config.history_length, reuse="max", unused="keep")
    if config == flax:
        return config
    if not config.as_fp8refs:
        raise ValueError(
            f"fp8ref.jax keeps histories as 'delayed' does, with another history_length, amax_compute, interval or margin; got "
            f"{config.name!r}. Use fp8ref.sim.delayed for it; flax's with reuse 'max' and unused 'keep' works too (H-10)."
        )
    return config


def _largest(magnitudes: jax.Array, *, axis: int) -> jax.Array:
    return jnp.squeeze(scaling.amax(magnitudes, "rowwise", axis=axis), axis)


def _used(state: DelayedState | FlaxState, fmt: Format, config: DelayedScaling) -> jax.Array:
    if config.timing == "update":
        return state.stored
    return scale_rules.flax_scale_inv(jnp.max(state.amax_history, axis=-1), state.stored, fmt)


@functools.partial(jax.jit, static_argnames=("fmt", "config"))  # traced once for all states of a shape
def _advance(state: DelayedState | FlaxState, seen: jax.Array, fmt: Format, config: DelayedScaling) -> DelayedState | FlaxState:
    amax, non_finite, was_seen = seen[..., 0], seen[..., 1], seen[..., 2]
    if config.timing == "use":
        amax = jnp.where(non_finite > 0, jnp.inf, amax)  # recorded: it keeps the scale until it leaves, as a NaN would
    past = state.amax_history[..., :-1]
    pushed = jnp.concatenate([amax[..., None], past], axis=-1)
    stored = _used(state, fmt, config) if config.timing == "use" else _scale_of(amax, past, state, fmt, config)
    after = kind(config)(stored, pushed, state.step + 1)
    taken = (was_seen > 0) & ((non_finite == 0) | (config.timing == "use"))
    kept = _where(taken, after, state)
    summed = jnp.maximum(non_finite, was_seen) > 1
    return kept._replace(stored=jnp.where(summed, jnp.nan, kept.stored))


def _scale_of(amax: jax.Array, past: jax.Array, state: DelayedState | FlaxState, fmt: Format, config: DelayedScaling) -> jax.Array:
    """The scale of an amax and those before it; in between intervals, and of nothing but zeros, the scale before."""
    if config.amax_compute == "max" and past.shape[-1]:
        amax = larger(amax, _largest(past, axis=-1))
    bits, limit = cast.magnitude_bits(amax), np.float32(fmt.max * 2.0**-config.policy.margin)
    # A subnormal amax, n * 2^-149, XLA on a CPU would flush; limit * 2^149 / n in two powers, as 2^149 is no float32
    subnormal = (limit * 2.0**75 / bits.astype(jnp.float32)) * 2.0**74
    scale = jnp.minimum(jnp.where(bits < 1 << 23, subnormal, limit / amax), np.finfo(np.float32).max)
    return jnp.where((state.step % config.interval == 0) & (bits != 0), scale, state.stored)


def _where(condition: jax.Array, a: DelayedState | FlaxState, b: DelayedState | FlaxState) -> DelayedState | FlaxState:
    def select(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)

    return jax.tree.map(select, a, b)


def _casts(recipe: str | Recipe) -> dict[Role, tuple[Format, DelayedScaling]]:
    """``recipe.delayed_casts``, of configs that this backend implements."""
    return {role: (fmt, implemented(config)) for role, (fmt, config) in recipes.delayed_casts(recipe).items()}
