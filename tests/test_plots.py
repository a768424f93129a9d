"""Every public figure, from small arrays: it returns its Axes, says what they show, and leaves
nothing behind.
"""

import io
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import same_color
from PIL import Image

from fp8ref import plots
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.quantize import scaling
from fp8ref.spec.states import health

X = np.ldexp(1.0, np.arange(-24, 8)).astype(np.float32).reshape(4, 8)
Q = scaling.quantize(X, E4M3FN)
HEALTH = [health.of(np.arange(1.0, 1 + len(health.FIELDS)), 2.06)] * 3
LINES = [{"step": step, "loss": 3.0 - step} for step in range(3)]
FIGURES = {
    "cast_curve": lambda ax: plots.cast_curve(
        ax, np.linspace(1, 2, 9), E4M3FN, label="mine", color="black"
    ),
    "cost_map": lambda ax: plots.cost_map(
        ax,
        [[0.5, np.nan], [-0.25, 0.0]],
        ["layers.0", "layers.1"],
        ["output\ninput", "output\nweight"],
    ),
    "cast_difference": lambda ax: plots.cast_difference(ax, X[0], Q.codes[0], E4M3FN),
    "code_difference": lambda ax: plots.code_difference(ax, Q, Q),
    "code_map": lambda ax: plots.code_map(ax, E5M2),
    "depth_lines": lambda ax: plots.depth_lines(
        ax, {"rowwise": [0.0, 0.1], "tensorwise": [0.0, 0.2]}
    ),
    "error_histogram": lambda ax: plots.error_histogram(
        ax, {"fast": np.array([0.01, 0.02]), "slow": np.array([0.0, 0.01])}
    ),
    "error_lines": lambda ax: plots.error_lines(
        ax, [32, 64], {"fast": [0.1, 0.2], "slow": [0.0, 0.1]}, ylabel="bias"
    ),
    "error_map": lambda ax: plots.error_map(ax, X, Q),
    "exponent_histogram": lambda ax: plots.exponent_histogram(ax, X, Q),
    "fate_map": lambda ax: plots.fate_map(ax, X, Q),
    "health_lines": lambda ax: plots.health_lines(ax, {"te": HEALTH, "coat": HEALTH}, "stalled_v"),
    "loss_gaps": lambda ax: plots.loss_gaps(ax, {"jax rowwise": (0.5, 0.25, 0.75)}, margin=0.1),
    "loss_curves": lambda ax: plots.loss_curves(ax, {("jax", "bf16"): LINES}),
    "magnitude_map": lambda ax: plots.magnitude_map(ax, X),
    "moment_range": lambda ax: plots.moment_range(ax, {"v": X, "sqrt(v)": np.sqrt(X)}, E4M3FN),
    "near_zero": lambda ax: plots.near_zero(ax, [E4M3FN, E5M2]),
    "number_line": lambda ax: plots.number_line(ax, [E4M3FN, E5M2]),
    "number_table": lambda ax: plots.number_table(ax, [[1.0, 2.0]], ["row"], ["one", "two"]),
    "ranges": lambda ax: plots.ranges(ax, [E4M3FN, E5M2]),
    "relative_error": lambda ax: plots.relative_error(ax, [E4M3FN, E5M2], lowest=-8, highest=-4),
    "row_lines": lambda ax: plots.row_lines(ax, {"rowwise": X[0], "tensorwise": X[1]}),
    "scale_difference": lambda ax: plots.scale_difference(
        ax, [1.0, 1.5, 2.0], np.float32([1, 2, 3]), np.float32([1, 1, 4]), bins=2
    ),
    "share_by_exponent": lambda ax: plots.share_by_exponent(ax, X, X > 1, label="mine"),
    "spacing": lambda ax: plots.spacing(ax, [E4M3FN, E5M2]),
    "layer_map": lambda ax: plots.layer_map(
        ax, [[31.0, 25.0]], ["layer"], ["rowwise", "tensorwise"]
    ),
    "staleness": lambda ax: plots.staleness(ax, [1.0, 2.0], {"history of 1": [1.0, 448.0]}, E4M3FN),
    "step_lines": lambda ax: plots.step_lines(
        ax, {"one": [3.0, 2.0], "other": [3.0, 1.0]}, ylabel="nats"
    ),
    "update_ratios": lambda ax: plots.update_ratios(ax, {"te": X, "coat": X / 2}, bound=1.2),
    "worst_error": lambda ax: plots.worst_error(ax, [E4M3FN, E5M2]),
}
# rows and columns are the reader's
MAPS = {
    "code_difference",
    "cost_map",
    "error_map",
    "fate_map",
    "magnitude_map",
    "number_table",
    "layer_map",
}
every_figure = pytest.mark.parametrize("name", FIGURES)


