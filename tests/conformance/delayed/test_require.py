"""require_delayed: rules of libraries pass under their own names; planted faults are found with few
steps (spec H-13).
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

from fp8ref.conformance.delayed import Functions, identify_delayed, of_step, require_delayed
from fp8ref.conformance.delayed.comparison import Asked
from fp8ref.conformance.delayed.require import asked_of, departures
from fp8ref.conformance.delayed.subject import subject_of
from fp8ref.formats import E4M3FN
from fp8ref.policy import POLICIES
from fp8ref.sim import delayed
from fp8ref.spec.delayed import DELAYED

F32 = np.float32
LENGTH = 4
RULES = {name: dataclasses.replace(rule, history_length=LENGTH) for name, rule in DELAYED.items()}


def said(*args, **how) -> str:
    with pytest.raises(AssertionError) as raised:
        require_delayed(*args, **how)
    return str(raised.value)


def of_rule(rule) -> Functions:
    """The simulator's own state."""

    def update(state, *amaxes):
        return delayed.update(state, *map(delayed.observe, amaxes), config=rule, fmt=E4M3FN)

    return Functions(
        init=lambda: delayed.init(rule),
        update=update,
        scale=lambda state: delayed.scales(state, rule, E4M3FN).scale,
        reset=lambda state: delayed.init(rule),
        save=lambda state: state,
        load=lambda saved: saved,
    )


class Ordinary:
    """Rule ``delayed`` as somebody writes it; subclasses plant one fault each."""

    length = LENGTH

    def __init__(self):
        self.history = [0.0] * self.length
        self.seen = []
        self.scale = F32(1)

    def observe(self, amax):
        self.seen.append(float(amax))

    def reduced(self):
        return float(np.max(self.history))

    def merged(self):
        return float(np.max(self.seen))

    def update(self):
        if not self.seen:
            return
        amax, self.seen = self.merged(), []
        if not math.isfinite(amax):
            return
        self.history = [amax, *self.history[:-1]]
        self.rescale(self.reduced())

    def rescale(self, amax):
        if amax > 0:
            self.scale = F32(min(448 / amax, float(np.finfo(F32).max)))

    def reset(self):
        self.__init__()

    def save(self):
        return list(self.history), self.scale

    def load(self, saved):
        history, self.scale = saved
        self.history = list(history)


class ShortHistory(Ordinary):
    length = LENGTH - 1


class LongHistory(Ordinary):
    length = LENGTH + 1


class UpdateBeforeUse(Ordinary):
    """The step's own amax makes its scale."""

    def observe(self, amax):
        super().observe(amax)
        self.rescale(max(self.merged(), self.reduced()))


class PushAfterUse(Ordinary):
    """The scale is made before the push: one step late."""

    def update(self):
        if self.seen and math.isfinite(amax := self.merged()):
            self.rescale(self.reduced())
            self.history = [amax, *self.history[:-1]]
        self.seen = []


class DropsNaN(Ordinary):
    """A maximum that drops NaN records the other elements' amax, or 0."""

    def observe(self, amax):
        super().observe(0.0 if math.isnan(amax) else amax)


class Mean(Ordinary):
    def reduced(self):
        used = [amax for amax in self.history if amax]
        return sum(used) / len(used) if used else 0.0


class Overwritten(Ordinary):
    """The last microbatch alone counts."""

    def observe(self, amax):
        self.seen = [float(amax)]


class Frozen(Ordinary):
    """An infinity enters the history, and keeps the scale until it leaves."""

    def update(self):
        if self.seen:
            amax, self.seen = self.merged(), []
            self.history = [amax, *self.history[:-1]]
            if math.isfinite(self.reduced()):
                self.rescale(self.reduced())


class UnusedIsZero(Ordinary):
    """A step without use pushes 0."""

    def update(self):
        self.seen = self.seen or [0.0]
        super().update()


class SharedSave(Ordinary):
    """What was saved changes with the state."""

    def save(self):
        return self

    def load(self, saved):
        self.history, self.scale = list(saved.history), saved.scale


class ForgetsHistory(Ordinary):
    """The scale alone is loaded."""

    def load(self, saved):
        self.scale = saved[1]


class KeepsScale(Ordinary):
    """A reset that keeps the scale."""

    def reset(self):
        self.history = [0.0] * self.length


class Unbounded(Ordinary):
    """448 / amax may be infinite."""

    def rescale(self, amax):
        if amax > 0:
            with np.errstate(over="ignore"):
                self.scale = F32(448) / F32(amax)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_passes_under_its_own_name(name):  # H-13
    require_delayed(of_rule(RULES[name]), RULES[name], examples=8)


