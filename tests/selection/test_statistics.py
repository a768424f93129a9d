import numpy as np
import pytest

from fp8ref import recipe
from fp8ref.formats import E4M3FN
from fp8ref.selection import linears as linear_selection
from fp8ref.selection import statistics as stats
from fp8ref.selection.statistics import FIELDS


def recorded(*parts) -> dict:
    operand = stats.Operand("mlp", "output", "input", recipe.CastSpec(fmt=E4M3FN))
    rows = np.array([[part[field] for field in FIELDS] for part in parts], np.float64)
    return stats.merged([operand], [rows])["mlp/output/input"]


def part(**fields) -> dict:
    return {
        **dict.fromkeys(FIELDS, 0.0),
        "count": 10,
        "signal": 4.0,
        "noise": 1.0,
        "amax": 2.0,
        "scale_min": 3.0,
        "scale_max": 3.0,
    } | fields


def test_parts_merge_by_sums_and_extrema():
    one = recorded(
        part(underflows=1, saturated=2),
        part(count=30, underflows=3, overflows=4, signal=8.0, noise=2.0, amax=5.0, scale_min=1.0),
    )
    assert one == {
        "amax": 5.0,
        "scale_min": 1.0,
        "scale_max": 3.0,
        "underflow_rate": 0.1,
        "saturation_rate": 0.05,
        "overflow_rate": 0.1,
        "non_finite": 0,
        "sqnr": pytest.approx(10 * np.log10(4)),
    }


def test_a_part_of_nothing_is_no_part():
    assert recorded(part(), dict.fromkeys(FIELDS, 0.0)) == recorded(part())


@pytest.mark.parametrize(
    ("fields", "null"),
    [
        ({"amax": np.nan, "non_finite": 1}, {"amax"}),
        ({"amax": np.inf, "non_finite": 10}, {"amax", "sqnr"}),
        ({"noise": 0.0}, {"sqnr"}),
        ({"noise": np.nan}, {"sqnr"}),
        ({"noise": np.inf}, {"sqnr"}),
        ({"signal": 0.0}, {"sqnr"}),
        ({"scale_min": np.nan, "scale_max": np.nan}, {"scale_min", "scale_max"}),
    ],
)
def test_what_json_lacks_is_null(fields, null):
    assert {key for key, value in recorded(part(**fields)).items() if value is None} == null


def test_the_plan_has_every_fp8_operand():
    shapes = {"up": (32, 32), "lm_head": (32, 32)}
    plan = linear_selection.select(shapes, "rowwise_with_gw_hp", filter_fqns=["lm_head"])
    names = [operand.name for operand in stats.planned(plan)]
    assert names == [
        "up/output/input",
        "up/output/weight",
        "up/grad_input/grad_output",
        "up/grad_input/weight",
    ]
