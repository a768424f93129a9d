"""Split a kernel's work over threads. Kernels release the interpreter's lock, and every piece
writes its own part of the result.

No result depends on the number of threads: pieces are cut where it changes no bit.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

PIECES = 4
"""Ranges for each thread."""

_threads: ContextVar[int | None] = ContextVar("fp8ref_threads", default=None)


def threads() -> int:
    """The threads that kernels use: the process's processors, unless ``using`` sets it."""
    chosen = _threads.get()
    if chosen is not None:
        return chosen
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def using(count: int) -> Iterator[None]:
    """In the context kernels of this thread use count threads; bits stay. ValueError below 1."""
    if count < 1:
        raise ValueError(f"the number of threads is at least 1; got {count}.")
    token = _threads.set(count)
    try:
        yield
    finally:
        _threads.reset(token)


def ranges(size: int, unit: int, pieces: int) -> list[tuple[int, int]]:
    """[0, size) cut into at most ``pieces`` ranges at multiples of unit, as even as units allow.

    >>> ranges(10, 4, 2), ranges(3, 4, 2), ranges(0, 4, 2)
    ([(0, 4), (4, 10)], [(0, 3)], [])
    """
    units = -(-size // unit)
    cuts = [unit * (units * i // pieces) for i in range(pieces)] + [size]
    return [(a, b) for a, b in itertools.pairwise(cuts) if a < b]


def run(function: Callable[[int, int], None], size: int, *, unit: int = 1, grain: int = 1) -> None:
    """function(begin, end) over ranges of [0, size), on threads of at least ``grain`` each.

    A thread that is done takes another range: a processor that something else slows down does less.
    """
    workers = min(threads(), size // grain)
    pieces = ranges(size, unit, max(1, min(workers * PIECES, size // grain)) if workers > 1 else 1)
    if len(pieces) < 2:
        for piece in pieces:
            function(*piece)
    else:
        list(_pool(workers).map(lambda piece: function(*piece), pieces))


def each(function: Callable[..., None], items: Sequence[tuple]) -> None:
    """function(*item) for all items, several at a time, a thread each; one item has all threads."""
    if len(items) == 1:
        function(*items[0])
        return

    def work(begin: int, end: int) -> None:
        with using(1):  # the items are the threads' work
            for item in items[begin:end]:
                function(*item)

    run(work, len(items))


@functools.lru_cache(maxsize=8)
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="fp8ref")


# A forked child has none of its parent's threads, and would wait for them.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
