"""What a person sees: tables on standard output, notes and one progress bar on standard error.

Where standard error is no terminal, such as a cluster's log, the bar is a line every ``SECONDS``. rich is imported when something is shown,
so that libraries need it only then.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fp8ref import extras

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


SECONDS = 30.0
"""The time between two lines of progress where there is no terminal."""


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
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(title, total=total, completed=done, note="")

        def advance(note: str = "", by: int = 1) -> None:
            progress.update(task, advance=by, note=note)

        yield advance


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
