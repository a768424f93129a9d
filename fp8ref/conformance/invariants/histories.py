"""Invariants of a delayed scaling state that takes the maximum of a history (spec H-14).

The implementation is a ``History``: a state as ``conformance.delayed`` takes it, and its length.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from fp8ref.conformance.delayed.sequences import ORDINARY, Sequence, named
from fp8ref.conformance.delayed.subject import subject_of
from fp8ref.conformance.invariants.invariant import Clause, text
from fp8ref.formats import Format


@dataclass(frozen=True, kw_only=True)
class History:
    """A state and the length of its history.

    late    steps that the shown scale is behind: 1 for what a rule of timing ``use`` stores.
    implementation, takes, framework  as of ``require_delayed``.
    made    ``scale`` or ``scale_inv``: whether it falls or rises with amaxes.
    """

    implementation: Any
    length: int
    late: int = 0
    made: str = "scale"
    takes: str = "amax"
    framework: str = "numpy"

    def scale(self, sequence: Sequence) -> float:
        """The scale after a sequence. RuntimeError: it raised."""
        last = subject_of(self.implementation, takes=self.takes, framework=self.framework).run(
            sequence
        )[-1]
        if last.raised:
            raise RuntimeError(last.raised)
        return last.scale


Drawn = tuple[list[float], list[float], list[int]]
"""Earlier amaxes, recent ones, and places: random numbers that order the recent ones."""


def _steps(amaxes: list[float]) -> Sequence:
    return tuple((amax,) for amax in amaxes)


def _differ(state: History, sequence: Sequence, other: Sequence) -> str:
    a, b = state.scale(sequence), state.scale(other)
    if a == b:
        return ""
    return f"after {named(sequence)}: {text(a)}; after {named(other)}: {text(b)}"


def _window(state: History, inputs: Drawn) -> list[float]:
    """As many amaxes as its history holds; padded in front with the first."""
    recent = inputs[1][: state.length]
    return [recent[0]] * (state.length - len(recent)) + recent


_SMALL = [amax for amax in ORDINARY if amax < 2.0**100]
_DRAWN = st.tuples(
    st.lists(st.sampled_from(_SMALL), min_size=1, max_size=3),
    st.lists(st.sampled_from(_SMALL), min_size=3, max_size=6),
    st.lists(st.integers(0, 9), min_size=5, max_size=5),
)

HISTORIES = Clause("H-14")
"""The invariants of histories (H-14)."""


@HISTORIES.states("amaxes of the history in another order give the same scale", _DRAWN)
def _order(state: History, fmt: Format, inputs: Drawn) -> str:
    window = _window(state, inputs)
    moved = sorted(window, key=lambda amax: (inputs[2][int(amax) % len(inputs[2])], amax))
    later = [1.0] * state.late
    return _differ(state, _steps([*window, *later]), _steps([*moved, *later]))


@HISTORIES.states("amaxes older than the history have no effect", _DRAWN)
def _forgets(state: History, fmt: Format, inputs: Drawn) -> str:
    window = [*_window(state, inputs), *[1.0] * state.late]
    return _differ(state, _steps([*inputs[0], *window]), _steps(window))


@HISTORIES.states("uses of a step, in any order, are one of the largest amax", _DRAWN)
def _uses(state: History, fmt: Format, inputs: Drawn) -> str:
    uses = tuple(inputs[1][:3])
    after = _steps([1.0] * state.late)
    return _differ(state, (uses, *after), (uses[::-1], *after)) or _differ(
        state, (uses, *after), ((max(uses),), *after)
    )


@HISTORIES.states("larger amaxes give no larger scale", _DRAWN)
def _monotone(state: History, fmt: Format, inputs: Drawn) -> str:
    window = _window(state, inputs)
    larger = _steps([2 * amax for amax in window])
    a, b = state.scale(_steps(window)), state.scale(larger)
    if (a >= b) if state.made == "scale" else (a <= b):
        return ""
    return f"after {named(_steps(window))}: {text(a)}; after {named(larger)}: {text(b)}"
