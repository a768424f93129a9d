"""All 2^32 float32 inputs of a cast, next to what was found."""

from dataclasses import dataclass

import numpy as np

from fp8ref import console
from fp8ref.conformance.cast import behaviour, outputs
from fp8ref.conformance.cast.behaviour import Behaviour
from fp8ref.conformance.cast.outputs import Answers
from fp8ref.conformance.counterexample import Witness
from fp8ref.conformance.explain import simplest
from fp8ref.conformance.finding import Finding
from fp8ref.conformance.subject import Subject
from fp8ref.formats import Format

INPUTS = 1 << 32
PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Checked:
    finding: Finding
    unlike: list[Witness]


def compare(subject: Subject, fmt: Format, found: Behaviour, *, inputs: int | None = None) -> Checked:
    """Every input from bits 0 on, in pieces; the simplest of those that are unlike what was found."""
    inputs = INPUTS if inputs is None else inputs
    wrong, best, count = 0, None, -(-inputs // PIECE)
    with console.bar("all float32 inputs", count) as advance:
        for begin in range(0, inputs, PIECE):
            x = np.arange(begin, min(begin + PIECE, inputs), dtype=np.int64).astype(np.uint32).view(np.float32)
            reply = outputs.ask(subject, x, "float32")
            codes = reply.codes(fmt) if reply.values_only else reply.array
            expected = behaviour.encode(x, fmt, found)
            if not np.array_equal(codes, expected):
                answers = Answers(x=x, source="float32", reply=reply, fmt=fmt, codes=codes.astype(np.int64))
                differs = answers.unlike(found)
                wrong += int(differs.sum())
                if differs.any():
                    at = simplest(x, differs)
                    best = _simpler(best, (x[at], answers.witness(at, found, "by what was found")))
            advance(f"{wrong:,} unlike" if wrong else "")
    finding = Finding(
        what="all inputs", value=inputs - wrong, words=f"{inputs - wrong:,}", evidence=f"of {inputs:,} float32 inputs are those of this"
    )
    return Checked(finding=finding, unlike=[best[1]] if best else [])


def _simpler(first: tuple[float, Witness] | None, second: tuple[float, Witness]) -> tuple[float, Witness]:
    if first is None:
        return second
    both = np.array([first[0], second[0]], np.float32)
    return (first, second)[simplest(both, np.array([True, True]))]