def test_a_class_passes():  # H-1 to H-6, H-13
    require_delayed(Ordinary, RULES["delayed"], examples=8)


FAULTS = [
    (
        ShortHistory,
        r"after 4 steps: amax 2; amax 1, 3 times: .* \(H-3\)\n  It follows a rule with "
        r"history_length 3, not 4\.",
    ),
    (
        LongHistory,
        r"after 5 steps: amax 2; amax 1, 4 times: .*\(H-3\)\n  It follows a rule with "
        r"history_length 5, not 4\.",
    ),
    (
        UpdateBeforeUse,
        r"in step 1, once its tensor is observed: amax 1: got 448 \S+, expected 1 \S+ \(H-1\)\n"
        r".* own tensor is observed",
    ),
    (PushAfterUse, r"after 1 step: amax 1: got 1 \S+, expected 448 \S+ \(H-1, S-9\)"),
    (
        DropsNaN,
        r"amax 2; amax 1, 2 times; amax nan; amax 1: got 448 .* \(H-5\)\n  no rule explains a "
        r"NaN amax",
    ),
    (
        Mean,
        r"after 2 steps: amax 1; amax 2: .* \(H-3\)\n  its scale is that of the mean of the "
        r"amaxes, not of the largest",
    ),
    (Overwritten, r"after 1 step: amaxes 2 and 1: got 448 \S+, expected 224 \S+ \(H-4\)"),
    (
        Frozen,
        r"amax inf; amax 1: got 1 .* \(H-5\)\n.*amax nan; amax 1: got 1 .* \(H-5\)\n  It "
        r"follows a rule with non_finite record, not skip\.",
    ),
    (UnusedIsZero, r"amax 2; .*no use.* \(H-5\)\n  no rule explains a step without use"),
    (
        SharedSave,
        r"after 2 steps: save; amax 1; load; amax .*|save; amax 1; load: got 448 \S+, expected "
        r"1 \S+ \(H-13\)",
    ),
    (ForgetsHistory, r"amax 2; save; load; amax 1: got 448 \S+, expected 224 \S+ \(H-13\)"),
    (KeepsScale, r"amax 1; reset: got 448 \S+, expected 1 \S+ \(H-2\)"),
    (
        Unbounded,
        r"amax 1e-36: got inf .* \(S-12\)\n  It follows a rule with policy flax|overflow inf",
    ),
]


@pytest.mark.grid(3)
@pytest.mark.parametrize(("made", "message"), FAULTS, ids=[made.__name__ for made, _ in FAULTS])
def test_a_planted_fault_is_found_and_nothing_else(made, message):  # H-1 to H-6, H-13
    text = said(made, RULES["delayed"], examples=8)
    assert re.search(message, text), text


# ---- libraries ----


def te_update(state, *amaxes):
    """delayed_scaling.cu, kernel_bulk (commit 6b71a0ad), after one step's atomic maximum of amaxes.

    The maximum in slot 0 starts at 0; an atomic maximum of integers orders NaN above infinity.
    """
    history, scale = state
    amax = max((float(a) for a in amaxes if not math.isnan(a)), default=0.0)
    amax = math.nan if any(math.isnan(a) for a in amaxes) else amax
    largest = 0.0
    if amax != 0:
        rolled = [*history[1:], amax]
        largest = functools.reduce(lambda a, b: a if math.isnan(b) else max(a, b), rolled, 0.0)
        history = [0.0, *rolled[1:]]
    if math.isfinite(largest) and largest > 0:
        with np.errstate(over="ignore"):
            scale = F32(448) / F32(largest)
    return history, min(scale, np.finfo(F32).max)


TE = Functions(
    init=lambda: ([0.0] * LENGTH, F32(1)),
    update=te_update,
    scale=lambda state: state[1],
    save=lambda state: state,
    load=lambda saved: saved,
)

_quantize = functools.partial(fp8_ops.in_qdq, jnp.float32, jnp.float8_e4m3fn)


@jax.jit
def flax_update(state, *tensors):
    """flax's state after a step: the gradient by it, which overwrites it."""
    used = jax.grad(
        lambda state: sum((jnp.sum(_quantize(x, *state)) for x in tensors), jnp.float32(0))
    )
    return used(state)


FLAX = Functions(
    init=lambda: (jnp.ones(1), jnp.zeros(LENGTH)),
    update=flax_update,
    scale=lambda state: state[0],
    save=lambda state: state,
    load=lambda saved: saved,
)
AS_FLAX = {"made": "scale_inv", "shows": "stored", "takes": "tensor", "framework": "jax"}


