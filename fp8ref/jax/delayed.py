"""Delayed scaling in JAX (spec H): a step reads a state and observes amaxes; an update follows.

    state, seen = delayed.init(recipe), delayed.unseen(recipe)        # of one linear

    def loss(params, seen):                                          # every use takes seen
        y, seen = linear.apply(x, params, recipe=recipe, state=state, seen=seen)
        return (y ** 2).sum(), seen

    of_loss = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, forward), (grads, backward) = of_loss(w, seen)
    state = delayed.update(state, delayed.merge(forward, backward), recipe=recipe)

``seen`` holds amax observations. Its forward value carries those of input and weight. grad_output
exists in the backward pass only, so its observation comes out as the gradient by seen. Merging
takes the maximum of each entry, so uses, microbatches and shards merge in any order.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax

from fp8ref import recipe as recipes
from fp8ref.formats import Format
from fp8ref.jax.quantize import cast, division, scaling
from fp8ref.jax.quantize import scales as scale_rules
from fp8ref.recipe import Recipe, Role
from fp8ref.spec import support
from fp8ref.spec.attention.delayed import Casts
from fp8ref.spec.delayed import DelayedScaling

__all__ = [
    "DelayedState",
    "FlaxState",
    "Seen",
    "State",
    "init",
    "keeps_state",
    "larger",
    "merge",
    "observe",
    "scales",
    "unseen",
    "unset",
    "update",
]

Seen = Mapping[Role, Array]
"""Role -> float32 [..., 3]: amax, and the flags non_finite and seen, 0 or 1."""


class DelayedState(NamedTuple):
    """The state of one tensor of one linear, or of any shape [...] of them.

    stored        float32 [...]: the scale.
    amax_history  float32 [..., history_length], newest first; 0 where nothing was observed yet.
    step          int32 [...]: observed updates so far.
    """

    stored: Array
    amax_history: Array
    step: Array


class FlaxState(NamedTuple):
    """The state under policy ``flax``, which stores scale_inv. Its type differs, so that one is
    never taken for the other."""

    stored: Array
    amax_history: Array
    step: Array


for _kind in (DelayedState, FlaxState):  # programs that take a state can be written by jax.export
    export.register_namedtuple_serialization(
        _kind, serialized_name=f"fp8ref.jax.delayed.{_kind.__name__}"
    )

State = Mapping[Role, DelayedState | FlaxState]
"""Role -> its state, of a linear under delayed scaling."""


def init(
    recipe: str | Recipe | Casts, shape: tuple[int, ...] = ()
) -> dict[Role, DelayedState | FlaxState]:
    """A state for each role that the recipe scales by past amaxes: scale 1, empty history (H-2).

    recipe:   or the casts of attention (``fp8ref.spec.attention.delayed``), here and in ``unseen``
              and ``update``.
    shape:    that of a stack of layers, for example.
    Raises:   ValueError: an unknown recipe, or histories that this backend does not keep
              (``implemented``).
    """
    return {
        role: kind(config)(
            jnp.ones(shape, jnp.float32),
            jnp.zeros((*shape, config.history_length), jnp.float32),
            jnp.zeros(shape, jnp.int32),
        )
        for role, (_, config) in _casts(recipe).items()
    }


def kind(config: DelayedScaling) -> type[DelayedState | FlaxState]:
    """The type of a config's states."""
    return FlaxState if config.policy.stored == "scale_inv" else DelayedState


def unseen(recipe: str | Recipe | Casts, shape: tuple[int, ...] = ()) -> dict[Role, Array]:
    """Empty observations for a step: float32 zeros [*shape, 3] by role. Raises as init."""
    return {role: jnp.zeros((*shape, 3), jnp.float32) for role in _casts(recipe)}


def observe(x: Array, *, over: tuple[str, ...] = ()) -> Array:
    """An observation, along ``over`` too: float32 [3] of amax (0 if not finite), non_finite, 1.

    Raises:   ValueError: x empty, or not float32, float16 or bfloat16.
    """
    amax = scaling.amax(x, over=over)
    finite = jnp.isfinite(amax)
    return jnp.stack([jnp.where(finite, amax, 0.0), jnp.where(finite, 0.0, 1.0), jnp.float32(1)])


def larger(a: Array, b: Array) -> Array:
    """The elementwise maximum of magnitudes, from bits: XLA on a CPU flushes subnormals."""
    return cast.from_magnitude_bits(
        jnp.maximum(cast.magnitude_bits(a), cast.magnitude_bits(b)), jnp.float32
    )


