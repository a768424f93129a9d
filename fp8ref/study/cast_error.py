"""Cast recorded operands as recipes would, and measure what each cast loses (spec Q)."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fp8ref import recipe as recipes_of
from fp8ref.formats import FLOAT32
from fp8ref.recipe import ROLES, CastSpec, OperandCast, Recipe, Role, fp8_recipes
from fp8ref.shared import console
from fp8ref.shared.result import Result, finite
from fp8ref.sim.attention.operands import hadamard
from fp8ref.sim.quantize import cast, scaling, stats
from fp8ref.spec import granularity
from fp8ref.study import cast_rows
from fp8ref.study import recording as recordings
from fp8ref.study.cast_rows import Row
from fp8ref.study.recording import Operand, Recording

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


FEW = 30
"""The most rows of a table of every operand under every recipe."""

WIDE = 110
"""The columns of a terminal from which a table has all of its columns."""

Measure = Literal["sqnr", "median", "low", "lost", "clipped"]
"""A number of a Row."""


class Summary(NamedTuple):
    """All operands of a role under a recipe: median and lowest SQNR, where that is, the lowest 5th
    percentile of rows, and the largest shares lost and clipped."""

    recipe: str
    role: Role
    median: float
    lowest: float
    at: str
    low: float
    lost: float
    clipped: float


@dataclass(frozen=True, kw_only=True)
class Judged(Result):
    """Every operand under every recipe.

    absent    what the recording lacks, such as gradients, or left out.
    titles    the names of tensors of no model, by "<layer>/<role>".
    causes    by (recipe, layer, role), why an operand loses elements (``cast_rows.cause``).
    non_finite
              by "<layer>/<role>", what an operand holds of Inf and NaN (``cast_rows.non_finite``).
    """

    rows: tuple[Row, ...]
    absent: tuple[str, ...] = ()
    titles: Mapping[str, str] = field(default_factory=dict)
    causes: Mapping[tuple[str, str, Role], str] = field(default_factory=dict)
    non_finite: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether anything was judged."""
        return bool(self.rows)

    @property
    def recipes(self) -> list[str]:
        """The recipes, in the order given."""
        return list(dict.fromkeys(row.recipe for row in self.rows))

    @property
    def layers(self) -> list[str]:
        """The layers, in the order in which they ran."""
        return list(dict.fromkeys(row.layer for row in self.rows))

    @property
    def subject(self) -> str:
        """How many linears, or tensors of no model."""
        titles = {self.title(row) for row in self.rows}
        count = len(titles if self.titles else self.layers)
        return f"{count} {'tensor' if self.titles else 'linear'}{'s' * (count != 1)}"

    def by_layer(self, role: Role, of: Measure = "sqnr") -> np.ndarray:
        """float64 [layers, recipes]: that number of a Row, of a role's two GEMMs the worse; NaN
        where neither casts it. An SQNR that is not a number is -inf."""
        numbers = np.full((len(self.layers), len(self.recipes)), np.nan)
        layers = {name: i for i, name in enumerate(self.layers)}
        recipes = {name: i for i, name in enumerate(self.recipes)}
        worse = np.fmax if of in ("lost", "clipped") else np.fmin
        for row in self.rows:
            if row.role == role:
                at = layers[row.layer], recipes[row.recipe]
                number = getattr(row, of)
                numbers[at] = worse(numbers[at], -math.inf if math.isnan(number) else number)
        return numbers

    def by_operand(self) -> list[Row]:
        """A row for each operand and recipe: of each number the worse of its two GEMMs."""
        return cast_rows.by_operand(self.rows)

    def title(self, row: Row) -> str:
        """What a row's operand is called in a sentence."""
        return self.titles.get(f"{row.layer}/{row.role}", f"the {row.role} of {row.layer}")

    def worst(self, count: int = 10, recipe: str | None = None) -> list[Row]:
        """The worst operands by any measure, of one recipe or all: in turn the lowest SQNR, the
        lowest 5th percentile of rows, the most lost and the most clipped elements, then the second
        of each. Rows are those of ``by_operand``."""
        once = [row for row in self.by_operand() if recipe in (None, row.recipe)]
        orders = [
            sorted(once, key=lambda row: (not math.isnan(row.sqnr), row.sqnr)),
            sorted(once, key=lambda row: row.low),
            sorted((row for row in once if row.lost), key=lambda row: -row.lost),
            sorted((row for row in once if row.clipped), key=lambda row: -row.clipped),
        ]
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*orders))
        return [row for row in dict.fromkeys(in_turn) if row is not None][:count]

    def sentence(self) -> str:
        """What the worst cast does, why, and which recipes do not (``cast_rows.sentence``)."""
        return cast_rows.sentence(self.rows, self.title, self.causes, self.non_finite)

    def by_role(self) -> list[Summary]:
        """For each recipe and role the median over operands, and the worst of each number."""
        summaries = []
        for recipe, role in itertools.product(self.recipes, ROLES):
            rows = [row for row in self.rows if (row.recipe, row.role) == (recipe, role)]
            if rows:
                worst = min(rows, key=lambda row: (not math.isnan(row.sqnr), row.sqnr))
                summary = Summary(
                    recipe,
                    role,
                    median=float(np.median([row.sqnr for row in rows])),
                    lowest=worst.sqnr,
                    at=f"{worst.layer}/{worst.gemm}",
                    low=min(row.low for row in rows),
                    lost=max(row.lost for row in rows),
                    clipped=max(row.clipped for row in rows),
                )
                summaries.append(summary)
        return summaries

    def to_dict(self) -> dict:
        """Rows as lists under their columns; None where a number is not finite."""
        columns = [column.name for column in fields(Row)]
        rows = [[finite(getattr(row, key)) for key in columns] for row in self.rows]
        return {"columns": columns, "rows": rows, "absent": list(self.absent)}

    def render(self, console: "Console") -> None:
        """The sentence, then each operand by recipe; of many the medians by role, the worst."""
        wide = console.width >= WIDE
        say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
        say(self.sentence())
        rows = self.by_operand()
        titles = ("SQNR, dB", "5 % of rows below", "zeroed", "clipped")
        if len(rows) > FEW:
            where = ["at"] if wide else []  # else names have no room
            columns = ["recipe", "operand", "median SQNR, dB", "lowest", *where]
            table = _table(wide, *columns, *titles[1:])
            for recipe, role, median, lowest, at, low, *shares in self.by_role():
                numbers = f"{median:.1f}", f"{lowest:.1f}", *([at] if where else [])
                table.add_row(recipe, role, *numbers, *_cells(low, *shares))
            console.print(table)
            rows = self.worst(10)
            console.print(f"The worst {len(rows)}:", markup=False)
        table = _table(wide, "tensor", "recipe", *titles, "worst rows")
        for row in rows:
            name = self.titles.get(f"{row.layer}/{row.role}", f"{row.layer}/{row.role}")
            numbers = f"{row.sqnr:.1f}", *_cells(row.low, row.lost, row.clipped)
            table.add_row(name, row.recipe, *numbers, ", ".join(map(str, row.worst_rows)))
        console.print(table)
        reasons: dict[str, list[str]] = {}
        for text in self.absent:
            name, mark, why = text.partition(" (")
            reasons.setdefault(mark + why, []).append(name)
        for why, names in reasons.items():
            say(f"not judged: {recordings.some(names)}{why}")


