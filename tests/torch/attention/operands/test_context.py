"""Attention of ranks that have parts of the tokens, next to one process (spec A-21)."""

import functools

import numpy as np
import pytest
import torch
from helpers.processes import ranks
from torch import distributed

from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask
from fp8ref.torch.attention import RankCall, attention

CAUSAL, WINDOW = Mask(causal=True), Mask(causal=True, window=(50, None))
CASES = [
    ("cudnn", CAUSAL, "stated"),
    ("cudnn", WINDOW, "fast"),
    ("cudnn", Mask(), "fast"),
    ("bf16", CAUSAL, "stated"),
]
TOKENS = 192  # of both ranks: neither's part is a whole number of tiles of 128


def given() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, h, TOKENS, 32, generator=generator).bfloat16() for h in (4, 2, 2, 4)]


def gradients(q, k, v, do, run) -> list[np.ndarray]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = run(*leaves)
    o.backward(do)
    return [x.detach().float().numpy() for x in (o, *(leaf.grad for leaf in leaves))]


def of_rank() -> list[list[np.ndarray]]:
    """o, dq, dk and dv of this rank's tokens, of every case."""
    group, rank, size = (
        distributed.group.WORLD.group_name,
        distributed.get_rank(),
        distributed.get_world_size(),
    )
    own = [x.chunk(size, dim=2)[rank].contiguous() for x in given()]
    found = []
    for variant, mask, arithmetic in CASES:
        call = RankCall(variant=variant, mask=mask, arithmetic=arithmetic, context=group)
        apply = functools.partial(attention.apply, variant=call)
        found.append(gradients(*own, apply))
    return found


@pytest.mark.slow
def test_two_ranks_have_the_rows_of_one_process():
    """Rows of queries are computed alike. A gradient of a key is a sum of two parts in place of
    one: after two roundings, to 8 bits and to bfloat16, it is the same number, or next to it where
    a rounding falls either way."""
    parts = ranks.run(2, of_rank)
    for i, (variant, mask, arithmetic) in enumerate(CASES):
        call = Call(variant=variant, mask=mask, arithmetic=arithmetic)
        right = gradients(*given(), functools.partial(attention.apply, variant=call))
        found = [np.concatenate([part[i][j] for part in parts], axis=2) for j in range(4)]
        for name, mine, other in zip(("o", "dq"), found[:2], right[:2], strict=True):
            equal = (mine == other).mean()
            assert equal == 1 if arithmetic == "stated" else equal > 0.99, (name, call)
        for mine, other in zip(found[2:], right[2:], strict=True):
            assert (mine == other).mean() > 0.98, call
            unit = 2.0**-3 if variant == "cudnn" else 2.0**-7
            np.testing.assert_allclose(
                mine, other, rtol=1.01 * unit, atol=2**-9 * np.abs(other).max()
            )


def test_what_cannot_be_cut_is_refused():
    q, k, v, _ = given()
    with pytest.raises(
        ValueError, match=r"variant 'mxfp8' has scales of mx_1x32. Use 'cudnn' or 'bf16'"
    ):
        attention.apply(q, k, v, variant=RankCall(variant="mxfp8", context="0"))
    with pytest.raises(ValueError, match=r"variant 'exact' has scales of real numbers"):
        attention.apply(q, k, v, variant=RankCall(variant="exact", context="0"))
    with pytest.raises(
        ValueError,
        match=r"cuts queries and keys alike, without documents; got 192 queries and 100 keys",
    ):
        attention.apply(
            q, k[:, :, :100], v[:, :, :100], variant=RankCall(variant="cudnn", context="0")
        )
    documents = torch.zeros(1, TOKENS, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"192 keys on a rank, and documents"):
        attention.apply(
            q, k, v, variant=RankCall(variant="cudnn", context="0"), documents=documents
        )
