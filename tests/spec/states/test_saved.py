"""Layouts are told apart by what they decide, whatever their names are (spec O-1)."""

import dataclasses
import itertools

import pytest

from fp8ref.formats import BFLOAT16
from fp8ref.spec.states import saved as layout_decisions
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS, Moment


def test_each_named_layout_is_its_own_and_no_other():  # O-1
    for one, other in itertools.product((LAYOUTS | WITH_MASTERS).values(), repeat=2):
        assert (not layout_decisions.differences(one, layout_decisions.written(other))) == (
            one == other
        )


def test_names_and_sources_decide_nothing():
    own = LAYOUTS["sqrt_e4m3"]
    assert layout_decisions.written(
        dataclasses.replace(own, name="mine", source="me")
    ) == layout_decisions.written(own)


def test_what_differs_is_named():
    own = LAYOUTS["sqrt_e4m3"]
    m = dataclasses.replace(own.m, block=256, floor=2.0**-60)
    other = layout_decisions.written(
        dataclasses.replace(own, m=m, v=Moment(fmt=BFLOAT16), bounded=False, smallest=7)
    )
    assert layout_decisions.differences(own, other) == [
        "m.block = 128, saved 256",
        f"m.floor = {2.0**-90!r}, saved {2.0**-60!r}",
        "v.fmt = 'e4m3fn', saved 'bfloat16'",
        "v.scaling = 'multiply', saved None",
        "v.block = 128, saved None",
        "v.root = True, saved False",
        "v.keep = True, saved False",
        "bounded = True, saved False",
        "smallest = 0, saved 7",
    ]


def test_fields_that_one_side_lacks():
    own = LAYOUTS["float32"]
    assert layout_decisions.differences(
        own, layout_decisions.written(own).replace('"smallest"', '"new"')
    ) == ["smallest = 0, saved None", "new = None, saved 0"]
    with pytest.raises(ValueError, match="Expecting value"):
        layout_decisions.differences(own, "sqrt_e4m3")


@pytest.mark.parametrize("saved", ["[]", "1", "[" * 100_000, '{"m": 1, "m": 2}'])
def test_text_of_a_state_that_was_not_written_here_is_refused(saved):
    with pytest.raises(
        ValueError, match=r"a state holds the decisions of its layout as text.*Use init"
    ):
        layout_decisions.check(LAYOUTS["sqrt_e4m3"], saved)
