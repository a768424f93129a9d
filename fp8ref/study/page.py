"""One HTML page of a study, for light and dark screens, with the script of reports."""

from pathlib import Path

import numpy as np

import fp8ref
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
            policy=svg.policy(),
            style=svg.style(),
            script=svg.script(),
            version=fp8ref.__version__,
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
    with matplotlib.rc_context(svg.STYLE):
        figure, (ax,) = style.figure(width=5, height=1.6 + 0.16 * min(40, len(layers)))
        plots.attention_map(ax, errors, [figures.short(layer) for layer in layers], variants)
        drawn = svg.inline(
            figure, "attention", "Error of the output of attention, by layer and variant"
        )
    return {"Error of the output of attention": drawn}


def _figures(judged: Judged, depth: Depth | None) -> dict[str, markupsafe.Markup]:
    """{title: <svg>}: error through depth, then the maps of all roles on one scale."""
    drawings = {}
    with matplotlib.rc_context(svg.STYLE):
        if depth is not None and depth.outcomes:
            figure, (ax,) = style.figure(width=5)
            errors = {name: list(one.inputs.values()) for name, one in depth.outcomes.items()}
            plots.depth_lines(
                ax,
                errors,
                colors=svg.RUNS,
                layers=max((list(one.inputs) for one in depth.outcomes.values()), key=len),
            )
            ax.grid(color=svg.LINE)
            drawings["Error of the input of each linear"] = svg.inline(
                figure, "depth", "Error of each linear's input, by recipe"
            )
        maps = {role: judged.sqnr(role, "low") for role in ROLES}
        numbers = np.concatenate([values[np.isfinite(values)] for values in maps.values()])
        # a few good ones hide no bad ones
        low, high = (
            (float(numbers.min()), float(np.quantile(numbers, 0.95)))
            if numbers.size
            else (0.0, 1.0)
        )
        for role, values in maps.items():
            if np.isfinite(values).any():
                figure, (ax,) = style.figure(
                    width=5, height=1.6 + 0.16 * min(40, len(judged.layers))
                )
                plots.sqnr_map(
                    ax,
                    values,
                    [figures.short(layer) for layer in judged.layers],
                    judged.recipes,
                    low=low,
                    high=high,
                )
                title = (
                    f"SQNR of {role}, 5th percentile of {'rows' if role == 'weight' else 'tokens'}"
                )
                drawings[title] = svg.inline(figure, role, f"{title}, by layer and recipe")
    return drawings
