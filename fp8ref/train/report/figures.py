"""The figures of a report: losses, gaps to bf16, metrics, heat maps; ``svg`` has their colors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from fp8ref.plots import legends, readout, style
from fp8ref.recipe import ROLES
from fp8ref.spec.attention.products import COUNTED, MEASURED
from fp8ref.train.report import gap as gap_intervals
from fp8ref.train.report import runs, svg
from fp8ref.train.report.runs import Run
from fp8ref.train.report.verdict import Compared, Seeds

__all__ = ["gaps", "heat_map", "losses", "short"]

POINTS = 1000
"""The most points in a curve: a screen shows no more, and every page would carry them."""

DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""The dashes of runs, so that they also differ without colors."""

MEASURES: dict[str, tuple[str, bool, Callable]] = {
    "amax": ("largest magnitude (log2)", True, np.log2),
    "underflow_rate": ("underflow, % of elements", True, lambda x: 100 * x),
    "saturation_rate": ("saturated, % of elements", True, lambda x: 100 * x),
    "overflow_rate": ("clipped beyond max, % of elements", True, lambda x: 100 * x),
    "sqnr": ("SQNR, dB", False, lambda x: x),
}
"""{measure: (title, whether the larger value of a tensor's two GEMMs is shown, transform)}."""

ONE_SCALE = ("sqnr", "underflow_rate", "saturation_rate", "overflow_rate")
"""The measures whose maps compare: one scale of colors for all roles of all runs of a group."""

STATES = {
    "v_lost": "v lost",
    "bounded": "bounded",
    "clipped_m": "m clipped",
    "clipped_v": "v clipped",
    "stalled_m": "m stalled",
    "stalled_v": "v stalled",
}
"""{count of the health of states (O-12): label of its line}."""


def losses(group: Sequence[Run], seeds: Seeds) -> Figure:
    """Running means of the training losses, over the range of the bf16 seeds."""
    with _axes("optimizer step", "training loss, nats") as (figure, ax):
        if seeds.band is not None:
            _band(ax, seeds.steps, *seeds.band, svg.BAND)
        for run, look in _looks(group, seeds):
            if not run.losses:  # its first step was not finite
                continue
            steps = np.array(list(run.losses))
            width = _width(seeds, len(steps))
            means = gap_intervals.running_mean(runs.at(run.losses, steps), width)
            _line(ax, steps[width - 1 :], means, run.name, look)
    return figure


def gaps(
    compared: Sequence[Compared], group: Sequence[Run], seeds: Seeds, *, margin: float = 0.0
) -> Figure:
    """The gap of each arm to bf16, with its interval, over the margin of equivalence.

    The y axis is scaled to the gaps; the margin may lie outside.
    """
    looks = {id(run): look for run, look in _looks(group, seeds)}
    with _axes("optimizer step", "loss minus bf16's, nats") as (figure, ax):
        if margin:
            longest = max((arm.steps for arm in compared), key=len)
            bound = np.full(len(longest), margin)
            _band(ax, longest, -bound, bound, svg.BAND)
        ax.axhline(0, color=svg.MUTED, linewidth=0.8)
        for arm in compared:
            look = looks[id(arm.runs[0])]
            _band(ax, arm.steps, arm.gap.low, arm.gap.high, look["color"])
            name = arm.runs[0].name + f", {len(arm.runs)} seeds" * (len(arm.runs) > 1)
            gap = arm.gap
            _line(ax, arm.steps, gap.mean, name, look, low=gap.low, high=gap.high)
        below = 1.25 * max(float(np.max(-a.gap.low)) for a in compared)
        above = 1.25 * max(float(np.max(a.gap.high)) for a in compared)
        widest = max(below, above)
        least = 1.5 * margin if margin < 3 * widest else 0.1 * widest
        if least > 0:
            ax.set_ylim(-max(below, least), max(above, least))
    return figure


def metric(group: Sequence[Run], seeds: Seeds, key: str, ylabel: str) -> Figure | None:
    """A metric of every run, speeds as running means; None if no run has it more than once."""
    curves = [(run, look, run.curve(key)) for run, look in _looks(group, seeds)]
    present = [entry for entry in curves if entry[2]]
    if max((len(curve) for _, _, curve in present), default=0) < 2:
        return None
    with _axes("optimizer step", ylabel) as (figure, ax):
        for run, look, curve in present:
            values = np.array(list(curve.values()))
            width = _width(seeds, len(curve)) if key == "tokens_per_second" else 1
            means = gap_intervals.running_mean(values, width)
            values = _peaks(values) if key == "grad_norm" else means
            steps = np.array(list(curve))[width - 1 :]
            _line(ax, steps, values, run.name, look | _markers(len(curve)))
        # a log has no zero
        if key == "grad_norm" and any(any(curve.values()) for _, _, curve in present):
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter(NullFormatter())
    return figure


