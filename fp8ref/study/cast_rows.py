"""The rows of judged casts, and what matters of them in one sentence: what becomes zero, is clipped
or loses its digits, why, and which recipes keep it.

A cause is tested, not guessed: the operand is cast again without the rows, or the columns, that
stand out, and they are the cause if half of the loss or more goes with them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp8ref.recipe import Gemm, Role
from fp8ref.study.recording import Operand

__all__ = ["Row", "by_operand", "cause", "non_finite", "sentence", "worse_gemms"]

SHARE = 0.01
"""The share of a tensor's elements that become zero, or are clipped, from which a cast is named."""

SEEN = 0.00005
"""The share from which a table shows other than 0.00 %: a better recipe's is named from there."""

NOTHING = "; there is nothing to judge"
"""The end of what ``non_finite`` says of an operand without a finite number but 0."""

DECIBELS = 20.0
"""The SQNR of the 5th percentile of rows below which a cast is named: e5m2 has about 25 dB."""

OUTLIER = 16.0
"""How many times the median's amax an outlying row or column has at least."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operand of one GEMM of a layer, under one recipe.

    sqnr      10 log10(signal / noise) in dB (Q-1), of all rows together: a few large elements may
              own it.
    median, low
              the median and the 5th percentile over rows, which are tokens of an input or a
              gradient, of a row's own SQNR; rows of zeros are left out, and one that is not a
              number counts as -inf.
    lost      the share of all elements that are other than zero and become zero (Q-3).
    clipped   the share that rounds beyond the format's range (C-4).
    worst_rows
              the numbers of the three rows of the lowest SQNR, the lowest first.
    """

    recipe: str
    layer: str
    gemm: Gemm
    role: Role
    sqnr: float
    median: float
    low: float
    lost: float
    clipped: float
    worst_rows: tuple[int, ...] = ()


def by_operand(rows: Sequence[Row]) -> list[Row]:
    """A row for each operand and recipe: of each number the worse of its two GEMMs.

    ``gemm`` and ``worst_rows`` are those of the lower 5th percentile.
    """
    alike: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.layer, row.role, row.recipe), []).append(row)
    operands = list(dict.fromkeys(key[:2] for key in alike))
    return [
        replace(
            min(alike[key], key=lambda row: row.low),
            sqnr=min((row.sqnr for row in alike[key]), key=lambda n: (not np.isnan(n), n)),
            median=min(row.median for row in alike[key]),
            lost=max(row.lost for row in alike[key]),
            clipped=max(row.clipped for row in alike[key]),
        )
        for key in sorted(alike, key=lambda key: operands.index(key[:2]))
    ]


def worse_gemms(rows: Sequence[Row]) -> list[Row]:
    """A row for each operand and recipe: its GEMM that loses or clips more, or has worse rows."""
    worse: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = row.layer, row.role, row.recipe
        other = worse.setdefault(key, row)
        if (_share(row), -row.low) > (_share(other), -other.low):
            worse[key] = row
    operands = list(dict.fromkeys(key[:2] for key in worse))
    return [worse[key] for key in sorted(worse, key=lambda key: operands.index(key[:2]))]


def non_finite(operand: Operand) -> str:
    """What an operand holds of Inf and NaN: "holds 1 Inf", of the kept rows; "" if none."""
    x = operand.kept
    counts = {"Inf": int(np.isinf(x).sum()), "NaN": int(np.isnan(x).sum())}
    parts = [f"{count:,} {name}" for name, count in counts.items() if count]
    whole = operand.rows <= len(x)
    if counts["NaN"] == x.size:
        return f"is all NaN{'' if whole else ' in the rows that were kept'}{NOTHING}"
    if parts:
        among = f" in the {len(x):,} of {operand.rows:,} rows that were kept"
        where = "" if whole else among
        others = (np.isfinite(x) & (x != 0)).any()
        nothing = "" if others else f" and no other number but 0{NOTHING}"
        return f"holds {' and '.join(parts)}{where}{nothing}"
    seen = np.isfinite(operand.columns).all() and np.isfinite(operand.amax).all()
    return "" if seen else "holds Inf or NaN in rows that were not kept"


