"""What of the whole a rank has.

Which rows: ``tests/parity/test_order.py``; on ranks: those of the trainer.
"""

from types import SimpleNamespace

import numpy as np
import torch

from fp8ref.train.torch import rank_parts


def of_three(rank):
    """The second of three ranks that share sequences, or another."""
    return SimpleNamespace(size=lambda: 3, rank=lambda: rank)


def test_ranks_that_share_sequences_have_parts_of_the_tokens_in_order():
    tokens = np.arange(12)
    parts = [tokens[rank_parts.own_tokens(12, of_three(rank))] for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), tokens)
    assert {len(part) for part in parts} == {4}
    assert tokens[rank_parts.own_tokens(11, None, behind=1)].tolist() == tokens.tolist()


def test_each_part_has_the_token_after_it_for_the_loss():
    tokens = np.arange(13)
    parts = [tokens[rank_parts.own_tokens(12, of_three(rank), behind=1)] for rank in range(3)]
    assert [part.tolist() for part in parts] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [8, 9, 10, 11, 12],
    ]


def test_one_process_has_all():
    tokens, x = np.arange(6).reshape(2, 3), torch.arange(6.0)
    assert rank_parts.own(tokens, None, None, None) is tokens
    assert rank_parts.gather_context(x, None) is x
    assert rank_parts.gather_ranks(torch.tensor(3.0), None).tolist() == [3.0]
    p = torch.nn.Parameter(torch.empty(2, 3))
    rank_parts.fill(p, tokens.astype(np.float32))
    assert p.tolist() == tokens.tolist()
