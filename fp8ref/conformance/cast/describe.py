"""Describe an identified cast: as JSON, in one line, and by differences from an expected one."""

from typing import Any

import numpy as np

from fp8ref.conformance.cast import behavior
from fp8ref.conformance.cast.behavior import Behavior, DoubleRounding
from fp8ref.conformance.cast.outputs import Responses
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.explain import simplest
from fp8ref.conformance.kit.finding import Counterexample, Finding
from fp8ref.formats import Format
from fp8ref.sim.quantize.cast import decode


def result_dict(b: Behavior, findings: list[Finding], a: Responses) -> dict[str, Any]:
    """``is`` of --json, without the known casts that it equals."""
    by = {f.what: f.value for f in findings}
    inf = int(a.codes[np.flatnonzero(np.isposinf(a.x))[0]])
    nan = b.nan[1] if not a.output.values_only and by["nan_code"] is not None else None
    tested = [f.what for f in findings if f.text != "not tested"]
    asked = [a.source, *(w.removeprefix("double_rounding of ") for w in tested)]
    return {
        "format": a.fmt.name,
        "behavior": [],
        "behavior_but_for_nan_codes": [],
        "rounding": by["rounding"],
        "saturates": None if by["overflow"] is None else by["overflow"] == "max",
        "overflow": by["overflow"],
        "infinities": by["infinities"],
        "inf_code": inf if inf >= 0 else None,
        "nan_code": by["nan_code"],
        "nan_code_of_negative": nan,
        "subnormals": by["subnormals"],
        "negative_zero": by["negative_zero"],
        "double_rounding": _dtype(b.double_rounding.get(a.source)),
        "double_roundings": {
            s: _dtype(b.double_rounding.get(s)) for s in subjects.DTYPES if s in asked
        },
        "policy": None,
        "gives": a.output.dtype,
    }


def _dtype(through: DoubleRounding | None) -> str | None:
    return None if through is None else str(through)


def names(a: Responses) -> tuple[list[str], list[str]]:
    """The known casts that give these codes, and those that do but for the codes of NaN."""
    known = behavior.known_casts(a.fmt).items()
    return (
        [name for name, b in known if not a.mismatches(b).any()],
        [name for name, b in known if not a.mismatches(b, canonical=True).any()],
    )


def without_guesses(findings: list[Finding], wrong: dict[str, np.ndarray]) -> list[Finding]:
    """The findings without a double rounding that leaves codes of its dtype unexplained."""
    unsure = {
        "double_rounding" if source == "float32" else f"double_rounding of {source}"
        for source, differs in wrong.items()
        if differs.any()
    }
    return [
        Finding(f.what, None, "codes that no double rounding explains") if f.what in unsure else f
        for f in findings
    ]


def summary(
    b: Behavior, a: Responses, fmt: Format, *, complete: bool, everywhere: bool, mistake: str = ""
) -> str:
    """The cast in one line.

    complete    every output is explained by the behavior found; everywhere: in other shapes too.
    mistake     of ``mistakes``, that explains what the behavior does not.
    """
    found_fmt = a.fmt
    of = f"a cast to {found_fmt}"
    if found_fmt is not fmt:
        of += f" (max {found_fmt.max:g}), not {fmt} (max {fmt.max:g}),"
    if complete and not everywhere:
        return f"{of} that gives other codes in arrays of other shapes"
    if not complete:
        reason = mistake or "it matches no known library: see the differences"
        return f"{of.rstrip(',')}: {reason}"
    decision_text = f"rounds {b.rounding}, overflow gives {b.overflow}, infinities {b.infinite}"
    if b.subnormals != "kept":
        decision_text += f", subnormals are {b.subnormals.replace('_', ' ')}"
    if b.negative_zero != "kept" and found_fmt.negative_zero:
        decision_text += ", -0 becomes 0"
    if not np.isnan(decoded := decode(np.array(b.nan, np.uint8), found_fmt)).all():
        decision_text += f", NaN becomes {decoded[0]:g}"
    for source, through in b.double_rounding.items():
        decision_text += f", {source} is rounded to {through} first"
    equal, but_for_nan = names(a)
    if equal:
        return f"{of.rstrip(',')}, equal to {' and '.join(equal)}: {decision_text}"
    if but_for_nan:
        alike = " and ".join(but_for_nan)
        return f"{of.rstrip(',')}, equal to {alike} except for NaN codes: {decision_text}"
    return f"{of} that {decision_text}"


def differences_from(
    responses: dict[str, Responses],
    expected_behavior: Behavior,
    fmt: Format,
    format_finding: Finding,
) -> list[Counterexample]:
    """The simplest input whose code is not the expected one, for each kind of input.

    Inputs that several decisions have a part in count for the first of them that is wrong.
    """
    if format_finding.witness:  # another format
        return [format_finding.witness]
    counterexamples: dict[str, Counterexample] = {}
    first = next(iter(responses))
    for a in responses.values():
        if a.source == "float64":  # the known casts leave it open (C-8)
            continue
        # the names of formats without NaN differ in the codes of NaNs alone
        differs = a.mismatches(expected_behavior, canonical=fmt.has_nan or a.source != first)
        magnitude = np.abs(a.x)
        coarse = a.among(cast_inputs.coarse(fmt))
        over = magnitude > (fmt.max + cast_inputs.with_next(fmt)[-1]) / 2
        zero = (a.codes & ~fmt.sign_bit) == 0
        small = (magnitude > fmt.smallest_subnormal / 2) & (magnitude < fmt.smallest_normal)
        flushed = coarse & zero & small
        beyond = "C-3" if expected_behavior.overflow == "max" else "C-4"
        normal = coarse & ~over & (magnitude >= fmt.smallest_normal)
        rounds_otherwise = (differs & normal).any()
        if rounds_otherwise:  # which is why small numbers become zero
            flushed = np.zeros_like(flushed)
        expected = behavior.encode(a.x, fmt, expected_behavior, source=a.source).astype(np.int64)
        # where they differ, by the sign alone
        zeros = (a.x == 0) | (zero & (expected & ~fmt.sign_bit == 0))
        rest = coarse & ~over & ~flushed & ~zeros
        # As disjoint as can be, so that one fault gives one counterexample.
        kinds = {
            "rounding": ("C-2", normal if rounds_otherwise else rest),
            "overflow": (beyond, over & np.isfinite(a.x)),
            "infinity": (beyond, np.isinf(a.x)),
            "NaN": ("C-5" if fmt.has_nan else "C-9", np.isnan(a.x)),
            "subnormal": ("F-1", flushed),
            "zero": ("C-6", zeros),
        }
        # What is left are inputs just next to numbers and ties, where double rounding shows.
        # They tell nothing new if numbers and ties themselves are wrong.
        twice = ~(over | np.isnan(a.x) | coarse | zeros)
        kinds["twice"] = ("C-1", twice & (not (differs & coarse).any()))
        for kind, (clause, among) in kinds.items():
            if kind not in counterexamples and (differs & among).any():
                at = simplest(a.x, differs & among)
                counterexamples[kind] = a.counterexample(at, expected_behavior, clause)
    return list(counterexamples.values())