def names_of(subject, rule, **how):
    """{difficulty: clause} of what departs."""
    asked = asked_of(rule, E4M3FN, how.pop("made", "scale"), how.pop("shows", "next"))
    return {
        one.difficulty: one.clause
        for one in departures(subject_of(subject, **how), asked, examples=8)
    }


def test_transformer_engine_departs_as_stated_and_in_nothing_else():  # H-7, H-13
    require_delayed(TE, RULES["te_delayed"], examples=8)
    assert names_of(TE, RULES["delayed"]) == {"zero": "H-5", "infinite": "H-5", "nan": "H-5"}
    found = identify_delayed(TE)
    fields = {
        "zero": "skip",
        "non_finite": "record",
        "nan_in_history": "drop",
        "history_length": LENGTH,
    }
    assert (found.ok, found.names, {key: found.fields[key] for key in fields}) == (
        True,
        ("te_delayed",),
        fields,
    )


def test_flax_departs_as_stated_and_in_nothing_else():  # H-8, H-13
    """Some programs of XLA on a CPU flush subnormal numbers (S-12), so tiny amaxes are left out;
    everything else is rule flax.
    """
    require_delayed(FLAX, RULES["flax"], without=("tiny",), examples=8, **AS_FLAX)
    # What is stored is one step behind, which shows in the first ordinary step.
    text = said(FLAX, RULES["delayed"], **AS_FLAX)
    for field in (
        "timing use, not update",
        "reuse sum, not max",
        "unused zero, not keep",
        "non_finite record, not skip",
        "policy flax",
    ):
        assert field in text


@pytest.mark.slow
def test_flax_is_identified():  # H-8, H-13
    found = identify_delayed(FLAX, **AS_FLAX)
    assert found.names == ("flax",)
    assert {key: found.fields[key] for key in ("timing", "reuse", "unused", "non_finite")} == {
        "timing": "use",
        "reuse": "sum",
        "unused": "zero",
        "non_finite": "record",
    }


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "changed",
    [
        {"history_length": 8, "interval": 3},
        {"policy": dataclasses.replace(POLICIES["te_delayed"], margin=2)},
        {"policy": POLICIES["msamp"]},
        {"history_length": 1, "amax_compute": "most_recent"},
    ],
    ids=["interval", "margin", "msamp", "most_recent"],
)
def test_other_decisions_are_identified(changed):  # H-6, H-13
    rule = dataclasses.replace(DELAYED["delayed"], **({"history_length": LENGTH} | changed))
    found = identify_delayed(of_rule(rule))
    assert found.ok
    for key in ("history_length", "interval", "amax_compute"):
        assert getattr(rule, key) in (found.fields[key], *found.others.get(key, ()))
    assert (found.fields["policy"], found.fields["margin"]) == (
        rule.policy.name,
        rule.policy.margin,
    )


# ---- how it is asked ----


def test_a_step_function_is_enough():  # H-1
    rule = RULES["delayed"]

    def step(state, *amaxes):
        return delayed.step(state, *map(delayed.observe, amaxes), config=rule, fmt=E4M3FN)

    def pair(state, *amaxes):
        state, scales = step(state, *amaxes)
        return state, scales.scale

    require_delayed(of_step(lambda: delayed.init(rule), pair), rule, examples=4)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_tensors_of_frameworks(framework):
    class OfTensors(Ordinary):
        def observe(self, x):
            super().observe(abs(np.asarray(x)).max())

    require_delayed(OfTensors, RULES["delayed"], takes="tensor", framework=framework, examples=2)


def test_what_it_cannot_ask_is_refused():
    with pytest.raises(ValueError, match=r"has no update and no scale"):
        require_delayed(type("Bad", (), {"observe": None}))
    with pytest.raises(ValueError, match="got 3"):
        require_delayed(Ordinary, RULES["delayed"], framework=3)
    with pytest.raises(ValueError, match="made is"):
        require_delayed(Ordinary, RULES["delayed"], made="amax")
    with pytest.raises(ValueError, match="shows is one of next, stored; got 'all'"):
        Asked(rule=RULES["delayed"], fmt=E4M3FN, shows="all")
    with pytest.raises(ValueError, match="without names difficulties"):
        require_delayed(Ordinary, RULES["delayed"], without=("ordinary",))
    with pytest.raises(ValueError, match="is a class"):
        require_delayed(3)


def test_what_raises_is_a_counterexample():
    class Raises(Ordinary):
        def merged(self):
            if np.inf in self.seen:
                raise OverflowError("too large")
            return super().merged()

    assert "amax inf: got it raises OverflowError: too large, expected 1" in said(
        Raises, RULES["delayed"], examples=2
    )
