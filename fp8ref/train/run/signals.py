"""What stops a run between steps: SIGTERM, which clusters send first, and Ctrl-C."""

import contextlib
import os
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
    # Even if Python thinks it is set: jax.distributed's handler in C++ is not seen.
    signal.signal(signal.SIGTERM, handler)
    try:
        yield handler.came.is_set
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


SAID = b"\nThe run stops after this step, when its state is saved. Ctrl-C again stops it at once.\n"
"""What the first Ctrl-C prints on standard error."""


@contextmanager
def deferring_ctrl_c() -> Iterator[Callable[[], bool]]:
    """In this context the first Ctrl-C sets a flag and prints ``SAID``; the next one interrupts.

    Yields a function that returns the flag. Does nothing outside the main thread, or where SIGINT
    has another handler than Python's, such as none in a shell's background jobs.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: False
        return
    came = threading.Event()

    def handler(*_) -> None:
        came.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # whoever reads standard error may have ended of the same Ctrl-C
        with contextlib.suppress(OSError):
            os.write(2, SAID)  # not print: the signal may have come in the middle of one

    signal.signal(signal.SIGINT, handler)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """In this context SIGTERM raises SystemExit(143), as shells report it; a second is ignored."""

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
