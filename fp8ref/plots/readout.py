"""What a figure's lines and maps show, as data that a page can show on hover.

``name`` and ``cells`` note what an artist is; ``of`` collects it from a drawn figure.
"""

import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colors
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

__all__ = ["cells", "name", "name_of", "of"]

POINTS_PER_INCH = 72
"""matplotlib's SVGs have this many units an inch."""

_NOTES: "weakref.WeakKeyDictionary[Artist, dict[str, Any]]" = weakref.WeakKeyDictionary()


def name(line: Line2D, text: str, *, low=None, high=None) -> None:
    """Name a line by plain text. low, high: an interval about it, of the line's shape."""
    _NOTES[line] = {"name": text, "low": low, "high": high}


def name_of(line: Line2D) -> str | None:
    """The name of a line; None if it has none."""
    return _NOTES[line]["name"] if line in _NOTES else None


def points(ax: Axes, names: Sequence[str]) -> None:
    """Name the places of a line chart, whose x are 1, 2, ..."""
    _NOTES[ax] = {"points": list(names)}


def cells(
    image: AxesImage,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    what: str,
    labels: Sequence[str] | None = None,
    places: Sequence | None = None,
) -> None:
    """Name the rows and columns of a map. what: its title and unit; labels, places: shorter names
    of rows and columns, for ticks.

    Raises:   ValueError: other numbers of names than the map has rows and columns.
    """
    shape = image.get_array().shape  # type: ignore[union-attr]
    if shape != (len(rows), len(columns)):
        raise ValueError(
            f"a map has as many names as rows and columns; got {shape}, {len(rows)} and "
            f"{len(columns)} names."
        )
    texts = [str(place) for place in places or columns]
    short = {"labels": list(labels or rows), "places": texts}
    _NOTES[image] = {"rows": list(rows), "columns": list(columns), "what": what} | short


def of(figure: Figure) -> str:
    """JSON of a figure that was drawn: an entry for each of its axes, null for a colorbar.

    An entry has the axes' place in the SVG's units, [left, top, right, bottom], their limits, and
    ``series``, or the ``values`` of ``rows`` and ``columns``, of five digits; null: not finite.
    """
    return json.dumps(
        [_axes_entry(ax, figure) for ax in figure.axes], separators=(",", ":"), ensure_ascii=False
    )


def _axes_entry(ax: Axes, figure: Figure) -> dict | None:
    lines = [
        line for line in ax.lines if line in _NOTES or not str(line.get_label()).startswith("_")
    ]
    images = [image for image in ax.images if image in _NOTES]
    if not lines and not images:
        return None
    width, height = (POINTS_PER_INCH * size for size in figure.get_size_inches())
    x0, y0, x1, y1 = ax.get_position().extents
    box = [x0 * width, (1 - y1) * height, x1 * width, (1 - y0) * height]
    about: dict[str, Any] = {
        "box": [round(v, 2) for v in box],
        "x": _numbers(ax.get_xlim()),
        "y": _numbers(ax.get_ylim()),
    }
    if images:
        note = _NOTES[images[0]]
        values = np.ma.filled(images[0].get_array().astype(float), np.nan)  # type: ignore[union-attr]
        rows = [_numbers(row) for row in values]
        return about | note | {"title": ax.get_title(loc="left"), "values": rows}
    log, series = ax.get_yscale() == "log", [_series(line) for line in lines]
    about |= {"log": log, "xlabel": ax.get_xlabel(), "series": series}
    return about | _NOTES.get(ax, {})


def _series(line: Line2D) -> dict:
    note = _NOTES.get(line, {"name": str(line.get_label())})
    series = {
        "name": note["name"],
        "color": colors.to_hex(line.get_color()),
        "x": _numbers(line.get_xdata()),
        "y": _numbers(line.get_ydata()),
    }
    return series | {
        key: _numbers(note[key]) for key in ("low", "high") if note.get(key) is not None
    }


def _numbers(values) -> list[float | int | None]:
    return [_number(float(v)) for v in np.asarray(values, np.float64)]


def _number(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    value = float(f"{value:.5g}") if abs(value) < 1e5 else value
    return int(value) if value == int(value) else value
