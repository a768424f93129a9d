"""A legend below a figure that is never cut: names are wrapped, and the figure grows."""

import unicodedata
import warnings
from collections.abc import Mapping

from matplotlib.artist import Artist
from matplotlib.figure import Figure

__all__ = ["below"]

AFTER = " /-_.,"
"""A name is broken after one of these, if there is one in the second half of a line."""


def below(
    figure: Figure, entries: Mapping[str, Artist], *, columns: int = 3, size: float = 9
) -> None:
    """A legend of {name: line} below the axes of a figure of constrained layout.

    Names are plain text: "$" is no formula, and "_" hides nothing. There are at most ``columns``,
    fewer where names are wide, and where one column is too wide, names take several lines. The
    figure grows by the legend's height, so that the axes keep theirs.
    """
    if not entries:
        return
    room = 0.98 * figure.bbox.width
    count = min(columns, len(entries))
    longest = most = max(map(_width, entries))
    while True:
        legend = figure.legend(
            list(entries.values()),
            ["-"] * len(entries),
            loc="outside lower center",
            ncols=count,
            frameon=False,
            fontsize=size,
        )
        for text, name in zip(legend.get_texts(), entries, strict=True):
            text.set_parse_math(False)
            text.set_text(wrapped(name, most))
        with warnings.catch_warnings():
            # a run may be named in any script
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            extent = legend.get_window_extent()
        # A font without a glyph draws a box, maybe narrower than the page's glyph: one em, at most.
        foreign = [
            _width(line)
            for name in entries
            if not name.isascii()
            for line in wrapped(name, most).split("\n")
        ]
        # 4 em: line and padding
        ems = count * (4 + max(foreign, default=0) / 2)
        width = max(extent.width, ems * size * figure.dpi / 72)
        if width <= room or (count == 1 and most == 1):
            break
        legend.remove()
        if count > 1:
            count -= 1
        else:
            fits = int(longest * room / width) if most == longest else most - 1
            most = max(1, min(most - 1, fits))
    height = figure.get_figheight() + extent.height / figure.dpi
    figure.set_size_inches(figure.get_figwidth(), height)


def wrapped(name: str, most: int) -> str:
    """The name in lines of at most ``most`` columns, of which wide characters take two."""
    lines, line = [], ""
    for character in name:
        if line and _width(line + character) > most:
            at = max(line.rfind(c) for c in AFTER) + 1
            at = at if at > len(line) // 2 else len(line)
            lines.append(line[:at])
            line = line[at:]
        line += character
    return "\n".join([*lines, line])


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