def sentence(
    rows: Sequence[Row],
    title: Callable[[Row], str],
    causes: Mapping[tuple[str, str, Role], str],
    bad: Mapping[str, str],
) -> str:
    """What holds Inf or NaN; what the worst cast does to its operand, why, and better recipes.

    title     what a row's operand is called.
    causes    by (recipe, layer, role), what ``cause`` found.
    bad       by "<layer>/<role>", what ``non_finite`` found.
    """
    if not rows:
        return "No operand was cast."
    names = {f"{row.layer}/{row.role}": title(row) for row in rows}
    texts = [f"{name} {bad[key]}" for key, name in names.items() if key in bad]
    if len(texts) > 3:
        texts[2:] = [f"{len(texts) - 2} more hold Inf or NaN"]
    first = f"{'; '.join(texts)}." if texts else ""
    rows = [r for r in rows if not bad.get(f"{r.layer}/{r.role}", "").endswith(NOTHING)]
    return " ".join(filter(None, [first, _worst_cast(rows, title, causes, bad) if rows else ""]))


def _worst_cast(
    rows: Sequence[Row],
    title: Callable[[Row], str],
    causes: Mapping[tuple[str, str, Role], str],
    named: Mapping[str, str],
) -> str:
    """The second part of ``sentence``; named: operands whose Inf and NaN the first part names."""
    once = worse_gemms(rows)
    worst = max(once, key=_share)
    if _share(worst) >= SHARE:
        why = causes.get((worst.recipe, worst.layer, worst.role), "")
        return _loss(rows, worst, f"{title(worst)}{_gemm(rows, worst, _share)}{why}")
    worst = min(rows, key=lambda row: row.low)
    name = f"{title(worst)}{_gemm(rows, worst, lambda row: row.low)}"
    if worst.low == -np.inf:
        bad = [row.recipe for row in _alike(rows, worst) if row.low == -np.inf]
        why = "" if f"{worst.layer}/{worst.role}" in named else ": it holds NaN or Inf"
        verb = "turns" if len(bad) == 1 else "turn"
        return f"{_listed(bad)} {verb} rows of {name} into NaN{why}."
    if worst.low < DECIBELS:
        return _low(_alike(rows, worst), worst, name)
    most, low = max(map(_share, once)), worst.low
    lost = f"more than {_percent(most)} of a tensor" if most else "an element"
    by_row = any(row.worst_rows for row in rows)
    exact = "95 % of the rows are" if by_row else "every row is"
    enough = f"95 % of the rows keep {low:.0f} dB or more"
    kept = f"{exact} exact" if low == np.inf else enough
    return f"No cast of these recipes zeroes or clips {lost}, and {kept}."


def _loss(rows: Sequence[Row], worst: Row, what: str) -> str:
    """Elements that become zero, or are clipped."""
    kind = "lost" if worst.lost >= worst.clipped else "clipped"
    share, alike = getattr(worst, kind), _alike(rows, worst)
    bad = [row.recipe for row in alike if getattr(row, kind) == share]
    text = f"{_listed(bad)} {_verb(worst, bad)} {_percent(share)} of {what}"
    good = [row.recipe for row in alike if _share(row) <= SHARE / 10]
    if not good:
        best = min(alike, key=_share)
        if _share(best) < share / 2:
            return f"{text}; {best.recipe} loses {_percent(_share(best))}."
        return f"{text}{'; no other recipe does much better' if len(alike) > len(bad) else ''}."
    same = worst.layer, worst.role
    others = [r for r in worse_gemms(rows) if (r.layer, r.role) == same and r.recipe in good]
    other = max(others, key=_share)
    but = f" ({other.recipe} loses {_percent(_share(other))} in the {other.gemm} GEMM)"
    but = but if _share(other) >= SHARE else ""
    most = max((row for row in alike if row.recipe in good), key=_share)
    does = f"{'does' if len(good) == 1 else 'do'} not"
    if _share(most) >= SEEN:
        less = f"{_percent(_share(most))}{' or less' if len(good) > 1 else ''}"
        does = f"{_verb(most, good)} {less}"
    return f"{text}; {_listed(good)} {does}{but}."


