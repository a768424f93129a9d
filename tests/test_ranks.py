import os

import pytest
import torch
from ranks import run
from torch import distributed


def add(value):
    total = torch.tensor(float(distributed.get_rank() + value))
    distributed.all_reduce(total)
    return distributed.get_rank(), total.item(), torch.get_num_threads()


def fail_on_one():
    if distributed.get_rank() == 1:
        raise KeyError("only here")
    distributed.barrier()


def die():
    os._exit(3)


def test_ranks_share_a_group():
    assert run(2, add, 5) == [(0, 11.0, 1), (1, 11.0, 1)]


def test_a_rank_that_raises_ends_the_others():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: Traceback.*fail_on_one.*KeyError: 'only here'"):
        run(2, fail_on_one)


def test_a_rank_that_dies_is_noticed():
    with pytest.raises(RuntimeError, match="ended without a result"):
        run(1, die)
