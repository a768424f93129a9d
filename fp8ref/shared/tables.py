"""Small tables as text and as HTML, without rich: for a REPL, a notebook and a model's report."""

import html
from collections.abc import Mapping, Sequence
from typing import TypeVar

__all__ = ["Listing", "aligned", "as_html"]

_T = TypeVar("_T")


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, a line for each row. A column whose name begins with > is right-aligned.

    >>> print(aligned(["recipe", ">SQNR"], [["rowwise", "31.5"], ["nvfp4", "9.4"]]))
    recipe   SQNR
    rowwise  31.5
    nvfp4     9.4
    """
    cells = [[name.removeprefix(">") for name in header], *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    marks = [">" if name.startswith(">") else "<" for name in header]
    return "\n".join(
        "  ".join(
            f"{cell:{mark}{width}}" for cell, mark, width in zip(line, marks, widths, strict=True)
        ).rstrip()
        for line in cells
    )


def as_html(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as HTML, its texts escaped."""

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = ["right" if name.startswith(">") else "left" for name in header]
        return "".join(
            f'<{tag} style="text-align:{side};white-space:nowrap">{html.escape(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )

    head = line("th", [name.removeprefix(">") for name in header])
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Listing(dict[str, _T]):
    """Entries by name. A REPL and a notebook show ``rows``, each name with its line."""

    _HEADER = ("name", "what it is")

    def __init__(self, entries: Mapping[str, _T], lines: Mapping[str, str]) -> None:
        """lines: {name: what it is, in a line}, of every entry."""
        super().__init__(entries)
        self.rows = [(name, lines[name]) for name in entries]

    def __repr__(self) -> str:
        return aligned(self._HEADER, self.rows)

    def _repr_html_(self) -> str:
        return as_html(self._HEADER, self.rows)