def merge(*observations: Seen) -> dict[Role, Array]:
    """Merge observations into one (H-4): the maximum of amaxes and of flags, in any order.

    Raises:   ValueError: none given; observations of different roles.
    """
    if not observations:
        raise ValueError(
            "merge takes at least one observation; got none. For unused layers use unseen(recipe)."
        )
    first, *others = observations
    merged = dict(first)
    for other in others:
        if set(other) != set(merged):
            raise ValueError(
                f"merge takes one recipe's observations; got {', '.join(merged)} and "
                f"{', '.join(other)}."
            )
        merged = {role: larger(merged[role], other[role]) for role in merged}
    return merged


def merged(seen: Seen, amaxes: Mapping[Role, Array], own_seen: Seen) -> dict[Role, Array]:
    """seen, merged with the observations of a pass's amaxes, of those roles that have one (H-4);
    over a vmapped axis that ``own_seen``, the layer's seen, lacks, the largest (``over_batch``).
    """
    updated = {
        role: larger(one, observe(amaxes[role])) if role in amaxes else one
        for role, one in seen.items()
    }
    return {role: over_batch(one, own_seen[role]) for role, one in updated.items()}


@jax.custom_batching.custom_vmap
def over_batch(observed: Array, own_seen: Array) -> Array:
    """observed; under a vmap that maps observed but not ``own_seen``, the layer's input, the
    maximum over the mapped axis.

    So a batch's examples merge as microbatches do; vmap's own gradient by an unmapped one sums.
    """
    del own_seen
    return observed


@over_batch.def_vmap
def _over_batch(axis_size: int, batched: list[bool], observed: Array, own_seen: Array):
    del axis_size
    observed_batched, own_batched = batched
    if observed_batched and not own_batched:
        observed = _largest(observed, axis=0)
    return over_batch(observed, own_seen), observed_batched and own_batched


def keeps_state(recipe: str | Recipe | Casts) -> bool:
    """True if the recipe scales some role by past amaxes, and so needs a state and seen."""
    return bool(_casts(recipe))


def update(
    state: State, seen: Seen, *, recipe: str | Recipe | Casts
) -> dict[Role, DelayedState | FlaxState]:
    """The state after an optimizer step, by merged observations (H-3, H-5, H-6): call it once.

    Shapes:   seen as ``unseen(recipe, shape)``, of the state's shape.
    Specials: a role not seen, or flagged as not finite, keeps its state; a zero amax is recorded. A
              flag above 1 is a sum: several uses were given the same seen instead of that of the
              use before. The amax is lost; under jit the scale becomes NaN.
    Raises:   ValueError: roles or shapes of another recipe; outside jit, a flag above 1.
    """
    casts = _casts(recipe)
    if not isinstance(recipe, Mapping):
        check(state, seen, recipe, "update")
    for role, observed in seen.items():
        if not isinstance(observed, jax.core.Tracer) and bool(
            (np.asarray(observed)[..., 1:] > 1).any()
        ):
            raise ValueError(
                f"update cannot use summed observations; {role} has flags "
                f"{np.asarray(observed)[..., 1:]}, not 0 or 1, so its amax is lost. Pass seen from "
                "each use of a layer to the next, and carry it through scans."
            )
    return {role: _advance(state[role], seen[role], *casts[role]) for role in state}


def scales(state: State, recipe: str | Recipe) -> dict[Role, Array]:
    """The scale of each role in the coming step (H-1), under policy ``flax`` scale_inv: float32 of
    the state's shape, without gradient."""
    casts = _casts(recipe)
    return {
        role: lax.stop_gradient(_used(role_state, *casts[role]))
        for role, role_state in state.items()
    }


def unset(state: State) -> bool:
    """Whether a linear's pass would cast input or weight by a scale that no update has set: it is 1
    (H-2). Ask it before you evaluate; False where the state is traced, and nobody knows.

    >>> unset(init("delayed"))
    True
    """
    steps = [state[role].step for role in ("input", "weight") if role in state]
    return any(bool((np.asarray(step) == 0).any()) for step in filter(readable, steps))


