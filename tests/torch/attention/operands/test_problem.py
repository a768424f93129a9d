"""A problem of attention: its scales of scores, and documents (spec A-3, A-4)."""

import numpy as np
import pytest
import torch

from fp8ref.torch.attention.operands import problem as problems
from fp8ref.torch.attention.operands.problem import Problem, RankCall, Shape


def test_the_softmax_scale_is_a_float32():
    shape = Shape(2, 4, 2, 5, 5, 96)
    assert Problem(RankCall(variant="fa3"), shape).softmax_scale == np.float32(1 / np.sqrt(96))
    assert Problem(RankCall(variant="fa3", scale=0.1), shape).softmax_scale == np.float32(0.1)
    for scale in (0.0, -1.0, 1e-60, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="softmax scale is positive and finite"):
            RankCall(variant="fa3", scale=scale)


def test_documents_are_padded_with_what_equals_none():
    ids = torch.arange(5)[None]
    found = problems.padded_documents(ids, ids)
    assert found.q.shape == (1, 32)
    assert found.k.shape == (1, 16)
    assert found.q[0, 5:].unique().tolist() == [-2]
    assert found.k[0, 5:].unique().tolist() == [-1]
    assert problems.padded_documents(None, None) == (None, None)
