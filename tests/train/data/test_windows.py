import numpy as np
import pytest

from fp8ref.train.data import windows
from fp8ref.train.data.windows import InMemory, Part, Windows


def test_windows_of_a_part_are_those_from_its_first(rng):  # D-2
    tokens = rng.integers(0, 1000, 50)
    part = Part(InMemory(tokens), 2, 3)
    cut = Windows([part], 7)
    assert len(cut) == 3
    for i in range(3):
        np.testing.assert_array_equal(cut[i], tokens[(2 + i) * 7 : (2 + i) * 7 + 8])
        assert cut[i].dtype == np.int32


def test_parts_follow_each_other_and_empty_ones_take_no_place():  # D-4
    parts = [
        Part(InMemory(np.arange(100 * i, 100 * i + 20)), 0, n)
        for i, n in enumerate((0, 2, 0, 0, 1, 3, 0))
    ]
    cut = Windows(parts, 5)
    assert [int(cut[i][0]) for i in range(len(cut))] == [100, 105, 400, 500, 505, 510]


@pytest.mark.parametrize(
    ("tokens", "length", "number"),
    [(0, 8, 0), (1, 8, 0), (8, 8, 0), (9, 8, 1), (16, 8, 1), (17, 8, 2), (5, 1, 4)],
)
def test_how_many_windows_so_many_tokens_hold(tokens, length, number):  # D-2
    assert windows.count(tokens, length) == number
    assert len(Windows([windows.whole(InMemory(np.zeros(tokens)), length)], length)) == number
