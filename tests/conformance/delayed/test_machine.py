"""The state machine that users subclass: it passes what follows the rule and fails what does not
(spec H-13).
"""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful

from fp8ref.conformance.delayed.machine import DelayedMachine
from fp8ref.formats import E4M3FN
from fp8ref.sim import delayed
from fp8ref.spec.delayed import DELAYED

RULE = dataclasses.replace(DELAYED["delayed"], history_length=2)
SETTINGS = hypothesis.settings(
    max_examples=15, stateful_step_count=12, deadline=None, derandomize=True, database=None
)


class Right:
    """The simulator's, as a class."""

    def __init__(self):
        self.state, self.seen = delayed.init(RULE), []

    def observe(self, amax):
        self.seen.append(delayed.observe(amax))

    def update(self):
        self.state, self.seen = delayed.update(self.state, *self.seen, config=RULE, fmt=E4M3FN), []

    def scale(self):
        return delayed.scales(self.state, RULE, E4M3FN).scale

    def reset(self):
        self.__init__()

    def state_dict(self):
        return self.state

    def load_state_dict(self, saved):
        self.state = saved


class Late(Right):
    """A history that is one step longer."""

    def __init__(self):
        super().__init__()
        self.longer = dataclasses.replace(RULE, history_length=3)
        self.state = delayed.init(self.longer)

    def update(self):
        self.state, self.seen = (
            delayed.update(self.state, *self.seen, config=self.longer, fmt=E4M3FN),
            [],
        )


class OfRight(DelayedMachine):
    implementation, rule = Right, RULE


class OfLate(DelayedMachine):
    implementation, rule = Late, RULE


TestRight = OfRight.TestCase
TestRight.settings = SETTINGS


def test_it_fails_what_departs():  # H-13
    phases = [hypothesis.Phase.generate]
    with pytest.raises(AssertionError, match=r"amax.*got scale .*, expected"):
        stateful.run_state_machine_as_test(
            OfLate, settings=hypothesis.settings(SETTINGS, max_examples=200, phases=phases)
        )


def test_it_needs_an_implementation():
    with pytest.raises(ValueError, match="Set the class attribute implementation"):
        DelayedMachine()


def test_amaxes_may_be_left_out():
    class Few(OfRight):
        amaxes = (1.0, 2.0)

    machine = Few()
    machine.leave_unused()
    machine.shows_the_specified_scale()
    assert machine.held.scale() == np.float32(1)
