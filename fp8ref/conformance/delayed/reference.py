"""The scales that a rule of delayed scaling specifies for sequences, all at once (H-3)."""

from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.delayed.sequences import Sequence
from fp8ref.formats import Format
from fp8ref.shared.errors import one_of
from fp8ref.sim import delayed
from fp8ref.sim.delayed import DelayedState
from fp8ref.sim.quantize.scales import scale_inv_from_scale
from fp8ref.spec.delayed import DelayedScaling

SHOWS = ("next", "stored")
"""The scale a state shows: the coming step's, or the stored; timing ``use`` parts them (H-1)."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A rule, and what a state shows: ``made`` scale or scale_inv; ``shows`` next or stored.

    ValueError for another word.
    """

    rule: DelayedScaling
    fmt: Format
    made: str = "scale"
    shows: str = "next"

    def __post_init__(self) -> None:
        one_of("made", self.made, ("scale", "scale_inv"))
        one_of("shows", self.shows, SHOWS)

    def scales(self, sequences: list[Sequence]) -> list[np.ndarray]:
        """The scales of every sequence: one before each operation, and one after the last.

        Shapes:   of a sequence of n operations float32 [n + 1].
        """
        state = delayed.init(self.rule, (len(sequences),))
        saved, rows = state, [self.shown(state)]
        for i in range(max(map(len, sequences))):
            at = [sequence[i] if i < len(sequence) else "end" for sequence in sequences]
            steps = [one if isinstance(one, tuple) else () for one in at]
            words = ("save", "load", "reset")
            save, load, reset = (np.array([x == word for x in at]) for word in words)
            stepped = np.array([isinstance(operation, tuple) for operation in at])
            saved = _where(save, state, saved)
            after = state
            if stepped.any():
                seen = _observations(steps)
                after = delayed.update(state, *seen, config=self.rule, fmt=self.fmt)
            state = _where(stepped, after, state)
            state = _where(load, saved, state)
            state = _where(reset, delayed.init(self.rule, state.stored.shape), state)
            rows.append(self.shown(state))
        pairs = zip(np.stack(rows, axis=1), sequences, strict=True)
        return [row[: len(sequence) + 1] for row, sequence in pairs]

    def shown(self, state: DelayedState) -> np.ndarray:
        """What a state shows; float32 of its shape."""
        if self.shows == "stored":
            as_stored = self.made == self.rule.policy.stored
            return state.stored if as_stored else scale_inv_from_scale(state.stored)
        scales = delayed.scales(state, self.rule, self.fmt)
        return np.asarray(scales.scale if self.made == "scale" else scales.scale_inv)


def _observations(steps: list[tuple[float, ...]]) -> list[delayed.Observation]:
    """One observation for each use, stacked over sequences; seen where a step has that use."""
    uses = max(1, *map(len, steps))
    amax = np.zeros((uses, len(steps)), np.float32)
    seen = np.zeros(amax.shape, bool)
    for i, step in enumerate(steps):
        amax[: len(step), i], seen[: len(step), i] = step, True
    pairs = zip(amax, seen, strict=True)
    return [delayed.observe(amaxes, seen=flags) for amaxes, flags in pairs]


def _where(condition: np.ndarray, a: DelayedState, b: DelayedState) -> DelayedState:
    return DelayedState(
        np.where(condition, a.stored, b.stored),
        np.where(condition[:, None], a.amax_history, b.amax_history),
        np.where(condition, a.step, b.step),
    )
