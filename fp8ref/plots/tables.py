"""Numbers by row and column, which a person reads faster when they are coloured too."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from fp8ref.plots import style


def number_table(ax: Axes, values, rows: Sequence[str], columns: Sequence[str], *, text: str = "{:.1f}", cmap: str = "viridis") -> Axes:
    """Each number in its cell, as ``text`` writes it, on a colour that goes with it; a NaN is an empty cell.

    Shapes:   values [rows, columns].
    Raises:   ValueError: values of another shape.
    """
    values = np.asarray(values, np.float64)
    if values.shape != (len(rows), len(columns)):
        raise ValueError(f"values are [{len(rows)}, {len(columns)}], as many as there are names; got {values.shape}.")
    image = ax.imshow(np.ma.masked_invalid(values), cmap=cmap, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
            ax.text(column, row, text.format(value), ha="center", va="center", fontsize=9, color="black" if light else "white")
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return style.plain_map(ax)
