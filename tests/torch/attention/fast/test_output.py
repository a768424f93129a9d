"""The forward pass in the fast form (spec A-18).

Its values are in parity/test_attention_fast.py.
"""

import pytest
import torch

from fp8ref.spec.attention.variants import VARIANTS, Mask
from fp8ref.torch.attention import attention
from fp8ref.torch.attention.fast import operands as attention_fast_operands


def inputs(tq=70, tk=300):
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, t, 64, generator=made) for h, t in ((4, tq), (2, tk), (2, tk))]


@pytest.mark.parametrize("name", ["fa3", "cudnn", "mxfp8", "bf16"])
def test_parts_of_a_tile_change_no_bit(name, monkeypatch):
    """Sequences and heads that are computed one at a time, in memory that is used again, or all at
    once.
    """
    tensors, how = inputs(), {"variant": name, "mask": Mask(window=(100, 3))}
    whole = attention.forward(*tensors, **how)
    monkeypatch.setattr(attention_fast_operands, "CHUNK", 1)
    parts = attention.forward(*tensors, **how)
    assert torch.equal(parts.o, whole.o)
    assert torch.equal(parts.lse, whole.lse)
    assert parts.amaxes.keys() == whole.amaxes.keys()


def test_inputs_are_not_written():
    """float32 numbers of bfloat16 and float32 tensors are multiplied in place: not those of the
    caller.
    """
    for name in VARIANTS:
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [x.to(dtype) for x in inputs()]
            before = [x.clone() for x in tensors]
            result = attention.forward(*tensors, variant=name)
            if VARIANTS[name].backward:
                do = torch.ones_like(tensors[0])
                attention.backward(do, *tensors, result, variant=name)
                assert torch.equal(do, torch.ones_like(do))
            assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True)), name


def test_a_nan_stays_in_its_rows():
    q, k, v = inputs()
    q[1, 3, 5, 7] = torch.nan
    scale = {role: torch.ones(2, 2, 1, 1) for role in ("q", "k", "v")}
    o = attention.forward(q, k, v, variant="fa3", scales=scale).o
    assert o[1, 3, 5].isnan().all()
    assert o.isnan().any(-1).sum() == 1
