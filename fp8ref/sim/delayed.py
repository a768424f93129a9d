"""Delayed scaling: a step's scale comes of earlier steps' amaxes (spec H). Pure functions.

    state = delayed.init(config)                                   # scale 1, an empty history
    scales = delayed.scales(state, config, fmt)                    # known before the step's tensor
    q = scaling.quantize_with(x, scales, fmt, policy=config.policy)
    state = delayed.update(state, delayed.observe(scaling.amax(x)), config=config, fmt=fmt)

config is a ``fp8ref.spec.delayed.DelayedScaling``: one of DELAYED or a custom one. Order of an
update: merge the step's observations by maximum (H-4); push the amax on the history; compute the
next scale from the history, by the config's policy (H-3).
"""

import functools
from typing import NamedTuple

import numpy as np

from fp8ref.formats import Format
from fp8ref.sim.quantize import cast, stats
from fp8ref.sim.quantize.scales import Scales, magnitudes, scale_inv_from_scale, scales_from_amax
from fp8ref.spec.delayed import DELAYED, DelayedScaling, by_name

__all__ = [
    "DELAYED",
    "DelayedScaling",
    "DelayedState",
    "Observation",
    "clipped",
    "flax_order",
    "init",
    "merge",
    "observe",
    "scales",
    "step",
    "te_order",
    "update",
]


class DelayedState(NamedTuple):
    """One module's one tensor, or any shape [...] of them.

    stored        float32 [...]: the scale; under a policy that stores scale_inv, that.
    amax_history  float32 [..., history_length], newest first; 0 where nothing was observed yet.
    step          int64 [...]: observed updates so far.
    """

    stored: np.ndarray
    amax_history: np.ndarray
    step: np.ndarray


class Observation(NamedTuple):
    """What a step observed of a tensor: amax float32; non_finite, seen bool: whether it was
    observed; all of one shape [...]."""

    amax: np.ndarray
    non_finite: np.ndarray
    seen: np.ndarray


def init(config: str | DelayedScaling, shape: tuple[int, ...] = ()) -> DelayedState:
    """The state before the first step (spec H-2): scale 1, an empty history; shape as of a
    stack. ValueError: unknown config; what is no shape."""
    config = by_name(config)
    cast.check_shape(shape)
    history = np.zeros((*shape, config.history_length), np.float32)
    return DelayedState(np.ones(shape, np.float32), history, np.zeros(shape, np.int64))


def observe(amax, *, non_finite=False, seen=True) -> Observation:
    """One use of a tensor: its amax; a flag of a non-finite element a reduction may lose (H-4).

    Shapes:   amax float32 [...], as ``scaling.amax`` gives it; flags of its shape or ().
    Raises:   ValueError: amax negative or not float32; flags of another shape.
    """
    amax = magnitudes(amax, "amax")
    if any(np.shape(flag) not in ((), amax.shape) for flag in (non_finite, seen)):
        raise ValueError(
            f"flags have amax's shape, {amax.shape}, or (); got "
            f"{[np.shape(x) for x in (non_finite, seen)]}."
        )
    flags = (np.broadcast_to(np.asarray(flag, bool), amax.shape) for flag in (non_finite, seen))
    return Observation(amax, *flags)


def merge(*observations: Observation) -> Observation:
    """One observation of several: microbatches, uses, shards (H-4), in any order and grouping.

    Shapes:   all of one shape.
    Specials: amax is NaN if any seen one is; an observation that is not seen contributes nothing;
              none at all is one not seen.
    Raises:   ValueError: observations of several shapes.
    """
    if not observations:
        return observe(np.float32(0), seen=False)
    if len({o.amax.shape for o in observations}) > 1:
        raise ValueError(
            f"merge needs observations of one shape; got {[o.amax.shape for o in observations]}."
        )
    amax = [np.where(o.seen, o.amax, np.float32(0)) for o in observations]
    flags = [o.non_finite & o.seen for o in observations]
    seen = [o.seen for o in observations]
    largest = functools.reduce(np.maximum, amax)
    return Observation(largest, *(functools.reduce(np.logical_or, x) for x in (flags, seen)))


def scales(state: DelayedState, config: str | DelayedScaling, fmt: Format) -> Scales:
    """The coming step's scales, from the steps before it (H-1): float32 of the state's shape.

    Order:    timing ``update``: what is stored, and RN32(1 / it). timing ``use``: of the history,
              by the policy (S-9).
    Specials: a state of ``init`` gives 1.
    Raises:   ValueError: an unknown config; a fmt that is no Format, where scales are computed.
    """
    config = by_name(config)
    if config.timing == "use":
        return _compute(state.amax_history, state.stored, config, fmt)
    if config.policy.stored == "scale":
        return Scales(state.stored, scale_inv_from_scale(state.stored))
    return Scales(scale_inv_from_scale(state.stored), state.stored)


