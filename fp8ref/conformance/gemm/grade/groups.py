"""Grade grouped and batched GEMMs: several products in one call, each graded as one GEMM.

A grouped GEMM multiplies runs of rows of a by a matrix of their own: group g has sizes[g] rows, and
b[g]. A batched one has groups of one size. A group is graded with the stimuli of ``grading`` in its
place, and random operands elsewhere: rows, matrices or scales of another group are other numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.conformance.gemm import scaled_gemm
from fp8ref.conformance.gemm.grade import row_bits, stimuli
from fp8ref.conformance.gemm.grade.grading import grade_gemm
from fp8ref.conformance.gemm.grade.row_bits import RowBits
from fp8ref.conformance.gemm.grade.scales.reading import OTHER_GROUPS
from fp8ref.conformance.gemm.grade.stimuli import Asked, Shape
from fp8ref.conformance.gemm.grade.verdict import Grade
from fp8ref.conformance.gemm.scaled_gemm import ProbeError
from fp8ref.conformance.kit.finding import Described
from fp8ref.conformance.kit.subject import name_of
from fp8ref.formats import E4M3FN, FLOAT32, Format
from fp8ref.sim.quantize.scaling import Quantized

Grouped = Callable[[Sequence[Quantized], Sequence[Quantized]], Any]
"""(a of each group [M_g, K], b of each group [N, K]) -> a sequence of results [M_g, N]."""

SIZES = (32, 0, 48, 32)  # rows of the groups: equal ones, another one, and none

SCALE = 0.25  # of the groups that are not graded


@dataclass(frozen=True, kw_only=True)
class GroupedGrade(Described):
    """The grade of each group that has rows, by its number.

    places   whether groups have the same bits at other places, alone and among more groups.
    """

    name: str
    sizes: tuple[int, ...]
    grades: Mapping[int, Grade]
    places: RowBits

    @property
    def verdict(self) -> str:
        """The gravest of all groups."""
        verdicts = {grade.verdict for grade in self.grades.values()}
        return max(verdicts, key=("right", "imprecise", "wrong").index)

    @property
    def ok(self) -> bool:
        """Whether every group is right."""
        return all(grade.ok for grade in self.grades.values())

    @property
    def message(self) -> str:
        """The grade of the groups that are not right, or of the first."""
        grades = list(self.grades.values())
        shown = [grade for grade in grades if not grade.ok] or grades[:1]
        sizes = ", ".join(map(str, self.sizes))
        title = f"{self.name}, groups of {sizes} rows, is {self.verdict}"
        said = [f"  {self.places.said}"] if self.places.said else []
        return "\n".join([title, *(grade.message for grade in shown), *said])

    def to_dict(self) -> dict[str, Any]:
        """What --json writes."""
        return {
            "ok": self.ok,
            "subject": self.name,
            "verdict": self.verdict,
            "sizes": list(self.sizes),
            "groups": {str(g): grade.to_dict() for g, grade in self.grades.items()},
            "group_invariant": self.places.alike,
        }


def grade_grouped(
    function: Grouped,
    *,
    sizes: Sequence[int] = SIZES,
    n: int = 48,
    k: int = 512,
    formats: tuple[Format, Format] = (E4M3FN, E4M3FN),
    name: str | None = None,
    granularity: str = "rowwise",
    granularity_b: str = "",
    **options: Any,
) -> GroupedGrade:
    """Grade a grouped GEMM, or with equal sizes a batched one, group by group.

    function   (a of the groups, b of the groups) -> their results. Adapt a kernel that takes all
               rows of a in one array and the offsets of groups with a lambda.
    sizes      rows of the groups; a group may have none, and is then not graded.
    n, k       columns of every group, and K.
    Raises:    ValueError: no group with rows, or a negative size. All others: as ``grade_gemm``.
    Source:    spec B-14.
    """
    if not any(sizes) or min(sizes) < 0:
        raise ValueError(
            f"groups have sizes of 0 or more rows, and one has rows; got {list(sizes)}."
        )
    name = name or name_of(function)
    both = granularity, granularity_b or granularity

    def one(g: int, sizes: Sequence[int]) -> scaled_gemm.ScaledGemm:
        return scaled_gemm.ScaledGemm(
            name=f"group {g} of {name}",
            function=_group_gemm(function, g, sizes, both),
            granularity=granularity,
            granularity_b=granularity_b,
            about={OTHER_GROUPS: f"{1 / SCALE:g}"},
        )

    shapes = {g: (size, n, k) for g, size in enumerate(sizes) if size}
    grades = {
        g: grade_gemm(one(g, sizes), shapes=[shape], formats=formats, **options)
        for g, shape in shapes.items()
    }
    places = row_bits.NOT_ASKED
    causes = {cause.name for grade in grades.values() for cause in grade.causes}
    right = all(grade.verdict != "wrong" for grade in grades.values())
    if right and row_bits.VARIES not in causes:
        asked = {g: Asked(scaled=one(g, sizes), formats=formats) for g in grades}
        places = _places(asked, shapes, sizes, one)
    return GroupedGrade(name=name, sizes=tuple(sizes), grades=grades, places=places)


def _places(
    asked: Mapping[int, Asked],
    shapes: Mapping[int, Shape],
    sizes: Sequence[int],
    one: Callable[[int, Sequence[int]], scaled_gemm.ScaledGemm],
) -> RowBits:
    """Each group's bits at another place of the list, alone, and behind more groups."""
    calls = dict[str, None]()
    for g, asked_alone in asked.items():
        stimulus = stimuli.random(asked_alone, shapes[g], FLOAT32)
        output = asked_alone.run(stimulus)[0]
        count = len(sizes)
        for words, place, others in (
            ("the groups in reverse order", count - 1 - g, sizes[::-1]),
            ("no other group", 0, sizes[g : g + 1]),
            ("twice as many groups", count + g, [*sizes, *sizes]),
        ):
            try:
                results = one(place, others).multiply(stimulus.a, stimulus.b, repeat=False)[0]
            except ProbeError:
                continue
            calls[words] = None
            differ = results.view(np.uint32) != output.view(np.uint32)
            if differ.any():
                i, j = np.argwhere(differ)[0]
                said = (
                    f"a group's bits depend on the other groups: {int(differ.sum())} of "
                    f"{differ.size} results of group {g} are others with {words}, first "
                    f"out[{i}, {j}], {output[i, j]:.9g} and {results[i, j]:.9g}"
                )
                return RowBits(tuple(calls), said)
    return RowBits(tuple(calls))


