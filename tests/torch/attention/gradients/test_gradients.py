"""Parts of the backward pass (spec A-15). Its bits are in parity/test_attention_torch.py."""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.sim.attention.gradients.mx import sums_of_rows as simulated_sums
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask
from fp8ref.torch.attention import attention
from fp8ref.torch.attention.gradients import parts
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.attention.operands.problem import Shape


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
    found = parts.rows_of(lse, Shape(1, 4, 2, 3, 5, 8), 16)
    assert found.shape == (1, 2, 16, 2)
    assert found[0, 0, :3].tolist() == [[0, 3], [1, 4], [2, 0]]
    assert not found[:, :, 3:].any()


class Gemms(TorchDispatchMode):
    """Counts FP8 GEMMs."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func._schema.name == "aten::_scaled_mm"
        return func(*args, **(kwargs or {}))


def gemms(scales=None, arithmetic="stated"):
    leaves = [torch.empty(2, h, 300, 64, device="meta").requires_grad_() for h in (4, 2, 2)]
    call = Call(variant="cudnn", mask=Mask(causal=True), arithmetic=arithmetic)
    o = attention.apply(*leaves, variant=call, scales=scales)
    with Gemms() as seen:
        o.backward(torch.empty_like(o))
    return seen.found


def test_a_given_scale_of_ds_saves_a_pass_over_the_tiles():  # A-15, step 7
    """Of each of three tiles: s, dp and dq for each of 4 heads of keys, dk and dv for each of 8
    query heads; without the scale s and dp twice. In the fast form dk and dv are summed over query
    heads by 4 GEMMs."""
    assert gemms({"ds": torch.ones((), device="meta")}) == 3 * (3 * 4 + 2 * 8)
    assert gemms() == 3 * (5 * 4 + 2 * 8)
    assert gemms({"ds": torch.ones((), device="meta")}, "fast") == 3 * (3 * 4 + 2 * 4)
    assert gemms(arithmetic="fast") == 3 * (5 * 4 + 2 * 4)
