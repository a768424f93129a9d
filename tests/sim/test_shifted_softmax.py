"""Shifted scores: maxima of exponents, factors of single keys, and the order of four lanes (spec A-26)."""

import numpy as np

from fp8ref.sim import online_softmax, shifted_softmax
from fp8ref.sim.online_softmax import Seen

F = np.float32
OFFSET = F(8.807)


def seen(rows, low, high, keys) -> Seen:
    zeros = np.zeros(rows, np.int64)
    return Seen(np.full(rows, low), np.full(rows, high), zeros, np.zeros(keys, np.int64))


def test_the_largest_probability_is_2_to_the_offset():
    s, factor = np.array([[3.0, 5.0, 1.0, 9.0]], F), np.array([[1.0, 2.0, 0.5, 4.0]], F)
    rows = online_softmax.start(1)
    p, c = shifted_softmax.step(s, factor, rows, seen(1, 0, 3, 4), OFFSET)  # the fourth key is hidden
    assert (c[0], rows.maximum[0]) == (0, F(10) - OFFSET)
    np.testing.assert_allclose(p[0], [2.0 ** (x + 8.807) for x in (-7, 0, -9.5)] + [0.0], rtol=2.0**-20)
    p, c = shifted_softmax.step(s + 1, factor, rows, seen(1, 0, 3, 4), OFFSET)
    np.testing.assert_allclose([c[0], p[0, 1]], [0.25, 2.0**8.807], rtol=2.0**-20)


def test_lanes_add_four_columns_before_the_sum():  # 2^24 + ((1 + 1) + 1) + 1 keeps the four, one by one they are lost
    sums, p = np.zeros((1, 4), F), np.zeros((1, 16), F)
    sums[0, 1] = 2.0**24
    p[0, [2, 3, 10, 11]] = 1
    shifted_softmax._add(p, np.ones(1, F), sums)
    assert list(sums[0]) == [0, 2.0**24 + 4, 0, 0]
    assert online_softmax.total(online_softmax.Rows(np.zeros(1, F), np.array([[2.0**24, 0, 1, 1]], F)), "warp")[0] == 2.0**24 + 2


def test_a_last_tile_is_that_of_64_queries():
    high = np.arange(200) + 1
    found = shifted_softmax.last_tiles(high, 200, 128)
    assert list(found[[0, 63, 64, 127, 128, 199]]) == [0, 0, 0, 0, 128, 128]
    assert list(shifted_softmax.last_tiles(np.full(3, 500), 300, 128)) == [256] * 3
    assert (shifted_softmax.last_tiles(np.zeros(3, np.int64), 300, 128) < 0).all()


def test_scores_of_the_last_tile_have_both_scales():
    s, scale = np.full((2, 1), 1000, F), F(0.1803)
    of_q, of_k = np.array([0.013, 0.013], F), np.array([0.0071], F)
    scores, factor = shifted_softmax.factors(s, scale, of_q, of_k, np.array([False, True]))
    both = F(of_q[0] * of_k[0])
    assert (scores[0, 0], factor[0, 0]) == (1000, F(scale * both))
    assert (scores[1, 0], factor[1, 0]) == (F(1000 * both), scale)
