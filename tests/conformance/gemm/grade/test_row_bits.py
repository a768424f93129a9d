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


def in_chains(a, b, *, parts=1, order=None):
    """Sums of K in so many parts, each bit for bit as float32 adds in order."""
    size = a.codes.shape[1] // parts
    sums = [
        gemm.matmul(
            *(q._replace(codes=q.codes[:, i * size : (i + 1) * size]) for q in (a, b)),
            accumulate="f32",
        )
        for i in (order if order is not None else range(parts))
    ]
    total = sums[0]
    for one in sums[1:]:
        total = total + one
    return total


def of_whole_tiles(a, b):
    """Rows that fill no tile of 64 go to another kernel."""
    return in_chains(a, b, parts=4 if len(a.codes) % 64 else 1)


def by_place(a, b):
    """Rows 40 and later belong to blocks of another order."""
    first, later = in_chains(a, b), in_chains(a, b, parts=4)
    return np.concatenate([first[:40], later[40:]])


def beside_nan(a, b):
    """A NaN anywhere changes the kernel."""
    return in_chains(a, b, parts=4 if (a.codes & 0x7F == 0x7F).any() and len(a.codes) > 70 else 1)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (of_whole_tiles, "the number of rows (K = 512): "),
        (by_place, "its place among the rows (K = 512): "),
        (beside_nan, "the padding behind it (K = 512): "),
    ],
)
def test_what_a_rows_bits_depend_on_is_named(function, kind):  # B-14
    grade = grade_gemm(function, shapes=[(64, 16, 512)])
    assert (grade.verdict, grade.rows.alike) == ("right", False)
    assert grade.rows.said.startswith(f"a row's bits depend on {kind}")


def test_the_calls_of_other_rows_are_listed():
    grade = grade_gemm(in_chains, shapes=[(64, 16, 64)])
    assert grade.rows.alike
    counts = ("M = 1", "M = 2", "M = 17", "M = 33", "M = 128", "M = 257", "M = 1024")
    assert grade.rows.asked[:7] == counts
    assert "a row's bits at M = 1, M = 2, " in grade.asked


def test_a_gemm_that_does_not_repeat_itself_is_imprecise():  # B-14
    """As with atomics: the parts of K are added in the order in which they end."""
    rng = np.random.default_rng(0)

    def atomics(a, b):
        return in_chains(a, b, parts=8, order=rng.permutation(8))

    grade = grade_gemm(atomics, shapes=[(32, 32, 512)])
    assert grade.verdict == "imprecise"
    assert [cause.name for cause in grade.causes] == ["does not repeat itself"]
    assert grade.worst.bounds < 1
    assert grade.rows.alike is None
    assert not grade_gemm(atomics, shapes=[(32, 32, 512)], accumulate="f32").ok


def test_a_race_that_loses_numbers_is_wrong():
    calls = iter(range(1000))

    def races(a, b):
        out = in_chains(a, b)
        dense = np.count_nonzero(a.codes) > a.codes.size / 2
        return np.where(dense and next(calls) % 2, np.inf, out).astype(np.float32)

    grade = grade_gemm(races, shapes=[(32, 32, 64)])
    assert grade.verdict == "wrong"
    assert "does not repeat itself" in [cause.name for cause in grade.causes]