def _verb(row: Row, recipes: Sequence[str]) -> str:
    """What the recipes do to most of the elements that a row loses."""
    verb = ("zeroe", "zero") if row.lost >= row.clipped else ("clip", "clip")
    return f"{verb[0]}s" if len(recipes) == 1 else verb[1]


def _low(alike: Sequence[Row], worst: Row, name: str) -> str:
    """Rows whose error is large though few elements are lost."""
    best = max(alike, key=lambda row: row.low)
    what = f"leaves 5 % of the rows of {name}"
    numbers = f"{worst.recipe} at {worst.low:.0f} dB, {best.recipe} at {best.low:.0f} dB"
    if len(alike) > 1 and best.low < DECIBELS:
        return f"Every recipe {what} below {DECIBELS:.0f} dB of SQNR: {numbers}."
    keeps = f"; {best.recipe} keeps {best.low:.0f} dB" if len(alike) > 1 else ""
    return f"{worst.recipe} {what} at {worst.low:.0f} dB of SQNR or less{keeps}."


def _alike(rows: Sequence[Row], row: Row) -> list[Row]:
    """The rows of the same operand in the same GEMM, of every recipe."""
    same = row.layer, row.role, row.gemm
    return [other for other in rows if (other.layer, other.role, other.gemm) == same]


def _gemm(rows: Sequence[Row], row: Row, of: Callable[[Row], float]) -> str:
    """In which GEMM, where that number is another in another."""
    same = row.layer, row.role, row.recipe
    numbers = {of(r) for r in rows if (r.layer, r.role, r.recipe) == same}
    return f" in the {row.gemm} GEMM" if len(numbers) > 1 else ""


def cause(operand: Operand, row: str, lost: float, again: Callable[[Operand], float]) -> str:
    """Why an operand loses so many elements: " because ..."; "" if neither rows nor columns stand
    out, or the loss stays without them.

    row       what a row is: token, or row.
    lost      the share that is lost.
    again     the share that another operand, of the same shape, would lose by the same cast.
    """
    magnitudes = np.abs(operand.kept)
    causes = []
    for axis, what in enumerate((row, "column")):
        amax = np.nan_to_num(magnitudes.max(axis=1 - axis), nan=0.0, posinf=0.0)
        usual = float(np.median(amax[amax > 0])) if amax.any() else np.inf
        places = np.flatnonzero(amax > OUTLIER * usual)
        if not 0 < len(places) <= len(amax) / 8:
            continue
        kept = operand.kept.copy()
        kept[(places,) if axis == 0 else (slice(None), places)] = 0.0
        columns = np.abs(kept).max(axis=0)
        others = replace(operand, kept=kept, amax=columns.max(), columns=columns)
        if again(others) <= lost / 2:
            first = places[amax[places].argmax()]
            number = int(operand.places[first]) if axis == 0 else int(first)
            times = f"{float(f'{amax[first] / usual:.2g}'):,.0f}x larger than the median {what}"
            more = f" and {len(places) - 1} more are up to" if len(places) > 1 else " is"
            causes.append((f"{what} {number}{more} {times}", f"{what} {number}"))
    if not causes:
        return ""
    return f" because {causes[0][0]}" + (f", in {causes[1][1]}" if len(causes) > 1 else "")


def _share(row: Row) -> float:
    return row.lost + row.clipped


def _percent(share: float) -> str:
    """A share in per cent, to two digits; never 0 or 100 for another."""
    rounded = float(f"{100 * share:.2g}")
    return f"{min(rounded, 99) if share < 1 else 100:g} %"


def _listed(names: Sequence[str], most: int = 4) -> str:
    names = list(dict.fromkeys(names))
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
