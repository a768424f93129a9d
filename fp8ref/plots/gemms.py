"""How far GEMMs lie from the exact sum (SEMANTICS G, Q-7)."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from fp8ref.plots import style


def error_lines(ax: Axes, x, errors: Mapping[str, np.ndarray], *, ylabel: str, linear: float = 0.01, xlabel: str = "K") -> Axes:
    """Errors in percent over K, or whatever x is, a line a name: on a logarithmic axis; where some are not positive, linear within ``linear`` percent.

    Shapes:   x [n], ascending powers of two or the like; every one of errors [n], as fractions.
    """
    x = np.asarray(x)
    percent = {name: 100 * np.asarray(error, np.float64) for name, error in errors.items()}
    for (name, error), look in zip(percent.items(), style.looks(len(percent)), strict=True):
        ax.plot(x, error, marker="o", markersize=3.5, linewidth=1.5, label=name, **look)
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
    """How errors of outputs, as fractions, are spread, in percent: one outline a name over common bins.

    Shapes:   every one of errors of any shape, not empty, finite.
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