def update(
    state: DelayedState, *observations: Observation, config: str | DelayedScaling, fmt: Format
) -> DelayedState:
    """The state after a step, from an observation of each use in it, in order (H-3 to H-8).

    Shapes:   observations of the state's shape [...].
    Order:    merge (or, under reuse ``sum``, one update a use, added up from the last use to the
              first); push the amax; compute.
    Specials: as the fields of DelayedScaling say.
    Raises:   ValueError: an unknown config; what is no observation; an observation or a history of
              another shape.
    Source:   next to each of DELAYED.
    """
    config = by_name(config)
    _check(state, observations, config)
    unused = Observation(np.zeros_like(state.stored), *(np.zeros(state.stored.shape, bool),) * 2)
    if config.reuse == "max":
        return _advance(state, merge(unused, *observations), config, fmt)
    # reuse sum: autodiff adds the states that the uses made, from the last use to the first (H-8).
    stored, history = np.zeros_like(state.stored), np.zeros_like(state.amax_history)
    for use in reversed(observations):
        after = _advance(state, use, config, fmt)
        # a sum of amaxes may leave float32's range, as in the library
        with np.errstate(over="ignore", invalid="ignore"):
            stored = stored + np.where(use.seen, after.stored, np.float32(0))
            history = history + np.where(use.seen[..., None], after.amax_history, np.float32(0))
    used = merge(unused, *observations).seen
    return _select(
        used, DelayedState(stored, history, state.step + 1), _advance(state, unused, config, fmt)
    )


def step(
    state: DelayedState, *observations: Observation, config: str | DelayedScaling, fmt: Format
) -> tuple[DelayedState, Scales]:
    """(state, observations) -> (state, scales): the state after a step, by ``update``, and the
    ``scales`` that its own tensor is quantized by.

    Shapes:   observations and scales of the state's shape [...]. Raises as update.
    """
    return update(state, *observations, config=config, fmt=fmt), scales(state, config, fmt)


def clipped(amax, scale, fmt: Format) -> np.ndarray:
    """Whether a tensor of this amax is clipped under a scale of other amaxes (spec Q-11).

    Shapes:   amax and scale broadcast; bool of their shape.
    Order:    RN32(amax * scale), as S-5 rounds it; clipped if it would round above max (C-4) with
              an exponent that has no bound. A product that rounds back to max is not clipped.
    Specials: an infinite product is clipped, NaN is not.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (np.asarray(amax, np.float64) * np.asarray(scale, np.float64)).astype(np.float32)
        return stats.overflows(scaled, fmt)


def flax_order(history: np.ndarray) -> np.ndarray:
    """[newest, oldest, ..., second newest], flax's order of a history, and back (H-8)."""
    return np.concatenate([history[..., :1], history[..., :0:-1]], axis=-1)


def te_order(history: np.ndarray) -> np.ndarray:
    """[0, oldest, ..., newest], TE's order: slot 0 awaits the next amax (H-7)."""
    return np.concatenate([np.zeros_like(history[..., :1]), history[..., -2::-1]], axis=-1)


def _advance(
    state: DelayedState, use: Observation, config: DelayedScaling, fmt: Format
) -> DelayedState:
    """The state after one observation; each element is pushed, skipped or left as unused."""
    pushed = np.concatenate([use.amax[..., None], state.amax_history[..., :-1]], axis=-1)
    # Under timing ``use`` the scale that this step used is stored, one step behind.
    history = state.amax_history if config.timing == "use" else pushed
    computed = getattr(_compute(history, state.stored, config, fmt), config.policy.stored)
    stored = np.where(state.step % config.interval == 0, computed, state.stored)
    skipped = np.zeros(state.stored.shape, bool)
    if config.non_finite == "skip":
        skipped |= use.non_finite | ~np.isfinite(use.amax)
    if config.zero == "skip":
        skipped |= use.amax == 0
    unused = state
    if config.unused == "zero":
        unused = DelayedState(
            np.zeros_like(state.stored), np.zeros_like(state.amax_history), state.step
        )
    after = _select(skipped, state, DelayedState(stored, pushed, state.step + 1))
    return _select(use.seen, after, unused)


def _select(condition: np.ndarray, a: DelayedState, b: DelayedState) -> DelayedState:
    """``a where condition else b``, for each element."""
    stored = np.where(condition, a.stored, b.stored)
    step = np.where(condition, a.step, b.step)
    return DelayedState(
        stored, np.where(condition[..., None], a.amax_history, b.amax_history), step
    )


def _check(
    state: DelayedState, observations: tuple[Observation, ...], config: DelayedScaling
) -> None:
    if not isinstance(state, DelayedState):
        raise ValueError(f"a state is a DelayedState; got {type(state).__name__}. Make it by init.")
    shape = state.stored.shape
    if state.amax_history.shape != (*shape, config.history_length):
        raise ValueError(
            f"amax_history of {config.name!r} has shape {(*shape, config.history_length)}; got "
            f"{state.amax_history.shape}. Use init with the same config."
        )
    for use in observations:
        if not isinstance(use, Observation):
            raise ValueError(
                f"update takes observations; got {type(use).__name__}. Use observe(amax)."
            )
        if any(np.shape(part) != shape for part in use):
            raise ValueError(
                f"observations have shape {shape}, as the state; got "
                f"{[np.shape(part) for part in use]}."
            )


def _compute(
    history: np.ndarray, stored: np.ndarray, config: DelayedScaling, fmt: Format
) -> Scales:
    """The scales of a history; ``stored`` is the scale that the policy may keep."""
    if config.amax_compute == "most_recent":
        amax = history[..., 0]
    else:
        maximum = np.fmax if config.nan_in_history == "drop" else np.maximum
        amax = np.asarray(maximum.reduce(history, axis=-1))
    if not config.policy.keeps:
        return scales_from_amax(amax, fmt, config.policy)
    previous = stored if config.policy.stored == "scale" else scale_inv_from_scale(stored)
    return scales_from_amax(amax, fmt, config.policy, previous=previous)
