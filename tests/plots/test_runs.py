import numpy as np
import pytest

from fp8ref import plots
from fp8ref.formats import E4M3FN
from fp8ref.plots.runs import COLORS
from fp8ref.recipe import RECIPES


@pytest.fixture
def ax():
    return plots.figure(1)[1][0]


def lines_of(losses) -> list[dict]:
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses)]


RUNS = {
    ("jax", "bf16"): lines_of([4.0, 2.0, 3.0]),
    ("torch", "tensorwise"): lines_of([6.0, 6.0, 0.0]),
}


def test_there_is_one_labeled_curve_a_run(ax):
    plots.loss_curves(ax, RUNS, smooth=1)
    assert [line.get_label() for line in ax.lines] == ["jax bf16", "torch tensorwise"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "jax bf16",
        "torch tensorwise",
    ]


def test_without_smoothing_a_curve_is_the_loss_of_each_step(ax):
    plots.loss_curves(ax, RUNS, smooth=1)
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [0, 1, 2])
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [4.0, 2.0, 3.0])


def test_a_smoothed_point_is_the_mean_of_the_steps_up_to_it(ax):
    plots.loss_curves(ax, RUNS, smooth=2)
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [1, 2])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [3.0, 2.5], rtol=1e-15)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [6.0, 3.0], rtol=1e-15)


def test_a_run_shorter_than_the_window_is_one_point(ax):
    plots.loss_curves(ax, {("jax", "bf16"): lines_of([4.0, 2.0, 3.0])}, smooth=10)
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [2])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [3.0], rtol=1e-15)


def test_recipes_differ_by_color_and_backends_by_style(ax):
    runs = {(backend, recipe): lines_of([1.0]) for backend in ("jax", "torch") for recipe in COLORS}
    plots.loss_curves(ax, runs, smooth=1)
    look = {(str(line.get_color()), line.get_linestyle()) for line in ax.lines}
    assert len(look) == len(runs) == 2 * len(RECIPES)
    same = {
        line.get_color()
        for line, (_, recipe) in zip(ax.lines, runs, strict=True)
        if recipe == "rowwise"
    }
    assert len(same) == 1


def test_entropy_is_a_reference_line_with_its_name(ax):
    plots.loss_curves(ax, RUNS, entropy=3.25)
    reference = ax.lines[-1]
    assert set(reference.get_ydata()) == {3.25}
    assert [note.get_text() for note in ax.texts] == ["unigram entropy"]


def test_without_entropy_there_is_no_reference_line(ax):
    plots.loss_curves(ax, RUNS)
    assert len(ax.lines) == 2
    assert not ax.texts


def test_axes_name_what_they_measure(ax):
    plots.loss_curves(ax, RUNS, smooth=7)
    assert ax.get_xlabel() == "optimizer step"
    assert "nats" in ax.get_ylabel()
    assert "7 steps" in ax.get_title()


def test_step_lines_are_what_they_were_given_from_the_first_step_on(ax):
    plots.step_lines(
        ax, {"exact": [3.0, 2.0], "hopper_fast": [2.5, 1.0, 0.5]}, ylabel="nats", first=1
    )
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[1, 3.0], [2, 2.0]])
    np.testing.assert_array_equal(ax.lines[1].get_xydata(), [[1, 2.5], [2, 1.0], [3, 0.5]])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["exact", "hopper_fast"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("optimizer step", "nats")
    assert len({(line.get_color(), str(line.get_linestyle())) for line in ax.lines}) == 2


def test_markers_of_step_lines_are_at_steps_of_their_own(ax):
    plots.step_lines(
        ax, {name: np.zeros(40) for name in ("exact", "hopper_slow", "hopper_fast")}, ylabel="nats"
    )
    marked = [
        set(range(40)[slice(start, None, every)])
        for start, every in (line.get_markevery() for line in ax.lines)
    ]
    assert all(marked)
    assert sum(map(len, marked)) == len(set.union(*marked))


GAPS = {"jax rowwise": (0.25, 0.125, 0.375), "torch rowwise": (-0.5, -0.75, -0.25)}


def test_gaps_are_drawn_with_their_intervals(ax):
    plots.loss_gaps(ax, GAPS)
    for i, (mean, low, high) in enumerate(GAPS.values()):
        bars = ax.containers[i]
        assert (bars[0].get_xdata()[0], bars[0].get_ydata()[0]) == (i, mean)
        assert bars[2][0].get_segments()[0][:, 1].tolist() == [low, high]
    assert not ax.patches
    assert ax.get_title() == "torch rowwise: -0.5 nats at the end"


def test_a_recipe_of_another_name_has_one_color_in_both_panels():
    _, axes = plots.figure(2)
    plots.loss_curves(axes[0], {("torch", "planted-fault"): lines_of([4.0, 2.0])})
    plots.loss_gaps(axes[1], {"torch planted-fault": (0.25, 0.125, 0.375)})
    colors = {axes[0].lines[0].get_color(), axes[1].containers[0][0].get_color()}
    assert len(colors) == 1
    assert not colors & set(COLORS.values())


def test_gaps_over_steps_are_lines_in_bands(ax):
    mean, low, high = np.array([0.5, 0.25]), np.array([0.0, 0.125]), np.array([1.0, 0.5])
    steps = {"torch rowwise": [4, 9]}
    plots.loss_gaps(ax, {"torch rowwise": (mean, low, high)}, margin=0.125, steps=steps)
    line, _ = ax.lines
    np.testing.assert_array_equal(line.get_xydata(), [[4, 0.5], [9, 0.25]])
    (band,) = ax.collections
    assert {tuple(place) for place in band.get_paths()[0].vertices} == {
        (4, 0.0),
        (4, 1.0),
        (9, 0.125),
        (9, 0.5),
    }
    assert (ax.get_xlabel(), ax.get_title()) == (
        "optimizer step",
        "torch rowwise: +0.25 nats at the end",
    )


def test_the_band_is_the_margin_both_ways(ax):
    plots.loss_gaps(ax, GAPS, margin=0.5)
    (band,) = ax.patches
    assert (band.get_y(), band.get_height()) == (-0.5, 1.0)
    assert band.get_label() == "margin 0.5"


def test_every_gap_is_named_below_its_point(ax):
    plots.loss_gaps(ax, GAPS)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["jax\nrowwise", "torch\nrowwise"]


def test_a_figure_is_saved_as_a_picture(tmp_path):
    made, axes = plots.figure(2)
    plots.loss_curves(axes[0], RUNS, entropy=3.0)
    plots.loss_gaps(axes[1], GAPS, margin=0.1)
    made.savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_functions_return_the_axes_they_were_given(ax):
    assert plots.loss_curves(ax, RUNS) is ax
    assert plots.loss_gaps(ax, GAPS) is ax


def test_staleness_shows_the_amax_what_fits_and_what_does_not(ax):
    plots.staleness(ax, [1.0, 4.0, 2.0], {"history of 1": [448.0, 448.0, 112.0]}, E4M3FN, first=7)
    amax, fits, missed = ax.lines
    np.testing.assert_array_equal(amax.get_xdata(), [7, 8, 9])
    np.testing.assert_array_equal(amax.get_ydata(), [1, 4, 2])
    np.testing.assert_array_equal(fits.get_ydata(), [1, 1, 4])
    np.testing.assert_array_equal(missed.get_data(), [[8], [4]])
    assert ax.get_legend().get_texts()[1].get_text() == "fits, history of 1: 1 clipped"
    assert ax.get_title() == "of 3 steps history of 1 clips 1"
