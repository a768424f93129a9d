"""Figures as functions: arrays in, Axes out, no global state, so that a notebook can reuse them."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, distinguishable to colour-blind readers; backends differ by line style as well.
COLOURS = {"bf16": "#000000", "tensorwise": "#0072B2", "rowwise": "#D55E00", "rowwise_with_gw_hp": "#009E73"}
STYLES = {"jax": "-", "torch": (0, (4, 2))}


def loss_curves(ax: Axes, runs: Mapping[tuple[str, str], Sequence[dict]], *, entropy: float | None = None, smooth: int = 10) -> Axes:
    """Training loss over steps, one line for each (backend, recipe): the running mean of ``smooth`` steps.

    runs: metrics lines as ``log.read_metrics`` gives them. entropy: the unigram entropy of the data, in nats, as a reference line.
    """
    for (backend, recipe), lines in runs.items():
        loss = np.array([line["loss"] for line in lines])
        width = min(smooth, len(loss))
        mean = np.convolve(loss, np.ones(width) / width, "valid")
        ax.plot(np.arange(width - 1, len(loss)), mean, color=COLOURS.get(recipe), linestyle=STYLES.get(backend), label=f"{backend} {recipe}")
    if entropy is not None:
        ax.axhline(entropy, color="#888888", linewidth=1, linestyle=":")
        ax.annotate("unigram entropy", (1, entropy), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="#666666", fontsize=8)
    ax.set(xlabel="optimizer step", ylabel=f"training loss, nats (mean of {smooth} steps)")
    ax.legend(frameon=False, fontsize=8)
    return _plain(ax)


def validation_gaps(ax: Axes, losses: Mapping[tuple[str, str], float], *, spread: tuple[float, float]) -> Axes:
    """Final validation loss of each (backend, recipe) as a point, over the band between the lowest and highest bf16 seed."""
    names = list(losses)
    ax.axhspan(*spread, color="#BBBBBB", alpha=0.4, linewidth=0, label="bf16, range of 3 seeds")
    for i, (backend, recipe) in enumerate(names):
        ax.plot(i, losses[backend, recipe], "o" if backend == "jax" else "s", color=COLOURS.get(recipe), markersize=7)
    ax.set(ylabel="final validation loss, nats")
    ax.set_xticks(range(len(names)), [f"{backend}\n{recipe}" for backend, recipe in names], fontsize=8)
    ax.margins(x=0.1, y=0.3)
    ax.legend(frameon=False, fontsize=8)
    return _plain(ax)


def figure(columns: int) -> tuple[Figure, Sequence[Axes]]:
    """A figure of one row, on white so that it reads in light and dark pages; save it with ``figure.savefig``."""
    made = Figure(figsize=(5.6 * columns, 3.8), layout="constrained", facecolor="white", dpi=120)
    return made, np.atleast_1d(made.subplots(1, columns)).tolist()


def _plain(ax: Axes) -> Axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)
    return ax
