"""What a person sees: tables on standard output, notes and one progress bar on standard error.

Where standard error is no terminal, such as a cluster's log, the bar is a line every ``SECONDS``.
rich is imported when something is shown, so that libraries need it only then.
"""

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from fp8ref.shared import extras

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment
    from rich.table import Table


_T = TypeVar("_T")

SECONDS = 30.0
"""The time between two lines of progress where there is no terminal."""

PATIENCE = 2.0
"""The time after which ``waiting`` says that something goes on."""

_bars: list[str] = []
"""The bars that are shown."""


_CONTROLS = {
    code: ascii(chr(code))[1:-1]
    for codes in (
        range(0x20),
        range(0x7F, 0xA0),
        (0x061C, 0x200E, 0x200F),
        range(0x2028, 0x202F),
        range(0x2066, 0x206A),
        range(0xD800, 0xE000),
    )
    for code in codes
}
"""{character that a terminal obeys or cannot show: its escape}: controls, directions of text, line
separators, half surrogates.
"""


_TEXT_CONTROLS = {code: escape for code, escape in _CONTROLS.items() if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    r"""A text without characters that a terminal obeys, which are shown as escapes. Tabs and line
    ends stay.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return text.translate(_TEXT_CONTROLS)


def one_line(text: str) -> str:
    r"""As ``printable``, and one line: a name from outside that has several could pass for lines of
    fp8ref's.

    >>> one_line("a\nb")
    'a\\nb'
    """
    return text.translate(_CONTROLS)


def show(*lines: str) -> None:
    """Lines on standard output, each ``one_line``, without rich."""
    for line in lines:
        print(one_line(line))


def console() -> "Console":
    """Standard output, wide enough for tables in a file. ImportError without rich."""
    rich_console = _rich()
    return rich_console if rich_console.is_terminal else _rich(width=120)


def table(*columns: str, title: str | None = None) -> "Table":
    """An empty table of rich's. Columns whose name begins with > are right-aligned, for numbers."""
    from rich.table import Table

    rich_table = Table(title=title)
    for name in columns:
        rich_table.add_column(
            name.removeprefix(">"), justify="right" if name.startswith(">") else "left"
        )
    return rich_table


def say(text: str) -> None:
    """Write a line for people to standard error, also in a notebook."""
    _rich(stderr=True, force_jupyter=False).print(
        one_line(text), markup=False, highlight=False, soft_wrap=True
    )


@contextmanager
def bar(
    title: str, total: int | None, *, shown: bool = True, done: int = 0
) -> Iterator[Callable[..., None]]:
    """Yields a function that advances the bar, by one by default, and shows a note next to it.
    total None: unknown.
    """
    console = _rich(stderr=True)
    if shown and not console.is_terminal and not console.is_jupyter:
        with _shown(title):
            yield _lines(title, total, done)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<22}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with (
        _shown(title),
        Progress(
            *columns, console=console, disable=not (shown and console.is_terminal)
        ) as progress,
    ):
        task = progress.add_task(one_line(title), total=total, completed=done, note="")

        def advance(note: str = "", by: int = 1) -> None:
            progress.update(task, advance=by, note=one_line(note))

        yield advance


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Say on standard error how long a computation whose length is not known goes on, from
    ``PATIENCE`` seconds on.

    On a terminal one line that changes each second, and is gone at the end; else a line every
    ``SECONDS``. A bar within takes its place.
    """
    done, terminal = threading.Event(), sys.stderr.isatty()

    def tell() -> None:
        begin, shown, pause = time.monotonic(), False, PATIENCE if terminal else SECONDS
        while not done.wait(pause):
            if _bars:
                continue
            text = f"{one_line(title)}: {time.monotonic() - begin:.0f} s"
            sys.stderr.write(f"\r{text}\x1b[K" if terminal else f"{text}\n")
            sys.stderr.flush()
            shown, pause = True, 1.0 if terminal else SECONDS
        if shown and terminal:
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
    if importlib.util.find_spec("rich"):
        return bar(title, total)
    return nullcontext(lambda note="", by=1: None)


def counted(title: str, items: Iterable[_T]) -> Iterator[_T]:
    """The items, with a ``library_bar`` that advances after each; of a length that is not known the
    count alone.
    """
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
    """A function that advances a count and prints it at most once in ``SECONDS``."""
    last_time = time.monotonic()

    def advance(note: str = "", by: int = 1) -> None:
        nonlocal done, last_time
        done += by
        if time.monotonic() - last_time >= SECONDS:
            last_time = time.monotonic()
            say(
                f"{title}: "
                f"{done:,}{'' if total is None else f' of {total:,}'}{f', {note}' if note else ''}"
            )

    return advance


def _rich(**options) -> "Console":
    """A console that shows text, markup and table cells as ``printable`` does."""
    extras.require("conformance", "the console output of fp8ref", "rich")
    from rich.console import Console

    rich_console = Console(markup=False, emoji=False, **options)
    rich_console.on_broken_pipe = _raise_again  # type: ignore[method-assign]
    rich_console.push_render_hook(_Escaping())  # type: ignore[arg-type]  # a RenderHook in all but its base, for which rich would be imported
    return rich_console


def _raise_again() -> None:
    """Leave a BrokenPipeError to the command line, which has an exit code for it: rich exits."""
    raise


class _Escaping:
    """A render hook of rich's."""

    def process_renderables(self, renderables: list) -> list:
        from rich.table import Table

        for renderable in renderables:
            if isinstance(renderable, Table):
                _keep_rows(renderable)
        return [_Escaped(renderable) for renderable in renderables]


def _keep_rows(table: "Table") -> None:
    """Keep each text of a table on one line; several could pass for more rows."""
    for column in table.columns:
        column.header = one_line(column.header) if isinstance(column.header, str) else column.header
        column._cells = [
            one_line(cell) if isinstance(cell, str) else cell for cell in column._cells
        ]
    if isinstance(table.title, str):
        table.title = one_line(table.title)


class _Escaped:
    def __init__(self, renderable) -> None:
        self._renderable = renderable

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[Segment]":
        from rich.segment import Segment

        for text, style, control in console.render(self._renderable, options):
            yield Segment(text if control else printable(text), style, control)
