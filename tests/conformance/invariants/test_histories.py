"""Invariants of histories, and what breaks each (spec H-14)."""

import dataclasses

import numpy as np
import pytest

from fp8ref.conformance.delayed.subject import Functions
from fp8ref.conformance.invariants import HISTORIES, broken
from fp8ref.conformance.invariants.histories import History
from fp8ref.formats import E4M3FN
from fp8ref.sim import delayed
from fp8ref.spec.delayed import DELAYED

F32 = np.float32
LENGTH = 3
EXAMPLES = 15


def of_rule(name, **changed) -> Functions:
    rule = dataclasses.replace(DELAYED[name], **({"history_length": LENGTH} | changed))
    return Functions(
        init=lambda: delayed.init(rule),
        update=lambda state, *amaxes: delayed.update(
            state, *map(delayed.observe, amaxes), config=rule, fmt=E4M3FN
        ),
        scale=lambda state: delayed.scales(state, rule, E4M3FN).scale,
    )


def of_reduction(reduce, length=LENGTH, merge=max) -> Functions:
    """A history as a tuple, newest last, and what makes one amax of it."""
    return Functions(
        init=tuple,
        update=lambda state, *amaxes: (*state, F32(merge(amaxes)))[-length:],
        scale=lambda state: F32(448) / F32(reduce(state)) if state else F32(1),
    )


STATES = {
    "delayed": (of_rule("delayed"), set()),
    "te_delayed": (of_rule("te_delayed"), set()),
    "flax": (of_rule("flax"), {"uses"}),  # uses add up (H-8)
    "an interval, under which an older amax may count": (
        of_rule("delayed", interval=2),
        {"forgets"},
    ),
    "the mean of the history": (
        of_reduction(lambda state: sum(map(float, state)) / len(state)),
        set(),
    ),
    "an average that decays": (
        Functions(
            init=lambda: F32(1),
            update=lambda state, *amaxes: F32(0.5) * state + F32(0.5) * F32(max(amaxes)),
            scale=lambda state: F32(448) / state,
        ),
        {"order", "forgets"},
    ),
    "a longer history": (of_reduction(max, LENGTH + 1), {"forgets"}),
    "the last use": (of_reduction(max, merge=lambda amaxes: amaxes[-1]), {"uses"}),
    "the smallest amax": (of_reduction(min), set()),
    "scale_inv for scale": (
        Functions(
            init=tuple,
            update=lambda state, *amaxes: (*state, max(amaxes))[-LENGTH:],
            scale=lambda state: F32(max(state, default=1)),
        ),
        {"monotone"},
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_states(name):  # H-14
    state, breaks = STATES[name]
    assert (
        set(broken(History(implementation=state, length=LENGTH), HISTORIES, examples=EXAMPLES))
        == breaks
    )


def test_what_raises_breaks():
    state = Functions(init=tuple, update=lambda state, *amaxes: 1 / 0, scale=lambda state: F32(1))
    assert set(broken(History(implementation=state, length=LENGTH), HISTORIES, examples=2)) == {
        one.name for one in HISTORIES
    }
