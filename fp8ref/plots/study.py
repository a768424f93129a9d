"""Plot what a study of a model found: SQNR by layer and recipe, and error through depth (spec
Q-1).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from fp8ref.plots import legends, readout, style

__all__ = ["attention_map", "depth_lines", "sqnr_map"]


def sqnr_map(
    ax: Axes,
    sqnr,
    layers: Sequence[str],
    recipes: Sequence[str],
    *,
    low: float | None = None,
    high: float | None = None,
    most: int = 40,
) -> Axes:
    """A map of SQNR in dB: a row for each layer, a column for each recipe; NaN is an empty cell.

    Shapes:   sqnr [layers, recipes]. low, high: the ends of the color scale, for several maps on
              one scale. None: the smallest and the largest finite number.
    most      the most layers whose names are written; of more, every n-th.
    Raises:   ValueError: sqnr of another shape.
    """
    sqnr = np.asarray(sqnr, np.float64)
    if sqnr.shape != (len(layers), len(recipes)):
        raise ValueError(
            f"sqnr is [{len(layers)}, {len(recipes)}], as many as there are names; got "
            f"{sqnr.shape}."
        )
    return _map(ax, sqnr, layers, recipes, _Scale("SQNR, dB", "viridis", low, high), most)


def attention_map(
    ax: Axes, errors, layers: Sequence[str], variants: Sequence[str], *, most: int = 40
) -> Axes:
    """A map of the error of attention's output, in per cent: a row for each layer, a column for
    each variant; NaN is an empty cell.

    Shapes:   errors [layers, variants], as shares.
    Raises:   ValueError: errors of another shape.
    """
    errors = 100 * np.asarray(errors, np.float64)
    if errors.shape != (len(layers), len(variants)):
        raise ValueError(
            f"errors are [{len(layers)}, {len(variants)}], as many as there are names; got "
            f"{errors.shape}."
        )
    scale = _Scale("error of the output, %", "viridis_r", 0.0, None)
    return _map(ax, errors, layers, variants, scale, most)


class _Scale(NamedTuple):
    """A scale of colors: what it is of, its colors and ends."""

    label: str
    cmap: str
    low: float | None
    high: float | None


def _map(
    ax: Axes,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    scale: _Scale,
    most: int,
) -> Axes:
    image = ax.imshow(
        np.ma.masked_invalid(values),
        cmap=scale.cmap,
        aspect="auto",
        interpolation="nearest",
        vmin=scale.low,
        vmax=scale.high,
    )
    readout.cells(image, rows, columns, what=scale.label)
    every = -(-len(rows) // most)
    ax.set_yticks(range(0, len(rows), every), rows[::every])
    ax.set_xticks(range(len(columns)), columns, rotation=30, ha="right", rotation_mode="anchor")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    if ax.figure is not None:
        ax.figure.colorbar(image, ax=ax, label=scale.label)
    return style.plain_map(ax)


def depth_lines(
    ax: Axes,
    errors: Mapping[str, Sequence[float]],
    *,
    colors: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
) -> Axes:
    """The error of each linear's input, ||x' - x|| / ||x||, in the order in which linears ran: a
    line a recipe.

    colors: of the lines, in turn; None: matplotlib's. layers: the names of the linears, which a
    page shows on hover.
    """
    entries: dict[str, Artist] = {}
    for i, (name, error) in enumerate(errors.items()):
        color = colors[i % len(colors)] if colors else None
        dash, places = style.DASHES[i % len(style.DASHES)], range(1, len(error) + 1)
        (line,) = ax.plot(places, error, linestyle=dash, linewidth=1.6, label=name, color=color)
        readout.name(line, name)
        entries[name] = line
    ax.set(xlabel="linear, in the order of the pass", ylabel="error of its input")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if layers is not None:
        readout.points(ax, layers)
    if ax.figure is not None:
        legends.below(ax.figure.figure, entries)
    return style.plain(ax)
