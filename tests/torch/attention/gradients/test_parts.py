"""What the backward passes have in common (spec A-15). Their bits: parity/test_attention_torch.py."""

import numpy as np
import pytest
import torch

from fp8ref.sim.attention.gradients.mx import sums_of_rows as simulated_sums
from fp8ref.torch.attention.gradients import parts
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.attention.operands.problem import Shape

SHAPE = Shape(1, 4, 2, 3, 5, 8)


def test_sums_of_rows_are_in_order(rng):  # A-15, step 2
    a, b = (
        torch.from_numpy(rng.normal(size=(50, 64)).astype(np.float32)).bfloat16() for _ in range(2)
    )
    right = simulated_sums(a.float().numpy(), b.float().numpy())
    np.testing.assert_array_equal(parts.sums_of_rows(a, b, 64).numpy(), right)
    assert (right != (a.float() * b.float()).sum(-1).numpy()).any()


def test_heads_of_a_group_are_added_in_order():  # A-15, step 9
    big = 2.0**24
    found = torch.tensor([big, 1.0, -big]).view(1, 1, 3, 1, 1)
    total = torch.zeros(1, 1, 1, 1)
    parts.add_heads(total, found, Tile(0, 1, 1, 0, 1, True))
    assert total.item() == 0  # (2^24 + 1) rounds to 2^24; from the back it would be 1


def test_rows_of_no_key_have_a_finite_log_sum():
    lse = torch.arange(12.0).view(1, 4, 3)
    lse[0, 1, 2] = -torch.inf
    found = parts.rows_of(lse, SHAPE, 16)
    assert found.shape == (1, 2, 16, 2)
    assert found[0, 0, :3].tolist() == [[0, 3], [1, 4], [2, 0]]
    assert not found[:, :, 3:].any()


def test_rows_come_back_in_the_order_of_query_heads():
    lse = torch.arange(12.0).view(1, 4, 3)
    assert torch.equal(parts.by_rows(parts.rows_of(lse, SHAPE, 16), SHAPE), lse)


def test_padding_is_left_out_of_gradients():
    dq = torch.arange(2 * 16 * 2 * 16.0).view(1, 2, 16, 2, 16)
    dk = torch.arange(2 * 16 * 16.0).view(1, 2, 16, 16)
    raw = parts.without_padding(dq, dk, dk + 1, SHAPE)
    assert (raw.dq.shape, raw.dk.shape) == ((1, 4, 3, 8), (1, 2, 5, 8))
    assert torch.equal(raw.dq[0, 3], dq[0, 1, :3, 1, :8])  # the second query head of its group
    assert torch.equal(raw.dk, dk[:, :, :5, :8])
    assert torch.equal(raw.dv, raw.dk + 1)


@pytest.mark.parametrize("arithmetic", ["stated", "fast"])
def test_features_that_pad_add_nothing(arithmetic):
    a = torch.ones(3, 16)
    a[:, 8:] = 0
    assert parts.sums_of_rows(a, a, 8, arithmetic).tolist() == [8, 8, 8]
