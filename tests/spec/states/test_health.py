"""Figures, records and columns of the health of states (spec O-12, Q-12)."""

import numpy as np
import pytest

from fp8ref.formats import E5M2, FLOAT16
from fp8ref.spec.states import health
from fp8ref.spec.states.layouts import LAYOUTS, Moment

NUMBERS = np.array(
    [[200.0, 4, 0, 1, 0, 50, 100, 10, -1, 8, 2, 3], [100.0, 2, 3, 0, 0, 10, 20, 10, 2, 0, 0, 0.5]]
)


def test_figures_and_parts():  # O-12
    found = health.of(NUMBERS[0], 2.5)
    assert (found.count, found.v_lost, found.clipped_m, found.stalled_v) == (200, 4, 1, 100)
    assert (
        found.root_bias,
        found.update_error,
        found.largest_ratio,
        found.bytes_per_parameter,
    ) == (-0.1, 0.5, 3.0, 2.5)
    assert health.of(NUMBERS[1], 2.0).update_error == 0  # no signal
    whole = health.total(NUMBERS)
    assert whole.tolist() == [300, 6, 3, 1, 0, 60, 120, 20, 1, 8, 2, 3]
    assert np.isnan(health.total(np.array([[0.0] * 12, [0.0] * 11 + [np.nan]]))[-1])


def test_records_and_columns():
    numbers = NUMBERS.copy()
    numbers[1, -1] = np.nan
    found = health.recorded(["a", "b"], numbers, LAYOUTS["fishman"])
    assert list(found) == ["", "a", "b"]
    assert found["b"]["largest_ratio"] is None
    assert found[""]["v_lost"] == found["a"]["v_lost"] + found["b"]["v_lost"] == 6
    assert found[""]["bytes_per_parameter"] == 2 + 16 / 300  # two scales a tensor
    columns = health.columns(found)
    assert columns["state_v_lost"] == 6 / 300
    assert columns["state_stalled_v"] == 120 / 300
    assert "state_largest_ratio" not in columns  # not a number that JSON has
    assert "state_count" not in columns
    assert health.columns({}) == {}


@pytest.mark.parametrize(
    ("fmt", "limit"), [(E5M2, 61440), (FLOAT16, 65520), (LAYOUTS["te"].m.fmt, 464)]
)
def test_the_limit_of_a_format(fmt, limit):  # O-12
    scaling = "power_of_two" if fmt == FLOAT16 else "multiply"
    assert health.clip_limit(Moment(fmt=fmt, scaling=scaling)) == limit
