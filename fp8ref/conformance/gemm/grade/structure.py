"""What is wrong where every GEMM of 8 bits is right: indices of K, tiles, scales, operands, bias.

``indices`` asks for every index of K alone, ``integers`` compares whole results and looks for the
fault that gives their bits, in all of the result or in the tile that is wrong.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8ref.conformance.gemm.grade import faults
from fp8ref.conformance.gemm.grade.stimuli import Stimulus
from fp8ref.conformance.kit.finding import Counterexample, show
from fp8ref.formats import Format
from fp8ref.sim.quantize import cast

WHOLE = 0.25
"""The part of a tile's results that differ at least: others are right by chance, such as a sum of
0, or one that has no product of those that the tile lacks."""

PARTS = 16  # the most parts of K that a part of it is called one of

NO_PRODUCT = "results without a product are not 0"
"""What is wrong with results that no index of K reaches."""

EVERY = " is added to every result"
"""The end of what is wrong where one number is added to all results, those without a product too.
"""


class Cause(NamedTuple):
    """Why a GEMM is not right.

    name      in words; evidence: how it was found.
    severity  ``wrong`` or ``imprecise``.
    first     the first result that shows it.
    part      the equal part of K that the indices are, in words.
    exact     every result has the bits that it gives.
    """

    name: str
    evidence: str
    severity: str
    first: Counterexample | None = None
    part: str = ""
    exact: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Name, evidence, severity and first result, as --json writes them."""
        first = self.first and self.first.to_dict()
        return {**dict(zip(self._fields[:3], self, strict=False)), "first": first}


