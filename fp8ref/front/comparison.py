"""Compare what recipes do to one tensor: a table, and a picture of the SQNR of its rows."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8ref.front import quantized
from fp8ref.front.quantized import NUMBERS, Accuracy, Quantized
from fp8ref.recipe import CastSpec, Recipe
from fp8ref.shared import tables
from fp8ref.shared.errors import require
from fp8ref.sim.quantize import scaling
from fp8ref.spec import granularity as granularities

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Comparison", "compare"]

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
"""What ``compare`` takes if no recipe is named."""

COLUMNS = {
    "recipe": ("recipe", "{}"),
    "format": ("format", "{}"),
    "scales": (">scales", "{:,}"),
    "granularity": ("", "{}"),
    "bits": (">bits", "{:.2f}"),
    "sqnr": (">SQNR, dB", "{:.1f}"),
    "zeroed": (">became zero", "{:.2%}"),
    "clipped": (">clipped", "{:.2%}"),
    "worst": (">worst row, dB", "{:.1f}"),
}
"""{key of a row: its header in the table, right-aligned after >, and how it is written}."""


class Table:
    """Rows of numbers and their finding, for a REPL, a notebook and pandas."""

    rows: tuple[dict[str, Any], ...]
    columns: dict[str, tuple[str, str]]
    finding: Callable[[], str]

    def to_pandas(self) -> Any:
        """The rows as a pandas.DataFrame; ImportError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(list(self.rows))

    def _table(self) -> tuple[Sequence[str], list[list[str]]]:
        headers, forms = zip(*self.columns.values(), strict=True)
        values = [[row[key] for key in self.columns] for row in self.rows]
        return headers, [list(map(str.format, forms, cells)) for cells in values]

    def __repr__(self) -> str:
        return f"{tables.aligned(*self._table())}\n{self.finding()}."

    def _repr_html_(self) -> str:
        finding = html.escape(self.finding())
        return f"<div>{tables.as_html(*self._table())}{finding}.</div>"


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Table):
    """One tensor under several recipes. Printed, a table and its finding.

    rows        a dict for each recipe: recipe, format, granularity, policy; scales, their number;
                bits, those of an element with its part of the scales; sqnr in dB, zeroed, clipped,
                median and worst, as in ``Accuracy``.
    accuracies  {recipe: its Accuracy}.
    non_finite  how many elements are NaN or infinite.
    """

    rows: tuple[dict[str, Any], ...]
    accuracies: dict[str, Accuracy]
    non_finite: int = 0
    columns = COLUMNS

    def finding(self) -> str:
        """A sentence: which recipe loses elements, or which keeps the worst row best."""
        if self.non_finite:  # a recipe that makes NaN of a block loses nothing by these measures
            return (
                f"x holds {self.non_finite:,} NaN or infinite elements, which spoil their blocks. "
                "Compare without them."
            )
        return self._loss()

    def _loss(self) -> str:
        zeroed = {row["recipe"]: row["zeroed"] for row in self.rows}
        most, least = max(zeroed, key=zeroed.__getitem__), min(zeroed.values())
        if zeroed[most] >= 1e-3:
            text = f"{most} makes {zeroed[most]:.1%} of the elements zero"
            if zeroed[most] - least < 1e-3:
                return text
            first = next(name for name, share in zeroed.items() if share < least + 1e-3)
            few = f"{zeroed[first]:.1%}" if zeroed[first] >= 1e-3 else "under 0.1%"
            return f"{text}, {first} {few if zeroed[first] else 'none'}"
        low, *_, high = sorted(self.rows * 2, key=lambda row: row["worst"])
        worst, best, names = low["worst"], high["worst"], ", ".join(zeroed)
        if worst == math.inf:
            exact = np.any(next(iter(self.accuracies.values())).rows == math.inf)
            empty = "x has no finite element other than zero: no recipe loses any"
            return f"Every row is exact under {names}" if exact else empty
        text = f"The worst row keeps {worst:.1f} dB"
        if worst == best or best - worst < 1:
            return f"{text}{' or more' * (worst > -math.inf)} under {names}"
        return f"{text} under {low['recipe']}, {best:.1f} dB under {high['recipe']}"

    def to_pandas(self) -> Any:
        """The rows as a pandas.DataFrame, by recipe; ImportError without pandas."""
        return super().to_pandas().set_index("recipe")

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the SQNR of each row, worst to best, under ``finding``; a line a recipe.

        ax        None: of a new figure; save it with ``ax.figure.savefig``.
        Raises:   ImportError without matplotlib, naming the extra.
        """
        from fp8ref import plots

        lines = {name: accuracy.rows for name, accuracy in self.accuracies.items()}
        ax = plots.figure()[1][0] if ax is None else ax
        return plots.row_lines(ax, lines, title=self.finding())


def compare(
    x: Any,
    recipes: Sequence[str | Recipe] | Mapping[str, str | Recipe | CastSpec] = RECIPES,
    *,
    axis: int = -1,
) -> Comparison:
    """Quantize x by each recipe, and measure what it costs.

    x         as ``quantize`` takes it. All is computed in NumPy: each framework has these bits.
    recipes   names or Recipes, as ``quantize`` takes, each once; or {label: such or a CastSpec}.
    axis      the reduced one. The last block along it may be shorter.
    Raises:   ValueError: as ``quantize``; no recipe; one without a name, or two of one name.
    """
    x = quantized.as_numpy(quantized.to_supported(x))
    axis = granularities.normalize_axis(axis, max(x.ndim, 1))
    labels: list[Any]
    listed: list[Any]
    if isinstance(recipes, Mapping):
        labels, listed = list(recipes), list(recipes.values())
    else:
        listed = [recipes] if isinstance(recipes, str | Recipe | CastSpec) else list(recipes)
        labels = [getattr(recipe, "name", recipe) for recipe in listed]
    require(len(listed) > 0, "compare needs a recipe; got none. Name one, or leave them out.")
    names = [x if isinstance(x, str) else type(x).__name__ for x in labels]
    require(
        names == labels and len({*names}) == len(names),
        "each recipe of a comparison has a name of its own, which is text; got "
        f"{', '.join(names)}. Give {{label: recipe}}.",
    )
    rows, accuracies = [], {}
    for name, recipe in zip(labels, listed, strict=True):
        spec = quantized.cast_spec(recipe)
        kind, policy = spec.granularity, spec.policy
        q = scaling.quantize(x, spec.fmt, granularity=kind, policy=policy, axis=axis, ragged=True)
        accuracies[name] = accuracy = quantized.measure(x, q, axis)
        row = {
            "recipe": name,
            "format": spec.fmt.name,
            "granularity": kind,
            "policy": policy.name,
            "scales": q.scale.size,
            "bits": Quantized(q, policy, axis).bits,
        }
        rows.append(row | {key: getattr(accuracy, key) for key in NUMBERS})
    return Comparison(tuple(rows), accuracies, int(np.sum(~np.isfinite(x))))