def readable(x: Array) -> bool:
    """Whether this process can read an array's numbers: it has all, and does not trace them."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def check(state: State | None, seen: Seen | None, recipe: str | Recipe, name: str) -> None:
    """ValueError, naming the layer, unless state and seen fit a recipe that runs here."""
    recipe = recipes.by_name(recipe)
    casts: dict = _casts(recipe)
    if not casts:
        if state or seen:
            raise ValueError(
                f"{name}: recipe {recipe.name!r} has no state; got state={state!r}, seen={seen!r}."
            )
        return
    if state is None or seen is None:
        missing = " and ".join(
            key for key, value in (("state", state), ("seen", seen)) if value is None
        )
        raise ValueError(
            f"{name}: recipe {recipe.name!r} needs a state and seen; {missing} is None. Use "
            f"delayed.init({recipe.name!r}) and delayed.unseen({recipe.name!r})."
        )
    for key, roles in (("state", state), ("seen", seen)):
        if not isinstance(roles, Mapping) or set(roles) != set(casts):
            got = ", ".join(roles) if isinstance(roles, Mapping) else type(roles).__name__
            raise ValueError(
                f"{name}: {key} of recipe {recipe.name!r} has roles {', '.join(casts)}; got {got}."
            )
    for role, (_, config) in casts.items():
        if not isinstance(state[role], kind(config)):
            raise ValueError(
                f"{name}: the {role} state of recipe {recipe.name!r} is a {kind(config).__name__}; "
                f"got {type(state[role]).__name__}. Use this recipe's state."
            )
        shape, observed = jnp.shape(state[role].stored), jnp.shape(seen[role])
        history = jnp.shape(state[role].amax_history)
        if history != (*shape, config.history_length):
            raise ValueError(
                f"{name}: amax_history of {role}, recipe {recipe.name!r}, has shape "
                f"{(*shape, config.history_length)}; got {history}. Use this recipe's state."
            )
        if observed != (*shape, 3):
            raise ValueError(
                f"{name}: seen of {role} has shape {(*shape, 3)}, as its state; got {observed}."
            )


def implemented(config: DelayedScaling) -> DelayedScaling:
    """The config, if this backend implements it.

    It implements fp8ref's own, with any history_length, interval, amax_compute and margin; and
    flax's with any history_length, reuse ``max`` and unused ``keep``, where Flax itself sums and
    zeroes (H-10).

    Raises:   ValueError: any other.
    """
    support.require("delayed scaling", "jax", config)
    return config


def _largest(magnitudes: Array, *, axis: int) -> Array:
    """The maximum of the bits of magnitudes along an axis (``scaling.amax``)."""
    return jnp.squeeze(scaling.amax(magnitudes, "rowwise", axis=axis), axis)


def _used(state: DelayedState | FlaxState, fmt: Format, config: DelayedScaling) -> Array:
    """What a state scales by in the next step: its scale; scale_inv under policy ``flax`` (H-1)."""
    if config.timing == "update":
        return state.stored
    return scale_rules.flax_scale_inv(jnp.max(state.amax_history, axis=-1), state.stored, fmt)


# traced once for all states of a shape
@functools.partial(jax.jit, static_argnames=("fmt", "config"))
def _advance(
    state: DelayedState | FlaxState, seen: Array, fmt: Format, config: DelayedScaling
) -> DelayedState | FlaxState:
    """The state after one update: push the amax and compute the scale, or keep the state."""
    amax, non_finite, was_seen = seen[..., 0], seen[..., 1], seen[..., 2]
    if config.timing == "use":
        # Recorded as infinity: the scale is kept until it leaves the history, as with a NaN.
        amax = jnp.where(non_finite > 0, jnp.inf, amax)
    past = state.amax_history[..., :-1]
    # The newest first; the oldest falls out.
    pushed = jnp.concatenate([amax[..., None], past], axis=-1)
    if config.timing == "use":
        stored = _used(state, fmt, config)
    else:
        stored = _scale_of(amax, past, state, fmt, config)
    after = kind(config)(stored, pushed, state.step + 1)
    valid = (was_seen > 0) & ((non_finite == 0) | (config.timing == "use"))

    def select(new: Array, old: Array) -> Array:
        return jnp.where(valid[(..., *[None] * (new.ndim - valid.ndim))], new, old)

    kept = jax.tree.map(select, after, state)
    # A flag above 1 is a sum (see update). Under jit nothing can raise: a NaN scale shows it.
    summed = jnp.maximum(non_finite, was_seen) > 1
    return kept._replace(stored=jnp.where(summed, jnp.nan, kept.stored))


def _scale_of(
    amax: Array, past: Array, state: DelayedState | FlaxState, fmt: Format, config: DelayedScaling
) -> Array:
    """The scale of the newest amax and its history; the old one between intervals or if 0."""
    if config.amax_compute == "max" and past.shape[-1]:
        amax = larger(amax, _largest(past, axis=-1))
    bits = cast.magnitude_bits(amax)
    limit = np.float32(fmt.max * 2.0**-config.policy.margin)
    # XLA on a CPU would flush a subnormal amax n * 2^-149. So: limit * 2^149 / n, in two powers.
    subnormal = division.divide(limit * 2.0**75, bits.astype(jnp.float32)) * 2.0**74
    scale = jnp.minimum(
        jnp.where(bits < 1 << 23, subnormal, division.divide(limit, amax)), np.finfo(np.float32).max
    )
    return jnp.where((state.step % config.interval == 0) & (bits != 0), scale, state.stored)


def _casts(recipe: str | Recipe | Casts) -> dict:
    """``recipe.delayed_casts``, or the casts themselves, if this backend implements them."""
    casts = recipe if isinstance(recipe, Mapping) else recipes.delayed_casts(recipe)
    return {role: (fmt, implemented(config)) for role, (fmt, config) in casts.items()}
