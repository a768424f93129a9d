import numpy as np
import pytest

from fp8ref import plots
from fp8ref.formats import E4M3FN


@pytest.fixture
def ax():
    return plots.figure()[1][0]


def test_staleness_shows_the_amax_what_fits_and_what_does_not(ax):
    plots.staleness(ax, [1.0, 4.0, 2.0], {"history of 1": [448.0, 448.0, 112.0]}, E4M3FN, first=7)
    amax, fits, missed = ax.lines
    np.testing.assert_array_equal(amax.get_xdata(), [7, 8, 9])
    np.testing.assert_array_equal(amax.get_ydata(), [1, 4, 2])
    np.testing.assert_array_equal(fits.get_ydata(), [1, 1, 4])
    np.testing.assert_array_equal(missed.get_data(), [[8], [4]])
    assert ax.get_legend().get_texts()[1].get_text() == "fits, history of 1: 1 clipped"
