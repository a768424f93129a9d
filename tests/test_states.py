"""Layouts of optimizer states as data: what exists, what is refused and why, and the numbers of a step."""

import dataclasses
import math
from fractions import Fraction

import pytest

from fp8ref import states
from fp8ref.formats import BFLOAT16, E4M3FN, E4M3FNUZ, E5M2, FLOAT16, FLOAT32
from fp8ref.states import LAYOUTS, WITH_MASTERS, Layout, Moment

HYPER = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def test_every_layout_has_its_own_name_decisions_and_source():  # O-1
    assert list(LAYOUTS) == ["float32", "bfloat16", "msamp", "fishman", "sqrt_e5m2", "sqrt_e4m3", "torchao", "te", "coat"]
    assert all(name == layout.name and layout.source for name, layout in LAYOUTS.items())
    assert len({dataclasses.replace(layout, name="", source="") for layout in LAYOUTS.values()}) == len(LAYOUTS)


BYTES = {
    "float32": 8,
    "bfloat16": 4,
    "msamp": 3,
    "fishman": 2,
    "sqrt_e5m2": 2,
    "te": 2,
    "torchao": 2.03125,
    "sqrt_e4m3": 2.0625,
    "coat": 2.1875,
}


@pytest.mark.parametrize(("name", "expected"), BYTES.items())
def test_bytes_a_parameter(name, expected):  # O-1
    assert LAYOUTS[name].bytes_per_parameter(1 << 24) == pytest.approx(expected, abs=1e-6)


def test_bytes_with_the_master():  # O-14
    """16 bytes a parameter, of float32 master, moments and gradient, become 6 with an FP8 gradient."""
    found = {name: LAYOUTS[name].bytes_with_master(1 << 24) for name in ("float32", "sqrt_e4m3")}
    found |= {name: layout.bytes_with_master(1 << 24) for name, layout in WITH_MASTERS.items()}
    assert found == pytest.approx({"float32": 12, "sqrt_e4m3": 6.0625, "msamp_o2": 5, "sqrt_e4m3_f16": 4.0625}, abs=1e-6)
    assert [layout.bytes_per_parameter(1 << 24) for layout in WITH_MASTERS.values()] == pytest.approx([3, 2.0625], abs=1e-6)


def test_small_and_ragged_tensors_of_torchao_stay_float32():  # O-1
    layout = LAYOUTS["torchao"]
    assert layout.of(4096) is layout
    for size in (4095, 256, 4096 + 128):
        assert (layout.of(size).m.fmt, layout.of(size).v.fmt, layout.of(size).average) == (FLOAT32, FLOAT32, "lerp")
    assert LAYOUTS["sqrt_e4m3"].of(1) is LAYOUTS["sqrt_e4m3"]


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ({"fmt": E4M3FNUZ}, "fmt is one of e4m3fn, e5m2, float16, bfloat16, float32; got e4m3fnuz"),
        ({"fmt": "e4m3fn"}, "fmt is one of"),
        ({"fmt": E4M3FN}, "needs a scale; got scaling=None. Use scaling='multiply'"),
        ({"fmt": E4M3FN, "scaling": "amax"}, "scaling is one of"),
        ({"fmt": E4M3FN, "scaling": "multiply", "block": 64}, r"block is one of 128, 256, None; got 64"),
        ({"fmt": E4M3FN, "scaling": "multiply", "block": 128.0}, "block is one of"),
        ({"fmt": E4M3FN, "scaling": "multiply", "amax": "delayed"}, "amax is one of 'exact', 'previous', 'predicted'"),
        ({"fmt": E4M3FN, "scaling": "multiply", "rounding": "to_odd"}, "rounding is one of"),
        ({"fmt": E4M3FN, "scaling": "multiply", "keep": 1}, "keep is one of"),
        ({"fmt": E4M3FN, "scaling": "multiply", "floor": 0.0}, r"floor is in \[2\^-100, 1\)"),
        ({"fmt": FLOAT16, "scaling": "multiply"}, "float16 takes no scale or a power of two"),
        ({"fmt": BFLOAT16, "scaling": "power_of_two"}, "bfloat16 has float32's range and takes no scale"),
        ({"scaling": "power_of_two"}, "float32 has float32's range"),
        ({"fmt": FLOAT16, "block": 128}, "without a scale has no use for block"),
        ({"fmt": FLOAT16, "amax": "previous"}, "without a scale has no use for amax"),
        ({"rounding": "stochastic"}, "float32, which is not rounded, has no use for rounding"),
        ({"fmt": BFLOAT16, "keep": True}, "bfloat16, which has float32's range, has no use for keep"),
        (
            {"fmt": E4M3FN, "scaling": "multiply", "block": 128, "expansion": True},
            "an expansion needs fmt e4m3fn, a block and scaling='divide'",
        ),
        ({"fmt": E5M2, "scaling": "divide", "block": 128, "expansion": True}, "got e5m2"),
        ({"fmt": E4M3FN, "scaling": "divide", "block": 128, "expansion": True, "root": True}, "an expansion has no use for root"),
        ({"fmt": E4M3FN, "scaling": "divide", "block": 128, "expansion": True, "amax": "previous"}, "no use for amax"),
    ],
)
def test_moments_that_do_not_exist_are_refused(decisions, message):  # O-1
    with pytest.raises(ValueError, match=message):
        Moment(**decisions)


