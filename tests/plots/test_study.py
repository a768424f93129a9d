"""Figures of a study of a model (spec Q-1)."""

import numpy as np
import pytest

from fp8ref import plots


@pytest.fixture
def ax():
    return plots.figure()[1][0]


def test_a_map_has_a_cell_for_each_layer_and_recipe(ax):
    sqnr = np.array([[31.0, 25.0], [np.nan, 20.0], [30.0, np.inf]])
    plots.layer_map(ax, sqnr, ["a", "b", "c"], ["rowwise", "tensorwise"], low=20, high=31)
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array().mask, ~np.isfinite(sqnr))
    assert image.get_clim() == (20, 31)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b", "c"]
    assert ax.get_title() == "worst 20: b, tensorwise"
    with pytest.raises(
        ValueError, match=r"values are \[2, 2\], as many as there are names; got \(3, 2\)"
    ):
        plots.layer_map(ax, sqnr, ["a", "b"], ["rowwise", "tensorwise"])


def test_the_title_names_the_worst(ax):
    shares = [[0.0, 0.1], [15.26, np.nan]]
    plots.layer_map(ax, shares, ["$a", "b_$"], ["r", "t"], what="zeroed, %", large_is_worse=True)
    assert ax.get_title() == "worst 15.3: b_$, r"
    assert not ax.title.get_parse_math()
    assert plots.layer_map(plots.figure()[1][0], [[np.nan]], ["a"], ["r"]).get_title() == ""


def test_of_many_layers_some_are_named(ax):
    names = [f"layer{i}" for i in range(100)]
    plots.layer_map(ax, np.ones((100, 1)), names, ["rowwise"])
    assert [label.get_text() for label in ax.get_yticklabels()] == names[::3]


def test_lines_begin_at_the_first_linear(ax):
    plots.depth_lines(
        ax, {"rowwise": [0.0, 0.1, 0.2], "tensorwise": [0.0, 0.3, 0.1]}, colors=["#111111"]
    )
    assert [line.get_label() for line in ax.lines] == ["rowwise", "tensorwise"]
    assert ax.lines[1].get_xdata().tolist() == [1, 2, 3]
    assert {line.get_color() for line in ax.lines} == {"#111111"}
    assert ax.lines[0].get_linestyle() != ax.lines[1].get_linestyle()
