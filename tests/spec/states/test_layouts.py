"""Layouts of optimizer states as data: what exists, what is refused and why, and the numbers of a
step.
"""

import dataclasses
import math
from fractions import Fraction

import pytest

from fp8ref.spec.states import layouts as states
from fp8ref.spec.states.layouts import LAYOUTS

HYPER = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def test_every_layout_has_its_own_name_decisions_and_source():  # O-1
    assert list(LAYOUTS) == [
        "float32",
        "bfloat16",
        "msamp",
        "fishman",
        "sqrt_e5m2",
        "sqrt_e4m3",
        "torchao",
        "te",
        "coat",
    ]
    assert all(name == layout.name and layout.source for name, layout in LAYOUTS.items())
    assert len(
        {dataclasses.replace(layout, name="", source="") for layout in LAYOUTS.values()}
    ) == len(LAYOUTS)


def test_a_layout_is_looked_up_by_its_name():
    assert states.by_name("msamp") is states.by_name(LAYOUTS["msamp"])
    with pytest.raises(
        ValueError, match=r"layout is a Layout or one of float32, .*; got 'adam8bit'"
    ):
        states.by_name("adam8bit")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("b1", 0.4, "b1 is 0 or in"),
        ("b1", 1.0, "b1 is 0 or in"),
        ("b2", 0.99999, "b2 is in .*, which keeps squared gradients normal"),
        ("b2", 0.0, "b2 is in"),
        ("eps", 0.0, "eps is in .* Use 1e-8"),
        ("eps", math.nan, "eps is in"),
        ("weight_decay", -0.1, "weight_decay is in"),
        ("learning_rate", -1e-3, "learning_rate is in"),
        ("learning_rate", math.nan, "learning_rate is in"),
        ("learning_rate", None, "learning_rate is a number; got None"),
        ("b2", "0.9", "b2 is a number; got '0.9'"),
    ],
)
def test_numbers_outside_their_range_are_refused(key, value, message):  # O-2
    with pytest.raises(ValueError, match=message):
        states.scalars(1, **{"learning_rate": 1e-3, **HYPER, key: value})


def test_a_bound_needs_a_ratio_below_one():  # O-2, O-6
    plain = {"eps": 1e-8, "weight_decay": 0.0}
    with pytest.raises(ValueError, match=r"'sqrt_e4m3' is bounded, which needs b1\^2 / b2 below"):
        states.check(b1=0.99, b2=0.95, layout=LAYOUTS["sqrt_e4m3"], **plain)
    states.check(b1=0.99, b2=0.95, layout=LAYOUTS["msamp"], **plain)
    assert states.scalars(3, learning_rate=0.0, b1=0.99, b2=0.95, **plain).bound == math.inf
    with pytest.raises(ValueError, match=r"'lerp' needs betas above 0.5"):
        states.check(b1=0.0, b2=0.95, layout=LAYOUTS["torchao"], **plain)


@pytest.mark.parametrize("step", [0, -1, 1.0, True])
def test_steps_are_counted_from_one(step):  # O-3
    with pytest.raises(ValueError, match="counted from 1"):
        states.scalars(step, learning_rate=1e-3, **HYPER)


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5), (0.5, 0.9)])
def test_corrections_are_close_to_their_exact_values(b1, b2):  # O-3
    table = states.corrections(b1, b2)
    for t in (1, 2, 3, 10, 100, len(table), 10 * len(table)):
        at = states.scalars(t, learning_rate=1.0, b1=b1, b2=b2, eps=1e-8, weight_decay=0.0)
        # t products of relative error 2^-53 each, and a difference that is at least 1 - b; then one
        # rounding to float32
        exact = 1 - Fraction(b1) ** t if t <= 100 else 1
        assert abs(Fraction(at.inverse1) * exact - 1) < Fraction(1, 1 << 23), t
        exact2 = 1 - float(b2) ** t
        assert at.inverse2 == pytest.approx(1 / math.sqrt(exact2), rel=2**-23)


def test_the_worked_example():  # O-3
    bits = {t: states.scalars(t, learning_rate=0.25, **HYPER) for t in (1, 2, 10)}
    hexadecimal = {
        t: [states.struct.pack(">f", x).hex().upper() for x in (s.inverse1, s.inverse2, s.bound)]
        for t, s in bits.items()
    }
    assert hexadecimal == {
        1: ["41200000", "408F1BBD", "3F810000"],
        2: ["40A86BCA", "404CF6CB", "3F810C09"],
        10: ["3FC48605", "3FCA1126", "3F827A40"],
    }
    assert (len(states.corrections(0.9, 0.95)), len(states.corrections(0.9, 0.999))) == (406, 20785)
    assert states.corrections(0.9, 0.999)[-1][2] == pytest.approx(7.2704 * (1 + 2**-7), rel=1e-4)
