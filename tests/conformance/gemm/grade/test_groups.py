"""Grouped and batched GEMMs (spec B-14)."""

import numpy as np
import pytest
from helpers.gemm.graded_gemms import correct, values

from fp8ref.conformance.gemm import grade_grouped, require_grouped
from fp8ref.sim.gemm import gemm


def grouped(a, b):
    return [correct(x, y) for x, y in zip(a, b, strict=True)]


@pytest.mark.slow
def test_right_groups():
    grade = require_grouped(grouped)
    assert grade.verdict == "right"
    assert list(grade.grades) == [0, 2, 3]
    assert grade.to_dict()["groups"]["2"]["measured"][0]["shape"] == [48, 48, 512]


@pytest.mark.slow
def test_a_batch():
    def batched(a, b):
        x, y = (np.stack([values(q) for q in side]) for side in (a, b))
        scales = [np.stack([q.scale_inv for q in side]) for side in (a, b)]
        return x @ y.mT * scales[0] * scales[1].mT

    assert require_grouped(batched, sizes=[32, 32, 32]).ok


@pytest.mark.slow
def test_the_matrix_of_another_group():
    """Offsets that forget the empty group: what comes after it takes the matrix before its own."""

    def function(a, b):
        return [correct(x, b[max(g - 1, 0)] if g > 1 else b[g]) for g, x in enumerate(a)]

    grade = grade_grouped(function)
    assert {g: one.verdict for g, one in grade.grades.items()} == {
        0: "right",
        2: "wrong",
        3: "wrong",
    }
    assert grade.exit_code == 1
    with pytest.raises(AssertionError, match="groups of 32, 0, 48, 32 rows, is wrong\ngroup 2 of"):
        require_grouped(function)


def test_the_end_of_k_of_the_last_group():
    def function(a, b):
        out = grouped(a, b)
        x, y = a[-1], b[-1]
        out[-1] = values(x)[:, :-64] @ values(y)[:, :-64].T * x.scale_inv * y.scale_inv.T
        return out

    grade = grade_grouped(function)
    (cause,) = grade.grades[3].causes
    assert cause.name.startswith("the last 64 of K dropped, or part ")


@pytest.mark.parametrize("sizes", [[0, 0], [4, -1]])
def test_sizes_that_no_group_has(sizes):
    with pytest.raises(
        ValueError, match="groups have sizes of 0 or more rows, and one has rows; got"
    ):
        grade_grouped(grouped, sizes=sizes)


def by_place(a, b):
    """The first group goes to a kernel that adds K in two parts."""
    halves = [
        [q._replace(codes=q.codes[:, part]) for q in (a[0], b[0])]
        for part in (np.s_[:128], np.s_[128:])
    ]
    first = sum(gemm.matmul(*half, accumulate="f32") for half in halves)
    return [
        first,
        *(gemm.matmul(x, y, accumulate="f32") for x, y in zip(a[1:], b[1:], strict=True)),
    ]


def test_a_group_whose_bits_depend_on_its_place_is_named():  # B-14
    grade = grade_grouped(by_place, sizes=[16, 16], n=16, k=256)
    assert (grade.verdict, grade.places.alike) == ("right", False)
    said = "a group's bits depend on the other groups: "
    assert grade.places.said.startswith(said)
    assert said in grade.message
    assert grade.to_dict()["group_invariant"] is False
