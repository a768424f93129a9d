"""A state machine of hypothesis for somebody's delayed scaling: a subclass names it (spec H-13).

class OfMine(DelayedMachine):
    implementation = MyScaling
    rule = "delayed"

TestMine = OfMine.TestCase              # pytest and unittest find it
"""

from typing import Any, ClassVar

import numpy as np
from hypothesis import stateful
from hypothesis import strategies as st

from fp8ref.conformance.delayed import sequences
from fp8ref.conformance.delayed.comparison import same
from fp8ref.conformance.delayed.require import asked_of
from fp8ref.conformance.delayed.subject import Held, subject_of
from fp8ref.formats import E4M3FN, Format
from fp8ref.sim import delayed
from fp8ref.spec.delayed import DelayedScaling

__all__ = ["DelayedMachine"]

_USED = [
    amax
    for name in ("zero", "infinite", "nan", "tiny")
    for step in sequences.DIFFICULTIES[name].special
    if not isinstance(step, str)
    for amax in step
]


class DelayedMachine(stateful.RuleBasedStateMachine):
    """Steps, saves, loads and resets in any order; after each, the scale is the rule's.

    implementation, rule, fmt, made, shows, takes, framework  as of ``require_delayed``.
    amaxes     the amaxes of steps; override it to leave some out.
    Raises:    ValueError: a subclass names no implementation; as ``require_delayed``.
    """

    implementation: ClassVar[Any] = None
    rule: ClassVar[str | DelayedScaling] = "delayed"
    fmt: ClassVar[Format] = E4M3FN
    made: ClassVar[str] = "scale"
    shows: ClassVar[str] = "next"
    takes: ClassVar[str] = "amax"
    framework: ClassVar[str] = "numpy"
    amaxes: ClassVar[tuple[float, ...]] = (*sequences.ORDINARY, *_USED)

    def __init__(self) -> None:
        super().__init__()
        implementation = type(self).__dict__.get("implementation", type(self).implementation)
        if implementation is None:
            raise ValueError(
                f"{type(self).__name__} tests an implementation; got None. Set the class "
                "attribute implementation."
            )
        self.asked = asked_of(self.rule, self.fmt, self.made, self.shows)
        self.subject = subject_of(
            getattr(implementation, "__func__", implementation),
            takes=self.takes,
            framework=self.framework,
        )
        self.held = Held(self.subject)
        self.done: tuple[sequences.Operation, ...] = ()
        self.state = self.saved = delayed.init(self.asked.rule, (1,))
        self.has_saved = False

    @stateful.rule(data=st.data(), uses=st.integers(1, 2))
    def use(self, data: st.DataObject, uses: int) -> None:
        """A step with one or two uses."""
        self._do(tuple(data.draw(st.sampled_from(self.amaxes)) for _ in range(uses)))

    @stateful.rule()
    def leave_unused(self) -> None:
        """A step without use."""
        self._do(())

    @stateful.precondition(lambda self: "load" not in self.subject.lacks)
    @stateful.rule()
    def save(self) -> None:
        """Save the state."""
        self._do("save")
        self.saved, self.has_saved = self.state, True

    @stateful.precondition(lambda self: self.has_saved)
    @stateful.rule()
    def load(self) -> None:
        """Load the last save into a new object."""
        self._do("load")
        self.state = self.saved

    @stateful.precondition(lambda self: "reset" not in self.subject.lacks)
    @stateful.rule()
    def reset(self) -> None:
        """Reset the state."""
        self._do("reset")
        self.state = delayed.init(self.asked.rule, (1,))

    @stateful.invariant()
    def shows_the_specified_scale(self) -> None:
        """The scale is the rule's."""
        self._check(self.held.scale(), "")

    def _do(self, operation: sequences.Operation) -> None:
        self.done = (*self.done, operation)
        observed = self.held.do(operation)
        if observed is not None:
            self._check(observed, " and before the last update")
        if isinstance(operation, tuple):
            seen = [delayed.observe(np.array([amax], np.float32)) for amax in operation]
            rule, fmt = self.asked.rule, self.asked.fmt
            self.state = delayed.update(self.state, *seen, config=rule, fmt=fmt)

    def _check(self, got: float, when: str) -> None:
        expected = self.asked.shown(self.state)[0]
        assert same(got, expected), (
            f"after {sequences.named(self.done) or 'no step'}{when}: got scale {got:.9g}, expected "
            f"{expected:.9g}"
        )
