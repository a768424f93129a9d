import numpy as np
import pytest

from fp8ref import plots
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import cast


@pytest.fixture
def ax():
    return plots.figure()[1][0]


def heights(ax, label: str) -> np.ndarray:
    """Of the bars of a label; of those that go down, negative."""
    (bars,) = (bars for bars in ax.containers if bars.get_label() == label)
    return np.array([bar.get_height() for bar in bars])


def test_a_dot_is_where_codes_are_others_than_nearest_even_gives(ax):
    x = np.float32([1, 1.0625, 1.1, 1.1875])  # of two ties the second goes up either way
    plots.cast_difference(
        ax, x, cast.encode(x, E4M3FN, rounding="nearest_away"), E4M3FN, label="away"
    )
    right, found, dots = ax.lines
    np.testing.assert_array_equal(right.get_ydata(), [1, 1, 1.125, 1.25])
    np.testing.assert_array_equal(found.get_ydata(), [1, 1.125, 1.125, 1.25])
    np.testing.assert_array_equal(dots.get_xydata(), [[1.0625, 1.125]])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "rounded to nearest even",
        "away",
        "1 of 4 differ",
    ]


def test_another_nan_code_is_no_other_code_and_a_gap(ax):
    x = np.float32([448, np.nan])
    plots.cast_difference(ax, x, np.uint8([0x7E, 0xFF]), "e4m3fn")
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), [448, np.nan])
    assert ax.lines[2].get_xdata().size == 0


def test_a_share_is_of_the_inputs_of_each_power_of_two(ax):
    x = [0.0, 1.0, -1.5, 4.0, 5.0, 6.0, 7.0, np.inf, np.nan]
    plots.share_by_exponent(ax, x, [True, True, False, True, False, False, False, True, True])
    # from 1, from 2, of which there is none, and from 4
    np.testing.assert_array_equal([bar.get_height() for bar in ax.patches], [50, 0, 25])
    np.testing.assert_allclose(
        [bar.get_x() + bar.get_width() / 2 for bar in ax.patches], [0.5, 1.5, 2.5], rtol=1e-14
    )


@pytest.mark.parametrize("x", [[0.0, -0.0], [np.inf, np.nan], []], ids=str)
def test_of_no_power_of_two_there_is_no_bar(ax, x):
    plots.share_by_exponent(ax, x, [True] * len(x))
    ax.figure.draw_without_rendering()
    assert not ax.patches


def test_scales_above_go_up_and_those_below_down_by_how_many_ulps(ax):
    expected = np.ones(8, np.float32)
    scales = (expected.view(np.int32) + np.int32([0, 1, 1, 0, -1, -2, -3, 0])).view(np.float32)
    plots.scale_difference(ax, [1, 1.1, 1.2, 1.3, 1.7, 1.8, 1.9, 2], scales, expected, bins=2)
    np.testing.assert_array_equal(heights(ax, "1 ulp above: 25.0 %"), [50, 0])
    np.testing.assert_array_equal(heights(ax, "1 ulp below: 12.5 %"), [0, -25])
    np.testing.assert_array_equal(heights(ax, "2 and more below: 25.0 %"), [0, -50])
    stacked = [
        bar.get_y() for bars in ax.containers if "2 and more" in bars.get_label() for bar in bars
    ]
    assert stacked == [0, -25]
    assert len(ax.containers) == 3


def test_equal_scales_have_no_bars(ax):
    plots.scale_difference(ax, [1.0, 2.0], np.float32([1, 2]), np.float32([1, 2]))
    assert ax.containers == []
    assert ax.get_legend() is None


