import numpy as np

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
    made = [mixture.train([source(0, 50), source(100, 50)], [1.0, 3.0], seed=seed) for seed in (0, 0, 1)]
    assert rows(made[0], 20, 40) == [rows(made[1], i, i + 1)[0] for i in range(20, 40)]
    assert rows(made[0], 0, 40) != rows(made[2], 0, 40)


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
