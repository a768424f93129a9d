import threading

import pytest
import torch
from helpers.processes import rank_jobs
from helpers.processes import ranks as of_test_files
from torch import distributed

from fp8ref.crosscheck import process_group
from fp8ref.shared.errors import ConfigError


def test_ranks_share_a_group_and_have_one_thread_and_no_gpu():
    assert process_group.run(2, rank_jobs.add, 5) == [(0, 11.0, 1, False), (1, 11.0, 1, False)]


def test_a_rank_that_fails_ends_the_others_and_says_why():
    with pytest.raises(
        process_group.RankError, match=r"(?s)rank 1: Traceback.*fail_on_one.*KeyError: 'only here'"
    ):
        process_group.run(2, rank_jobs.break_on_one)


def test_a_refusal_is_the_users():
    with pytest.raises(ConfigError, match=r"^rank 1: only here$"):
        process_group.run(2, rank_jobs.refuse_on_one)


def test_a_rank_that_dies_is_noticed():
    with pytest.raises(process_group.RankError, match="rank 0: it ended without a result"):
        process_group.run(1, rank_jobs.die)


def test_ranks_that_stand_still_are_noticed():
    """The first gives its result once the second is at the barrier too, which it never is."""
    with pytest.raises(process_group.RankError, match=r"^ranks \[0, 1\]: no result within 1 s$"):
        process_group.run(2, rank_jobs.stand_still_on_one, patience_s=1)


def test_a_result_that_cannot_be_pickled_says_so():
    with pytest.raises(process_group.RankError, match=r"(?s)rank 0: Traceback.*pickle.*lambda"):
        process_group.run(1, rank_jobs.give_a_lambda)


# ---- of test files ----


def rows(start):
    """Of the test file's own: tensors go there and back."""
    return start + distributed.get_rank() * torch.ones(3)


def stand_still():
    threading.Event().wait()


def test_a_function_of_a_test_file_runs_on_ranks():
    first, second = of_test_files.run(2, rows, torch.tensor([1.0, 2.0, 3.0]))
    assert first.tolist() == [1.0, 2.0, 3.0]
    assert second.tolist() == [2.0, 3.0, 4.0]


def test_a_test_that_hangs_fails():
    assert of_test_files.PATIENCE == 120
    with pytest.raises(process_group.RankError, match=r"^ranks \[0\]: no result within 1 s$"):
        of_test_files.run(1, stand_still, timeout=1)
