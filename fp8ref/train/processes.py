"""Who takes part in a run: one process, or several that train together and of which the first writes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from fp8ref.errors import ConfigError

T = TypeVar("T")


class Processes(Protocol):
    """One process's view of all of them. first: whether this is the one that writes."""

    first: bool

    def telling(self) -> AbstractContextManager:
        """In this context, what a framework raises when another process is gone is a LostProcessError."""
        ...

    def gather(self, value: Any) -> list:
        """Every process's value, anything that JSON holds, in their order; all call it at the same place."""
        ...


class Alone:
    """A run of a single process."""

    first = True

    def telling(self) -> AbstractContextManager:
        return nullcontext()

    def gather(self, value: Any) -> list:
        return [value]


def together(processes: Processes, f: Callable[[], T]) -> T:
    """f() on every process. Where it fails on one it fails on all, so that none waits for one that is gone: with its own error
    there, and elsewhere with a ConfigError that tells it."""
    error = result = None
    try:
        result = f()
    except Exception as raised:
        error = raised
    told = processes.gather(None if error is None else str(error))
    if error is not None:
        raise error
    for index, other in enumerate(told):
        if other is not None:
            raise ConfigError(f"process {index}: {other}")
    return result  # type: ignore[return-value]
