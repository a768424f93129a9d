"""Tiles, who sees them, layouts and products (spec A-2 to A-6)."""

import numpy as np
import pytest
import torch

from fp8ref.sim.attention.operands import inputs as sim
from fp8ref.spec.attention.variants import Mask
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.problem import Documents, Problem, RankCall, Shape

MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(window=(30, 5)),
    Mask(window=(None, 2), alignment="start"),
    Mask(causal=True, window=(100, 200)),
    Mask(causal=True, alignment="start"),
    Mask(window=(0, 0)),
]


@pytest.mark.parametrize("step", [1, 16, 32])
@pytest.mark.parametrize("lengths", [(70, 300), (300, 70), (128, 128), (1, 500), (257, 513)])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tiles_have_all_that_is_seen(mask, lengths, step):
    """Every pair of a query and a key that it sees is in one tile, in its place of the order; a
    pair that it does not see in none.
    """
    tq, tk = lengths
    low, high = sim.visible(tq, tk, mask)
    keys = np.arange(tk)
    expected = (keys >= low[:, None]) & (keys < high[:, None])
    for name in ("fa3", "cudnn"):
        call = RankCall(variant=name, mask=mask)
        problem, length = Problem(call, Shape(1, 2, 1, tq, tk, 64)), call.variant.tile(64, mask)
        found = np.zeros((-(-tq // step) * step, -(-tk // 16) * 16 + length), int)
        tiles = operands.tiles(problem, step)
        begins = [tile.begin for tile in tiles]
        assert begins == sorted(begins, reverse=name == "fa3")
        for tile in tiles:
            assert (
                tile.begin % length
                == tile.width % operands.STEP
                == tile.first % step
                == tile.last % step
                == 0
            )
            seen = operands.seen(tile, problem, torch.device("cpu"))
            assert (seen is None) == tile.inside
            area = np.ones((1, 1)) if seen is None else seen[0, 0, :, 0].numpy()
            found[tile.rows, tile.keys] += np.broadcast_to(
                area, (tile.last - tile.first, tile.width)
            ).astype(int)
        np.testing.assert_array_equal(found[:tq, :tk], expected)
        assert not found[tq:].any()
        assert not found[:, tk:].any()


def test_what_no_row_sees_is_left_out():
    call = RankCall(variant="cudnn", mask=Mask(window=(10, 0)))
    problem = Problem(call, Shape(1, 1, 1, 100, 1000, 64))
    assert [(tile.begin, tile.first, tile.last) for tile in operands.tiles(problem)] == [
        (768, 0, 6),
        (896, 0, 100),
    ]


def test_documents_are_seen_apart():
    q, k = torch.tensor([[0, 1, 2], [1, 1, 1]]), torch.arange(16).expand(2, 16) // 8
    problem = Problem(RankCall(variant="cudnn"), Shape(2, 1, 1, 3, 16, 64), Documents(q, k))
    (tile,) = operands.tiles(problem)
    assert tile.inside
    seen = operands.seen(tile, problem, torch.device("cpu"))[:, 0, :, 0]
    assert seen.sum(-1).tolist() == [[8, 8, 0], [8, 8, 8]]


def test_layouts_come_back():
    shape = Shape(2, 6, 2, 5, 7, 12)
    x = torch.randn(2, 6, 5, 12)
    rows = operands.grouped(x, shape, 16)
    assert rows.shape == (2, 2, 16, 3, 16)
    assert torch.equal(operands.by_head(rows, shape), x)
    k = torch.randn(2, 2, 7, 12)
    assert operands.along_features(k).shape == (2, 2, 16, 16)
    assert torch.equal(operands.along_tokens(k)[:, :, :12, :7], k.transpose(2, 3))
