import pytest
import rank_jobs

from fp8ref.check import ranks
from fp8ref.run.config import ConfigError


def test_ranks_share_a_group_and_have_one_thread_and_no_gpu():
    assert ranks.run(2, rank_jobs.add, 5) == [(0, 11.0, 1, False), (1, 11.0, 1, False)]


def test_a_rank_that_fails_ends_the_others_and_says_why():
    with pytest.raises(ranks.RankError, match=r"(?s)rank 1: Traceback.*fail_on_one.*KeyError: 'only here'"):
        ranks.run(2, rank_jobs.break_on_one)


def test_a_refusal_is_the_users():
    with pytest.raises(ConfigError, match=r"^rank 1: only here$"):
        ranks.run(2, rank_jobs.refuse_on_one)


def test_a_rank_that_dies_is_noticed():
    with pytest.raises(ranks.RankError, match="rank 0: it ended without a result"):
        ranks.run(1, rank_jobs.die)
