"""The picture of a finding: what was measured, and the figure beside the claim's threshold."""

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fp8ref.findings.claim import interval
from fp8ref.findings.measuring import Finding
from fp8ref.plots import style

COLORS = {"reproduced": style.GREEN, "not reproduced": style.VERMILLION, "cannot tell": style.MUTED}
"""{verdict: its color}."""


def draw(finding: Finding) -> Figure:
    """Lines over the claim's x on the left, with intervals over seeds; on the right the seeds'
    figures, their interval, and what the claim needs. Without lines the right part alone.
    """
    lines = bool(finding.samples[0].lines)
    figure, axes = style.figure(1 + lines, width=5.2, height=3.4)
    if lines:
        _lines(axes[0], finding)
    _figure(axes[-1], finding)
    return figure


def _lines(ax: Axes, finding: Finding) -> None:
    claim = finding.claim
    names = any(isinstance(x, str) for x in claim.places)
    places = np.arange(len(claim.places)) if names else np.array(claim.places, np.float64)
    labels = list(finding.samples[0].lines)
    for i, (label, look) in enumerate(zip(labels, style.looks(len(labels)), strict=True)):
        values = [sample.lines[label] for sample in finding.samples]
        mean, low, high = map(np.array, zip(*map(interval, zip(*values, strict=True)), strict=True))
        if names:
            shift = 0.6 * ((i + 0.5) / len(labels) - 0.5)
            ax.errorbar(
                mean,
                places + shift,
                xerr=[mean - low, high - mean],
                color=look["color"],
                fmt=style.MARKERS[i % len(style.MARKERS)],
                markersize=5,
                capsize=2,
                label=label,
            )
        else:
            style.line(ax, places, mean, look, label)
            ax.fill_between(places, low, high, color=look["color"], alpha=0.15, linewidth=0)
    x, y = claim.axes
    if names:
        ax.set_yticks(places, [str(name) for name in claim.places])
        ax.set(xlabel=y, ylabel=x, ylim=(len(places) - 0.5, -0.5))
        ax.xaxis.set_major_locator(MaxNLocator(5))
    else:
        ax.set(xlabel=x, ylabel=y)
    for axis in claim.log:
        ax.set(**{f"{axis}scale": "log"})
    if "x" in claim.log:
        ax.set_xticks(places, [f"{x:g}" for x in places])
        ax.minorticks_off()
    if len(labels) > 1:
        style.above(ax, 3)
    style.plain(ax, grid="x" if names else "y")


def _figure(ax: Axes, finding: Finding) -> None:
    claim, (mean, low, high) = finding.claim, finding.interval
    color, figures = COLORS[finding.verdict], [sample.figure for sample in finding.samples]
    error = [[mean - low], [high - mean]]
    ax.errorbar([mean], [0], xerr=error, color=color, capsize=5, linewidth=2, fmt="D", markersize=5)
    ax.plot(figures, _spread(figures), "o", color=color, markersize=4, alpha=0.6)
    ax.axvline(claim.above, color=style.MUTED, linestyle="--", linewidth=1)
    if claim.margin:
        edges = claim.above - claim.margin, claim.above + claim.margin
        ax.axvspan(*edges, color=style.FAINT, zorder=0)
    need = "gray band" if claim.margin else "dashed line"
    ax.set(title=f"{finding.verdict}: the claim is right of the {need}", ylim=(-0.5, 1))
    ax.set_xlabel(textwrap.fill(f"{claim.figure} (points: seeds; bar: 95 %)", 62), fontsize=9)
    ax.set_yticks([])
    ax.xaxis.set_major_locator(MaxNLocator(5))
    style.plain(ax, grid="x")


def _spread(figures: Sequence[float]) -> np.ndarray:
    """Heights at which seeds of one figure do not hide each other."""
    return 0.35 + 0.3 * np.linspace(0, 1, len(figures))
