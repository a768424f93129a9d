"""Indices of K and tiles, in words."""

import numpy as np
import pytest
from helpers.gemm.graded_gemms import correct

from fp8ref.conformance.gemm import grade_gemm
from fp8ref.conformance.gemm.grade import structure
from fp8ref.sim.quantize import cast


@pytest.mark.parametrize(
    ("numbers", "k", "expected"),
    [
        (range(480, 512), 512, "the last 32 of K dropped"),
        (range(32), 512, "the first 32 of K dropped"),
        (range(128, 256), 512, "128 of K, 128 to 255, dropped"),
        (range(512), 512, "all of K dropped"),
        (range(3, 512, 4), 512, "every index 3 modulo 4 of K dropped, from 3 to 511"),
        ([1, 2, 9], 512, "3 of K dropped: 1 to 2, 9"),
        ([7], 512, "1 of K, 7, dropped"),
    ],
)
def test_indices_in_words(numbers, k, expected):
    assert structure.in_words("dropped", np.array(numbers), k) == expected


def test_an_equal_part_of_k():
    assert (
        structure.part_of("dropped", np.arange(384, 512), 512)
        == "part 3 of 0 to 3 equal parts of K dropped"
    )
    assert structure.part_of("dropped", np.arange(400, 512), 512) == ""
    assert structure.part_of("dropped", np.arange(512), 512) == ""


def test_ranges():
    assert (
        structure.ranges(np.array([0, 1, 2, 5, 8, 9, 20, 30]))
        == "0 to 2, 5, 8 to 9, 20 and 1 more ranges"
    )


def test_a_tile():
    differ = np.zeros((64, 64), bool)
    differ[16:32, 32:48] = True
    differ[20, 40] = False
    tile = structure.tile_of(differ)
    assert str(tile) == "rows 16 to 31, columns 32 to 47"
    assert tile.place == (slice(16, 32), slice(32, 48))


@pytest.mark.parametrize(
    "places", [[(0, 0), (63, 63)], [(r, c) for r in range(64) for c in range(64)]]
)
def test_what_is_no_tile(places):
    differ = np.zeros((64, 64), bool)
    for at in places:
        differ[at] = True
    assert structure.tile_of(differ) is None


def test_a_number_that_is_added_to_every_result():
    grade = grade_gemm(lambda a, b: correct(a, b) + np.float32(0.5), shapes=[(16, 16, 32)])
    assert [cause.name for cause in grade.causes] == ["0.5 is added to every result"]


def test_results_without_a_product():
    def function(a, b):
        found = correct(a, b)
        found[0, 5] += 3
        return np.where(found[::-1] == 0, found, np.where(found == 0, 7, found)).astype(np.float32)

    grade = grade_gemm(function, shapes=[(16, 16, 32)])
    assert structure.NO_PRODUCT in [cause.name for cause in grade.causes]
    assert "-1" not in " ".join(cause.name for cause in grade.causes)


def test_operands_that_are_swapped():
    def swapped(a, b):
        x, y = (cast.decode(q.codes, q.fmt) for q in (a, b))
        return y @ x.T * a.scale_inv * b.scale_inv.T

    grade = grade_gemm(swapped, granularity="rowwise", shapes=[(16, 16, 64)])
    assert [cause.name for cause in grade.causes] == ["a and b swapped, under their own scales"]
