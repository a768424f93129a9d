"""Figures of optimizer states (spec O-12)."""

import numpy as np
import pytest

from fp8ref import plots
from fp8ref.formats import E4M3FN
from fp8ref.spec.states import health


@pytest.fixture
def ax():
    return plots.figure()[1][0]


def test_what_lies_below_the_format(ax):
    """The smallest code is 2^-9, half of it rounds to 0: 2^-10 / 448 of the amax."""
    x = np.array([1.0, 0.5, 2.0**-20, 0.0, np.nan])
    plots.moment_range(ax, {"v": x, "sqrt(v)": np.sqrt(x)}, E4M3FN)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["v: 33 % below", "sqrt(v): 0 % below"]
    assert ax.lines[0].get_xdata()[0] == pytest.approx(np.log2(2.0**-10 / 448))
    assert sum(patch.get_data().values.sum() for patch in ax.patches) == pytest.approx(200)


def test_the_largest_ratio_is_named_and_ends_the_curve(ax):
    plots.update_ratios(ax, {"te": np.array([0.5, -1e4, 0.0, 1.0])}, bound=1.2)
    curve = ax.lines[0]
    assert curve.get_xdata().tolist() == [0.5, 1.0, 1e4]
    assert curve.get_ydata().tolist() == [75, 50, 25]
    assert ax.get_legend().get_texts()[0].get_text() == "te: largest 1e+04"
    assert ax.lines[1].get_xdata()[0] == 1.2


def test_counts_are_shares_and_figures_are_percent(ax):
    found = [
        health.of(np.array([200.0, 0, 0, 0, 0, 0, stalled, 10, 1, 4, 1, 1]), 2.0)
        for stalled in (50.0, 100.0)
    ]
    plots.health_lines(ax, {"a": found}, "stalled_v")
    assert ax.lines[0].get_ydata().tolist() == [25, 50]
    plots.health_lines(ax, {"a": found}, "update_error", first=5)
    assert ax.lines[1].get_ydata().tolist() == [50, 50]
    assert ax.lines[1].get_xdata().tolist() == [5, 6]
