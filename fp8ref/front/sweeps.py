"""Sweep distributions, casts and sums without a model: what does each combination cost?"""

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fp8ref.front import comparison, quantized
from fp8ref.policy import UNSCALED
from fp8ref.shared import errors
from fp8ref.shared.errors import integer, one_of, require
from fp8ref.sim.gemm import accumulate as plans
from fp8ref.sim.gemm import gemm
from fp8ref.sim.linear import cast_operand
from fp8ref.sim.quantize import stats
from fp8ref.spec.gemm import CastSpec

__all__ = ["Distribution", "Sweep", "sweep"]

Axis = Any  # a value; or a sequence of values, which is swept

_TAILS: dict[str, Callable] = {
    "normal": lambda own, rng, shape: rng.standard_normal(shape),
    "uniform": lambda own, rng, shape: rng.uniform(-1, 1, shape),
    "laplace": lambda own, rng, shape: rng.laplace(size=shape),
    "student_t": lambda own, rng, shape: rng.standard_t(own.nu, shape),
    "lognormal": lambda own, rng, shape: rng.lognormal(0, own.sigma, shape),
}
_PARAMETERS = {"student_t": "nu", "lognormal": "sigma"}

MEASURES = {
    **{key: comparison.COLUMNS[key] for key in ("sqnr", "worst", "zeroed", "clipped")},
    "bias": (">bias", "{:+.2%}"),
    "cast_error": (">casts' error", "{:.2%}"),
    "sum_error": (">sum's error", "{:.3%}"),
}
"""{measure: its header, and how it is written}; the other keys of a row are axes."""


