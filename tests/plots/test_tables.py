import numpy as np
import pytest

from fp8ref import plots


@pytest.fixture
def ax():
    return plots.figure()[1][0]


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
