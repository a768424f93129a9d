"""Compare a state with a rule: the first scale that differs, and what shows it (H-13)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.delayed.reference import Asked as Asked
from fp8ref.conformance.delayed.sequences import DIFFICULTIES, Sequence, named, valid
from fp8ref.conformance.delayed.subject import Shown, Subject
from fp8ref.conformance.kit.finding import bits_of, show
from fp8ref.spec.delayed import DelayedScaling

TRIED = 48  # simpler sequences of one kind that are tried at a time


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The simplest sequence found after which a scale differs.

    difficulty  of the sequence, a key of DIFFICULTIES.
    sequence    up to the scale that differs.
    when        that scale is asked for: after the sequence, or "observed": in its last step,
                between observations and update.
    got, expected  the scale, in words; clause: that decides it.
    """

    difficulty: str
    sequence: Sequence
    when: str
    got: str
    expected: str
    clause: str

    def __str__(self) -> str:
        steps = sum(isinstance(operation, tuple) for operation in self.sequence)
        moment = f"after {steps} step{'s' * (steps != 1)}"
        if self.when == "observed":
            moment = f"in step {steps}, once its tensor is observed"
        elif not self.sequence:
            moment = "before the first step"
        operations = named(self.sequence) or "none"
        return f"{moment}: {operations}: got {self.got}, expected {self.expected} ({self.clause})"


class Difference(NamedTuple):
    """The first scale of a sequence that differs from its scales: after how many operations, when
    it is asked for, and what is shown.
    """

    sequence: Sequence
    scales: np.ndarray
    at: int
    when: str
    shown: Shown

    def __str__(self) -> str:
        """What differs, and where; a NaN is equal to itself there."""
        shown: object = self.shown.scale, self.shown.raised
        if self.when == "observed":
            shown = self.shown.observed
        return f"{self.at} {self.when} {shown}"


def difference(subject: Subject, sequence: Sequence, scales: np.ndarray) -> Difference | None:
    """The first scale of a sequence that differs; None: all agree."""
    for i, shown in enumerate(subject.run(sequence)):
        if shown.raised or not same(shown.scale, scales[min(i, len(sequence))]):
            return Difference(sequence, scales, i, "after", shown)
        if shown.observed is not None and not same(shown.observed, scales[i]):
            return Difference(sequence, scales, i + 1, "observed", shown)
    return None


def same(got: float, expected: np.float32) -> bool:
    """Equal numbers, or both NaN."""
    return got == float(expected) or (np.isnan(got) and np.isnan(expected))


def departure(
    subject: Subject,
    asked: Asked,
    difficulty: str,
    sequences: list[Sequence],
    specified: list[np.ndarray] | None = None,
) -> Departure | None:
    """The first of these sequences that departs from the rule, made as simple as it gets; None if
    none does. ``specified``: their scales, if they are known."""
    specified = asked.scales(sequences) if specified is None else specified
    for sequence, scales in zip(sequences, specified, strict=True):
        if (first := difference(subject, sequence, scales)) is not None:
            return _named(subject, asked, difficulty, _shrunk(subject, asked, first))
    return None


def _shrunk(subject: Subject, asked: Asked, first: Difference) -> Difference:
    """The simplest sequence that a search finds from one that departs."""
    first = first._replace(sequence=first.sequence[: first.at])
    while True:
        for tried in _batches(first.sequence):
            pairs = zip(tried, asked.scales(tried), strict=True)
            differences = (difference(subject, *pair) for pair in pairs)
            better = next((d for d in differences if d and d.when == first.when), None)
            if better is not None:
                first = better._replace(sequence=better.sequence[: better.at])
                break
        else:
            return first


def _named(subject: Subject, asked: Asked, difficulty: str, first: Difference) -> Departure:
    sequence, scales, at, when, shown = first
    repeats = str(difference(subject, sequence, scales)) == str(first)
    if when == "observed":
        got, expected, clause = shown.observed, scales[at - 1], "H-1"
    else:
        got = shown.scale
        expected = scales[min(at, len(sequence))]
        clause = _clause(asked.rule, sequence, difficulty)
    assert got is not None
    words = f"it raises {shown.raised}" if shown.raised else _value(float(got))
    words += "" if repeats else ", and something else when it is run again"
    return Departure(
        difficulty=difficulty,
        sequence=sequence,
        when=when,
        got=words,
        expected=_value(float(expected)),
        clause=clause,
    )


def _clause(rule: DelayedScaling, sequence: Sequence, difficulty: str) -> str:
    """The clause that decides the scale after a simplest sequence."""
    if not sequence:
        return "H-2"
    if difficulty in ("zero", "infinite", "nan", "unused", "uses"):
        if rule.name.startswith(("te_delayed", "flax")):
            return "H-7" if rule.name.startswith("te_delayed") else "H-8"
        return DIFFICULTIES[difficulty].clause
    if difficulty == "ordinary":
        if len(sequence) == 1:
            return f"H-1, {rule.policy.clause}"
        return "H-6" if rule.interval > 1 else "H-3"
    return DIFFICULTIES[difficulty].clause


def _value(scale: float) -> str:
    """A scale and its float32 bits."""
    if scale != float(np.float32(scale)) and not np.isnan(scale):
        return f"{show(scale)}, no float32 number"
    return f"{show(scale)} ({bits_of(scale, 'float32')})"


def _batches(sequence: Sequence) -> Iterator[list[Sequence]]:
    """Simpler sequences: shorter ones, then those with fewer uses, then with simpler amaxes."""
    n = len(sequence)
    size = n // 2
    while size:
        shorter = (sequence[:i] + sequence[i + size :] for i in range(0, n, size))
        if kept := [one for one in shorter if valid(one)][:TRIED]:
            yield kept
        size //= 2
    steps = [(i, step) for i, step in enumerate(sequence) if isinstance(step, tuple)]
    fewer = [
        (*sequence[:i], step[:j] + step[j + 1 :], *sequence[i + 1 :])
        for i, step in steps
        for j in range(len(step))
        if len(step) > 1
    ]
    if fewer:
        yield fewer[:TRIED]
    simpler = [
        (*sequence[:i], (*step[:j], plain, *step[j + 1 :]), *sequence[i + 1 :])
        for i, step in steps
        for j, amax in enumerate(step)
        for plain in _simpler(amax)
    ]
    for start in range(0, len(simpler), TRIED):
        yield simpler[start : start + TRIED]


def _simpler(amax: float) -> list[float]:
    """Ordinary amaxes that are simpler than an amax."""
    plain = [1.0, 2.0, 4.0]
    return plain[: plain.index(amax)] if amax in plain else plain