def test_error_lines_are_in_percent_and_named(ax):
    plots.error_lines(ax, [32, 64], {"fast": [-0.1, -0.2], "slow": [0.0, -0.01]}, ylabel="bias")
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [-10, -20], rtol=1e-15)
    np.testing.assert_array_equal(ax.lines[1].get_xdata(), [32, 64])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["fast", "slow"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("K", "bias")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["32", "64"]


def test_error_lines_that_coincide_are_told_apart(ax):
    plots.error_lines(ax, [32, 64], {"fast": [0.1, 0.2], "slow": [0.1, 0.2]}, ylabel="bias")
    below, above = ax.lines
    assert below.get_marker() != above.get_marker()
    assert below.get_linewidth() > above.get_linewidth()
    assert below.get_markersize() > above.get_markersize()


@pytest.mark.parametrize(
    ("errors", "scale"), [([0.1, 0.2], "log"), ([0.0, 0.2], "symlog"), ([-0.1, 0.2], "symlog")]
)
def test_only_errors_that_are_all_positive_are_on_a_logarithmic_axis(ax, errors, scale):
    plots.error_lines(ax, [32, 64], {"fast": errors}, ylabel="error")
    assert ax.get_yscale() == scale
    low, high = ax.get_ylim()
    assert low < 100 * min(errors)
    assert high > 100 * max(errors)


def test_many_lengths_are_not_all_labeled(ax):
    plots.error_lines(ax, 2 ** np.arange(5, 25), {"fast": np.ones(20)}, ylabel="error")
    assert 5 <= len(ax.get_xticks()) <= 9


def test_an_error_histogram_shares_out_all_outputs_over_common_bins(ax):
    plots.error_histogram(
        ax, {"fast": np.array([[0.01, 0.02], [0.02, 0.03]]), "slow": np.zeros((2, 2))}, bins=3
    )
    fast, slow = (patch.get_data() for patch in ax.patches[1::2])  # each has an area and an outline
    np.testing.assert_allclose(fast.edges, [0, 1, 2, 3], atol=1e-15)
    # 0.02 is the lower edge of the last bin
    np.testing.assert_array_equal(fast.values, [0, 25, 75])
    np.testing.assert_array_equal(slow.values, [100, 0, 0])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "fast: mean 2 %",
        "slow: mean 0 %",
    ]


def test_errors_that_are_all_equal_have_a_histogram_too(ax):
    plots.error_histogram(ax, {"exact": np.zeros(4)}, bins=3)
    np.testing.assert_array_equal(ax.patches[1].get_data().values, [0, 100, 0])


def test_a_number_table_writes_each_number_into_its_cell(ax):
    plots.number_table(ax, [[1.0, 2.5], [np.nan, -3.0]], ["a", "b"], ["one", "two"], text="{:.2f}")
    assert {note.get_position(): note.get_text() for note in ax.texts} == {
        (0, 0): "1.00",
        (1, 0): "2.50",
        (1, 1): "-3.00",
    }
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["one", "two"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["a", "b"]


def test_numbers_are_dark_on_light_and_light_on_dark(ax):
    plots.number_table(ax, [[0.0, 1.0]], ["a"], ["dark", "light"])
    assert [note.get_color() for note in ax.texts] == ["white", "black"]


def test_names_and_numbers_go_together(ax):
    with pytest.raises(ValueError, match=r"values are \[1, 2\].*got \(2, 1\)"):
        plots.number_table(ax, [[1.0], [2.0]], ["a"], ["one", "two"])


def test_rows_are_drawn_from_the_worst_to_the_best_without_zeros_and_exact_ones(ax):
    rows = {"$a": np.array([[30.0, np.nan], [-np.inf, 10.0]]), "b": np.array([np.inf, 5.0])}
    plots.row_lines(ax, rows, title="$1 of $2")
    first, second = ax.patches
    np.testing.assert_array_equal(first.get_data().values, [0, 10, 30])
    np.testing.assert_allclose(first.get_data().edges, [0, 100 / 3, 200 / 3, 100])
    np.testing.assert_array_equal(second.get_data().values, [5])
    assert first.get_linewidth() > second.get_linewidth()
    ax.figure.draw_without_rendering()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["$a", "b"]
    assert ax.get_title() == "$1 of $2"
