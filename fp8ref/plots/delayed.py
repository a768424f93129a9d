"""What scaling by the past does to a trace of amaxes (SEMANTICS H)."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from fp8ref.formats import Format
from fp8ref.plots import style
from fp8ref.sim import delayed


def staleness(ax: Axes, amaxes, scales: Mapping[str, np.ndarray], fmt: Format, *, first: int = 0) -> Axes:
    """A tensor's amax step by step, and under each name the largest number that fits, fmt.max / scale; a cross where the amax is clipped (Q-11).

    Shapes:   amaxes and every one of scales [steps]: those that each step's tensor is multiplied by; positive. first: the number of the first step.
    """
    amaxes = np.asarray(amaxes)
    steps = first + np.arange(amaxes.size)
    ax.plot(steps, amaxes, color=style.BLACK, linewidth=1.2, label="amax")
    for (name, scale), look in zip(scales.items(), style.looks(len(scales)), strict=True):
        missed = delayed.clipped(amaxes, scale, fmt)
        ax.step(
            steps,
            fmt.max / np.asarray(scale, np.float64),
            where="mid",
            linewidth=1.3,
            label=f"fits, {name}: {missed.sum()} clipped",
            **look,
        )
        ax.plot(steps[missed], amaxes[missed], "x", color=look["color"], markersize=6)
    ax.set_yscale("log", base=2)
    ax.set(xlabel="optimizer step", ylabel="magnitude")
    style.legend(ax)
    return style.plain(ax, grid="both")