def scale(group: Sequence[Sequence[dict]], measure: str) -> tuple[float, float] | None:
    """The ends of the one color scale of a measure's maps, of several runs; None without values.

    Raises:   KeyError: an unknown measure.
    """
    roles = (_tables(statistics, measure).values() for statistics in group)
    tables = [values for tables in roles for _, values in tables]
    numbers = np.concatenate([np.empty(0), *(values[np.isfinite(values)] for values in tables)])
    if not numbers.size or measure not in ONE_SCALE:
        return None
    return float(numbers.min()), float(numbers.max())


def heat_map(
    statistics: Sequence[dict], measure: str, ends: tuple[float, float] | None = None
) -> Figure | None:
    """A measure over layers and steps, one map per role; None if it was never recorded.

    A tensor is used by two GEMMs of its layer: the worse value is shown.

    ends      of the one scale of colors of all roles (``scale``); None: each role has its own.
    """
    title, tables = MEASURES[measure][0], _tables(statistics, measure)
    if not tables:
        return None
    low, high = ends or (None, None)
    steps = [line["step"] for line in statistics]
    rows = max(len(layers) for layers, _ in tables.values())
    with matplotlib.rc_context(svg.STYLE):
        height = 0.9 + len(tables) * min(3.2, 0.55 + 0.14 * rows)
        figure = Figure(figsize=(4.8, height), layout="constrained")
        axes = np.atleast_1d(figure.subplots(len(tables), 1, sharex=True))
        for ax, (role, (layers, values)) in zip(axes, tables.items(), strict=True):
            image = style.cells(ax, values, "cividis", low, high)
            labels = [short(layer) for layer in layers]
            columns = [f"step {step}" for step in steps]
            readout.cells(image, layers, columns, what=title, labels=labels, places=steps)
            ax.set_title(role, fontsize=10, loc="left")
            every = -(-len(layers) // 24)
            rows_named = range(0, len(layers), every)
            ax.set_yticks(rows_named, labels[::every], fontsize=7, parse_math=False)
            shown = np.unique(np.linspace(0, len(steps) - 1, min(6, len(steps))).astype(int))
            ax.set_xticks(shown, [steps[i] for i in shown])
            if ends is None:
                _colorbar(figure, image, [ax], title)
        if ends is not None:
            _colorbar(figure, image, list(axes), title)
        axes[-1].set_xlabel("optimizer step")
    return figure


def states(statistics: Sequence[dict]) -> Figure | None:
    """The health of a run's optimizer states over steps: counts in percent of all elements, and
    below them the error of the update and the bias of sqrt(v); None if it was never recorded."""
    lines = [(line["step"], line["states"][""]) for line in statistics if line.get("states")]
    if not lines:
        return None
    steps = np.array([step for step, _ in lines])
    curves = {
        label: np.array([100 * whole[key] / whole["count"] for _, whole in lines])
        for key, label in STATES.items()
    }
    curves = {label: values for label, values in curves.items() if values.any()}
    figures = {
        "update error": _percent(lines, "update_error"),
        "bias of sqrt(v)": _percent(lines, "root_bias"),
    }
    entries: dict[str, Any] = {}
    with matplotlib.rc_context(svg.STYLE):
        figure = Figure(figsize=(4.8, 4.8), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        for ax, ax_curves in ((upper, curves), (lower, figures)):
            for label, values in ax_curves.items():
                (entries[label],) = ax.plot(
                    steps,
                    values,
                    linewidth=1.5,
                    label=label,
                    **_distinct(len(entries)),
                    **_markers(len(lines)),
                )
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(axis="y", color=svg.LINE, linewidth=0.6)
            ax.set_xlabel("optimizer step")
        upper.xaxis.label.set_visible(False)  # a readout names it
        upper.set(ylabel="% of elements")
        lower.set(ylabel="%")
        lower.axhline(0, color=svg.MUTED, linewidth=0.8)
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        legends.below(figure, entries)
    return figure


def _colorbar(figure: Figure, image: AxesImage, axes: list[Axes], title: str) -> None:
    bar = figure.colorbar(image, ax=axes, fraction=0.06, aspect=18 * len(axes))
    bar.set_label(title, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _percent(lines: Sequence[tuple[int, dict]], key: str) -> np.ndarray:
    return np.array([np.nan if whole.get(key) is None else 100 * whole[key] for _, whole in lines])


def _tables(statistics: Sequence[dict], measure: str) -> dict[str, tuple[list[str], np.ndarray]]:
    """{role: (layers, values [layers, steps])} of a measure, as a map shows it; without roles that
    have no finite number, and those of which nothing was clipped."""
    _, larger, shown = MEASURES[measure]
    roles = (*ROLES, *MEASURED, *(role for _, role in COUNTED))
    tables = {role: _table(statistics, role, measure, larger) for role in roles}
    present = {role: table for role, table in tables.items() if np.isfinite(table[1]).any()}
    if measure == "overflow_rate":
        present = {role: table for role, table in present.items() if np.nanmax(table[1]) > 0}
    return {role: (layers, shown(values)) for role, (layers, values) in present.items()}


def _table(
    statistics: Sequence[dict], role: str, measure: str, larger: bool
) -> tuple[list[str], np.ndarray]:
    """(layers with that role, values [layers, steps]), NaN where nothing was recorded."""
    rows: dict[str, np.ndarray] = {}
    worse = np.fmax if larger else np.fmin
    for column, line in enumerate(statistics):
        for key, values in line["statistics"].items():
            layer, _, of = key.rsplit("/", 2)
            if of != role:
                continue
            row = rows.setdefault(layer, np.full(len(statistics), np.nan))
            value = values.get(measure)
            if value is not None and not (measure == "amax" and value == 0):
                row[column] = worse(row[column], value)
    return list(rows), np.array(list(rows.values())).reshape(len(rows), len(statistics))


def short(layer: str) -> str:
    """A layer's name in a map: without what all share."""
    return layer.removeprefix("model.layers.").removeprefix("model.")


def _looks(group: Sequence[Run], seeds: Seeds) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Each run with its line style. All bf16 seeds have one style, in the background."""
    others = 0
    for run in group:
        if any(run is member for member in seeds.runs):
            yield run, {"color": svg.SEED, "linewidth": 1.0, "zorder": 2}
            continue
        yield run, _distinct(others) | {"linewidth": 1.7, "zorder": 3}
        others += 1


def _distinct(i: int) -> dict[str, Any]:
    """The color and dashes of the i-th line: colors first."""
    turn, color = divmod(i, len(svg.RUNS))
    return {"color": svg.RUNS[color], "linestyle": DASHES[turn % len(DASHES)]}


def _markers(count: int) -> dict[str, Any]:
    """Markers of a line of few points."""
    return {"marker": "o", "markersize": 3} if count <= 40 else {}


def _width(seeds: Seeds, count: int) -> int:
    """Window of the running mean, in steps: the seeds', or without a band this run's own."""
    return min(gap_intervals.window(count) if seeds.band is None else seeds.width, count)


def _every(count: int) -> slice:
    """A slice of every k-th of ``count`` points: at most POINTS, the last one included."""
    k = -(-count // POINTS)
    return slice((count - 1) % k if count else 0, None, k)


def _peaks(values: np.ndarray) -> np.ndarray:
    """Running maximum over k points, so that a curve thinned by ``_every`` keeps every peak."""
    k = -(-len(values) // POINTS)
    padded = np.concatenate([np.full(k - 1, -np.inf), values])
    return np.lib.stride_tricks.sliding_window_view(padded, k).max(axis=-1)


def _band(ax: Axes, x, low, high, color: str) -> None:
    some = _every(len(x))
    ax.fill_between(x[some], low[some], high[some], color=color, alpha=0.3, linewidth=0)


def _line(ax: Axes, x, y, name: str, look: dict[str, Any], *, low=None, high=None) -> None:
    some = _every(len(x))
    (line,) = ax.plot(x[some], y[some], **look)
    if low is None:
        readout.name(line, name)
    else:
        readout.name(line, name, low=low[some], high=high[some])


@contextmanager
def _axes(xlabel: str, ylabel: str) -> Iterator[tuple[Figure, Axes]]:
    with matplotlib.rc_context(svg.STYLE):
        figure = Figure(figsize=(4.8, 3.6), layout="constrained")
        ax = figure.subplots()
        ax.set(xlabel=xlabel, ylabel=ylabel)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color=svg.LINE, linewidth=0.6)
        ax.set_axisbelow(True)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        yield figure, ax
        entries: dict[str, Any] = {}  # all seeds have one
        for line in ax.lines:
            if (name := readout.name_of(line)) is not None:
                entries.setdefault("bf16 seeds" if line.get_color() == svg.SEED else name, line)
        legends.below(figure, entries, columns=2)
