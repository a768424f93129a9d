"""What a person sees: one progress bar for everything that takes longer than a few seconds, and tables.

The bar goes to standard error and is silent where that is no terminal.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def console() -> Console:
    """Standard output, wide enough for tables also where it is a file."""
    made = Console()
    return made if made.is_terminal else Console(width=120)


def say(text: str) -> None:
    """A line to standard error, for what a person should know and no program reads."""
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def bar(title: str, total: int | None, *, shown: bool = True, done: int = 0) -> Iterator[Callable[..., None]]:
    """Yields a function that advances the bar, by one unless told, and shows a note beside it. total None: nobody knows."""
    console = Console(stderr=True)
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
