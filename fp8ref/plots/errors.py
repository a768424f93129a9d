"""Plot errors: where a cast or a scale differs from the specification, and how far GEMMs are from
the exact sum (spec C, S, G, Q-7)."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from fp8ref.formats import Format, by_name
from fp8ref.plots import style
from fp8ref.sim.quantize import cast


def cast_difference(ax: Axes, x, codes, fmt: Format | str, *, label: str = "theirs") -> Axes:
    """Draw codes of x over a saturating nearest-even cast's, dots where they differ; NaN: a gap.

    Shapes:   x [n], ascending, of a dtype that ``sim.cast.encode`` takes; codes [n], uint8.
    Raises:   ValueError: as ``sim.cast.encode`` and ``decode``.
    """
    x, codes, fmt = np.asarray(x), np.asarray(codes), by_name(fmt)
    right = cast.encode(x, fmt)
    differ = cast.canonical_nans(codes, fmt) != right
    expected, decoded = (_finite(cast.decode(c, fmt)) for c in (right, codes))
    about, dash = "rounded to nearest even", style.DASHES[1]
    ax.plot(x, expected, color=style.BLUE, linewidth=4, alpha=0.35, label=about)
    ax.plot(x, decoded, color=style.VERMILLION, lw=1.2, linestyle=dash, label=label)
    label = f"{np.count_nonzero(differ):,} of {x.size:,} differ"
    dots = x[differ], decoded[differ]
    ax.plot(*dots, "o", color=style.VERMILLION, markersize=3.5, label=label)
    ax.set(xlabel="before the cast", ylabel=f"after, in {fmt.name}")
    style.legend(ax, loc="lower right")
    return style.plain(ax, grid="both")


def share_by_exponent(ax: Axes, x, differ, *, label: str | None = None) -> Axes:
    """Draw how many percent of x's elements differ, a bar for each power of two of magnitude.

    Shapes:   x and differ, bool, of the same shape.
    Specials: zeros, infinities and NaNs are left out; without any other element there are no bars.
    """
    x, differ = np.abs(np.asarray(x, np.float64)).ravel(), np.asarray(differ).ravel()
    counted = np.isfinite(x) & (x > 0)
    exponent = np.frexp(x[counted])[1] - 1
    lowest, highest = (int(exponent.min()), int(exponent.max())) if exponent.size else (0, -1)
    total, wrong = (
        np.bincount(exponent - lowest, weights, highest - lowest + 1)
        for weights in (None, differ[counted].astype(np.float64))
    )
    share = 100 * np.divide(wrong, total, out=np.zeros(total.size), where=total > 0)
    # exponent e is from 2^e to 2^(e + 1)
    centers = np.arange(lowest, highest + 1) + 0.5
    ax.bar(centers, share, width=0.85, color=style.VERMILLION, label=label)
    style.label_powers(ax.xaxis, lowest, highest + 1)
    ax.yaxis.set_major_formatter("{x:g} %")
    ax.set(xlabel="magnitude", ylabel="% of inputs that differ")
    if label:
        style.legend(ax)
    return style.plain(ax)


def scale_difference(ax: Axes, amaxes, scales, expected, *, bins: int = 64) -> Axes:
    """Draw how many percent of scales are above the expected ones, upwards, and below them,
    downwards, over log2 of the amax.

    Differences of two or more ulps are darker.

    Shapes:   amaxes, scales and expected [n], positive and finite; scales and expected float32,
              whose order is that of their bits.
    """
    place = np.log2(np.asarray(amaxes, np.float64))
    bits, expected_bits = (np.asarray(x, np.float32).view(np.int32) for x in (scales, expected))
    ulps = bits.astype(np.int64) - expected_bits
    edges = np.linspace(place.min(), place.max(), bins + 1)
    total = np.histogram(place, edges)[0]
    looks = {"1 ulp": (np.abs(ulps) == 1, 0.45), "2 and more": (np.abs(ulps) > 1, 1.0)}
    most = 1.0
    signs = ((1, style.VERMILLION, "above"), (-1, style.BLUE, "below"))
    for sign, color, side in signs:
        bottom = np.zeros(bins)
        for name, (some, alpha) in looks.items():
            chosen = some & (np.sign(ulps) == sign)
            counts = np.histogram(place[chosen], edges)[0]
            share = 100 * np.divide(counts, total, out=np.zeros(bins), where=total > 0)
            if chosen.any():
                ax.bar(
                    edges[:-1],
                    sign * share,
                    np.diff(edges),
                    sign * bottom,
                    align="edge",
                    color=color,
                    alpha=alpha,
                    label=f"{name} {side}: {100 * chosen.mean():.1f} %",
                )
            bottom += share
        most = max(most, float(bottom.max()))
    ax.axhline(0, color=style.MUTED, linewidth=0.8)
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylim(-1.5 * most, 1.5 * most)  # room for the legend
    ax.yaxis.set_major_formatter(lambda share, _: f"{abs(share):g} %")
    ax.set(xlabel="log2 of the amax", ylabel="% of scales that differ")
    if ax.containers:
        style.legend(ax, loc="upper right")
    return style.plain(ax)


def error_lines(
    ax: Axes, x, errors: Mapping[str, np.ndarray], *, ylabel: str, xlabel: str = "K"
) -> Axes:
    """Errors in percent over K, or another x, one line for each name; later lines are narrower, so
    that lines that coincide all show.

    The axis is logarithmic; if not all errors are positive, linear within 0.01 percent.

    Shapes:   x [n], ascending, such as powers of two; every one of errors [n], as fractions.
    """
    x = np.asarray(x)
    percent = {name: 100 * np.asarray(error, np.float64) for name, error in errors.items()}
    for (name, error), look in zip(percent.items(), style.layers(len(percent)), strict=True):
        style.line(ax, x, error, look, name)
    low = min(e.min() for e in percent.values())
    high = max(e.max() for e in percent.values())
    if low > 0:
        ax.set_yscale("log")
        style.log_ticks(ax.yaxis, low, high, text="{x:g} %")
    else:
        ax.set_yscale("symlog", linthresh=0.01)
        ax.set_ylim(min(2 * low, -0.005), max(2 * high, 0.005))
        ax.axhline(0, color=style.MUTED, linewidth=0.8, zorder=0)
        ax.yaxis.set_major_formatter("{x:g} %")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_xscale("log", base=2)
    ax.set_xticks(x[:: -(-len(x) // 9)], [f"{v:g}" for v in x[:: -(-len(x) // 9)]])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(xlabel=xlabel, ylabel=ylabel)
    style.below(ax)
    return style.plain(ax, grid="both")


def row_lines(ax: Axes, rows: Mapping[str, np.ndarray], *, title: str = "") -> Axes:
    """The SQNR of each row of a tensor, in dB, worst row first: a line a name, later ones narrower.

    Shapes:   every one of rows of any shape, such as of ``stats.sqnr_by_row``.
    Specials: NaN, rows of zeros, and Inf, exact ones, are left out; -Inf is drawn as 0 dB.
    """
    for i, (name, decibels) in enumerate(rows.items()):
        levels = np.sort(decibels[~np.isnan(decibels) & (decibels < np.inf)], axis=None)
        ax.stairs(
            np.maximum(levels, 0),
            np.linspace(0, 100, levels.size + 1),
            baseline=None,
            label=name,
            linewidth=2.2 - 1.2 * i / len(rows),
            color=style.CYCLE[i % len(style.CYCLE)],
            linestyle=style.DASHES[i % len(style.DASHES)],
        )
    ax.set(xlabel="rows, from the worst to the best", ylabel="SQNR, dB", xlim=(0, 100))
    ax.set_ylim(0, 1.3 * ax.get_ylim()[1])  # room for the legend
    ax.xaxis.set_major_formatter("{x:g} %")
    ax.set_title(title, parse_math=False)
    style.legend(ax, loc="upper left", ncols=3)
    for text in ax.get_legend().get_texts():  # type: ignore[union-attr]
        text.set_parse_math(False)
    return style.plain(ax)


def error_histogram(ax: Axes, errors: Mapping[str, np.ndarray], *, bins: int = 60) -> Axes:
    """The distribution of output errors in percent: one outline for each name, over common bins.

    Shapes:   every one of errors of any shape, not empty, finite; as fractions.
    """
    values = {name: 100 * np.asarray(error, np.float64).ravel() for name, error in errors.items()}
    low = min(v.min() for v in values.values())
    high = max(v.max() for v in values.values())
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, bins + 1)
    for (name, value), look in zip(values.items(), style.looks(len(values)), strict=True):
        share, color = 100 * np.histogram(value, edges)[0] / value.size, look["color"]
        label, dash = f"{name}: mean {value.mean():.2g} %", look["linestyle"]
        ax.stairs(share, edges, fill=True, alpha=0.25, color=color)
        ax.stairs(share, edges, label=label, linewidth=1.4, color=color, linestyle=dash)
    ax.axvline(0, ymax=0.75, color=style.MUTED, linewidth=0.8)
    ax.set(xlabel="error, %", ylabel="% of outputs")
    ax.set_ylim(0, 1.35 * ax.get_ylim()[1])
    # room above for the legend
    ax.set_yticks([tick for tick in ax.get_yticks() if 0 <= tick <= 100])
    style.legend(ax, loc="upper left")
    return style.plain(ax)


def number_table(
    ax: Axes,
    values,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    text: str = "{:.1f}",
    cmap: str = "viridis",
    ends: tuple[float | None, float | None] = (None, None),
) -> Axes:
    """A table of colored numbers: each in its cell, formatted by ``text``; a NaN is an empty cell.

    ends      of the color scale; None: the smallest and the largest finite number.
    Shapes:   values [rows, columns].
    Raises:   ValueError: values of another shape.
    """
    values = style.named_cells(values, rows, columns)
    image = style.cells(ax, values, cmap, *ends)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
            shown, color = text.format(value), "black" if light else "white"
            ax.text(column, row, shown, ha="center", va="center", fontsize=9, color=color)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return style.plain_map(ax)


def cost_map(ax: Axes, costs, rows: Sequence[str], columns: Sequence[str]) -> Axes:
    """A table of costs in nats: red above 0, blue below, on one scale about 0; NaN: an empty cell.

    Shapes:   costs [rows, columns].
    Raises:   ValueError: costs of another shape.
    """
    costs = np.asarray(costs, np.float64)
    most = float(np.nanmax(np.abs(costs), initial=0.0)) or 1.0
    number_table(ax, costs, rows, columns, text="{:+.4f}", cmap="RdBu_r", ends=(-most, most))
    ax.set(title="cost of a cast, nats")
    return style.plain_map(ax)


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)
