import pytest
from matplotlib.figure import Figure

from fp8ref.plots import legends


def drawn(names, columns: int = 3):
    figure = Figure(figsize=(4.8, 3.6), layout="constrained")
    ax = figure.subplots()
    legends.below(figure, {name: ax.plot([0, 1])[0] for name in names}, columns=columns)
    figure.draw_without_rendering()
    return figure, ax


@pytest.mark.filterwarnings("ignore:Glyph")  # of this test's own drawing
@pytest.mark.parametrize(
    "names",
    [
        ["a"],
        ["run"] * 1 + [f"runs/{'x' * 30}-{i}" for i in range(5)],
        ["y" * 300, "試行" * 60],
        ["$x_{$", "_h"],
    ],
)
def test_a_legend_lies_within_the_figure_and_names_are_whole(names):
    figure, ax = drawn(names)
    (legend,) = figure.legends
    assert [text.get_text().replace("\n", "") for text in legend.get_texts()] == names
    box, all_of = legend.get_window_extent(), figure.bbox
    assert all_of.x0 <= box.x0
    assert box.x1 <= all_of.x1
    assert all_of.y0 <= box.y0
    assert box.y1 <= ax.get_window_extent().y0
    # What a figure without a legend leaves to its axes, but for the legend's padding: constrained
    # layout pads by 3 points a side.
    plain, alone = drawn([])
    assert (
        ax.get_window_extent().height >= alone.get_window_extent().height - 6 * figure.dpi / 72 - 4
    )
    assert not plain.legends


def test_narrow_names_share_rows():
    assert drawn(["a", "b", "c"])[0].legends[0]._ncols == 3
    assert drawn(["a" * 40, "b" * 40, "c" * 40])[0].legends[0]._ncols == 1


def test_names_are_broken_where_words_end():
    assert legends.wrapped("runs/jax-tensorwise-seed0", 12) == "runs/jax-\ntensorwise-\nseed0"
    assert legends.wrapped("abcdef", 4) == "abcd\nef"
    assert legends.wrapped("試行試行", 4) == "試行\n試行"
