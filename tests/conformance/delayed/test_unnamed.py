"""What a delayed scaling does that no rule does is said, and so is what does not repeat itself."""

import numpy as np
import pytest

from fp8ref.conformance.delayed import Functions, identify_delayed, require_delayed
from fp8ref.conformance.delayed.comparison import Asked, departure
from fp8ref.conformance.delayed.subject import Subject
from fp8ref.formats import E4M3FN
from fp8ref.spec.delayed import by_name


class Scaling:
    """Rule ``delayed``; subclasses plant one fault each."""

    def __init__(self):
        self.history, self.seen, self.scale = [0.0] * 16, [], np.float32(1)

    def observe(self, amax):
        self.seen.append(float(amax))

    def update(self):
        if self.seen and np.isfinite(self.seen).all():
            self.history.insert(0, max(self.seen))
            self.history.pop()
            self.rescale(max(self.history))
        self.seen = []

    def rescale(self, amax):
        self.scale = self.made(448 / amax) if amax else self.scale

    def made(self, scale):
        return np.float32(min(scale, float(np.finfo(np.float32).max)))


class Shared(Scaling):
    shared: list = []  # noqa: RUF012 - the fault

    def __init__(self):
        super().__init__()
        self.shared.extend([0.0] * (16 - len(self.shared)))
        self.history = self.shared


class Late(Scaling):
    pending = np.float32(1)

    def rescale(self, amax):
        self.scale, self.pending = self.pending, self.made(448 / amax)


class Wide(Scaling):
    def made(self, scale):
        return scale


class Narrow(Scaling):
    def made(self, scale):
        return (np.float32(scale).view(np.uint32) + np.uint32(0x8000) & np.uint32(0xFFFF0000)).view(
            np.float32
        )


class Of240(Scaling):
    def made(self, scale):
        return np.float32(scale * 240 / 448)


class Raises(Scaling):
    def __init__(self):
        raise SystemExit("no memory.")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            Shared,
            "a new state knows of earlier ones: after amax 1 its scale is 448, and 0.4375 where "
            "a state before it had amax 1024 (H-2)",
        ),
        (Late, "its scale is a step late: after amaxes 2 and 8 it is that of 2. shows='stored'"),
        (Wide, "its scale is not rounded to float32"),
        (Narrow, "its scale is rounded to bfloat16"),
        (Of240, "its scale is 0.535714 times that of the largest amax to e4m3fn, max 448"),
    ],
)
def test_what_no_rule_does_is_said(state, said):  # H-13
    assert said in identify_delayed(state).message


def test_what_raises_at_once_is_an_answer():  # H-13
    functions = Functions(init=Raises, update=lambda state: state, scale=lambda state: 1.0)
    with pytest.raises(
        AssertionError,
        match="before the first step: none: got it raises SystemExit: no memory, expected 1",
    ):
        require_delayed(functions, "delayed")


def test_what_does_not_repeat_itself_is_said_to():  # H-13
    calls = [0]

    def scale(state):
        calls[0] += 1
        return 1.0 if calls[0] > 1 else 2.0

    functions = Functions(init=lambda: None, update=lambda state, *amaxes: state, scale=scale)
    asked = Asked(rule=by_name("delayed"), fmt=E4M3FN)
    found = departure(Subject(functions=functions, name="mine"), asked, "ordinary", [()])
    assert str(found) == (
        "before the first step: none: got 2 (0x40000000), and something else when it is run "
        "again, expected 1 (0x3F800000) (H-2)"
    )
    assert "something else" not in str(
        departure(Subject(functions=functions, name="mine"), asked, "ordinary", [((2.0,),)])
    )


def test_examples_are_some():
    with pytest.raises(ValueError, match="examples is an integer of at least 1; got 0"):
        require_delayed(Scaling, "delayed", examples=0)


def test_an_object_is_no_class():
    with pytest.raises(
        ValueError, match=r"got Scaling\. Of an object give the class, or a function that makes one"
    ):
        require_delayed(Scaling(), "delayed")


class Unused(Scaling):
    def update(self):
        """Never done."""


class Once(Scaling):
    def rescale(self, amax):
        self.scale = self.made(448 / amax) if self.scale == 1 else self.scale


class NeverReset(Scaling):
    largest = 0.0

    def rescale(self, amax):
        self.largest = max(self.largest, amax)
        super().rescale(self.largest)


class Drifting(Scaling):
    def rescale(self, amax):
        self.scale = np.float32(self.scale * np.float32(0.999))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Unused, "no amax changes its scale, 1: amaxes are not used"),
        (Once, "its scale changes once, and then never again"),
        (NeverReset, "an amax is never forgotten: after 2,100 steps its scale is that of it"),
        (Drifting, "its scale goes on to change after 2,100 equal steps"),
    ],
)
def test_a_scale_without_a_history_says_why(fault, words):  # H-1, H-3
    (reason,) = identify_delayed(fault).evidence
    assert reason.startswith(words)
    with pytest.raises(AssertionError, match=words):
        require_delayed(fault, "delayed", examples=8)


def test_a_bound_of_the_amaxes_is_solved():
    """Amaxes that a clip of gradients bounds."""

    class Clipped(Scaling):
        def observe(self, amax):
            super().observe(min(float(amax), 0.75))

    assert identify_delayed(Clipped).evidence == ("an amax above 0.75 counts as 0.75 (H-1)",)
