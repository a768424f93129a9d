"""Contexts in which a variable has another value."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextmanager
def setting(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """In this context a variable has this value, in this thread or task alone."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
