"""One HTML page of a study, for light and dark screens, with the script of reports."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fp8ref.plots import study as plots
from fp8ref.plots import style
from fp8ref.recipe import ROLES
from fp8ref.shared import extras
from fp8ref.study.attention_error import JudgedAttention
from fp8ref.study.cast_error import Judged
from fp8ref.study.depth_error import Depth
from fp8ref.study.state_error import COLUMNS, JudgedStates
from fp8ref.train.report import figures, svg

try:
    import markupsafe
    import matplotlib
except ImportError:
    extras.require("train", "a page of fp8ref.study", "jinja2", "matplotlib")
    raise

ZEROED = 0.1
"""The per cent of an operand that a recipe makes zero from which there is a map of it."""


def write(
    out: Path,
    judged: Judged,
    depth: Depth | None,
    *,
    attention: JudgedAttention | None = None,
    states: JudgedStates | None = None,
) -> None:
    """Write the page to ``out``."""
    out.write_text(
        svg.template("fp8ref.study").render(
            judged=judged,
            depth=depth,
            attention=attention,
            states=states,
            columns=COLUMNS,
            figures=_figures(judged, depth) | _attention_figures(attention),
            worst=[(recipe, judged.worst(3, recipe)) for recipe in judged.recipes],
        ),
        encoding="utf-8",
    )


def _attention_figures(attention: JudgedAttention | None) -> dict[str, markupsafe.Markup]:
    """{title: <svg>}: the map of errors of attention's output."""
    if attention is None or not attention.rows:
        return {}
    layers, variants, errors = attention.errors()
    what = "error of the output, %"
    return _map(
        "Error of the output of attention", "attention", (layers, variants, 100 * errors), what
    )


def _map(
    title: str,
    name: str,
    table: tuple[Sequence[str], Sequence[str], np.ndarray],
    what: str,
    ends: tuple[float | None, float | None] = (0.0, None),
) -> dict[str, markupsafe.Markup]:
    """{title: <svg>}: a map of layers and recipes; none without a finite number."""
    layers, columns, values = table
    if not np.isfinite(values).any():
        return {}
    with matplotlib.rc_context(svg.STYLE):
        figure, (ax,) = style.figure(width=5, height=max(2.3, 1.6 + 0.16 * min(40, len(layers))))
        low, high = ends
        plots.layer_map(
            ax,
            values,
            [figures.short(layer) for layer in layers],
            columns,
            what=what,
            large_is_worse=not what.startswith("SQNR"),
            low=low,
            high=high,
        )
        return {title: svg.inline(figure, name, f"{title}, by layer")}


def _figures(judged: Judged, depth: Depth | None) -> dict[str, markupsafe.Markup]:
    """{title: <svg>}: error through depth, then the maps of all roles on one scale."""
    drawings = {}
    with matplotlib.rc_context(svg.STYLE):
        if depth is not None and depth.outcomes:
            figure, (ax,) = style.figure(width=5)
            errors = {name: list(one.inputs.values()) for name, one in depth.outcomes.items()}
            layers = max((list(one.inputs) for one in depth.outcomes.values()), key=len)
            names = [figures.short(layer) for layer in layers]
            plots.depth_lines(ax, errors, colors=svg.RUNS, layers=names)
            ax.grid(color=svg.LINE)
            drawings["Error of the input of each linear"] = svg.inline(
                figure, "depth", "Error of each linear's input, by recipe"
            )
    maps = {role: judged.by_layer(role, "low") for role in ROLES}
    numbers = np.concatenate([values[np.isfinite(values)] for values in maps.values()])
    # a few good ones hide no bad ones
    low, high = 0.0, 1.0
    if numbers.size:
        low, high = float(numbers.min()), float(np.quantile(numbers, 0.95))
    zeroed = {role: 100 * judged.by_layer(role, "lost") for role in ROLES}
    most = max((float(np.nanmax(v)) for v in zeroed.values() if np.isfinite(v).any()), default=0.0)
    for role, values in maps.items():
        title = f"SQNR of {role}, 5th percentile of {'rows' if role == 'weight' else 'tokens'}"
        table = judged.layers, judged.recipes, values
        drawings |= _map(title, role, table, "SQNR, dB", (low, high))
        if np.nan_to_num(zeroed[role]).max(initial=0.0) >= ZEROED:
            table = judged.layers, judged.recipes, zeroed[role]
            drawings |= _map(f"Zeroed of {role}", f"{role}_zeroed", table, "zeroed, %", (0.0, most))
    return drawings
