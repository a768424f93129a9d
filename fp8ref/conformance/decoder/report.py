"""What is found of a decoder: findings, and faults with an input that shows each."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.kit.finding import Counterexample, Finding


class Fault(NamedTuple):
    """A mistake, in words, and an input that shows it."""

    name: str
    witness: Counterexample


@dataclass
class Report:
    """The findings and faults, as they come."""

    findings: list[Finding] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def add(self, what: str, faults: list[Fault], right: str, evidence: str) -> None:
        """A question that is answered: right, or by faults."""
        self.faults += faults
        words = "; ".join(fault.name for fault in faults) or right
        witness = faults[0].witness if faults else None
        evidence = str(witness) if witness else evidence
        self.findings.append(Finding(what, words, evidence, witness=witness))


def first(wrong: np.ndarray) -> tuple[int, int]:
    """The first place of a matrix that is wrong."""
    i, j = np.argwhere(wrong)[0]
    return int(i), int(j)


def place(wrong: np.ndarray) -> str:
    """Where elements are wrong, in words: lines in which more than half of them are."""
    for axis, word in ((0, "column"), (1, "row")):
        lines = np.flatnonzero(wrong.any(axis=axis))
        if lines.size == wrong.shape[1 - axis] or wrong.take(lines, 1 - axis).mean() < 0.5:
            continue
        start, steps = int(lines[0]), np.diff(lines)
        if lines.size == 1:
            return f"{word} {start}"
        if lines.size == wrong.shape[1 - axis] - start:
            return f"{word}s from {start} on"
        if (steps == steps[0]).all():
            return f"every {steps[0]}th {word} from {start} on"
    i, j = first(wrong)
    return f"first at [{i}, {j}]"
