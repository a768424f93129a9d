"""A row whose bits depend on how many rows a call has (spec B-14)."""

import numpy as np
import pytest

from fp8ref.conformance.gemm import grade_gemm
from fp8ref.conformance.gemm.grade import grading
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast


def in_parts(a, b, parts):
    x, y = (np.array_split(cast.decode(q.codes, q.fmt), parts, axis=1) for q in (a, b))
    return sum(i @ j.T for i, j in zip(x, y, strict=True)) * a.scale_inv * b.scale_inv.T


def splits_k_of_few_rows(a, b):  # TransformerEngine#2986
    return in_parts(a, b, 4 if len(a.codes) < 32 else 1)


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_a_gemm_that_splits_k_by_the_number_of_rows_is_named(granularity, monkeypatch):
    """Every result is within its bound, so that it is right: but a token's bits depend on its
    batch.
    """
    monkeypatch.setattr(grading, "SHAPES", ((64, 64, 2048),))
    grade = grade_gemm(splits_k_of_few_rows, granularity=granularity)
    assert (grade.verdict, grade.rows.alike) == ("right", False)
    assert "a row's bits depend on the number of rows (K = 2048): " in grade.message
    assert "results at M = 1 are others at M = 64" in grade.rows.said
    assert grade.to_dict()["batch_invariant"] is False
    same = grade_gemm(lambda a, b: gemm.matmul(a, b), granularity=granularity)
    assert (same.verdict, same.rows.alike) == ("right", True)


def test_a_gemm_that_takes_no_other_number_of_rows_is_not_asked(monkeypatch):
    monkeypatch.setattr(grading, "SHAPES", ((64, 64, 64),))

    def function(a, b):
        if len(a.codes) != 64:
            raise ValueError("64 rows")
        return gemm.matmul(a, b)

    grade = grade_gemm(function)
    assert grade.rows.alike is None
    assert "whether a row's bits depend on the number of rows" in grade.unasked


def test_a_wrong_second_tile_is_found():
    """No default shape had a second tile: all results beyond column 127 could be zeros."""

    def first_tile(a, b):
        out = gemm.matmul(a, b)
        out[:, 128:] = 0
        return out

    grade = grade_gemm(first_tile)
    assert grade.verdict == "wrong"
    assert any("columns 128 to 271" in cause.name for cause in grade.causes)
