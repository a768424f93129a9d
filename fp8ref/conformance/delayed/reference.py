"""The scales that a rule of delayed scaling specifies for sequences, all at once (H-3)."""

import numpy as np

from fp8ref.conformance.delayed.sequences import Sequence
from fp8ref.formats import Format
from fp8ref.sim import delayed
from fp8ref.sim.delayed import DelayedState
from fp8ref.sim.quantize.scales import scale_inv_from_scale
from fp8ref.spec.delayed import DelayedScaling

SHOWS = ("next", "stored")
"""Which scale a state shows: that of the coming step, or the one it stores. Under timing ``use``
these differ (H-1)."""


def expected(
    sequences: list[Sequence],
    rule: DelayedScaling,
    fmt: Format,
    *,
    value: str = "scale",
    shows: str = "next",
) -> list[np.ndarray]:
    """The scales of every sequence: one before each operation, and one after the last.

    Shapes:   of a sequence of n operations float32 [n + 1].
    """
    state = delayed.init(rule, (len(sequences),))
    saved, rows = state, [shown(state, rule, fmt, value=value, shows=shows)]
    for i in range(max(map(len, sequences))):
        at = [sequence[i] if i < len(sequence) else "end" for sequence in sequences]
        steps = [operation if isinstance(operation, tuple) else () for operation in at]
        of = {
            word: np.array([operation == word for operation in at])
            for word in ("save", "load", "reset")
        }
        stepped = np.array([isinstance(operation, tuple) for operation in at])
        saved = _where(of["save"], state, saved)
        after = state
        if stepped.any():
            after = delayed.update(state, *_observations(steps), config=rule, fmt=fmt)
        state = _where(stepped, after, state)
        state = _where(of["load"], saved, state)
        state = _where(of["reset"], delayed.init(rule, state.stored.shape), state)
        rows.append(shown(state, rule, fmt, value=value, shows=shows))
    scales = np.stack(rows, axis=1)
    return [row[: len(sequence) + 1] for row, sequence in zip(scales, sequences, strict=True)]


def shown(
    state: DelayedState, rule: DelayedScaling, fmt: Format, *, value: str, shows: str
) -> np.ndarray:
    """What a state shows: scale or scale_inv, next or stored; float32 of the state's shape."""
    if shows == "stored":
        if value == rule.policy.stored:
            return state.stored
        return scale_inv_from_scale(state.stored)
    scales = delayed.scales(state, rule, fmt)
    return np.asarray(scales.scale if value == "scale" else scales.scale_inv)


def _observations(steps: list[tuple[float, ...]]) -> list[delayed.Observation]:
    """One observation for each use, stacked over sequences; seen where a step has that use."""
    uses = max(1, *map(len, steps))
    amax = np.zeros((uses, len(steps)), np.float32)
    seen = np.zeros(amax.shape, bool)
    for i, step in enumerate(steps):
        amax[: len(step), i], seen[: len(step), i] = step, True
    return [delayed.observe(amaxes, seen=flags) for amaxes, flags in zip(amax, seen, strict=True)]


def _where(condition: np.ndarray, a: DelayedState, b: DelayedState) -> DelayedState:
    return DelayedState(
        np.where(condition, a.stored, b.stored),
        np.where(condition[:, None], a.amax_history, b.amax_history),
        np.where(condition, a.step, b.step),
    )
