"""A GEMM that is wrong only for one row, one column or a ragged K is wrong (spec B-14)."""

import numpy as np
import pytest

from fp8ref.conformance.gemm import grade_gemm
from fp8ref.conformance.gemm.grade import edges, grading
from fp8ref.sim.quantize import cast


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
    assert [
        cause.name.startswith(start) for cause, start in zip(grade.causes, said, strict=True)
    ] == [True] * len(said)


def test_what_was_asked_and_refused_at_edges_is_said():  # B-14
    grade = grade_gemm(correct)
    assert (grade.verdict, grade.edges) == ("right", ["M = 1", "N = 1", "K = 48", "K = 37"])
    assert "K = 32; integers at M = 1, N = 1, K = 48, K = 37; a row's bits at M = 1," in grade.asked
    refused = grade_gemm(raises)
    assert (refused.verdict, refused.edges) == ("right", ["K = 48"])
    assert "M = 1, N = 1, K = 37, for which it raised" in refused.unasked


def test_shapes_that_are_asked_for_are_all():
    assert grade_gemm(of_no_row, shapes=[(32, 32, 32)]).verdict == "right"


def of_blocks(a, b, size):
    """Block after block of K, of which the last may be shorter; by float32, which has all sums
    here.
    """
    total = np.zeros((len(a.codes), len(b.codes)), np.float32)
    for i in range(a.scale_inv.shape[1]):
        x, y = (cast.decode(q.codes[:, i * size : (i + 1) * size], q.fmt) for q in (a, b))
        total += x @ y.T * a.scale_inv[:, i, None] * b.scale_inv[:, i]
    return total


def last_block_by_the_scale_before(a, b):
    """As where the number of blocks is K // 128."""

    def scales(q):
        before = [q.scale_inv[:, :-1], q.scale_inv[:, -2:-1]]
        return q._replace(scale_inv=np.concatenate(before, axis=1)) if q.codes.shape[1] % 128 else q

    return of_blocks(scales(a), scales(b), 128)


def without_the_last_block(a, b):
    """Whole blocks alone, as a loop to K // 128."""
    size, k = 128, a.codes.shape[1] // 128 * 128
    whole = (
        q._replace(codes=q.codes[:, :k], scale_inv=q.scale_inv[:, : k // size]) for q in (a, b)
    )
    return of_blocks(*whole, size)


def test_the_last_block_of_k_may_be_shorter(monkeypatch):  # FBGEMM#6159
    assert edges.shapes(128, 128, 128, block=128)["K = 192"] == (128, 128, 192)
    monkeypatch.setattr(grading, "SHAPES_OF_BLOCKS", ((32, 32, 128),))
    how = {"granularity": "blockwise_1x128"}
    right = grade_gemm(lambda a, b: of_blocks(a, b, 128), **how)
    tiles = [f"[80, 80] K = {k}" for k in (256, 512)]
    assert (right.verdict, right.edges) == ("right", ["M = 1", "N = 1", "K = 192", *tiles])
    wrong = grade_gemm(without_the_last_block, **how)
    assert [cause.name.partition(":")[0] for cause in wrong.causes] == ["at K = 192"]
    shapes = edges.shapes(128, 128, 128, block=32)
    assert [shape for words, shape in shapes.items() if words.startswith("[272, 272]")] == [
        (272, 272, 160),
        (272, 272, 224),
    ]
    assert grade_gemm(last_block_by_the_scale_before, **how).verdict == "wrong"
    mx = grade_gemm(lambda a, b: of_blocks(a, b, 32), granularity="mx_1x32")
    assert (mx.verdict, mx.edges[2:4]) == ("right", ["K = 144", "[80, 80] K = 160"])


def test_a_plan_does_not_excuse_wrong_products():  # B-14, G-6
    def nan_is_zero(a, b):
        return correct(
            *(
                q._replace(codes=np.where(q.codes & 0x7F == 0x7F, 0, q.codes).astype(np.uint8))
                for q in (a, b)
            )
        )

    grade = grade_gemm(nan_is_zero, accumulate="exact", shapes=[(32, 32, 2)])
    assert grade.equal == grade.compared
    assert not grade.ok
