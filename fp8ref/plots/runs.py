"""Curves over optimizer steps: losses of runs, validation gaps, staleness of delayed scales
(SEMANTICS H)."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from fp8ref.formats import Format
from fp8ref.plots import style
from fp8ref.recipe import RECIPES
from fp8ref.sim import delayed

_IN_TURN = itertools.cycle(color for color in (*style.CYCLE, *style.MORE) if color != style.BLACK)
COLORS = {name: next(_IN_TURN) if recipe.fp8 else style.BLACK for name, recipe in RECIPES.items()}
"""{recipe: color of its line}; a recipe without FP8 is black."""

STYLES = {"jax": "-", "torch": (0, (4, 2))}
"""{backend: style of its line}."""


def loss_curves(ax: Axes, runs: Mapping[tuple[str, str], Sequence[dict]], *, entropy: float | None = None, smooth: int = 10) -> Axes:
    """Training loss in nats over steps, one line for each (backend, recipe): the running mean of
    ``smooth`` steps.

    runs      metrics lines as ``log.read_metrics`` gives them; a run without steps has no line.
    entropy   the unigram entropy of the data, in nats, as a reference line.
    """
    for (backend, recipe), lines in runs.items():
        loss = np.array([line["loss"] for line in lines])
        if not len(loss):
            continue
        width = min(smooth, len(loss))
        mean = np.convolve(loss, np.ones(width) / width, "valid")
        ax.plot(np.arange(width - 1, len(loss)), mean, color=COLORS.get(recipe), linestyle=STYLES.get(backend), label=f"{backend} {recipe}")
    if entropy is not None:
        ax.axhline(entropy, color="#888888", linewidth=1, linestyle=":")
        ax.annotate(
            "unigram entropy", (1, entropy), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="#666666", fontsize=8
        )
    ax.set(xlabel="optimizer step", ylabel="training loss, nats", title=f"running mean of {smooth} steps")
    style.legend(ax)
    return style.plain(ax)


def step_lines(ax: Axes, curves: Mapping[str, Sequence[float]], *, ylabel: str, first: int = 0) -> Axes:
    """Any value of several runs at every step, one line for each run; later lines are narrower, so
    that lines that coincide all show.

    Shapes:   every one of curves [steps]. first: the number of the first step.
    """
    for i, ((name, curve), look) in enumerate(zip(curves.items(), style.layers(len(curves)), strict=True)):
        every = max(len(curve) // 6, len(curves))  # a marker of one line after the other
        ax.plot(np.arange(first, first + len(curve)), curve, markevery=(i, every), label=name, **look)
    ax.set(xlabel="optimizer step", ylabel=ylabel)
    style.legend(ax)
    return style.plain(ax)


def validation_gaps(ax: Axes, losses: Mapping[tuple[str, str], float], *, seeds: Sequence[float]) -> Axes:
    """Final validation loss of each (backend, recipe) minus bf16's of that backend, over the
    seed-to-seed spread.

    losses    in nats; (backend, "bf16") is among them for each backend.
    seeds     final validation losses of bf16 runs that differ only in their seed; the first is the
              seed of ``losses``.
    """
    spread = max(seeds) - min(seeds)
    ax.axhspan(-spread, spread, color="#BBBBBB", alpha=0.4, linewidth=0, label=f"spread of {len(seeds)} bf16 seeds")
    points = {key: loss - losses[key[0], "bf16"] for key, loss in losses.items() if key[1] != "bf16"}
    for i, ((backend, recipe), gap) in enumerate(points.items()):
        ax.plot(i, gap, "o" if backend == "jax" else "s", color=COLORS.get(recipe), markersize=7)
    for i, loss in enumerate(seeds[1:]):
        ax.plot(len(points), loss - seeds[0], "x", color=COLORS["bf16"], label="bf16, other seeds" if i == 0 else None)
    ax.axhline(0, color="#000000", linewidth=0.8)
    names = [f"{backend}\n{recipe}" for backend, recipe in points] + ["bf16\nother seeds"]
    ax.set_xticks(range(len(names)), names, fontsize=8)
    ax.set(ylabel="nats", title="final validation loss minus bf16's")
    ax.margins(x=0.1, y=0.25)
    style.legend(ax)
    return style.plain(ax)


def staleness(ax: Axes, amaxes, scales: Mapping[str, np.ndarray], fmt: Format, *, first: int = 0) -> Axes:
    """A tensor's amax at each step, and for each name the largest number that fits, fmt.max /
    scale.

    A cross marks a step whose amax is clipped (Q-11).

    Shapes:   amaxes and every one of scales [steps]: the scales that multiply each step's tensor;
              all positive. first: the number of the first step.
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
