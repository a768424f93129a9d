"""What a layout of optimizer states stores, and which decisions are refused (spec O-1, O-14)."""

import dataclasses
from pathlib import Path

import pytest

from fp8ref.formats import BFLOAT16, E4M3FN, E4M3FNUZ, E5M2, FLOAT16, FLOAT32
from fp8ref.spec.states.layout import Layout, Moment
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS

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
    """16 bytes a parameter, of float32 master, moments and gradient, become 6 with an FP8
    gradient.
    """
    found = {name: LAYOUTS[name].bytes_with_master(1 << 24) for name in ("float32", "sqrt_e4m3")}
    found |= {name: layout.bytes_with_master(1 << 24) for name, layout in WITH_MASTERS.items()}
    assert found == pytest.approx(
        {"float32": 12, "sqrt_e4m3": 6.0625, "msamp_o2": 5, "sqrt_e4m3_f16": 4.0625}, abs=1e-6
    )
    assert [
        layout.bytes_per_parameter(1 << 24) for layout in WITH_MASTERS.values()
    ] == pytest.approx([3, 2.0625], abs=1e-6)


def test_small_and_ragged_tensors_of_torchao_stay_float32():  # O-1
    layout = LAYOUTS["torchao"]
    assert layout.of(4096) is layout
    for size in (4095, 256, 4096 + 128):
        assert (layout.of(size).m.fmt, layout.of(size).v.fmt, layout.of(size).average) == (
            FLOAT32,
            FLOAT32,
            "lerp",
        )
    assert LAYOUTS["sqrt_e4m3"].of(1) is LAYOUTS["sqrt_e4m3"]


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ({"fmt": E4M3FNUZ}, "fmt is one of e4m3fn, e5m2, float16, bfloat16, float32; got e4m3fnuz"),
        ({"fmt": "e4m3fn"}, "fmt is one of"),
        ({"fmt": E4M3FN}, "needs a scale; got scaling=None. Use scaling='multiply'"),
        ({"fmt": E4M3FN, "scaling": "amax"}, "scaling is one of"),
        (
            {"fmt": E4M3FN, "scaling": "multiply", "block": 64},
            r"block is one of 128, 256, None; got 64",
        ),
        ({"fmt": E4M3FN, "scaling": "multiply", "block": 128.0}, "block is one of"),
        (
            {"fmt": E4M3FN, "scaling": "multiply", "amax": "delayed"},
            "amax is one of 'exact', 'previous', 'predicted'",
        ),
        ({"fmt": E4M3FN, "scaling": "multiply", "rounding": "to_odd"}, "rounding is one of"),
        ({"fmt": E4M3FN, "scaling": "multiply", "keep": 1}, "keep is one of"),
        ({"fmt": E4M3FN, "scaling": "multiply", "floor": 0.0}, r"floor is in \[2\^-100, 1\)"),
        (
            {"fmt": FLOAT16, "scaling": "multiply"},
            "float16 takes no scale or scaling='power_of_two'",
        ),
        ({"fmt": BFLOAT16, "scaling": "power_of_two"}, "bfloat16 needs no scale"),
        ({"scaling": "power_of_two"}, "float32 needs no scale"),
        ({"fmt": FLOAT16, "block": 128}, "without a scale has no use for block"),
        ({"fmt": FLOAT16, "amax": "previous"}, "without a scale has no use for amax"),
        ({"rounding": "stochastic"}, "float32, which is not rounded, has no use for rounding"),
        (
            {"fmt": BFLOAT16, "keep": True},
            "bfloat16, which has float32's range, has no use for keep",
        ),
        (
            {"fmt": E4M3FN, "scaling": "multiply", "block": 128, "expansion": True},
            "an expansion needs e4m3fn, a block and scaling='divide'",
        ),
        ({"fmt": E5M2, "scaling": "divide", "block": 128, "expansion": True}, "got e5m2"),
        (
            {"fmt": E4M3FN, "scaling": "divide", "block": 128, "expansion": True, "root": True},
            "an expansion has no use for root",
        ),
        (
            {
                "fmt": E4M3FN,
                "scaling": "divide",
                "block": 128,
                "expansion": True,
                "amax": "previous",
            },
            "no use for amax",
        ),
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
        (
            {"m": dataclasses.replace(E4M3, root=True)},
            "m has signs, so layout 'mine' cannot store its root",
        ),
        (
            {"average": "lerp", "v": dataclasses.replace(E4M3, amax="predicted")},
            "predicted for average 'products'.* Use amax='exact'",
        ),
        ({"ragged": False}, "has no blocks, so ragged has no use"),
        ({"master": E4M3}, "a master is float16, bfloat16, float32, at most one scale"),
        ({"master": dataclasses.replace(HALF, block=128)}, "at most one scale per tensor"),
        ({"master": dataclasses.replace(HALF, amax="previous")}, "exact or predicted amax"),
        ({"master": dataclasses.replace(HALF, root=True)}, "without root"),
        ({"master": "float16"}, "master of layout 'mine' is a Moment"),
        (
            {"master": dataclasses.replace(HALF, amax="predicted")},
            "predicted master amax needs bounded=True; layout 'mine' is not",
        ),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(decisions, message):  # O-1, O-9, O-14, O-15
    with pytest.raises(ValueError, match=message):
        Layout(name="mine", **decisions)


def test_what_is_not_said_has_the_defaults_of_the_specification():  # O-1
    """The table of O-1, row by row."""
    page = (Path(__file__).parents[3] / "docs/spec/o.md").read_text()
    _, _, rest = page.partition("Where a layout says nothing, its fields are these.")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in rest.split("\n\n")[1].splitlines()[2:]
    ]
    words = {
        "none": None,
        "no": False,
        "yes": True,
        "2^-90": 2.0**-90,
        "0": 0,
        "a moment of these defaults": Moment(),
    }
    seen = {}
    for kind, cells in ((Moment, [row[:2] for row in rows]), (Layout, [row[2:] for row in rows])):
        for names, value in cells:
            for name in filter(None, (one.strip(" `") for one in names.split(","))):
                seen[kind, name] = words.get(value, value.strip("`"))
    own = {
        (kind, one.name): one.default
        for kind in (Moment, Layout)
        for one in dataclasses.fields(kind)
        if one.name not in ("name", "source")
    }
    own[Moment, "fmt"] = own[Moment, "fmt"].name
    assert seen == own
