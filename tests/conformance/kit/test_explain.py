"""The simplest of several inputs, and numbers as text."""

import numpy as np
import pytest

from fp8ref.conformance.kit import explain


def test_the_simplest_comes_first():
    x = np.float32([np.nan, np.inf, 3.14159, -1.0, 1.0, 2.0, 0.0, 1.5, -0.0, 1e30, 2.0**60])
    ordered = x[explain.simplicity(x)]
    expected = np.float32([0.0, -0.0, 1.0, -1.0, 2.0, 2.0**60, 1.5, 3.14159, 1e30, np.inf, np.nan])
    np.testing.assert_array_equal(ordered, expected)
    assert explain.simplest(x, np.isin(x, [3.14159, 2.0**60])) == 10


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (np.float32(0.1), "0.1"),
        (np.nan, "NaN"),
        (-np.inf, "-inf"),
        (-0.0, "-0"),
        (2.0**70, "1.1805916207174113e+21"),
    ],
)
def test_decimals(value, text):
    assert explain.decimal(value) == text
