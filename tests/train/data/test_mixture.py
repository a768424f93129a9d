from fractions import Fraction

import numpy as np
import pytest

from fp8ref.train.data import mixture, windows
from fp8ref.train.data.windows import InMemory, Windows


def source(first: int, count: int) -> Windows:
    """Windows of two tokens each, of which the first tells the window."""
    return Windows([windows.whole(InMemory(np.arange(first, first + count + 1)), 1)], 1)


def rows(dataset, start: int, stop: int) -> list[int]:
    return [int(dataset[i][0]) for i in range(start, stop)]


def test_every_source_has_its_share_anywhere():  # D-8
    mixed = mixture.train([source(0, 7), source(100, 5), source(200, 400)], [2.0, 1.0, 1.0], seed=0)
    for start in (0, 1000, 10**7):
        found = np.array(rows(mixed, start, start + 40)) // 100
        assert np.bincount(np.minimum(found, 2)).tolist() == [20, 10, 10]


def test_a_row_is_a_function_of_its_index_and_the_seed():
    made = [
        mixture.train([source(0, 50), source(100, 50)], [1.0, 3.0], seed=seed) for seed in (0, 0, 1)
    ]
    assert rows(made[0], 20, 40) == [rows(made[1], i, i + 1)[0] for i in range(20, 40)]
    assert rows(made[0], 0, 40) != rows(made[2], 0, 40)


def test_every_source_has_a_shuffle_of_its_own():
    mixed = mixture.train([source(0, 50), source(100, 50)], [1.0, 1.0], seed=0)
    found = np.array(rows(mixed, 0, 100))
    assert sorted(found[found < 100]) == sorted(found[found >= 100] - 100)
    assert (found[found < 100] != found[found >= 100] - 100).any()


def test_a_source_begins_anew_when_it_is_used_up():
    mixed = mixture.train([source(0, 3), source(100, 1000)], [1.0, 1.0], seed=0)
    small = [row for row in rows(mixed, 0, 12) if row < 100]
    assert sorted(small[:3]) == sorted(small[3:]) == [0, 1, 2]


def test_validation_ends_with_the_first_source():
    mixed = mixture.validation([source(0, 4), source(100, 1000)], [1.0, 1.0])
    assert 7 <= len(mixed) <= 9
    assert len(set(rows(mixed, 0, len(mixed)))) == len(mixed)


def test_a_description_has_one_sum_of_texts_and_weights():
    about = [{"sha256": "a"}, {"sha256": "b"}]
    found = [mixture.described([("x", w), ("y", 1.0)], about) for w in (1.0, 2.0)]
    assert found[0]["mixture"][0] == {"source": "x", "weight": 1.0, "sha256": "a"}
    assert found[0]["sha256"] != found[1]["sha256"]


@pytest.mark.parametrize(
    "weights", [(0.7, 0.2, 0.1), (1.0, 1.004, 2.006), (3.0, 1.0), (1.0, 1.0, 1.0, 5.5)]
)
def test_shares_are_the_weights_as_near_as_rows_allow(weights):  # D-8
    mixed = mixture.Mixture([source(0, 1)] * len(weights), weights)
    exact = [Fraction(str(w)) / sum(Fraction(str(w)) for w in weights) for w in weights]
    counts = [0] * len(weights)
    for n in range(1, 2001):
        of, row = mixed.at(n - 1)
        assert row == counts[of]  # each source's rows in its order, none left out
        counts[of] += 1
        # floor(t w + 1/2) of a t that is within s/2 of n
        assert all(
            abs(c - n * w) <= Fraction(1, 2) + w * len(weights) / 2
            for c, w in zip(counts, exact, strict=True)
        )
        if all((n * w).denominator == 1 for w in exact):
            assert counts == [n * w for w in exact]


def test_seven_two_and_one_tenths_are_exact():  # D-8
    mixed = mixture.Mixture([source(0, 1)] * 3, [0.7, 0.2, 0.1])
    found = [mixed.at(i)[0] for i in range(2000)]
    assert np.bincount(found).tolist() == [1400, 400, 200]
    # places 5/7, 15/7, 5/2, 25/7, 5, 5, 45/7, 15/2, 55/7, 65/7 of rows 0 to 9: source 0 is the
    # first of the two at 5
    assert found[:10] == [0, 0, 1, 0, 0, 2, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("lengths", "weights"),
    [((4, 1000), (1.0, 1.0)), ((7, 3, 2), (0.7, 0.2, 0.1)), ((1, 1, 9), (1.0, 2.5, 4.0))],
)
def test_a_mixture_is_as_long_as_its_rows_last(lengths, weights):  # D-8
    mixed = mixture.Mixture([source(0, n) for n in lengths], weights)
    there = [row < lengths[of] for of, row in map(mixed.at, range(40))]
    assert len(mixed) == there.index(False)
