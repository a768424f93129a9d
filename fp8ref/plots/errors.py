"""Errors of GEMMs against the exact sum: over K, as histograms, and as tables of numbers (SEMANTICS
G, Q-7)."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from fp8ref.plots import style


def error_lines(ax: Axes, x, errors: Mapping[str, np.ndarray], *, ylabel: str, linear: float = 0.01, xlabel: str = "K") -> Axes:
    """Errors in percent over K, or another x, one line for each name; later lines are narrower, so
    that lines that coincide all show.

    The axis is logarithmic; if some errors are not positive, it is linear within ``linear``
    percent.

    Shapes:   x [n], ascending, such as powers of two; every one of errors [n], as fractions.
    """
    x = np.asarray(x)
    percent = {name: 100 * np.asarray(error, np.float64) for name, error in errors.items()}
    for (name, error), look in zip(percent.items(), style.layers(len(percent)), strict=True):
        ax.plot(x, error, label=name, **look)
    low, high = min(e.min() for e in percent.values()), max(e.max() for e in percent.values())
    if low > 0:
        ax.set_yscale("log")
    else:
        ax.set_yscale("symlog", linthresh=linear)
        ax.set_ylim(min(2 * low, -linear / 2), max(2 * high, linear / 2))
        ax.axhline(0, color=style.MUTED, linewidth=0.8, zorder=0)
    ax.yaxis.set_major_formatter("{x:g} %")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_xscale("log", base=2)
    ax.set_xticks(x[:: -(-len(x) // 9)], [f"{v:g}" for v in x[:: -(-len(x) // 9)]])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(xlabel=xlabel, ylabel=ylabel)
    style.legend(ax)
    return style.plain(ax, grid="both")


def error_histogram(ax: Axes, errors: Mapping[str, np.ndarray], *, bins: int = 60) -> Axes:
    """The distribution of output errors in percent: one outline for each name, over common bins.

    Shapes:   every one of errors of any shape, not empty, finite; as fractions.
    """
    values = {name: 100 * np.asarray(error, np.float64).ravel() for name, error in errors.items()}
    low, high = min(v.min() for v in values.values()), max(v.max() for v in values.values())
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, bins + 1)
    for (name, value), look in zip(values.items(), style.looks(len(values)), strict=True):
        share = 100 * np.histogram(value, edges)[0] / value.size
        ax.stairs(share, edges, fill=True, alpha=0.25, color=look["color"])
        ax.stairs(share, edges, label=f"{name}: mean {value.mean():.2g} %", linewidth=1.4, **look)
    ax.axvline(0, ymax=0.75, color=style.MUTED, linewidth=0.8)
    ax.set(xlabel="error, %", ylabel="% of outputs")
    ax.set_ylim(0, 1.35 * ax.get_ylim()[1])
    ax.set_yticks([tick for tick in ax.get_yticks() if 0 <= tick <= 100])  # room above for the legend
    style.legend(ax, loc="upper left")
    return style.plain(ax)


def number_table(ax: Axes, values, rows: Sequence[str], columns: Sequence[str], *, text: str = "{:.1f}", cmap: str = "viridis") -> Axes:
    """A table of colored numbers: each in its cell, formatted by ``text``; a NaN is an empty cell.

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
