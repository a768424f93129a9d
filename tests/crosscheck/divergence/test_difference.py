import numpy as np
import pytest

from fp8ref.conformance.kit.compare import Check
from fp8ref.crosscheck.divergence.difference import difference
from fp8ref.crosscheck.divergence.step_values import Value
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.recipe import CastSpec


def value(x, dtype=np.float32, fmt=None) -> Value:
    cast = CastSpec(fmt=fmt) if fmt else None
    return Value(
        phase="forward",
        layer="l",
        role="r",
        value=np.asarray(x, dtype),
        part="codes" if fmt else "value",
        cast=cast,
    )


def test_equal_bits_are_no_difference():
    check = Check(name="c")
    assert (
        difference(value([[1, 2], [np.nan, -0.0]]), value([[1, 2], [np.nan, -0.0]]), check) is None
    )
    assert (check.compared, check.equal, check.ok) == (4, 4, True)


def test_the_first_element_in_the_order_of_rows_is_named_with_its_bits():
    a, b = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    b[1, 0], b[0, 2] = 1.5, -1.0
    check = Check(name="c")
    d = difference(value(a), value(b), check)
    assert (d.element, d.differ, d.of, d.largest) == ((0, 2), 2, 6, 1.5)
    assert (d.a, d.b, d.unit) == ("0 (0x0000)", "-1 (0xBF80)", "bfloat16")
    assert (check.compared, check.equal) == (6, 4)
    assert "[0, 2]: 0 (0x0000) and -1 (0xBF80)" in check.detail


@pytest.mark.parametrize(
    ("a", "b", "worst", "unit"),
    [
        (1.0, 1.0 + 2**-7, 1, "bfloat16"),  # bfloat16 has 7 fraction bits
        (1.0, 1.0 + 2**-23, 1, "float32"),
        (-1.0, -1.0 - 3 * 2**-7, 3, "bfloat16"),
        (-(2.0**-133), 2.0**-133, 2, "bfloat16"),  # the subnormals on either side of zero
        (0.0, -0.0, 0, "bfloat16"),
    ],
)
def test_distance_is_in_numbers_of_the_narrowest_format_that_holds_both(a, b, worst, unit):
    d = difference(value([a]), value([b]), Check(name="c"))
    assert (d.worst, d.unit, d.element) == (worst, unit, (0,))


def test_codes_are_shown_as_values_and_nans_are_alike():  # C-5
    check = Check(name="c")
    assert (
        difference(value([0x7F], np.uint8, E4M3FN), value([0xFF], np.uint8, E4M3FN), check) is None
    )
    d = difference(
        value([0x38, 0x08], np.uint8, E4M3FN), value([0x38, 0x09], np.uint8, E4M3FN), check
    )
    assert (d.element, d.a, d.b) == ((1,), "0.015625 (code 0x08)", "0.017578125 (code 0x09)")
    assert (d.worst, d.unit) == (1, "codes of e4m3fn")


def test_a_number_of_python_differs_in_its_last_bit():
    d = difference(value(1.0, np.float64), value(np.nextafter(1.0, 2), np.float64), Check(name="c"))
    assert (d.element, d.a, d.b) == ((), "1", "1.0000000000000002")


@pytest.mark.parametrize("there", [np.inf, np.nan])
def test_a_distance_that_is_not_finite_is_no_number(there):
    d = difference(value([1.0, np.inf]), value([there, np.inf]), Check(name="c"))
    assert (d.element, d.differ, d.largest) == ((0,), 1, None)


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        (value(1.0), value([[1.0], [1.0]]), ("float32 []", "float32 [2, 1]")),
        (value([8], np.uint8, E4M3FN), value([8], np.uint8, E5M2), ("e4m3fn [1]", "e5m2 [1]")),
    ],
)
def test_other_shapes_or_formats_differ_as_a_whole(a, b, shown):
    check = Check(name="c")
    d = difference(a, b, check)
    assert (d.element, d.a, d.b) == (None, *shown)
    assert not check.ok