@pytest.fixture
def ax():
    return plots.figure()[1][0]


def test_every_figure_is_here():
    others = {"figure", "png"}
    assert set(plots.__all__) == FIGURES.keys() | others
    assert plots.__all__ == sorted(plots.__all__)


@every_figure
def test_it_returns_the_axes_it_was_given_and_draws_without_a_warning(ax, name):
    assert FIGURES[name](ax) is ax
    assert plots.png(ax.figure).startswith(b"\x89PNG\r\n")


@every_figure
def test_its_axes_are_named(ax, name):
    FIGURES[name](ax)
    if name not in MAPS and name != "loss_gaps":
        assert ax.get_xlabel()
    assert (
        ax.get_ylabel()
        or name in MAPS
        or [tick.get_text() for tick in ax.get_yticklabels()] == ["e4m3fn", "e5m2"]
    )
    for bar in ax.figure.axes[1:]:
        assert bar.get_ylabel(), "a color bar says what its colors are"


@every_figure
def test_it_draws_on_no_other_axes_but_color_bars(name):
    _, (mine, other) = plots.figure(2)
    FIGURES[name](mine)
    assert not any([other.lines, other.patches, other.images, other.texts, other.collections])


def test_no_figure_touches_pyplot_or_the_settings():
    """In a process of its own, as others may import pyplot."""
    program = (
        "import sys, matplotlib\n"
        # to ask for it imports pyplot
        "def settings(): return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams "
        "if key != 'backend'}\nbefore = settings()\nimport test_plots\nfor draw in "
        "test_plots.FIGURES.values(): "
        "draw(test_plots.plots.figure()[1][0])\nprint('matplotlib.pyplot' in sys.modules, "
        "settings() == before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=__file__.rpartition("/")[0],
    )
    assert (done.stdout, done.stderr) == ("False True\n", "")


def test_without_matplotlib_the_extra_is_named():
    program = (
        "import sys; sys.modules['matplotlib'] = None\ntry:\n import fp8ref.plots\nexcept "
        "ImportError as e: print(e)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert "matplotlib" in out
    assert "fp8ref[train]" in out


def test_a_figure_has_its_axes_row_by_row_on_white():
    made, axes = plots.figure(3, 2)
    assert list(made.axes) == axes
    assert [
        (ax.get_subplotspec().rowspan.start, ax.get_subplotspec().colspan.start) for ax in axes
    ] == [(row, column) for row in range(2) for column in range(3)]
    assert all(isinstance(ax, Axes) for ax in axes)
    assert same_color(made.get_facecolor(), "white")


def test_the_sizes_given_are_of_one_of_the_axes():
    made, _ = plots.figure(2, 3, width=4, height=2)
    assert tuple(made.get_size_inches()) == (8, 6)


def test_a_png_has_the_figures_size_and_an_opaque_white_ground(ax):
    plots.spacing(ax, [E4M3FN])
    picture = Image.open(io.BytesIO(plots.png(ax.figure)))
    width, height = ax.figure.get_size_inches() * ax.figure.dpi
    assert picture.size == (int(width), int(height))
    assert picture.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)
