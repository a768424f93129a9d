"""SIGTERM, which clusters send before they take a machine away: remembered, so that a run stops between two steps, or an end in good order."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM


class _Remembering:
    """A handler that ends nothing."""

    def __init__(self) -> None:
        self.came = threading.Event()

    def __call__(self, *_) -> None:
        self.came.set()


@contextmanager
def asked() -> Iterator[Callable[[], bool]]:
    """In this context SIGTERM ends nothing; yields a function that tells whether it came, in a context around this one too.

    Outside a main thread signals are as they were.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGTERM)
    handler = before if isinstance(before, _Remembering) else _Remembering()
    # Set also where it is set: a library may have put its own behind Python's back, as jax.distributed does.
    signal.signal(signal.SIGTERM, handler)
    try:
        yield handler.came.is_set
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextmanager
def exiting() -> Iterator[None]:
    """In this context SIGTERM raises SystemExit, with the code that a shell gives it; another then disturbs no tidying up."""

    def leave(*_) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
