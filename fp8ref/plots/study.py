"""Plot a study of a model: SQNR by layer and recipe, and error through depth (spec Q-1)."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from fp8ref.plots import legends, readout, runs, style

__all__ = ["depth_lines", "layer_map"]

NAMED = 40
"""The most layers of a map whose names are written; of more, every n-th."""


def layer_map(
    ax: Axes,
    values,
    layers: Sequence[str],
    columns: Sequence[str],
    *,
    what: str = "SQNR, dB",
    large_is_worse: bool = False,
    low: float | None = None,
    high: float | None = None,
) -> Axes:
    """A map of a measure of casts: a row for each layer, a column for each recipe. NaN is an empty
    cell; the title names the worst.

    Shapes:   values [layers, columns].
    what      the measure and its unit, such as "zeroed, %" or "error of the output, %".
    low, high the ends of the color scale, for several maps on one scale. None: the smallest and the
              largest finite number.
    Raises:   ValueError: values of another shape.
    """
    values = style.named_cells(values, layers, columns)
    image = style.cells(ax, values, "viridis_r" if large_is_worse else "viridis", low, high)
    readout.cells(image, layers, columns, what=what)
    every = -(-len(layers) // NAMED)
    ax.set_yticks(range(0, len(layers), every), layers[::every], parse_math=False)
    ax.set_xticks(range(len(columns)), columns, rotation=30, ha="right", rotation_mode="anchor")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    if ax.figure is not None:
        ax.figure.colorbar(image, ax=ax, label=what)
    if np.isfinite(values).any():
        worst = np.nanargmax(values) if large_is_worse else np.nanargmin(values)
        row, column = divmod(int(worst), len(columns))
        text = f"worst {values[row, column]:.3g}: {layers[row]}, {columns[column]}"
        ax.set_title(text, fontsize=9, parse_math=False)
    return style.plain_map(ax)


def depth_lines(
    ax: Axes,
    errors: Mapping[str, Sequence[float]],
    *,
    colors: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
) -> Axes:
    """The error of each linear's input, ||x' - x|| / ||x||, in the order of a pass, by recipe.

    colors: of the lines, in turn; None: those of recipes in other figures. layers: the names of the
    linears, some of which are written; a page shows all on hover.
    """
    entries: dict[str, Artist] = {}
    for i, (name, error) in enumerate(errors.items()):
        own = runs.COLORS.get(name, style.CYCLE[i % len(style.CYCLE)])
        color = colors[i % len(colors)] if colors else own
        dash, places = style.DASHES[i % len(style.DASHES)], range(1, len(error) + 1)
        (line,) = ax.plot(places, error, linestyle=dash, linewidth=1.6, label=name, color=color)
        readout.name(line, name)
        entries[name] = line
    ax.set(xlabel="linear, in the order of the pass", ylabel="error of its input")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if layers is not None:
        readout.points(ax, layers)
        every = -(-len(layers) // 14)
        places = range(1, 1 + len(layers), every)
        ax.set_xticks(places, layers[::every], parse_math=False)
        for label in ax.get_xticklabels():
            label.set(rotation=40, ha="right", rotation_mode="anchor")
        ax.tick_params(axis="x", labelsize=8)
    if ax.figure is not None:
        legends.below(ax.figure.figure, entries)
    return style.plain(ax)