E4M3 = Moment(fmt=E4M3FN, scaling="multiply")
HALF = Moment(fmt=FLOAT16, scaling="power_of_two")


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ({"m": "e4m3"}, "m of layout 'mine' is a Moment"),
        ({"average": "mean"}, "average is one of products, lerp"),
        ({"smallest": -1}, "smallest is an integer of at least 0"),
        ({"m": dataclasses.replace(E4M3, root=True)}, "m has signs, so layout 'mine' cannot store its root"),
        (
            {"average": "lerp", "v": dataclasses.replace(E4M3, amax="predicted")},
            "predicted of average 'products' alone .* Use amax='exact'",
        ),
        ({"ragged": False}, "has no blocks, so ragged has no use"),
        ({"master": E4M3}, "a master is float16, bfloat16, float32, with at most one scale"),
        ({"master": dataclasses.replace(HALF, block=128)}, "at most one scale for the tensor"),
        ({"master": dataclasses.replace(HALF, amax="previous")}, "of an exact or a predicted amax"),
        ({"master": dataclasses.replace(HALF, root=True)}, "without root"),
        ({"master": "float16"}, "master of layout 'mine' is a Moment"),
        ({"master": dataclasses.replace(HALF, amax="predicted")}, "predicted from the bound of O-6; layout 'mine' is not bounded"),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(decisions, message):  # O-1, O-9, O-14, O-15
    with pytest.raises(ValueError, match=message):
        Layout(name="mine", **decisions)


def test_a_layout_is_looked_up_by_its_name():
    assert states.by_name("msamp") is states.by_name(LAYOUTS["msamp"])
    with pytest.raises(ValueError, match=r"layout is a Layout or one of float32, .*; got 'adam8bit'"):
        states.by_name("adam8bit")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("b1", 0.4, "b1 is 0 or in"),
        ("b1", 1.0, "b1 is 0 or in"),
        ("b2", 0.99999, "b2 is in .*, so that squares of gradients stay normal"),
        ("b2", 0.0, "b2 is in"),
        ("eps", 0.0, "eps is in .* Use 1e-8"),
        ("eps", math.nan, "eps is in"),
        ("weight_decay", -0.1, "weight_decay is in"),
        ("learning_rate", -1e-3, "learning_rate is in"),
        ("learning_rate", math.nan, "learning_rate is in"),
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
        # t products of relative error 2^-53 each, and a difference that is at least 1 - b; then one rounding to float32
        exact = 1 - Fraction(b1) ** t if t <= 100 else 1
        assert abs(Fraction(at.inverse1) * exact - 1) < Fraction(1, 1 << 23), t
        exact2 = 1 - float(b2) ** t
        assert at.inverse2 == pytest.approx(1 / math.sqrt(exact2), rel=2**-23)


def test_the_worked_example():  # O-3
    bits = {t: states.scalars(t, learning_rate=0.25, **HYPER) for t in (1, 2, 10)}
    hexadecimal = {t: [states.struct.pack(">f", x).hex().upper() for x in (s.inverse1, s.inverse2, s.bound)] for t, s in bits.items()}
    assert hexadecimal == {
        1: ["41200000", "408F1BBD", "3F810000"],
        2: ["40A86BCA", "404CF6CB", "3F810C09"],
        10: ["3FC48605", "3FCA1126", "3F827A40"],
    }
    assert (len(states.corrections(0.9, 0.95)), len(states.corrections(0.9, 0.999))) == (406, 20785)
    assert states.corrections(0.9, 0.999)[-1][2] == pytest.approx(7.2704 * (1 + 2**-7), rel=1e-4)
