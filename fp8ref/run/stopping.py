"""SIGTERM, which clusters send before they take a machine away: remembered, so that a run stops between two steps."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StoppedError(RuntimeError):
    """A run stopped because it was asked to; its state is saved."""


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
    signal.signal(
        signal.SIGTERM, handler
    )  # also where it was so: a library may have put its own behind Python's back, as jax.distributed does
    try:
        yield handler.came.is_set
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
