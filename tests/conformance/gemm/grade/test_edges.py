"""A GEMM that is wrong only for one row, one column or a ragged K is wrong (spec B-14)."""

import numpy as np
import pytest

from fp8ref.conformance.gemm import grade_gemm
from fp8ref.conformance.gemm.grade import edges, grading
from fp8ref.sim import cast


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Fewer shapes, each of which edges are near to."""
    monkeypatch.setattr(grading, "SHAPES", ((32, 32, 32),))


def correct(a, b):
    x, y = (cast.decode(q.codes, q.fmt) for q in (a, b))
    return x @ y.T * a.scale_inv * b.scale_inv.T


def of_no_row(a, b):
    return correct(a, b) * np.float32(len(a.codes) > 1)


def of_no_column(a, b):
    return correct(a, b) * np.float32(len(b.codes) > 1)


def in_blocks(a, b):
    k = a.codes.shape[1] // 32 * 32
    return correct(*(q._replace(codes=q.codes[:, :k]) for q in (a, b)))


def squeezes(a, b):
    return correct(a, b).squeeze()


def raises(a, b):
    if a.codes.shape[1] % 16 or min(len(a.codes), len(b.codes)) == 1:
        raise ValueError("multiples of 16")
    return correct(a, b)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (of_no_row, ["at M = 1: zeros"]),
        (of_no_column, ["at N = 1: zeros"]),
        (in_blocks, ["at K = 48: the last 16 of K dropped", "at K = 37: "]),
        (squeezes, ["at M = 1: no valid result", "at N = 1: no valid result"]),
    ],
)
def test_a_wrong_edge_is_named(function, said):  # B-14
    grade = grade_gemm(function)
    assert grade.verdict == "wrong"
    assert [cause.name.startswith(start) for cause, start in zip(grade.causes, said, strict=True)] == [True] * len(said)


def test_what_was_asked_and_refused_at_edges_is_said():  # B-14
    grade = grade_gemm(correct)
    assert (grade.verdict, grade.edges) == ("right", ["M = 1", "N = 1", "K = 48", "K = 37"])
    assert "K = 32; integers at M = 1, N = 1, K = 48, K = 37; e4m3fn" in grade.asked
    refused = grade_gemm(raises)
    assert (refused.verdict, refused.edges) == ("right", ["K = 48"])
    assert "M = 1, N = 1, K = 37, for which it raised" in refused.unasked


def test_shapes_that_are_asked_for_are_all():
    assert grade_gemm(of_no_row, shapes=[(32, 32, 32)]).verdict == "right"


def test_blocks_divide_k():
    assert edges.shapes(128, 128, 128, blocks=True) == {"M = 1": (1, 128, 128), "N = 1": (128, 1, 128)}


def test_a_plan_does_not_excuse_wrong_products():  # B-14, G-6
    def nan_is_zero(a, b):
        return correct(*(q._replace(codes=np.where(q.codes & 0x7F == 0x7F, 0, q.codes).astype(np.uint8)) for q in (a, b)))

    grade = grade_gemm(nan_is_zero, accumulate="exact", shapes=[(32, 32, 2)])
    assert grade.equal == grade.compared
    assert not grade.ok
