"""Plot what a format can hold: its numbers, their spacing, and the error of rounding (F, C)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from fp8ref.formats import Format, by_name
from fp8ref.plots import style
from fp8ref.sim.quantize import cast


def ranges(ax: Axes, formats: Sequence[Format]) -> Axes:
    """One bar per format, from its smallest positive number to its largest; subnormals lighter."""
    for row, fmt in enumerate(formats):
        smallest, normal, largest = (
            np.log2(v) for v in (fmt.smallest_subnormal, fmt.smallest_normal, fmt.max)
        )
        for left, right, color, label in (
            (normal, largest, style.BLUE, "normal"),
            (smallest, normal, style.ORANGE, "subnormal"),
        ):
            named = label if row == 0 else None  # once in the legend
            ax.barh(row, right - left, left=left, height=0.5, color=color, label=named)
        style.note(ax, f"{fmt.max:.4g}", (largest, row), (4, 0), "left")
    _rows(ax, formats)
    lowest = np.log2(min(fmt.smallest_subnormal for fmt in formats))
    highest = np.log2(max(fmt.max for fmt in formats))
    ax.set_xlim(lowest - 0.03 * (highest - lowest), highest + 0.12 * (highest - lowest))
    style.label_powers(ax.xaxis, int(np.floor(lowest)), int(np.ceil(highest)))
    ax.set(xlabel="magnitude", title="from the smallest positive number to the largest")
    style.above(ax, 2)
    return style.plain(ax, grid="x")


def number_line(ax: Axes, formats: Sequence[Format]) -> Axes:
    """Every positive number of each format, one tick each, over log2 of its magnitude.

    Raises:   ValueError: a format that is not of 8 bits.
    """
    for row, fmt in enumerate(formats):
        values = _positive(fmt)
        normal = values >= fmt.smallest_normal
        for some, color, width, label in (
            (normal, style.BLUE, 0.7, "normal"),
            (~normal, style.VERMILLION, 1.2, "subnormal"),
        ):
            label = label if row == 0 else ""  # once in the legend
            x, low, high = np.log2(values[some]), row - 0.3, row + 0.3
            ax.vlines(x, low, high, color=color, linewidth=width, label=label)
        smallest, largest = np.log2(fmt.smallest_subnormal), np.log2(fmt.max)
        style.note(ax, style.power(smallest), (smallest, row), (-5, 0), "right")
        style.note(ax, f"{fmt.max:g}", (largest, row), (5, 0), "left")
    _rows(ax, formats)
    lowest, highest = _limits(formats, 0)
    ax.set_xlim(lowest - 3, highest + 4)
    style.label_powers(ax.xaxis, lowest, highest, ticks=12)
    ax.set(xlabel="magnitude", title="every positive number")
    style.above(ax, 2)
    return style.plain(ax, grid="x")


def near_zero(ax: Axes, formats: Sequence[Format], *, until: int = 32) -> Axes:
    """The numbers next to zero, up to ``until``, in units of each format's smallest, on a linear
    axis: evenly spaced where they are subnormal.

    Raises:   ValueError: a format that is not of 8 bits.
    """
    for row, fmt in enumerate(formats):
        values = np.append(0, _positive(fmt)) / fmt.smallest_subnormal
        values = values[values <= until]
        border = fmt.smallest_normal / fmt.smallest_subnormal
        for below, color, label in (
            (True, style.VERMILLION, "zero and subnormal"),
            (False, style.BLUE, "normal"),
        ):
            some = values[(values < border) == below]
            named = label if row == 0 else None
            places = np.full(some.size, row)
            ax.plot(some, places, "o", color=color, markersize=5, label=named)
        ax.axhline(row, color=style.FAINT, linewidth=0.8, zorder=0)
    _rows(ax, formats)
    xlabel = "multiples of the format's smallest number"
    ax.set(xlabel=xlabel, title="next to zero", xlim=(-1, until + 1))
    style.above(ax, 2)
    return style.plain(ax, grid="x")


def spacing(ax: Axes, formats: Sequence[Format]) -> Axes:
    """The gap between neighboring numbers over their magnitude, up to each format's largest.

    Raises:   ValueError: a format that is not of 8 bits.
    """
    for fmt, look in zip(formats, style.looks(len(formats)), strict=True):
        color, dash = look["color"], look["linestyle"]
        values = np.append(fmt.smallest_subnormal, _positive(fmt)[1:])
        x, gaps = np.log2(values[:-1]), np.log2(np.diff(values))
        ax.step(x, gaps, where="post", label=fmt.name, color=color, linestyle=dash)
        normal, gap = np.log2(fmt.smallest_normal), np.log2(fmt.smallest_subnormal)
        ax.plot(normal, gap, "o", color=color, markersize=5)
    style.label_powers(ax.xaxis, *_limits(formats, 0))
    bottom, top = (int(limit) for limit in ax.get_ylim())
    style.label_powers(ax.yaxis, bottom, top)
    title = "spacing; a dot where the normal numbers begin"
    ax.set(xlabel="magnitude", ylabel="gap to the next number", title=title)
    style.legend(ax)
    return style.plain(ax, grid="both")


def relative_error(
    ax: Axes, formats: Sequence[Format], *, lowest: int, highest: int, points: int = 4000
) -> Axes:
    """|rounded - x| / |x| of nearest even with saturation, in percent, for ``points`` of x from
    2^lowest to 2^highest, evenly over log2 x."""
    x = np.exp2(np.linspace(lowest, highest, points))
    for fmt, look in zip(formats, style.looks(len(formats)), strict=True):
        error = 100 * _error(x, fmt)
        ax.plot(np.log2(x), error, linewidth=1.1, label=fmt.name, color=look["color"])
    style.label_powers(ax.xaxis, lowest, highest)
    ax.yaxis.set_major_formatter("{x:g} %")
    ax.set(xlabel="magnitude", ylabel="relative error", title="rounded to nearest even")
    style.legend(ax)
    return style.plain(ax, grid="both")


def worst_error(ax: Axes, formats: Sequence[Format], *, beyond: int = 3, points: int = 256) -> Axes:
    """The largest relative error, in percent, within each power of two, from ``beyond`` of them
    below all ranges to as many above.

    points    evenly spaced numbers of each power of two that are looked at; beyond max all
              saturate, below the smallest number all become zero.
    """
    lowest, highest = _limits(formats, beyond)
    exponents = np.arange(lowest, highest)
    x = np.ldexp(1 + (np.arange(points) + 0.5) / points, exponents[:, None])
    edges = np.append(exponents, highest)
    for fmt, look in zip(formats, style.looks(len(formats)), strict=True):
        color, dash = look["color"], look["linestyle"]
        worst = 100 * _error(x, fmt).max(axis=1)
        ax.stairs(worst, edges, baseline=None, lw=1.8, label=fmt.name, color=color, ls=dash)
    ax.set_yscale("log")
    ax.set_yticks([5, 10, 20, 50, 100], ["5 %", "10 %", "20 %", "50 %", "100 %"])
    ax.minorticks_off()
    style.label_powers(ax.xaxis, lowest, highest)
    title = "the worst within each power of two"
    ax.set(xlabel="magnitude", ylabel="relative error", title=title)
    style.legend(ax, loc="upper center")
    return style.plain(ax, grid="both")


def code_map(ax: Axes, fmt: Format | str) -> Axes:
    """All 256 codes, 16 in a row, colored by log2 of their magnitude; specials are labeled.

    Raises:   ValueError: fmt not of 8 bits.
    """
    codes, fmt = np.arange(256, dtype=np.uint8).reshape(16, 16), by_name(fmt)
    values = cast.decode(codes, fmt)
    with np.errstate(divide="ignore"):
        shown = np.ma.masked_invalid(np.log2(np.abs(values.astype(np.float64))))
    image = ax.imshow(shown, cmap="viridis", interpolation="nearest")
    for (row, column), value in np.ndenumerate(values):
        if value == 0 or not np.isfinite(value):
            text = "NaN" if np.isnan(value) else f"{value:g}"
            ax.text(column, row, text, ha="center", va="center", fontsize=6)
    digits = [f"{i:X}" for i in range(16)]
    ax.set_xticks(range(16), digits)
    ax.set_yticks(range(16), digits)
    ax.set(xlabel="low four bits", ylabel="high four bits", title=f"codes of {fmt.name}")
    ax.figure.colorbar(image, ax=ax, label="log2 of the magnitude", fraction=0.046)
    return style.plain_map(ax)


def cast_curve(ax: Axes, x, fmt: Format | str, *, label: str, color: str, **options) -> Axes:
    """The result of a cast over its ascending input: a staircase. Raises as ``sim.cast.round_to``.

    options   ``rounding``, ``saturate`` and ``seed``, as ``sim.cast.encode`` takes them; saturating
              by default. Infinities and NaNs are not drawn, and so show as a gap.
    """
    x, fmt = np.asarray(x), by_name(fmt)
    y = cast.round_to(x, fmt, **({"saturate": True} | options)).astype(np.float64)
    ax.plot(x, np.where(np.isfinite(y), y, np.nan), color=color, linewidth=1.6, label=label)
    ax.set(xlabel="before the cast", ylabel=f"after, in {fmt.name}")
    style.legend(ax)
    return style.plain(ax, grid="both")


def _positive(fmt: Format) -> np.ndarray:
    """The positive numbers of an 8-bit format, float64, ascending."""
    values = cast.decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)
    return values[values > 0]


def _error(x: np.ndarray, fmt: Format) -> np.ndarray:
    return np.abs(cast.round_to(x, fmt, saturate=True).astype(np.float64) - x) / x


def _limits(formats: Sequence[Format], beyond: int) -> tuple[int, int]:
    smallest = min(fmt.smallest_subnormal for fmt in formats)
    largest = max(fmt.max for fmt in formats)
    return int(np.log2(smallest)) - beyond, int(np.ceil(np.log2(largest))) + beyond


def _rows(ax: Axes, formats: Sequence[Format]) -> None:
    ax.set_yticks(range(len(formats)), [fmt.name for fmt in formats])
    ax.set_ylim(len(formats) - 0.4, -0.6)  # the first on top
