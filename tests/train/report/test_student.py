import math

import numpy as np
import pytest
from scipy import stats

from fp8ref.train.report.gap import student


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 5, 6, 7, 15, 30, 100, 101])
@pytest.mark.parametrize("confidence", [0.1, 0.5, 0.9, 0.95, 0.99, 0.999999])
def test_student_is_scipys(dof, confidence):
    # tan magnifies theta's error of a few ulps by up to t^2 / dof + 1, a million for 1 degree of
    # freedom
    np.testing.assert_allclose(
        student(confidence, dof), stats.t.ppf((1 + confidence) / 2, dof), rtol=1e-8
    )


@pytest.mark.parametrize("confidence", [0, 1, -0.5, math.nan])
def test_student_refuses_what_is_no_probability(confidence):
    with pytest.raises(ValueError, match="between 0 and 1"):
        student(confidence, 3)


def test_student_refuses_no_freedom():
    with pytest.raises(ValueError, match="at least 1 degree"):
        student(0.95, 0)
