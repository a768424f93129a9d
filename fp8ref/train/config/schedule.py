"""Which recipe a step runs in: the phases of ``numerics.schedule`` (spec T-9).

    schedule = [[0, "tensorwise"], ["learning_rate < 3e-4", "rowwise"], ["sqnr < 18", "delayed"],
    ["update_error > 0.1", "bf16"]]

``parse`` reads the entries, and ``Schedule`` says which phase a step belongs to. Beginnings at a
step or a learning rate are functions of the config. Those at a measurement, of operands or of
optimizer states, are recorded, and every checkpoint holds the record.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import pydantic

from fp8ref.recipe import RECIPES, check_trained, delayed_casts
from fp8ref.spec.attention.products import is_attention

Entries = tuple[tuple[Annotated[int | str, pydantic.Field(union_mode="left_to_right")], str], ...]
"""The entries of a schedule, as the config has them: where a phase begins, and its recipe."""


_CONDITION = re.compile(r"\s*(\w+)\s*([<>])\s*(\S+)\s*")
_CONDITIONS = {"learning_rate": "<", "sqnr": "<", "update_error": ">"}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A recipe, and one of four places where it begins.

    step           a step, counted from 0.
    learning_rate  the first step after warm-up whose rate is below this.
    sqnr           the step after a record in which an operand's SQNR is below this, in dB.
    update_error   the step after a record in which the error of the update that optimizer states
                   make (spec O-12) is above this.
    """

    recipe: str
    step: int | None = None
    learning_rate: float | None = None
    sqnr: float | None = None
    update_error: float | None = None

    @property
    def measured(self) -> bool:
        """Whether it begins at a measurement."""
        return self.sqnr is not None or self.update_error is not None

    def begins_at(self, value: float) -> bool:
        """Whether a measured value begins it."""
        if self.sqnr is not None:
            return value < self.sqnr
        return self.update_error is not None and value > self.update_error


def parse(entries: Entries) -> tuple[Phase, ...]:
    """The phases of a schedule.

    Raises:   ValueError: no phase; an unknown recipe, or the same twice in a row; a beginning that
              is no step or condition; a first step other than 0; steps or thresholds that do not
              follow each other; recipes that would keep a tensor's amaxes in two ways.
    """
    if not entries:
        raise ValueError(
            "numerics.schedule has at least one phase, [0, recipe]; got none. Leave it out to "
            "train in numerics.recipe alone."
        )
    phases = tuple(_phase(*entry) for entry in entries)
    if phases[0].step != 0:
        raise ValueError(
            f"numerics.schedule begins at step 0; got {entries[0][0]!r}. Write [0, "
            f"{phases[0].recipe!r}]."
        )
    for before, phase in itertools.pairwise(phases):
        if before.recipe == phase.recipe:
            raise ValueError(
                f"numerics.schedule has {phase.recipe!r} twice in a row, which is one phase. "
                "Leave out the second."
            )
        if phase.sqnr is not None and not RECIPES[before.recipe].fp8:
            raise ValueError(
                "numerics.schedule: 'sqnr' is of the FP8 operands of the phase before, and "
                f"{before.recipe!r} has none. Begin at a step instead."
            )
    _check_states(dict.fromkeys(phase.recipe for phase in phases))
    _check_order("steps ascend", [p.step for p in phases], lambda a, b: a < b)
    _check_order("learning rates descend", [p.learning_rate for p in phases], lambda a, b: a > b)
    return phases


def _phase(begins: int | str, recipe: str) -> Phase:
    check_trained(recipe, "a recipe of numerics.schedule")
    if isinstance(begins, int) and not isinstance(begins, bool):
        return Phase(recipe=recipe, step=begins)
    match = _CONDITION.fullmatch(str(begins))
    try:
        quantity, sign, threshold = (
            (match[1], match[2], float(match[3])) if match else ("", "", math.nan)
        )
    except ValueError:
        quantity, sign, threshold = "", "", math.nan
    if _CONDITIONS.get(quantity) != sign or not math.isfinite(threshold):
        raise ValueError(
            "a phase of numerics.schedule begins at a step, at 'learning_rate < NUMBER', at "
            f"'sqnr < NUMBER' (in dB) or at 'update_error > NUMBER'; got {begins!r}."
        )
    if quantity == "learning_rate":
        return Phase(recipe=recipe, learning_rate=threshold)
    if quantity == "sqnr":
        return Phase(recipe=recipe, sqnr=threshold)
    return Phase(recipe=recipe, update_error=threshold)


