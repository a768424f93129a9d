"""Where a cast is not what was expected: minimal counterexamples."""

import numpy as np

from fp8ref.conformance.cast import behaviour
from fp8ref.conformance.cast.behaviour import Behaviour
from fp8ref.conformance.cast.decisions import Answers
from fp8ref.conformance.counterexample import Witness
from fp8ref.conformance.explain import simplest
from fp8ref.conformance.finding import Finding
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.formats import Format


def unexpected(answers: dict[str, Answers], wanted: Behaviour, fmt: Format, layout: Format, findings: list[Finding]) -> list[Witness]:
    """The simplest input on which it is not what was expected, for each kind of input."""
    if layout is not fmt:
        return [f.witness for f in findings if f.what == "format" and f.witness]
    found: dict[str, Witness] = {}
    for a in answers.values():
        if a.source == "float64":  # which no name speaks of, C-8
            continue
        differs, magnitude = a.unlike(wanted, canonical=True), np.abs(a.x)
        coarse = a.of(cast_inputs.coarse(fmt))
        over = magnitude > (fmt.max + cast_inputs.with_next(fmt)[-1]) / 2
        zero = (a.codes & ~fmt.sign_bit) == 0
        flushed = coarse & zero & (magnitude > fmt.smallest_subnormal / 2) & (magnitude < fmt.smallest_normal)
        beyond = "C-3" if wanted.overflow == "max" else "C-4"
        normal = coarse & ~over & (magnitude >= fmt.smallest_normal)
        if (differs & normal).any():  # it rounds otherwise, and so to zero
            flushed = np.zeros_like(flushed)
        expected = behaviour.encode(a.x, fmt, wanted, source=a.source).astype(np.int64)
        zeros = (a.x == 0) | (zero & (expected & ~fmt.sign_bit == 0))  # of another sign, where they differ
        kinds = {
            "rounding": ("C-2", normal if (differs & normal).any() else coarse & ~over & ~flushed & ~zeros),
            "overflow": (beyond, over & np.isfinite(a.x)),
            "infinity": (beyond, np.isinf(a.x)),
            "NaN": ("C-5", np.isnan(a.x)),
            "subnormal": ("F-1", flushed),
            "zero": ("C-6", zeros),
        }
        seen = over | np.isnan(a.x) | coarse | zeros
        kinds["twice"] = ("C-1", ~seen if not (differs & coarse).any() else np.zeros_like(seen))
        for kind, (clause, among) in kinds.items():
            if kind not in found and (differs & among).any():
                found[kind] = a.witness(simplest(a.x, differs & among), wanted, clause)
    return list(found.values())
