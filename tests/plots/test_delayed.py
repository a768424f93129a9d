import numpy as np
import pytest

from fp8ref import plots
from fp8ref.formats import E4M3FN, E5M2


@pytest.fixture
def ax():
    return plots.figure()[1][0]


@pytest.mark.parametrize(("fmt", "fits", "clips"), [(E4M3FN, 464.0, 464.5), (E5M2, 61439.0, 61440.0)])
def test_an_amax_is_clipped_where_it_rounds_beyond_max(fmt, fits, clips):
    assert plots.clipped([fits, clips, 2 * fits, 2 * clips], [1, 1, 0.5, 0.5], fmt).tolist() == [False, True, False, True]


def test_staleness_shows_the_amax_what_fits_and_what_does_not(ax):
    plots.staleness(ax, [1.0, 4.0, 2.0], {"history of 1": [448.0, 448.0, 112.0]}, E4M3FN, first=7)
    amax, fits, missed = ax.lines
    np.testing.assert_array_equal(amax.get_xdata(), [7, 8, 9])
    np.testing.assert_array_equal(amax.get_ydata(), [1, 4, 2])
    np.testing.assert_array_equal(fits.get_ydata(), [1, 1, 4])
    np.testing.assert_array_equal(missed.get_data(), [[8], [4]])
    assert ax.get_legend().get_texts()[1].get_text() == "fits, history of 1: 1 clipped"
