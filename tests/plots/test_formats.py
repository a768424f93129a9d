import numpy as np
import pytest

from fp8ref import plots
from fp8ref.formats import E4M3FN, E4M3FNUZ, E5M2, FLOAT16, FP8_FORMATS
from fp8ref.plots import style


@pytest.fixture
def ax():
    return plots.figure()[1][0]


def values(collection) -> np.ndarray:
    """The magnitudes at which vlines stand."""
    return np.exp2([segment[0, 0] for segment in collection.get_segments()])


@pytest.mark.parametrize(
    ("fmt", "normal", "subnormal"), [(E4M3FN, 119, 7), (E5M2, 120, 3), (E4M3FNUZ, 120, 7)]
)
def test_a_number_line_has_every_positive_number_once(ax, fmt, normal, subnormal):
    plots.number_line(ax, [fmt])
    of_normal, of_subnormal = ax.collections
    assert (len(values(of_normal)), len(values(of_subnormal))) == (normal, subnormal)
    np.testing.assert_allclose(
        values(of_normal)[[0, -1]], [fmt.smallest_normal, fmt.max], rtol=1e-14
    )
    np.testing.assert_allclose(
        values(of_subnormal), fmt.smallest_subnormal * np.arange(1, subnormal + 1), rtol=1e-14
    )


def test_a_number_line_says_its_smallest_and_largest(ax):
    plots.number_line(ax, [E4M3FN])
    assert [note.get_text() for note in ax.texts] == ["$2^{-9}$", "448"]


def test_a_legend_names_each_color_once_however_many_formats(ax):
    plots.number_line(ax, list(FP8_FORMATS.values()))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["normal", "subnormal"]


def test_next_to_zero_numbers_are_in_units_of_the_smallest(ax):
    plots.near_zero(ax, [E5M2], until=8)
    below, above = ax.lines[:2]
    np.testing.assert_array_equal(below.get_xdata(), [0, 1, 2, 3])
    np.testing.assert_array_equal(above.get_xdata(), [4, 5, 6, 7, 8])


def test_a_range_begins_at_the_smallest_number_and_ends_at_max(ax):
    plots.ranges(ax, [FLOAT16])
    normal, subnormal = ax.patches
    np.testing.assert_allclose(
        (subnormal.get_x(), subnormal.get_x() + subnormal.get_width()), (-24, -14), rtol=1e-14
    )
    np.testing.assert_allclose(
        (normal.get_x(), normal.get_x() + normal.get_width()), (-14, np.log2(65504)), rtol=1e-14
    )


def test_spacing_is_the_gap_behind_each_number(ax):
    plots.spacing(ax, [E4M3FN])
    x, gap = np.exp2(ax.lines[0].get_data())
    assert gap[np.isclose(x, 2.0**-9)] == 2.0**-9
    assert gap[np.isclose(x, 1.0)] == 2.0**-3
    assert gap[np.isclose(x, 416.0)] == 32.0


def test_the_normal_range_begins_at_the_dot(ax):
    plots.spacing(ax, [E5M2])
    assert (ax.lines[1].get_xdata()[0], ax.lines[1].get_ydata()[0]) == (-14, -16)


def test_a_relative_error_is_0_on_numbers_and_largest_at_a_middle(ax):
    plots.relative_error(ax, [E4M3FN], lowest=0, highest=1, points=2)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [0, 0])
    plots.relative_error(ax, [E4M3FN], lowest=0, highest=1, points=20001)
    # half a gap of 1/8 next to 1 + 1/16
    np.testing.assert_allclose(ax.lines[1].get_ydata().max(), 100 / 17, rtol=1e-3)


def test_the_worst_error_is_all_below_half_the_smallest_and_u_over_1_plus_u_in_the_normal_range(ax):
    plots.worst_error(ax, [E4M3FN], points=4096)
    worst, edges, _ = ax.patches[0].get_data()
    assert worst[edges[:-1] == -11] == 100
    # points are 2^-13 of a power apart at least
    np.testing.assert_allclose(worst[(edges[:-1] >= -6) & (edges[:-1] < 8)], 100 / 17, rtol=2e-3)
    assert np.all(worst[edges[:-1] >= 9] > 12)


def test_a_code_map_names_what_has_no_magnitude(ax):
    plots.code_map(ax, "e5m2")
    named = {
        (int(note.get_position()[1]), int(note.get_position()[0])): note.get_text()
        for note in ax.texts
    }
    assert named == {
        (0, 0): "0",
        (8, 0): "-0",
        (7, 12): "inf",
        (15, 12): "-inf",
        **{(row, column): "NaN" for row in (7, 15) for column in (13, 14, 15)},
    }
    shown = ax.images[0].get_array()
    assert shown[3, 12] == 0  # code 0x3C is 1
    assert shown.mask.sum() == 10


def test_a_cast_curve_is_a_staircase_of_its_rounding(ax):
    x = [1.0, 1.06, 1.07, 1.12]
    plots.cast_curve(ax, x, E4M3FN, label="nearest", color=style.BLUE)
    plots.cast_curve(ax, x, E4M3FN, label="down", color=style.GREEN, rounding="toward_zero")
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [1, 1, 1.125, 1.125])
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), [1, 1, 1, 1])


def test_what_is_no_number_is_a_gap_of_a_cast_curve(ax):
    plots.cast_curve(
        ax, [448.0, 500.0], E4M3FN, label="not saturated", color=style.BLUE, saturate=False
    )
    plots.cast_curve(ax, [448.0, 500.0], "e4m3fn", label="saturated", color=style.GREEN)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [448, np.nan])
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), [448, 448])