def _check_states(recipes: Iterable[str]) -> None:
    """ValueError unless all recipes keep one state of delayed scaling for a role, in all phases."""
    held: dict[str, tuple] = {}
    for recipe in recipes:
        for role, kept in delayed_casts(recipe).items():
            if held.setdefault(role, kept) != kept:
                raise ValueError(
                    "recipes of numerics.schedule share the states of delayed scaling; "
                    f"{recipe!r} keeps that of {role} in another way than one before it. Use "
                    "one of them."
                )


def _check_order(
    rule: str, values: Sequence[float | None], follows: Callable[[float, float], bool]
) -> None:
    """ValueError unless the values that are there follow each other."""
    held = [value for value in values if value is not None]
    for before, value in itertools.pairwise(held):
        if not follows(before, value):
            raise ValueError(
                f"in numerics.schedule {rule}; got {before} and then {value}. Order the phases, "
                "each once."
            )


def is_measured(entries: Sequence[Sequence] | None) -> bool:
    """Whether a phase begins at a measurement, so that a run's statistics decide its recipes."""
    return any(_phase(*entry).measured for entry in entries or ())


def lowest_sqnr(statistics: Mapping[str, dict]) -> tuple[float, str] | None:
    """The smallest SQNR of a record (Q-8) in dB, and its operand; None if it has none. Attention,
    which no phase changes, is left out."""
    linears = (item for item in statistics.items() if not is_attention(item[0]))
    return min(
        ((row["sqnr"], name) for name, row in linears if row["sqnr"] is not None), default=None
    )


def measured(
    phase: Phase, statistics: Mapping[str, dict], states: Mapping[str, dict]
) -> tuple[float, str] | None:
    """What a phase compares of a record, and what it is of; None if the record has none."""
    if phase.sqnr is not None:
        return lowest_sqnr(statistics)
    error = states.get("", {}).get("update_error")
    return None if error is None else (error, "the update of all parameters")


class Schedule:
    """The phases of a run, and where the measured ones began.

    measured   [step, phase's index] of each phase that began at a measurement, for checkpoints.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        starts: Sequence[int | None],
        measured: Sequence[Sequence[int]] = (),
    ) -> None:
        """starts: of each phase, as ``Config.starts``. ``Config.scheduled`` makes it."""
        self._phases = phases
        self._starts = starts
        self.measured = [list(entry) for entry in measured]

    def recipe(self, step: int) -> str:
        """The recipe of a step, counted from 0."""
        return self._phases[self._index(step)].recipe

    def waits(self, step: int) -> Phase | None:
        """The phase after a step's, if it begins at a measurement."""
        after = self._index(step) + 1
        if not (after < len(self._phases) and self._phases[after].measured):
            return None
        return self._phases[after]

    def measure(self, step: int, value: float) -> bool:
        """Begin the phase that waits at ``step + 1``, if the value begins it; whether it does."""
        phase = self.waits(step)
        if phase is None or not phase.begins_at(value):
            return False
        self.measured.append([step + 1, self._index(step) + 1])
        return True

    def ran(self, step: int) -> list[list]:
        """[first step, recipe] of each change of recipe up to a step."""
        begun = {start for start in self._starts if start is not None} | {
            start for start, _ in self.measured
        }
        changes: list[list] = []
        for start in sorted(start for start in begun if start <= step):
            if not changes or changes[-1][1] != self.recipe(start):
                changes.append([start, self.recipe(start)])
        return changes

    def _index(self, step: int) -> int:
        """The last phase that has begun."""
        starts = enumerate(self._starts)
        by_step = [i for i, start in starts if start is not None and start <= step]
        return max(by_step + [i for start, i in self.measured if start <= step])