@dataclass(frozen=True, eq=False)
class Distribution:
    """What tensors of tokens (rows) and channels are drawn from. Any field may be swept.

    tail       normal, uniform in [-1, 1), laplace, student_t (nu) or lognormal (sigma)
    scale, token_factor, channel_factor
               of all elements, and of outliers: a share of rows or columns, at least one
    Raises:    ValueError: an unknown tail, a number out of range.
    """

    tail: Axis = "normal"
    nu: Axis = 4.0
    sigma: Axis = 1.0
    scale: Axis = 1.0
    token_factor: Axis = 1.0
    token_share: Axis = 0.01
    channel_factor: Axis = 1.0
    channel_share: Axis = 0.01

    def __post_init__(self) -> None:
        for tail in _values(self.tail):
            one_of("tail", tail, _TAILS)
        for name, axis in list(vars(self).items())[1:]:
            low, listed = {"nu": 1e-3, "scale": 1e-30}.get(name, 0), _values(axis)
            top = 1 if "share" in name else 1e30
            fits = [isinstance(v, int | float) and low <= v <= top for v in listed]
            require(all(fits), f"{name} is from {low:g} to {top:g}; got {axis!r}.")

    def draw(self, seed: int, shape: tuple[int, int]) -> np.ndarray:
        """A tensor, float32, of single values in each field. Order: as ``sweep``."""
        generators = [np.random.default_rng([seed, i]) for i in range(3)]
        x = self.scale * _TAILS[self.tail](self, generators[0], shape)
        for axis, side in enumerate(("token", "channel")):
            share = getattr(self, f"{side}_share")
            order = generators[1 + axis].permutation(shape[axis])
            places = order[: max(round(share * shape[axis]), share > 0)]
            np.moveaxis(x, axis, 0)[places] *= getattr(self, f"{side}_factor")
        require(bool(np.abs(x).max() < 3e38), f"{self} has elements above 3e38.")
        return x.astype(np.float32)


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(comparison.Table):
    """What each combination of a sweep costs. Printed, a table and its finding.

    rows      dicts of axes and measures: those of ``Accuracy``; with k also root mean
              squares (Q-7): cast_error, of the exact sum over codes against float64;
              sum_error, of the accumulation against that exact sum.
    columns   {swept axis, or measure: its header, and how it is written}.
    left_out  why combinations do not exist.
    """

    rows: tuple[dict[str, Any], ...]
    columns: dict[str, tuple[str, str]]
    left_out: tuple[str, ...]

    def finding(self, value: str = "") -> str:
        """The best and the worst of a measure; by default of sum_error or sqnr, and after it
        what was left out."""
        if not value:
            text = self.finding("sum_error" if "sum_error" in self.columns else "sqnr")
            return "\nLeft out: ".join([text, *self.left_out]).removesuffix(".")
        header, form = self.columns[value]
        share = "%" in form  # of elements or of an error, which may be of either sign
        rows = sorted(self.rows, key=lambda row: abs(row[value]) if share else -row[value])
        best, worst = (form.format(row[value]) for row in (rows[0], rows[-1]))
        if best == worst:
            return f"{header[1:]}: {best}"
        text = f"{header[1:]}: best {best} ({self._label(rows[0])})"
        return f"{text}\nand worst {worst} ({self._label(rows[-1])})"

    def heatmap(self, x: str, y: str, value: str = "sqnr") -> Any:
        """Draw a measure over two axes, its number in each cell; empty: left out. Returns
        matplotlib's Axes, or a Figure of maps if further axes are swept. Raises ValueError
        unless axes are swept and the value is a measure, ImportError without matplotlib.
        """
        from fp8ref import plots

        maps, (header, form) = self._groups(value, y, x), self.columns[value]
        down, across = (dict.fromkeys(row[a] for row in self.rows) for a in (y, x))
        names = [*map(self.columns[y][1].format, down)]
        titles = [*map(self.columns[x][1].format, across)]
        numbers = [[[m.get((i, j)) for j in across] for i in down] for m in maps.values()]
        cells = np.array(numbers, np.float64)  # None, which was left out, becomes NaN
        shown = cells[np.isfinite(cells)]
        ends = (np.min(shown), np.max(shown)) if shown.size else (None, None)
        count, cmap = min(len(maps), 3), "viridis_r" if "%" in form else "viridis"
        wide = max(6 / count, 1.6 + len(titles) * max(map(len, titles)) / 11)
        lines, high = -(-len(maps) // count), 1.5 + 0.4 * len(names)
        figure, axes = plots.figure(count, lines, width=wide, height=high)
        for ax, name, grid in zip(axes, maps, cells, strict=False):
            plots.number_table(ax, grid, names, titles, text=form, cmap=cmap, ends=ends)
            ax.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
            ax.set_title(f"{header[1:]}, {name}".removesuffix(", "), fontsize=9)
        for ax in axes[len(maps) :]:
            ax.remove()
        figure.suptitle(self.finding(value), fontsize=10)
        return axes[0] if len(maps) == 1 else figure

    def plot(self, x: str, value: str = "sqnr") -> Any:
        """Draw a measure over an axis of numbers, a line for each value of the others, on
        matplotlib's Axes, which is returned. Raises as ``heatmap``."""
        from fp8ref.plots import style

        lines, (figure, (ax,)) = self._groups(value, x), style.figure()
        require(not isinstance(self.rows[0][x], str), f"{x} has no numbers. Use heatmap.")
        looks = style.layers(len(lines))
        for look, (name, line) in zip(looks, lines.items(), strict=True):
            style.line(ax, [i for (i,) in line], list(line.values()), look, name)
        ax.set_xscale("log", base=10 if "factor" in x else 2)
        if "%" in self.columns[value][1]:
            ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
        ax.set(xlabel=x.replace("_", " "), ylabel=self.columns[value][0][1:])
        figure.suptitle(self.finding(value), fontsize=10)
        style.below(ax)
        return style.plain(ax, grid="both")

    def _groups(self, value: str, *fixed: str) -> dict[str, dict[tuple, float]]:
        """{values of the other axes: {those of fixed ones: the measure}}."""
        one_of("value", value, [key for key in self.columns if key in MEASURES])
        axes = [key for key in self.columns if key not in MEASURES]
        require(bool(axes), "a figure needs an axis of several values; got none. Sweep one.")
        for axis in fixed:
            one_of("an axis", axis, axes)
        groups: dict[str, dict[tuple, float]] = {}
        for row in self.rows:
            group = groups.setdefault(self._label(row, *fixed), {})
            group[tuple(row[axis] for axis in fixed)] = row[value]
        return groups

    def _label(self, row: dict[str, Any], *fixed: str) -> str:
        """The values of the axes, besides some, with their names."""
        axes = [a for a in self.columns if a not in (*MEASURES, *fixed)]
        looks = [(a.replace("_", " "), self.columns[a][1].format(row[a])) for a in axes]
        return ", ".join(f"{name} {text}" for name, text in looks)


def sweep(
    distributions: Axis = "normal",
    formats: Axis = None,
    granularities: Axis = "tensorwise",
    policies: Axis = None,
    roundings: Axis = "nearest_even",
    k: Axis = None,
    accumulate: Axis = "hopper_fast",
    seed: int = 0,
) -> Sweep:
    """Cast tensors of each distribution in each way, and measure what it costs. Sequences
    are swept, and axes crossed. What does not exist is left out, and the result says why.

    distributions  names of tails, or Distributions.
    granularities  or recipes, as ``quantize`` takes both; whose formats and policies are
                   the default. Policy "unscaled": scale 1.
    roundings      nearest_even, stochastic and stochastic_8.
    k, accumulate  multiply by a weight [64, k], standard normal and cast alike, too: by
                   exact, f32 or plans of tensor cores. None: do not multiply. k <= 2^20.
    seed           of stochastic rounding; seed + 1 of that of the weight.

    Shapes:   tensors [1024, 1024], or [64, k]; rows and blocks run along the last axis.
    Order:    numpy's default_rng([seed, 0]) draws a tail in float64; times scale. Outliers
              are the first round(share * n) of the permutation by [seed, 1], and channels
              by [seed, 2]. Weights are drawn by [seed, 3]. Rounded to float32 last.
    Raises:   ValueError: an unknown name, a number out of range; no combination exists.
    """
    errors.seed(seed)
    text = "accumulate is of a sum over k; got no k. Leave it out, or name k."
    require(k is not None or accumulate == "hopper_fast", text)
    swept = {"granularity": granularities, "format": formats, "policy": policies}
    swept |= {"rounding": roundings, "k": k}
    swept["accumulate"] = None if k is None else accumulate
    cells = _cells(distributions, swept)
    rows: list[dict[str, Any]] = []
    reasons: dict[str, None] = {}
    for axes, cell in cells.items():
        try:
            rows.append(dict(axes) | _measure(seed, *cell))
        except ValueError as error:  # each name is right: they do not go together
            reasons[str(error)] = None
    require(len(rows) > 0, f"no combination exists: {', '.join(reasons)}")
    columns = {key: look for key, look in MEASURES.items() if key in rows[0]}
    for key in [key for key in reversed(rows[0]) if key not in columns]:
        name, several = key.replace("_", " "), len(_values(swept.get(key, (0, 1)))) > 1
        look = (name, "{}") if isinstance(rows[0][key], str) else (f">{name}", "{:g}")
        if several and len({row[key] for row in rows}) > 1:
            columns = {key: look} | columns
    return Sweep(tuple(rows), columns, tuple(reasons))


def _cells(distributions: Axis, swept: dict[str, Axis]) -> dict[tuple, tuple]:
    """{axes of a row: what ``_measure`` takes}, of all axes crossed, each once."""
    cells: dict[tuple, tuple] = {}
    for each in _values(distributions):
        own = Distribution(each) if isinstance(each, str) else each
        text = f"distributions are Distributions or tails; got {type(own).__name__}"
        require(isinstance(own, Distribution), f"{text}. Use compare for a tensor.")
        axes = map(_values, (*vars(own).values(), *swept.values()))
        for *point, kind, fmt, rule, mode, k, plan in itertools.product(*axes):
            rule = UNSCALED if rule == "unscaled" else rule
            spec = replace(quantized.cast_spec(kind, fmt, rule), rounding=mode)
            integer("k", 1 if k is None else k, 1, 1 << 20)
            cell = Distribution(*point), spec, k, plan and plans.by_name(plan)
            row = asdict(cell[0]) | {"format": spec.fmt.name}
            parameters = {tail: row.pop(name) for tail, name in _PARAMETERS.items()}
            if (tail := row["tail"]) in parameters:
                row["tail"] += f" {_PARAMETERS[tail]}={parameters[tail]:g}"
            row |= {"granularity": getattr(kind, "name", kind), "policy": spec.policy.name}
            row["rounding"] = mode
            if k is not None:
                row |= {"k": k, "accumulate": getattr(plan, "name", plan)}
            twice = f"two policies or plans have one name; got {row}. Name each its own."
            require(cells.setdefault(tuple(row.items()), cell)[1:] == cell[1:], twice)
    return cells


def _measure(seed: int, point: Distribution, spec: CastSpec, k: Any, plan: Any) -> dict:
    """The measures of a cell; ValueError if its parts do not go together."""
    rule = spec.policy
    if rule.two_level is not None:
        blocks = rule.two_level.granularities
        one_of(f"granularity of {rule.name}", spec.granularity, blocks)
    x = point.draw(seed, (64, k) if k else (1024, 1024))
    q = cast_operand(x, spec, seed, ragged=True)
    accuracy = quantized.measure(x, q, 1)
    row = {key: getattr(accuracy, key) for key in MEASURES if hasattr(accuracy, key)}
    if not k:
        return row
    b = np.random.default_rng([seed, 3]).standard_normal(x.shape).astype(np.float32)
    w = cast_operand(b, spec, seed + 1, ragged=True)
    exact, out = (gemm.matmul(q, w, accumulate=each) for each in ("exact", plan))
    row["cast_error"] = stats.error(exact, gemm.matmul_hp(x, b)).rms_relative
    return row | {"sum_error": stats.error(out, exact).rms_relative}


def _values(axis: Axis) -> tuple[Any, ...]:
    """The values of an axis, each once."""
    listed = [axis] if isinstance(axis, str) or np.ndim(axis) == 0 else list(axis)
    flat = len(listed) > 0 and not any(map(np.ndim, listed))
    require(flat, f"an axis is one value or a flat sequence of some; got {axis!r}.")
    plain = (x.item() if isinstance(x, np.generic) else x for x in listed)
    return tuple(dict.fromkeys(plain))
