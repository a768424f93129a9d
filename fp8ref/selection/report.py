"""What of a model runs in FP8 and what does not, and why: rows, shares and the table of
``fj.flax.report`` and ``ft.report``.
"""

import contextlib
import contextvars
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from fp8ref.shared import contexts, tables

NAMED = 6
"""The most rows without FP8 that the summary names."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layer, or products of one kind that belong to no layer in FP8.

    path             of the layer; empty for products without one.
    kind             the class of the layer, or what multiplies.
    shape            [N, K] of a linear, else that of its largest parameter, or of the result.
    recipe           the name of the recipe; None without FP8.
    kernel           what multiplies codes on the device; None: no FP8, or a compiler chooses.
    reason           why.
    parameters       their number. One that several layers share counts once.
    in_fp8           those that are multiplied in FP8.
    multiplications  of one forward pass; None where none was run or traced.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    recipe: str | None
    reason: str
    kernel: str | None = None
    parameters: int = 0
    in_fp8: int = 0
    multiplications: int | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Rows of a model, and what share of it is in FP8. As a string, a table.

    A backend's own subclass says which rows are left out, and which of these surprise.
    """

    rows: list[Row] = field(default_factory=list)

    @property
    def parameters(self) -> float:
        """The share of parameters that are multiplied in FP8."""
        return _share(
            sum(row.in_fp8 for row in self.rows), sum(row.parameters for row in self.rows)
        )

    @property
    def multiplications(self) -> float | None:
        """The share of multiplications of a forward pass in FP8; None where none was counted."""
        if all(row.multiplications is None for row in self.rows):
            return None
        counts = [(row.recipe, row.multiplications or 0) for row in self.rows]
        return _share(sum(n for recipe, n in counts if recipe), sum(n for _, n in counts))

    @property
    def left_out(self) -> list[Row]:
        """The rows that multiply matrices without FP8, or may do so."""
        return [row for row in self.rows if row.recipe is None and row.kind != "vectors"]

    def share_of(self, rows: list[Row], *, multiplications: bool = False) -> float:
        """The share of the parameters, or of the multiplications, that some rows have."""
        sizes = {
            id(row): (row.multiplications or 0) if multiplications else row.parameters
            for row in self.rows
        }
        return _share(sum(sizes[id(row)] for row in rows), sum(sizes.values()))

    def summary(self) -> str:
        """One line: shares, and what is left out."""
        layers = [row for row in self.rows if row.recipe]
        shares = [f"{self.parameters:.1%} of the parameters"]
        if self.multiplications is not None:
            shares.append(f"{self.multiplications:.1%} of the multiplications")
        recipes = ", ".join(
            dict.fromkeys(
                f"{row.recipe}{f' by {row.kernel}' if row.kernel else ''}" for row in layers
            )
        )
        line = (
            f"{len(layers)} layer{'s' * (len(layers) != 1)} in "
            f"FP8{f' ({recipes})' if recipes else ''}, {' and '.join(shares)}"
        )
        names = [
            f"{row.path or row.kind} ({row.kind}: {row.reason})"
            if row.path
            else f"{row.kind} ({row.reason})"
            for row in self.left_out
        ]
        more = f"; and {len(names) - NAMED} more" if len(names) > NAMED else ""
        shown = "; ".join(names[:NAMED]) + more
        return f"{line}. Not in FP8: {shown}." if names else f"{line}."

    def headline(self) -> str:
        """A short line: how many of the layers that multiply are in FP8, and which are not."""
        layers, names = (
            [row for row in self.rows if row.recipe],
            [row.path or row.kind for row in self.left_out],
        )
        recipes = ", ".join(dict.fromkeys(str(row.recipe) for row in layers)) or "no recipe"
        line = f"fp8: {len(layers)} of {len(layers) + len(names)} layers ({recipes})"
        more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
        shown = ", ".join([*names[:NAMED], *more])
        return f"{line}; in high precision: {shown}" if names else line

    def __str__(self) -> str:
        columns = {
            "layer": lambda row: row.path or "-",
            "kind": lambda row: row.kind,
            "shape": lambda row: "x".join(map(str, row.shape)) or "-",
            "recipe": lambda row: row.recipe or "-",
            "kernel": lambda row: row.kernel or "-",
            "parameters": lambda row: f"{row.parameters:,}",
            "multiplications": lambda row: f"{row.multiplications or 0:,}",
            "why": lambda row: row.reason,
        }
        if not any(row.kernel for row in self.rows):
            del columns["kernel"]
        if self.multiplications is None:
            del columns["multiplications"]
        rows = [[cell(row) for cell in columns.values()] for row in self.rows]
        return f"{tables.aligned(list(columns), rows)}\n{self.summary()}"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


_quiet = contextvars.ContextVar("quiet", default=False)


def quiet() -> AbstractContextManager[None]:
    """Conversions within print nothing: those of copies, and of the trainer."""
    return contexts.setting(_quiet, True)


def announce(
    report: Report,
    logger: logging.Logger,
    name: str,
    *,
    warns: bool,
    see: str,
    rank: Callable[[], int],
) -> None:
    """Log what became of a model. Where that shows nothing and a person looks, at a terminal or a
    notebook, rank 0 prints a line. A logger with a level of its own is the user's choice: then
    nothing is printed.

    warns     the line is a warning.  see: how to print the report.
    rank      this process's; called only where a line would be printed, as JAX's starts a backend.
    """
    level = logging.WARNING if warns else logging.INFO
    logger.log(level, "convert: %s: %s", name, report.summary())
    shown = logger.isEnabledFor(level) or logger.level != logging.NOTSET
    line = f"{report.headline()}. print({see}) says why."
    # a user's own stream may lack isatty, be closed or break: the model is converted all the same
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if not shown and not _quiet.get() and _person_looks() and rank() == 0:
            print(line)


def _person_looks() -> bool:
    """Whether standard output is a terminal, or a cell of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel") or getattr(sys.stdout, "isatty", bool)()
