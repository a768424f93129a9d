"""Curves over optimizer steps: losses, validation gaps, staleness of delayed scales (spec H)."""

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

OTHER = "#888888"  # a recipe of another name, such as a planted fault
STYLES = {"jax": "-", "torch": (0, (4, 2))}
"""{backend: style of its line}."""


def loss_curves(
    ax: Axes,
    runs: Mapping[tuple[str, str], Sequence[dict]],
    *,
    entropy: float | None = None,
    smooth: int = 10,
) -> Axes:
    """Training loss in nats over steps, a line a (backend, recipe): the mean of ``smooth`` steps.

    runs      metrics lines as ``log.read_metrics`` gives them; a run without steps has no line.
    entropy   the unigram entropy of the data, in nats, as a reference line.
    """
    for (backend, recipe), lines in runs.items():
        loss = np.array([line["loss"] for line in lines])
        if not len(loss):
            continue
        width = min(smooth, len(loss))
        mean = np.convolve(loss, np.ones(width) / width, "valid")
        steps, dash = np.arange(width - 1, len(loss)), STYLES.get(backend)
        label = f"{backend} {recipe}"
        ax.plot(steps, mean, color=COLORS.get(recipe, OTHER), linestyle=dash, label=label)
    if entropy is not None:
        ax.axhline(entropy, color="#888888", linewidth=1, linestyle=":")
        text = ax.text(1, entropy, "unigram entropy", transform=ax.get_yaxis_transform())
        text.set(ha="right", va="bottom", color=style.MUTED, fontsize=8)
    title = f"running mean of {smooth} steps"
    ax.set(xlabel="optimizer step", ylabel="training loss, nats", title=title)
    style.legend(ax)
    return style.plain(ax)


def step_lines(
    ax: Axes, curves: Mapping[str, Sequence[float]], *, ylabel: str, first: int = 0
) -> Axes:
    """Any value of several runs at every step, one line for each run; later lines are narrower, so
    that lines that coincide all show.

    Shapes:   every one of curves [steps]. first: the number of the first step.
    """
    lines = zip(curves.items(), style.layers(len(curves)), strict=True)
    for i, ((name, curve), look) in enumerate(lines):
        every = max(len(curve) // 6, len(curves))  # a marker of one line after the other
        steps = np.arange(first, first + len(curve))
        style.line(ax, steps, curve, look, name, markevery=(i, every))
    ax.set(xlabel="optimizer step", ylabel=ylabel)
    style.below(ax)
    return style.plain(ax)


def loss_gaps(
    ax: Axes,
    gaps: Mapping[str, tuple],
    *,
    margin: float | None = None,
    steps: Mapping[str, Sequence[float]] | None = None,
) -> Axes:
    """The loss of FP8 minus that of bf16, in nats, with its interval, over the margin of
    equivalence. The title names the largest gap at the end.

    gaps      by name, (mean, low, high); a name's words are stacked.
    steps     by name, the optimizer steps of arrays in ``gaps``: a line in a band, no point.
    """
    if margin:
        label = f"margin {margin:.2g}"
        ax.axhspan(-margin, margin, color="#BBBBBB", alpha=0.4, linewidth=0, label=label)
    for i, (name, (mean, low, high)) in enumerate(gaps.items()):
        color = COLORS.get(name.split()[-1], OTHER)
        if steps is not None:
            ax.fill_between(steps[name], low, high, color=color, alpha=0.25, linewidth=0)
            dash = style.DASHES[i % len(style.DASHES)]
            ax.plot(steps[name], mean, color=color, linestyle=dash, label=name)
            continue
        marker, sides = "s" if "torch" in name else "o", [[mean - low], [high - mean]]
        ax.errorbar(i, mean, sides, fmt=marker, color=color, capsize=4)
    ax.axhline(0, color="#000000", linewidth=0.8)
    if steps is None:
        ax.set_xticks(range(len(gaps)), [name.replace(" ", "\n") for name in gaps], fontsize=8)
        ax.margins(x=0.15, y=0.25)
    else:
        ax.set(xlabel="optimizer step")
    ends = {name: float(np.ravel(mean)[-1]) for name, (mean, _, _) in gaps.items()}
    worst = max(ends, key=lambda name: abs(ends[name]), default="")
    title = f"{worst}: {ends[worst]:+.2g} nats at the end" if ends else ""
    ax.set(ylabel="loss minus bf16's, nats")
    ax.set_title(title, parse_math=False)
    if steps is not None:
        style.below(ax)
    elif margin:
        style.legend(ax)
    return style.plain(ax)


def staleness(
    ax: Axes, amaxes, scales: Mapping[str, np.ndarray], fmt: Format, *, first: int = 0
) -> Axes:
    """A tensor's amax at each step, and for each name the largest number that fits, max / scale.

    A cross marks a step whose amax is clipped (Q-11); the title counts them.

    Shapes:   amaxes and every one of scales [steps]: the scales that multiply each step's tensor;
              all positive. first: the number of the first step.
    """
    amaxes = np.asarray(amaxes)
    steps = first + np.arange(amaxes.size)
    ax.plot(steps, amaxes, color=style.BLACK, linewidth=1.2, label="amax")
    said = []
    for (name, scale), look in zip(scales.items(), style.looks(len(scales)), strict=True):
        missed = delayed.clipped(amaxes, scale, fmt)
        fits = fmt.max / np.asarray(scale, np.float64)
        color, dash = look["color"], look["linestyle"]
        label = f"fits, {name}: {missed.sum()} clipped"
        said.append(f"{name} clips {missed.sum()}")
        ax.step(steps, fits, where="mid", lw=1.3, label=label, color=color, ls=dash)
        ax.plot(steps[missed], amaxes[missed], "x", color=color, markersize=6)
    ax.set_yscale("log", base=2)
    title = f"of {amaxes.size} steps {', '.join(said)}"
    ax.set(xlabel="optimizer step", ylabel="magnitude", title=title)
    style.legend(ax)
    return style.plain(ax, grid="both")
