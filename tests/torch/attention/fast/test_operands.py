"""Rows and parts of a tile in the fast form (spec A-3, A-6, A-18)."""

import pytest
import torch

from fp8ref.spec.attention.variants import VARIANTS, Mask
from fp8ref.torch.attention.fast import operands as fast
from fp8ref.torch.attention.operands import heads as head_scaling
from fp8ref.torch.attention.operands import inputs as attention_inputs
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.problem import Problem, RankCall, Shape

MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(window=(30, 5)),
    Mask(causal=True, window=(200, None)),
    Mask(causal=True, alignment="start"),
]


def layout(mask, name="cudnn", tq=150, tk=300, step=1):
    call, shape = RankCall(variant=name, mask=mask), Shape(2, 4, 2, tq, tk, 32)
    problem = Problem(call, shape)
    made = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, h, t, 32, generator=made) for h, t in ((4, tq), (2, tk), (2, tk))]
    assert attention_inputs.check(*tensors, call) == shape
    return fast.Layout(operands.quantize(*tensors, problem), problem, step), problem


@pytest.mark.parametrize("step", [1, 16])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_what_is_hidden_is_what_is_not_seen(mask, step):
    """Rows that see all keys of a tile are left out of the masks."""
    made, problem = layout(mask, step=step)
    for tile in operands.tiles(problem, step):
        seen = operands.seen(tile._replace(inside=False), problem, made.q.device)[0, 0, :, 0]
        found = torch.ones_like(seen)
        for rows, hidden in made.hidden(tile):
            group = problem.shape.group
            at = slice(rows.start // group, rows.stop // group)
            found[at] &= ~hidden[0, :, 0]
        assert torch.equal(found, seen)


def test_parts_are_all_sequences_and_heads(monkeypatch):
    made, problem = layout(Mask(causal=True))
    tile = operands.tiles(problem)[0]
    for chunk in (1, 1 << 17, 1 << 30):
        monkeypatch.setattr(fast, "CHUNK", chunk)
        parts = list(made.parts(tile))
        assert [i for part in parts for i in range(part.start, part.stop)] == [0, 1, 2, 3]
    assert len(parts) == 1


def test_memory_is_used_again():
    made, problem = layout(Mask())
    first, second = (made.scratch(0, slice(0, 2), tile) for tile in operands.tiles(problem)[:2])
    assert (
        first.data_ptr()
        == second.data_ptr()
        != made.scratch(1, slice(0, 2), operands.tiles(problem)[0]).data_ptr()
    )


@pytest.mark.parametrize("name", ["fa3", "cudnn", "mxfp8", "fa3_paper"])
def test_operands_of_a_cpu_are_dequantized(name):  # A-18, item 3
    made, problem = layout(Mask(), name)
    tensor = made.tensors["q"]
    of_elements = head_scaling.spread(tensor.scale_inv, tensor)
    q = tensor.codes.float() * of_elements * problem.score_scale
    assert not made.codes
    torch.testing.assert_close(made.by_head(made.q), q, rtol=2.0**-22, atol=0)


def test_a_gpu_takes_codes_and_no_mx_blocks():
    codes = torch.empty(1, dtype=torch.float8_e4m3fn, device="meta")
    assert fast.takes_codes(codes, VARIANTS["cudnn"])
    assert not fast.takes_codes(codes, VARIANTS["mxfp8"])
    assert not fast.takes_codes(torch.empty(1, dtype=torch.float8_e4m3fn), VARIANTS["cudnn"])
