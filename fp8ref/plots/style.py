"""The style of all figures: colors, figures on white, plain axes, legends."""

import io
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
from matplotlib.transforms import offset_copy
from PIL import Image  # matplotlib's own means of writing PNGs

__all__ = [
    "BLUE",
    "CYCLE",
    "DASHES",
    "FAINT",
    "GREEN",
    "MUTED",
    "PURPLE",
    "VERMILLION",
    "figure",
    "layers",
    "legend",
    "looks",
    "plain",
]

# Okabe and Ito's colors, for color-blind readers, without yellow, which white swallows.
BLACK, BLUE, VERMILLION, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"
PURPLE, ORANGE, SKY = "#CC79A7", "#E69F00", "#56B4E9"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""The colors of a figure's lines, in order."""

MORE = ("#882255", "#999933", "#332288", "#AA4499", "#117733", "#44AA99", "#DDCC77")
"""Seven of Tol's muted colors, for more lines than that."""

_GAPS = ((5, 2), (1, 1.2), (4, 1.5, 1, 1.5), (8, 2), (2, 2), (6, 1, 1, 1, 1, 1))
DASHES: tuple = ("-", *((0, gaps) for gaps in _GAPS))
"""The dashes of a figure's lines, in order, for eyes and printers without colors."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""The markers of lines that may coincide, in order."""

MUTED, FAINT = "#666666", "#DDDDDD"


def figure(
    columns: int = 1, rows: int = 1, *, width: float = 5.6, height: float = 3.8
) -> tuple[Figure, list[Axes]]:
    """A figure on white, and its axes row by row; width and height are of one of them, in inches.

    Save it with ``figure.savefig``, or take ``png`` of it.
    """
    size = width * columns, height * rows
    new_figure = Figure(figsize=size, layout="constrained", facecolor="white", dpi=120)
    return new_figure, np.atleast_1d(new_figure.subplots(rows, columns)).ravel().tolist()


def png(figure: Figure) -> bytes:
    """The figure as a PNG of 256 colors, for IPython.display.Image: a third as large."""
    drawn, written = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    few = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(written, format="png", optimize=True)
    return written.getvalue()


def plain(ax: Axes, *, grid: Literal["x", "y", "both"] = "y") -> Axes:
    """Axes without a frame on top and right, and a faint grid behind what they show."""
    ax.title.set_fontsize(10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color=FAINT, linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def plain_map(ax: Axes) -> Axes:
    """Axes of an image, whose ticks count rows and columns."""
    ax.title.set_fontsize(10)
    ax.tick_params(labelsize=8)
    return ax


def named_cells(values, rows: Sequence[str], columns: Sequence[str]) -> np.ndarray:
    """Values as float64 [rows, columns]. ValueError: of another shape."""
    values = np.asarray(values, np.float64)
    if values.shape != (len(rows), len(columns)):
        raise ValueError(
            f"values are [{len(rows)}, {len(columns)}], as many as there are names; got "
            f"{values.shape}."
        )
    return values


def cells(
    ax: Axes, values, cmap, low=None, high=None, *, norm: Normalize | None = None, extent=None
) -> AxesImage:
    """The image of a map: a cell for each element; NaNs and masked ones stay white."""
    shown, norm = np.ma.masked_invalid(values), norm or Normalize(low, high)
    return ax.imshow(shown, cmap, norm, interpolation="nearest", aspect="auto", extent=extent)


def looks(count: int) -> Sequence[dict]:
    """Color and dash of each of so many lines."""
    return [
        {"color": CYCLE[i % len(CYCLE)], "linestyle": DASHES[i % len(DASHES)]} for i in range(count)
    ]


def layers(count: int) -> Sequence[dict]:
    """Color, dash, marker and width of each of so many lines that may coincide.

    Each line is narrower than the line below it, and its markers are smaller and of another shape,
    so that equal curves all show.
    """
    styles = []
    for i, look in enumerate(looks(count)):
        rest = 1 - i / max(count - 1, 1)  # from 1 to 0
        size = {"linewidth": 1.1 + 1.1 * rest, "markersize": 4 + 5 * rest}
        marker = {"marker": MARKERS[i % len(MARKERS)], "markerfacecolor": "white"}
        styles.append(look | size | marker)
    return styles


def line(ax: Axes, x, y, look: dict, label: str, markevery: int | tuple | None = None) -> None:
    """Draw a line of one of ``looks`` or ``layers``."""
    ax.plot(x, y, label=label, markevery=markevery, **look)


def note(ax: Axes, text: str, at: tuple[float, float], shift: tuple[int, int], ha: str) -> None:
    """A small gray note beside a place; shift: in points."""
    beside = ax.annotate(text, at, xytext=shift, textcoords="offset points")
    beside.set(ha=ha, va="center", fontsize=8, color=MUTED)


def power(exponent: float) -> str:
    """2^exponent, as matplotlib sets it."""
    return f"$2^{{{exponent:g}}}$"


def label_powers(axis, lowest: int, highest: int, *, ticks: int = 9) -> None:
    """Ticks at powers of two on an axis that shows log2, from lowest to highest, evenly spaced.

    There are at most ``ticks`` of them, unless they are 64 apart.
    """
    steps = (1, 2, 3, 4, 5, 8, 16, 32, 64)
    every = next((n for n in steps if (highest - lowest) // n < ticks), 64)
    places = np.arange(-(-lowest // every) * every, highest + 1, every)
    axis.set_ticks(places, labels=[power(float(place)) for place in places])


def legend(ax: Axes, **options: Any) -> None:
    """A legend on white, over grid and shading; options: matplotlib's own keywords."""
    plain = {"fontsize": 8, "facecolor": "white", "edgecolor": "none"}
    ax.legend(**{**plain, "framealpha": 0.9, "borderpad": 0.2} | options)


def log_ticks(axis, lowest: float, highest: float, *, text: str = "{x:g}") -> None:
    """Ticks of a logarithmic axis: decades, or 1, 2 and 5 of each where there are few decades."""
    few = highest < 300 * lowest
    subs: tuple[float, ...] = (1, 2, 5) if few else (1,)
    subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if highest < 10 * lowest else subs
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(text)
    axis.set_minor_formatter(NullFormatter())
    if few:
        axis.set_minor_locator(NullLocator())


def below(ax: Axes) -> None:
    """A legend below the axes, where it hides nothing, in as many columns as fit."""
    labels, figure = ax.get_legend_handles_labels()[1], ax.get_figure(root=True)
    if figure is None or not labels:
        return
    room = 12 * figure.get_figwidth() / max(1, len(figure.axes))  # in letters
    columns = max(1, min(len(labels), int(room // (max(map(len, labels)) + 6))))
    under = offset_copy(ax.transAxes, figure, x=0, y=-40, units="points")  # ticks and a label
    legend(
        ax,
        ncols=columns,
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        bbox_transform=under,
        borderaxespad=0,
    )


def above(ax: Axes, columns: int) -> None:
    """A legend in one row above the axes, right-aligned, where there are no data."""
    legend(ax, ncols=columns, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