class Tile(NamedTuple):
    """Rows and columns [begin, end) of a result."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def place(self) -> tuple[slice, slice]:
        """The index that cuts it out of a result."""
        return slice(*self.rows), slice(*self.columns)

    def __str__(self) -> str:
        (r0, r1), (c0, c1) = self
        return f"rows {r0} to {r1 - 1}, columns {c0} to {c1 - 1}"


def counterexample(
    stimulus: Stimulus, at: Sequence[int], got: float, expected: float, clause: str = "G-2"
) -> Counterexample:
    """One result of a stimulus that differs."""
    return Counterexample(
        f"out{list(map(int, at))} of {stimulus}", show(got), show(expected), clause
    )


def first_of(
    stimulus: Stimulus,
    results: np.ndarray,
    expected: np.ndarray,
    where: np.ndarray,
    clause: str = "G-2",
) -> Counterexample:
    """The first result at which ``where`` [M, N] is true."""
    at = tuple(np.argwhere(where)[0])
    return counterexample(stimulus, at, results[at], expected[at], clause)


def indices(
    places: np.ndarray, stimulus: Stimulus, results: np.ndarray, skipped: Tile | None
) -> list[tuple[str, np.ndarray, Counterexample]]:
    """Indices of K whose product is not added once: (kind, the indices, the first result); of
    results without a product that are not 0, their flat indices.

    places   the index of K whose product alone a result has, [M, N]; -1 of none.
    skipped  a tile that is wrong in a way of its own.
    """
    present, empty = places >= 0, places < 0
    added = results[empty][:1]
    shifted = (present + added).astype(np.float32) if added.size else present
    if added.size and added[0] and np.array_equal(results, shifted):
        first = first_of(stimulus, results, present.astype(np.float32), empty)
        return [(f"{show(added[0])}{EVERY}", np.flatnonzero(empty), first)]
    if skipped is not None:
        present[skipped.place] = False
        empty[skipped.place] = False
    kinds = {
        "dropped": present & (results == 0),
        "added twice": present & (results == 2),
        "added with another factor": present & ~np.isin(results, (0, 1, 2)),
        NO_PRODUCT: empty & (results != 0),
    }
    causes = []
    for kind, at in kinds.items():
        if at.any():
            numbers = np.flatnonzero(at) if kind == NO_PRODUCT else np.sort(places[at])
            first = first_of(stimulus, results, present.astype(np.float32), at)
            causes.append((kind, numbers, first))
    return causes


def ranges(numbers: np.ndarray) -> str:
    """Numbers in words: 0 to 31, 64 to 95; of many ranges the first four."""
    cuts = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    parts = [f"{x[0]}" if len(x) == 1 else f"{x[0]} to {x[-1]}" for x in cuts]
    more = f" and {len(parts) - 4} more ranges" if len(parts) > 4 else ""
    return ", ".join(parts[:4]) + more


def in_words(kind: str, numbers: np.ndarray, k: int) -> str:
    """Indices of K that are not added once, such as: the last 32 of K dropped."""
    count = len(numbers)
    if kind == NO_PRODUCT or kind.endswith(EVERY):
        return kind
    if numbers[-1] - numbers[0] + 1 == count:
        if count == k:
            return f"all of K {kind}"
        ends = {
            k - 1 - numbers[-1]: f"the last {count} of K {kind}",
            numbers[0]: f"the first {count} of K {kind}",
        }
        return ends.get(0, f"{count} of K, {ranges(numbers)}, {kind}")
    steps = np.diff(numbers)
    if (steps == steps[0]).all():
        return (
            f"every index {numbers[0] % steps[0]} modulo {steps[0]} of K {kind}, from "
            f"{numbers[0]} to {numbers[-1]}"
        )
    return f"{count} of K {kind}: {ranges(numbers)}"


def part_of(kind: str, numbers: np.ndarray, k: int) -> str:
    """The equal part of K that the indices are, such as the last of 4 parts; else ''."""
    count = len(numbers)
    if kind == NO_PRODUCT or kind.endswith(EVERY):
        return ""
    whole = k % count == 0 and numbers[0] % count == 0
    whole = whole and numbers[-1] - numbers[0] + 1 == count
    if not whole or not 1 < k // count <= PARTS:
        return ""
    return f"part {numbers[0] // count} of 0 to {k // count - 1} equal parts of K {kind}"


def tile_of(differ: np.ndarray, earlier: Tile | None = None) -> Tile | None:
    """The rectangle of all differences, if it is not the whole result and many of it differ.

    earlier   the tile that is wrong in another shape: it is the one if it holds all differences.
    """
    rows = np.flatnonzero(differ.any(axis=1))
    columns = np.flatnonzero(differ.any(axis=0))
    tile = Tile((int(rows[0]), int(rows[-1]) + 1), (int(columns[0]), int(columns[-1]) + 1))
    if earlier is not None and differ[earlier.place].sum() == differ.sum():
        return earlier
    inside = differ[tile.place]
    return tile if inside.size < differ.size and inside.mean() >= WHOLE else None


def integer_causes(
    stimulus: Stimulus,
    results: np.ndarray,
    out: Format,
    factors: np.ndarray | None,
    earlier: Tile | None = None,
) -> tuple[list[Cause], Tile | None]:
    """The causes of wrong sums of integers, and the tile that is wrong.

    factors  the GEMM's, of each index of K: if they explain all bits, there is no other cause.
    earlier  the tile that is wrong in another shape.
    """
    expected = faults.expected(stimulus)
    differ = results != expected
    if not differ.any():
        return [], None
    if factors is not None:
        a, b = faults.values(stimulus)
        if alike(results, faults.product(stimulus, a * factors, b), out):
            return [], None
    tile = tile_of(differ, earlier)
    count = (
        f"{int(differ.sum())} of {differ.size} sums of integers differ, which every "
        "accumulator of 8 bits has exactly"
    )
    first = first_of(stimulus, results, expected, differ)
    tile_cause: Cause | None = None
    for fault in faults.all_faults():
        faulty = fault.gives(stimulus)
        if faulty is None or np.array_equal(faulty, expected):
            continue
        if alike(results, faulty, out):
            evidence = f"all {results.size} results have the bits of it; {count}"
            return [Cause(fault.name, evidence, "wrong", first, exact=True)], None
        if tile is None or tile_cause is not None:
            continue
        inside, faulty = results[tile.place], faulty[tile.place]
        if alike(inside, faulty, out) and not np.array_equal(faulty, expected[tile.place]):
            evidence = (
                f"its {inside.size} results have the bits of it, and all others are right; {count}"
            )
            name = f"a wrong tile, {tile}: {fault.name}"
            tile_cause = Cause(name, evidence, "wrong", first, exact=True)
    unnamed = Cause(_unnamed(results, expected, differ, tile), count, "wrong", first)
    return [tile_cause or unnamed], tile


def alike(results: np.ndarray, faulty: np.ndarray, out: Format) -> bool:
    """Whether results are a fault's, rounded to the output dtype."""
    with np.errstate(all="ignore"):
        outputs = cast.round_to(np.ascontiguousarray(faulty, np.float32), out)
    return np.array_equal(outputs, results, equal_nan=True)


def _unnamed(
    results: np.ndarray, expected: np.ndarray, differ: np.ndarray, tile: Tile | None
) -> str:
    """What is seen of a fault that has no name."""
    where = np.s_[:, :] if tile is None else tile.place
    some = (expected[where] != 0) & np.isfinite(results[where])
    with np.errstate(over="ignore"):
        ratios = np.unique(results[where][some] / expected[where][some])
    if len(ratios) == 1:
        words = f"results {ratios[0]:g} times as large as they are"
    elif np.isnan(results[where]).all():
        words = "NaN"
    else:
        words = "no fault that has a name"
    if tile is not None:
        return f"a wrong tile, {tile}: {words}"
    rows, columns = differ.any(axis=1), differ.any(axis=0)
    if len(ratios) != 1 and (rows.mean() <= 0.5 or columns.mean() <= 0.5):
        words = (
            f"wrong in rows {ranges(np.flatnonzero(rows))}, columns "
            f"{ranges(np.flatnonzero(columns))}"
        )
    return words
