"""SIGTERM, which clusters send before they take a machine away: remembered, so that a run stops between two steps."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StoppedError(RuntimeError):
    """A run stopped because it was asked to; its state is saved."""


@contextmanager
def asked() -> Iterator[Callable[[], bool]]:
    """In this context SIGTERM ends nothing; yields a function that tells whether it came. Outside a main thread it is as it was."""
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