def _table(wide: bool, *titles: str) -> "Table":
    """An empty table: where it is not wide long names go on in the next line, and none is cut."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in titles:
        most = 7 if not wide and title.endswith((" dB", " below", " rows")) else None
        whole = most is None and title not in ("tensor", "at")
        table.add_column(title, overflow="fold", no_wrap=whole, max_width=most)
    return table


def _cells(low: float, lost: float, clipped: float) -> tuple[str, str, str]:
    return f"{low:.1f}", f"{lost:.2%}", f"{clipped:.2%}"


def judge(
    recording: Recording, recipes: Sequence[str | Recipe] | Mapping[str, CastSpec] | None = None
) -> Judged:
    """Cast every recorded operand as each recipe casts it, and measure.

    recipes   names or Recipes; {name: CastSpec}: that cast of every operand in place of a recipe's,
              for a format, granularity or policy; None: all in FP8 that train, not in FP4.
    Scales are those of the whole tensor, and errors those of the rows that were kept. A cast by
    delayed scaling takes this step's amaxes, as if those of the step before were the same.
    Raises:   ValueError: an unknown recipe, one without FP8, or one under simulation alone (R-9); a
              cast that backends neither compute nor emulate.
    Source:   spec S-5 to S-8, Q-1, Q-3.
    """
    recordings.check(recording)
    recordings.listed(recipes, "recipes")
    casts = _casts(recipes)
    rows: list[Row] = []
    once: dict[tuple, dict[str, Any]] = {}
    left_out = [f"{name} ({why})" for name, why in recording.refused.items()]
    absent = dict.fromkeys(left_out if recording.titles else ())
    with console.library_bar("judge", len(recording.layers)) as advance:
        for layer in recording.layers:
            every = ((name, *each) for name, operands in casts.items() for each in operands)
            for name, gemm, role, spec, axis in every:
                operand = recording.operands.get(f"{layer}/{role}")
                if operand is None:
                    if not recording.titles:  # a tensor of no model has one role
                        absent[f"{layer}/{role}"] = None
                    continue
                own_axis = None if spec.granularity == "tensorwise" else axis
                key = layer, role, spec.fmt.name, spec.granularity, spec.policy, own_axis
                if key not in once:
                    once[key] = _measure(operand, spec, axis)
                rows.append(Row(recipe=name, layer=layer, gemm=gemm, role=role, **once[key]))
            advance(layer)
    bad = {name: cast_rows.non_finite(one) for name, one in recording.operands.items()}
    judged = Judged(
        rows=tuple(rows),
        absent=tuple(absent),
        titles=recording.titles,
        non_finite={name: text for name, text in bad.items() if text},
    )
    return replace(judged, causes=_causes(judged, recording, casts))


def _causes(
    judged: Judged, recording: Recording, casts: Mapping[str, list[OperandCast]]
) -> dict[tuple[str, str, Role], str]:
    """Why the operand that loses most elements does: one more cast, or two."""
    row = max(cast_rows.worse_gemms(judged.rows), key=lambda row: row.lost, default=None)
    if row is None or row.lost < cast_rows.SHARE:
        return {}
    (cast,) = (c for c in casts[row.recipe] if (c.gemm, c.role) == (row.gemm, row.role))
    why = cast_rows.cause(
        recording.operands[f"{row.layer}/{row.role}"],
        "row" if row.role == "weight" else "token",
        row.lost,
        lambda other: _measure(other, cast.cast, cast.axis)["lost"],
    )
    return {(row.recipe, row.layer, row.role): why}


def _casts(
    recipes: Sequence[str | Recipe] | Mapping[str, CastSpec] | None,
) -> dict[str, list[OperandCast]]:
    """The casts of operands in FP8 by recipe, as ``judge`` takes recipes."""
    if isinstance(recipes, Mapping):
        if other := [name for name, spec in recipes.items() if not isinstance(spec, CastSpec)]:
            raise ValueError(
                f"a cast is a CastSpec; got {type(recipes[other[0]]).__name__} for "
                f"{other[0]!r}. Recipes are given in a list."
            )
        if alone := [name for name, spec in recipes.items() if spec.simulated]:
            raise ValueError(
                "a study judges casts to FP8, or to e2m1fn in blocks of MX or NVFP4; "
                f"{alone[0]!r} is another. Use fp8ref.sim.linear.quantize_operands."
            )
        return {
            name: [
                OperandCast(gemm, role, spec, axis)
                for gemm, roles in recipes_of.OPERANDS.items()
                for role, axis in zip(roles, recipes_of.REDUCED_AXES[gemm], strict=True)
            ]
            for name, spec in recipes.items()
        }
    named = fp8_recipes() if recipes is None else recipes
    chosen = [recipes_of.check_trained(recipe) for recipe in named]
    if plain := [recipe.name for recipe in chosen if not recipe.fp8]:
        raise ValueError(
            f"a study judges casts to FP8; recipe {plain[0]!r} has none. Leave it out."
        )
    return {recipe.name: recipe.operand_casts for recipe in chosen}


def _measure(operand: Operand, spec: CastSpec, axis: int) -> dict[str, Any]:
    """The numbers of a Row: of the kept rows, by scales of the whole tensor; rotated, by scales of
    the kept rows, of which errors are those before a rotation back. Stochastic: by seed 0."""
    x, kind = operand.kept, spec.granularity
    size = math.lcm(
        granularity.by_name(kind).reduced or 1, spec.rotation.size if spec.rotation else 1
    )
    # zeros, in a last block that is shorter: no other scale (L-5)
    x = np.pad(x, [(0, -x.shape[axis] % size * (d == axis)) for d in range(2)])
    tensor_amax = operand.amax
    if spec.rotation is not None:
        turned = hadamard.rotate_blocks(x if axis else x.T, spec.rotation)
        x = np.ascontiguousarray(turned if axis else turned.T)
        columns = np.abs(x).max(axis=0)
        operand = replace(operand, kept=x, amax=columns.max(), columns=columns)
        tensor_amax = operand.amax
    if kind == "tensorwise":
        amax = operand.amax.reshape(scaling.amax(x, kind, axis=axis).shape)
    elif kind == "rowwise" and axis == 0:
        amax = operand.columns.reshape(scaling.amax(x, kind, axis=axis).shape)
    else:  # of rows, which are whole, or of blocks, which are too
        amax = scaling.amax(x, kind, axis=axis)
    # the policy sees tensors in this dtype, and rounding keeps their order (S-13)
    if spec.policy.compute != FLOAT32:
        amax = cast.round_to(amax, spec.policy.compute).astype(np.float32)
    by, whole = scaling.scales_of(x, amax, tensor_amax, spec.fmt, spec.policy, axis)
    q = scaling.quantize_with(
        x,
        by,
        spec.fmt,
        granularity=kind,
        policy=spec.policy,
        axis=axis,
        rounding=spec.rounding,
        seed=0 if spec.stochastic else None,
    )
    q = q._replace(tensor_scale_inv=whole)
    statistics = stats.statistics(x, q)
    count = operand.kept.size
    rows, columns = operand.kept.shape
    decibels = stats.sqnr_by_row(operand.kept, scaling.dequantize(q)[:rows, :columns])
    median, low = _low(decibels)
    worst = np.argsort(decibels, kind="stable")[: min(3, int((decibels < np.inf).sum()))]
    return {
        "sqnr": float(statistics.sqnr),
        "median": median,
        "low": low,
        "lost": float(statistics.underflows) / count,
        "clipped": float(statistics.overflows) / count,
        "worst_rows": tuple(operand.places[worst].tolist()),
    }


def _low(decibels: np.ndarray) -> tuple[float, float]:
    """The median and the 5th percentile of rows that are not zeros; the lower of two neighbors."""
    numbers = decibels[~np.isnan(decibels)]
    if not numbers.size:
        return math.inf, math.inf
    median, low = np.percentile(numbers, [50, 5], method="lower")
    return float(median), float(low)
