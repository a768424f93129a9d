"""Figures as functions, of custom tensors, formats and GEMMs: arrays in, Axes out, no global state.

    figure, (left, right) = plots.figure(2)
    plots.exponent_histogram(left, x, q)
    plots.error_map(right, x, q)
    IPython.display.Image(plots.png(figure))

Every function draws on the given axes and returns them. x is a matrix or a list of numbers of any
floating-point dtype, q the result of ``sim.scaling.quantize``, fmt one of ``fp8ref.formats``.
``figure`` makes the axes, ``png`` the picture.

Colors are Okabe and Ito's, on white, so that figures read in light and dark pages. The notebooks
use these functions. The figures of a report are separate (``fp8ref.train.report.figures``), because
its page chooses their colors.
"""

try:
    import matplotlib as _matplotlib
except ImportError as error:
    raise ImportError(
        f"fp8ref.plots needs matplotlib; {error.name} is missing. Install it with: pip install "
        "'fp8ref[train]'"
    ) from error

from fp8ref.plots.errors import (
    cast_difference,
    cost_map,
    error_histogram,
    error_lines,
    number_table,
    row_lines,
    scale_difference,
    share_by_exponent,
)
from fp8ref.plots.formats import (
    cast_curve,
    code_map,
    near_zero,
    number_line,
    ranges,
    relative_error,
    spacing,
    worst_error,
)
from fp8ref.plots.runs import loss_curves, loss_gaps, staleness, step_lines
from fp8ref.plots.states import health_lines, moment_range, update_ratios
from fp8ref.plots.study import depth_lines, layer_map
from fp8ref.plots.style import figure, png
from fp8ref.plots.tensors import (
    code_difference,
    error_map,
    exponent_histogram,
    fate_map,
    magnitude_map,
)

__all__ = [
    "cast_curve",
    "cast_difference",
    "code_difference",
    "code_map",
    "cost_map",
    "depth_lines",
    "error_histogram",
    "error_lines",
    "error_map",
    "exponent_histogram",
    "fate_map",
    "figure",
    "health_lines",
    "layer_map",
    "loss_curves",
    "loss_gaps",
    "magnitude_map",
    "moment_range",
    "near_zero",
    "number_line",
    "number_table",
    "png",
    "ranges",
    "relative_error",
    "row_lines",
    "scale_difference",
    "share_by_exponent",
    "spacing",
    "staleness",
    "step_lines",
    "update_ratios",
    "worst_error",
]
del _matplotlib
