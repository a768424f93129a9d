"""The processes of a run: one alone, or several that train together. The first one writes files."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from fp8ref.shared.errors import ConfigError

_T = TypeVar("_T")


class Processes(Protocol):
    """The processes of a run, as one of them sees the others; first: whether it writes files."""

    first: bool

    def naming_lost_processes(self) -> AbstractContextManager:
        """In this context, a framework's error about a lost process becomes a LostProcessError."""
        ...

    def gather(self, value: Any) -> list:
        """All processes' values, in order: an all-gather of JSON, which every process calls."""
        ...


class Alone:
    """A run of a single process."""

    first = True

    def naming_lost_processes(self) -> AbstractContextManager:
        """Does nothing: there is no other process."""
        return nullcontext()

    def gather(self, value: Any) -> list:
        """A list of the value alone."""
        return [value]


def together(processes: Processes, f: Callable[[], _T]) -> _T:
    """f() on every process.

    If it fails on one it fails on all, so that none waits for a process that has ended.

    Raises:   f's error where it failed; elsewhere a ConfigError that reports it.
    """
    error = result = None
    try:
        result = f()
    except Exception as raised:
        error = raised
    # gathered even after an error: the other processes wait in the same collective
    errors = processes.gather(None if error is None else str(error))
    if error is not None:
        raise error
    for index, other in enumerate(errors):
        if other is not None:
            raise ConfigError(f"process {index}: {other}")
    return result  # type: ignore[return-value]
