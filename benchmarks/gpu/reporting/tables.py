"""Tables of results: printed, and in markdown."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

Rows = Sequence[Sequence[str]]


def markdown(heads: Sequence[str], rows: Rows) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show(title: str, heads: Sequence[str], rows: Rows) -> None:
    table = Table(*heads, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)


def duration(seconds: float | None) -> str:
    """In milliseconds."""
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}x"


def spread(values: Sequence[float] | None) -> str:
    return "-" if values is None else f"{values[0]:.3f} to {values[1]:.3f}"
