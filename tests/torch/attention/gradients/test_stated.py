"""The passes over tiles in the stated form, and in the fast one (spec A-15): how often they
multiply. Their bits: parity/test_attention_torch.py.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask
from fp8ref.torch.attention import attention


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
