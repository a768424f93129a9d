"""What a person sees: tables on standard output, notes and one progress bar on standard error.

Where standard error is no terminal, such as a cluster's log, the bar is a line every ``SECONDS``. rich is imported when something is shown,
so that libraries need it only then.
"""

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from fp8ref import extras

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_T = TypeVar("_T")

SECONDS = 30.0
"""The time between two lines of progress where there is no terminal."""

PATIENCE = 2.0
"""The time after which ``waiting`` says that something goes on."""

_bars: list[str] = []
"""The bars that are shown."""


def console() -> "Console":
    """Standard output, wide enough for tables also where it is a file. ImportError without rich, naming the extra."""
    made = _rich()
    return made if made.is_terminal else _rich(width=120)


def table(*columns: str, title: str | None = None) -> "Table":
    """An empty table of rich's. Columns whose name begins with > are right-aligned, for numbers."""
    from rich.table import Table

    made = Table(title=title)
    for name in columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return made


def say(text: str) -> None:
    """A line to standard error, also in a notebook, for what a person should know and no program reads."""
    _rich(stderr=True, force_jupyter=False).print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def bar(title: str, total: int | None, *, shown: bool = True, done: int = 0) -> Iterator[Callable[..., None]]:
    """Yields a function that advances the bar, by one by default, and shows a note next to it. total None: unknown."""
    console = _rich(stderr=True)
    if shown and not console.is_terminal and not console.is_jupyter:
        with _shown(title):
            yield _lines(title, total, done)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with _shown(title), Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(title, total=total, completed=done, note="")

        def advance(note: str = "", by: int = 1) -> None:
            progress.update(task, advance=by, note=note)

        yield advance


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Say on standard error how long a computation whose length is not known goes on, from ``PATIENCE`` seconds on.

    On a terminal one line that changes each second, and is gone at the end; else a line every ``SECONDS``. A bar within takes its place.
    """
    done, terminal = threading.Event(), sys.stderr.isatty()

    def tell() -> None:
        begin, said, pause = time.monotonic(), False, PATIENCE if terminal else SECONDS
        while not done.wait(pause):
            if _bars:
                continue
            text = f"{title}: {time.monotonic() - begin:.0f} s"
            sys.stderr.write(f"\r{text}\x1b[K" if terminal else f"{text}\n")
            sys.stderr.flush()
            said, pause = True, 1.0 if terminal else SECONDS
        if said and terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def library_bar(title: str, total: int | None) -> AbstractContextManager[Callable[..., None]]:
    """``bar``, of a library's function, which runs without one where rich is not installed."""
    return bar(title, total) if importlib.util.find_spec("rich") else nullcontext(lambda note="", by=1: None)


def counted(title: str, items: Iterable[_T]) -> Iterator[_T]:
    """The items, with a ``library_bar`` that advances after each; of a length that is not known the count alone."""
    total = len(items) if isinstance(items, Sized) else None
    with library_bar(title, total) as advance:
        for item in items:
            yield item
            advance()


@contextmanager
def _shown(title: str) -> Iterator[None]:
    _bars.append(title)
    try:
        yield
    finally:
        _bars.remove(title)


def _lines(title: str, total: int | None, done: int) -> Callable[..., None]:
    """A function that advances a count, and says it at most once in ``SECONDS``."""
    said = time.monotonic()

    def advance(note: str = "", by: int = 1) -> None:
        nonlocal done, said
        done += by
        if time.monotonic() - said >= SECONDS:
            said = time.monotonic()
            say(f"{title}: {done:,}{'' if total is None else f' of {total:,}'}{f', {note}' if note else ''}")

    return advance


def _rich(**options) -> "Console":
    extras.require("conformance", "the console output of fp8ref", "rich")
    from rich.console import Console

    return Console(**options)
