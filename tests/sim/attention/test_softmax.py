"""The compiled softmax of a tile is its definition (spec A-4 to A-8)."""

import dataclasses

import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.attention import softmax as online_softmax
from fp8ref.sim.attention.attention import count_lost, round_probabilities
from fp8ref.sim.attention.softmax import Seen
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.variants import VARIANTS

F = np.float32
CHANGED = [
    VARIANTS["fa3"],
    VARIANTS["fa4_threshold4"],
    VARIANTS["cudnn"],
    VARIANTS["fa3_paper"],
    dataclasses.replace(VARIANTS["cudnn"], name="cudnn with a threshold", threshold=1.0),
    dataclasses.replace(VARIANTS["fa3"], name="fa3 by tiles", sum_order="tile", bias="separate"),
]


def tiles(seed: int, rows: int = 9, keys: int = 64, count: int = 4):
    """Scores and masks of tiles: rows without keys in the first, in all, and with documents."""
    rng = np.random.default_rng(seed)
    for n in range(count):
        s = (
            rng.normal(size=(rows, keys)) * np.array([0.1, 1, 3, 10, 30, 100, 1, 1, 0])[:rows, None]
        ).astype(F)
        low, high = rng.integers(-20, 30, rows), rng.integers(20, 90, rows)
        low[1], high[1] = (99, 80) if n == 0 else (0, keys)
        low[2], high[2] = 70, 3
        q, k = np.zeros(rows, np.int64), np.zeros(keys, np.int64)
        if n == 2:
            q[3:6], k[20:40] = 1, 1
        yield s, Seen(low, high, q, k)


@pytest.mark.parametrize("variant", CHANGED, ids=lambda v: v.name)
def test_compiled_is_plain(variant):
    factors, factor = F([0.125, 1.7, 0.3]), F(0.183)
    mine, plain = online_softmax.start(9), online_softmax.start(9)
    for s, seen in tiles(0):
        found = online_softmax.step(s.copy(), mine, seen, variant, factors, factor)
        expected = online_softmax.step_plain(s.copy(), plain, seen, variant, factors, factor)
        for x, y in zip((*found, *mine), (*expected, *plain), strict=True):
            # a maximum of zero has either sign, which changes nothing
            np.testing.assert_array_equal(x, y)
    assert mine.maximum[2] == -np.inf  # it has seen no key
    assert online_softmax.total(mine, variant.sum_order)[2] == 0
    assert (online_softmax.total(mine, variant.sum_order)[[0, 1]] > 0).all()


@pytest.mark.parametrize("name", ["fa3", "fa4", "cudnn", "fa3_paper"])
def test_a_tile_without_keys_changes_nothing(name):
    variant, rows = VARIANTS[name], online_softmax.start(9)
    for s, seen in tiles(1):
        online_softmax.step(s, rows, seen, variant, F([0.125]), F(0.2))
        before = [x.copy() for x in rows]
        none = Seen(np.full(9, 64), np.zeros(9, np.int64), *seen[2:])
        p, c = online_softmax.step(s, rows, none, variant, F([0.125]), F(0.2))
        assert not p.any()
        seen_before = before[0] > -np.inf
        assert (c[seen_before] == 1).all()
        for x, y in zip(rows, before, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
def test_probabilities_are_cast_as_everything_is(fmt):  # A-8, C-3
    numbers = np.concatenate(
        [
            cast.decode(np.arange(127, dtype=np.uint8), fmt)[: fmt.max_code + 1],
            [fmt.max * 1.05, fmt.max * 4],
        ]
    )
    middles = (numbers[1:] + numbers[:-1]) / 2
    p = np.concatenate(
        [numbers, middles, np.nextafter(middles, F(0)), np.nextafter(middles, F(np.inf))]
    ).astype(F)
    values, clipped, _ = round_probabilities(p, F(1), fmt)
    np.testing.assert_array_equal(cast.encode(values, fmt), cast.encode(p, fmt))
    unsaturated = cast.round_to(p, fmt)
    assert clipped == (~np.isfinite(unsaturated)).sum() > 0
    scaled, _, lost = round_probabilities(p, F(0.3), fmt)
    np.testing.assert_array_equal(scaled, cast.decode(cast.encode(p * F(0.3), fmt), fmt))
    assert lost == count_lost(p, scaled, fmt) > 0
