"""All 2^32 float32 inputs of a cast, next to what was found."""

from dataclasses import dataclass

import numpy as np

from fp8ref import console
from fp8ref.conformance.cast import behaviour, outputs
from fp8ref.conformance.cast.behaviour import Behaviour
from fp8ref.conformance.cast.outputs import Responses
from fp8ref.conformance.counterexample import Counterexample
from fp8ref.conformance.explain import simplest
from fp8ref.conformance.finding import Finding
from fp8ref.conformance.subject import Subject
from fp8ref.formats import Format

INPUTS = 1 << 32
PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Checked:
    finding: Finding
    unlike: list[Counterexample]


def compare(subject: Subject, fmt: Format, found: Behaviour, *, inputs: int | None = None) -> Checked:
    """Every input from bits 0 on, in pieces; the simplest of those that are unlike what was found."""
    inputs = INPUTS if inputs is None else inputs
    wrong, best, count = 0, None, -(-inputs // PIECE)
    with console.bar("all float32 inputs", count) as advance:
        for begin in range(0, inputs, PIECE):
            x = np.arange(begin, min(begin + PIECE, inputs), dtype=np.int64).astype(np.uint32).view(np.float32)
            output = outputs.ask(subject, x, "float32")
            codes = output.codes(fmt) if output.values_only else output.array
            expected = behaviour.encode(x, fmt, found)
            if not np.array_equal(codes, expected):
                responses = Responses(x=x, source="float32", output=output, fmt=fmt, codes=codes.astype(np.int64))
                differs = responses.mismatches(found)
                wrong += int(differs.sum())
                if differs.any():
                    at = simplest(x, differs)
                    best = _simpler(best, (x[at], responses.counterexample(at, found, "by what was found")))
            advance(f"{wrong:,} unlike" if wrong else "")
    finding = Finding(
        what="all inputs", value=inputs - wrong, words=f"{inputs - wrong:,}", evidence=f"of {inputs:,} float32 inputs are those of this"
    )
    return Checked(finding=finding, unlike=[best[1]] if best else [])


def _simpler(first: tuple[float, Counterexample] | None, second: tuple[float, Counterexample]) -> tuple[float, Counterexample]:
    if first is None:
        return second
    both = np.array([first[0], second[0]], np.float32)
    return (first, second)[simplest(both, np.array([True, True]))]
