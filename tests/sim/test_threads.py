import itertools
import subprocess
import sys
import threading

import pytest

from fp8ref.sim import threads


@pytest.mark.parametrize(
    ("size", "unit", "pieces"),
    [(0, 1, 3), (1, 4, 2), (10, 4, 2), (4096 * 7 + 1, 4096, 3), (100, 1, 200)],
)
def test_ranges_cover_everything_once_and_start_at_units(size, unit, pieces):
    ranges = threads.ranges(size, unit, pieces)
    assert [i for begin, end in ranges for i in range(begin, end)] == list(range(size))
    assert all(begin % unit == 0 for begin, _ in ranges)
    assert len(ranges) <= pieces


def test_run_uses_as_many_threads_as_it_is_given_and_no_more_than_pay():
    for count, size, expected, pieces in (
        (1, 100, 1, 1),
        (3, 200, 3, 12),
        (3, 100, 3, 10),
        (3, 19, 1, 1),
        (3, 20, 2, 2),
    ):
        first, begun, seen = threading.Barrier(expected), itertools.count(), []

        def work(begin, end, first=first, begun=begun, seen=seen, expected=expected):
            if next(begun) < expected:
                first.wait(timeout=10)  # passes only when so many ranges run at once
            seen.append((begin, end, threading.get_ident()))

        with threads.using(count):
            threads.run(work, size, grain=10)
        assert sum(end - begin for begin, end, _ in seen) == size
        assert len(seen) == pieces
        assert len({ident for *_, ident in seen}) == expected


def test_each_item_has_one_thread_and_one_alone_has_all():
    seen = []
    with threads.using(3):
        threads.each(lambda n: seen.append((n, threads.threads())), [(n,) for n in range(5)])
        threads.each(lambda n: seen.append((n, threads.threads())), [(9,)])
    assert sorted(seen) == [*((n, 1) for n in range(5)), (9, 3)]


def test_an_error_in_a_piece_is_raised():
    def work(begin, end):
        raise ValueError(f"{begin}")

    with threads.using(2), pytest.raises(ValueError, match="0"):
        threads.run(work, 10)


def test_the_number_of_threads_is_set_for_a_context():
    before = threads.threads()
    with threads.using(before + 1):
        assert threads.threads() == before + 1
    assert threads.threads() == before >= 1
    with pytest.raises(ValueError, match="at least 1; got 0"), threads.using(0):
        pass


def test_a_forked_child_makes_threads_of_its_own():
    """In a fresh interpreter, since a fork of one that has run XLA or torch is not safe."""
    program = """
import os, sys, numpy as np
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import cast
from fp8ref.sim import threads
x = np.ones(1 << 20, np.float32)
with threads.using(2):
    whole = cast.encode(x, E4M3FN)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(cast.encode(x, E4M3FN), whole) else 1)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert (
        subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=60).returncode == 0
    )
