import numpy as np
import pytest

from fp8ref import plots


@pytest.fixture
def ax():
    return plots.figure()[1][0]


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


@pytest.mark.parametrize(("errors", "scale"), [([0.1, 0.2], "log"), ([0.0, 0.2], "symlog"), ([-0.1, 0.2], "symlog")])
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
    plots.error_histogram(ax, {"fast": np.array([[0.01, 0.02], [0.02, 0.03]]), "slow": np.zeros((2, 2))}, bins=3)
    fast, slow = (patch.get_data() for patch in ax.patches[1::2])  # each has an area and an outline
    np.testing.assert_allclose(fast.edges, [0, 1, 2, 3], atol=1e-15)
    np.testing.assert_array_equal(fast.values, [0, 25, 75])  # 0.02 is the lower edge of the last bin
    np.testing.assert_array_equal(slow.values, [100, 0, 0])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["fast: mean 2 %", "slow: mean 0 %"]


def test_errors_that_are_all_equal_have_a_histogram_too(ax):
    plots.error_histogram(ax, {"exact": np.zeros(4)}, bins=3)
    np.testing.assert_array_equal(ax.patches[1].get_data().values, [0, 100, 0])


def test_a_number_table_writes_each_number_into_its_cell(ax):
    plots.number_table(ax, [[1.0, 2.5], [np.nan, -3.0]], ["a", "b"], ["one", "two"], text="{:.2f}")
    assert {note.get_position(): note.get_text() for note in ax.texts} == {(0, 0): "1.00", (1, 0): "2.50", (1, 1): "-3.00"}
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["one", "two"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["a", "b"]


def test_numbers_are_dark_on_light_and_light_on_dark(ax):
    plots.number_table(ax, [[0.0, 1.0]], ["a"], ["dark", "light"])
    assert [note.get_color() for note in ax.texts] == ["white", "black"]


def test_names_and_numbers_go_together(ax):
    with pytest.raises(ValueError, match=r"values are \[1, 2\].*got \(2, 1\)"):
        plots.number_table(ax, [[1.0], [2.0]], ["a"], ["one", "two"])
