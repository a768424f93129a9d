"""Hold a cast to its description on all 2^32 float32 inputs."""

from collections.abc import Callable

import numpy as np

from fp8ref.conformance import exhaustive
from fp8ref.conformance.cast import behaviour, outputs
from fp8ref.conformance.cast.behaviour import Behaviour
from fp8ref.conformance.cast.decisions import Answers
from fp8ref.conformance.counterexample import Witness
from fp8ref.conformance.finding import Finding
from fp8ref.conformance.subject import Subject
from fp8ref.formats import Format


def compare(subject: Subject, fmt: Format, found: Behaviour, *, inputs: int | None = None) -> tuple[Finding, list[Witness]]:
    """How many inputs, from bits 0 on, have the codes of what was found; and the simplest that has not, if any."""

    def differing(x: np.ndarray) -> tuple[np.ndarray, Callable[[int], Witness]]:
        reply = outputs.ask(subject, x, "float32")
        codes = reply.codes(fmt) if reply.values_only else reply.array
        answers = Answers(x=x, source="float32", reply=reply, fmt=fmt, codes=codes.astype(np.int64))
        # nearly always all are equal: one comparison, without the one of NaNs and infinities
        same = np.array_equal(codes, behaviour.encode(x, fmt, found))
        differs = np.zeros(x.shape, bool) if same else answers.unlike(found)
        return differs, lambda at: answers.witness(at, found, "by what was found")

    wrong, simplest = exhaustive.simplest_difference(differing, inputs=inputs)
    total = exhaustive.INPUTS if inputs is None else inputs
    finding = Finding(
        what="all inputs", value=total - wrong, words=f"{total - wrong:,}", evidence=f"of {total:,} float32 inputs are those of this"
    )
    return finding, [simplest] if simplest else []
