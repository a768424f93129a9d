"""Plot optimizer states: moments in a format's range, updates that explode, health (spec O)."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from fp8ref.formats import Format
from fp8ref.plots import style
from fp8ref.plots.runs import step_lines
from fp8ref.spec.states.health import COUNTS, Health


def moment_range(ax: Axes, values: Mapping[str, np.ndarray], fmt: Format) -> Axes:
    """The share of elements at each power of two below the amax, one outline for each name; what
    lies left of the line is stored as 0 in the format, under one scale that fits the amax.

    Shapes:   every one of values of any shape; zeros and what is not finite are left out.
    """
    lost = float(np.log2(fmt.smallest_subnormal / fmt.max)) - 1
    edges = np.arange(np.floor(1.4 * lost), 1)
    for (name, x), look in zip(values.items(), style.looks(len(values)), strict=True):
        x = np.abs(np.asarray(x, np.float64)).ravel()
        x = x[np.isfinite(x) & (x > 0)]
        binades = np.log2(x / x.max()) if x.size else x
        share = 100 * np.histogram(np.clip(binades, edges[0], 0), edges)[0] / max(x.size, 1)
        below = 100 * np.mean(binades < lost) if x.size else 0.0
        label, color = f"{name}: {below:.2g} % below", look["color"]
        dash = look["linestyle"]
        ax.stairs(share, edges, linewidth=1.5, label=label, color=color, linestyle=dash)
    ax.axvline(lost, color=style.MUTED, linewidth=0.9)
    text = ax.text(lost - 0.3, 0.4, f"0 in {fmt.name}", transform=ax.get_xaxis_transform())
    text.set(ha="right", fontsize=8, color=style.MUTED)
    style.label_powers(ax.xaxis, int(edges[0]), 0)
    ax.set(xlabel="magnitude, by the amax", ylabel="% of elements")
    style.legend(ax, loc="upper left")
    ax.set_ylim(0, 1.3 * ax.get_ylim()[1])  # room for the legend
    return style.plain(ax)


def update_ratios(
    ax: Axes,
    ratios: Mapping[str, np.ndarray],
    *,
    bound: float | None = None,
    among: Sequence[str] | None = None,
) -> Axes:
    """How many percent of elements have a larger ratio of moments, in magnitude: one curve for each
    name, both axes logarithmic. bound: that of float32 states (O-6), as a line.

    among     the names of all panels of a figure, so that each has one color in all; None: these.
    Shapes:   every one of ratios of any shape, with an element that is neither 0 nor infinite.
    """
    names = list(among or ratios)
    looks = dict(zip(names, style.looks(len(names)), strict=True))
    for name, ratio in ratios.items():
        x = np.sort(np.abs(np.asarray(ratio, np.float64)).ravel())
        x = x[np.isfinite(x) & (x > 0)]
        above = 100 * np.arange(x.size, 0, -1) / np.size(ratio)
        style.line(ax, x, above, looks[name], f"{name}: largest {x[-1]:.3g}")
    if bound is not None:
        ax.axvline(bound, color=style.MUTED, linewidth=0.9)
        text = ax.text(bound, 1, "bound", transform=ax.get_xaxis_transform())
        text.set(ha="left", va="bottom", fontsize=8, color=style.MUTED)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(left=1e-2)
    ax.set(xlabel="|m| / sqrt(v), corrected", ylabel="% of elements above")
    style.below(ax)
    return style.plain(ax, grid="both")


def health_lines(
    ax: Axes, runs: Mapping[str, Sequence[Health]], field: str, *, first: int = 1
) -> Axes:
    """A figure or count (over the elements) of health over steps, in percent: one line per name.

    field     a field of Health, such as ``stalled_v`` or ``update_error``.
    first     the number of the first step.
    """
    curves = {
        name: [
            100 * getattr(health, field) / (health.count if field in COUNTS else 1)
            for health in measurements
        ]
        for name, measurements in runs.items()
    }
    return step_lines(ax, curves, ylabel=f"{field}, %", first=first)