def require_grouped(function: Grouped, **options: Any) -> GroupedGrade:
    """Require that all groups of a grouped GEMM are right, else raise AssertionError with causes.

    options   as ``grade_grouped``.
    Raises:   AssertionError: a group is imprecise or wrong. Others as ``grade_grouped``.
    Source:   spec B-14.
    """
    return grade_grouped(function, **options).require()


def _group_gemm(
    function: Grouped, g: int, sizes: Sequence[int], granularities: tuple[str, str]
) -> Callable[[Quantized, Quantized], Any]:
    """One group as a GEMM; the others multiply random numbers."""

    def multiply(a: Quantized, b: Quantized) -> Any:
        k = a.codes.shape[1]
        rng = np.random.default_rng([g, k])
        left = [_filled(rng, size, k, a.fmt, granularities[0]) for size in sizes]
        right = [_filled(rng, len(b.codes), k, b.fmt, granularities[1]) for _ in sizes]
        left[g], right[g] = a, b
        results = function(left, right)
        if len(results) != len(sizes):
            raise scaled_gemm.RefusedError(
                f"gives a result for each of {len(sizes)} groups; got {len(results)}."
            )
        return results[g]

    return multiply


def _filled(
    rng: np.random.Generator, rows: int, k: int, fmt: Format, granularity: str
) -> Quantized:
    """Random positive numbers near 1; no rows of a group that has none."""
    codes = rng.integers(0x30, 0x40, (max(rows, 1), k)).astype(np.uint8)
    quantized = scaled_gemm.operand(codes, fmt, granularity, SCALE)
    if rows:
        return quantized
    scale, scale_inv = (x[:0] if x.ndim else x for x in (quantized.scale, quantized.scale_inv))
    return quantized._replace(codes=codes[:0], scale=scale, scale_inv=scale_inv)
