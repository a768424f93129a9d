"""SIGTERM handling: clusters send it before they take a machine; a run stops between steps."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM
"""The exit status of a process that SIGTERM ended, as shells report it: 143."""


class _Remembering:
    """A handler that sets an event, and does not end the process."""

    def __init__(self) -> None:
        self.came = threading.Event()

    def __call__(self, *_) -> None:
        self.came.set()


@contextmanager
def deferring_sigterm() -> Iterator[Callable[[], bool]]:
    """In this context SIGTERM only sets a flag.

    Yields a function that returns the flag; nested contexts share it.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGTERM)
    handler = before if isinstance(before, _Remembering) else _Remembering()
    # Set it even if Python thinks it is set: jax.distributed installs its own handler in C++, which
    # Python does not see.
    signal.signal(signal.SIGTERM, handler)
    try:
        yield handler.came.is_set
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """In this context SIGTERM raises SystemExit(143), as a shell reports it.

    A second SIGTERM is ignored during clean-up.
    """

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
