"""The backward pass in the fast form (spec A-18).

Its values are in parity/test_attention_fast.py.
"""

import pytest
import torch

from fp8ref.spec.attention.variants import Mask
from fp8ref.torch.attention import attention
from fp8ref.torch.attention.fast import operands as attention_fast_operands

CAUSAL = Mask(causal=True)


def inputs():
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, 150, 64, generator=made) for h in (4, 2, 2, 4)]


@pytest.mark.parametrize("name", ["cudnn", "bf16"])
def test_parts_of_a_tile_change_no_bit(name, monkeypatch):
    *tensors, do = inputs()
    result = attention.forward(*tensors, variant=name, mask=CAUSAL)
    whole = attention.backward(do, *tensors, result, variant=name, mask=CAUSAL)
    monkeypatch.setattr(attention_fast_operands, "CHUNK", 1)
    parts = attention.backward(do, *tensors, result, variant=name, mask=CAUSAL)
    for role in ("dq", "dk", "dv"):
        assert torch.equal(getattr(parts, role), getattr(whole, role)), role


def test_a_given_scale_of_ds_gives_the_same_gradients():  # A-15, step 7
    """One walk over the tiles or two."""
    *tensors, do = inputs()
    how = {"variant": "cudnn", "mask": CAUSAL}
    result = attention.forward(*tensors, **how)
    two = attention.backward(do, *tensors, result, **how)
    one = attention.backward(do, *tensors, result, scales={"ds": two.scale_ds.scale}, **how)
    for role in ("dq", "dk", "dv"):
        assert torch.equal(getattr(one, role), getattr(two, role)), role
    assert torch.equal(one.amaxes["ds"], two.amaxes["ds"])
    assert one.saturated == two.saturated
