"""Find each decision of a cast, such as its rounding, from the outputs that it alone explains.

Each function takes the responses and the behavior found so far, and gives a finding.
Its value is None where no value of the decision explains the outputs.
"""

import dataclasses

import numpy as np

from fp8ref.conformance.cast.behavior import KNOWN_CASTS, ROUNDINGS, WIDE, Behavior, DoubleRounding
from fp8ref.conformance.cast.outputs import Responses, number_text, output_text
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.conformance.kit.explain import simplest
from fp8ref.conformance.kit.finding import Finding
from fp8ref.sim.quantize import cast


def rounding(a: Responses, b: Behavior) -> Finding:
    """The rounding, from normal numbers, quarter points and ties.

    Intermediate formats hold all of these exactly, so that a double rounding does not show here.
    """
    fmt, magnitude = a.fmt, np.abs(a.x)
    relevant = a.among(cast_inputs.coarse(fmt)) & (magnitude >= fmt.smallest_normal)
    relevant &= magnitude <= fmt.max
    about = f"{int(relevant.sum())} numbers, quarter points and ties"
    # Only one rounding explains all of these inputs. None may, if the function is no cast.
    finding = _decided("rounding", ROUNDINGS, a, b, relevant, about, "C-2")
    if finding.witness:
        finding = dataclasses.replace(finding, evidence=f"{about}: {finding.witness}")
    return finding


def _decided(
    name: str,
    values: tuple[str, ...],
    a: Responses,
    b: Behavior,
    relevant: np.ndarray,
    about: str,
    clause: str,
) -> Finding:
    """The first value of a decision, which b has, if it explains the relevant codes; else the one
    that does, and the simplest input that shows it.
    """
    differs = a.mismatches(b, relevant)
    if not differs.any():
        return Finding(name, values[0], about)
    behaviors = {v: dataclasses.replace(b, **{name: v}) for v in values}  # type: ignore[arg-type]
    matches = [v for v, other in behaviors.items() if not a.mismatches(other, relevant).any()]
    shown = a.counterexample(simplest(a.x, differs), b, clause)
    return Finding(name, matches[0] if matches else None, str(shown), witness=shown)


def subnormals(a: Responses, b: Behavior) -> Finding:
    """Whether subnormals are kept or flushed, from inputs below the smallest normal number."""
    relevant = a.among(cast_inputs.coarse(a.fmt)) & (a.x != 0)
    relevant &= np.abs(a.x) < a.fmt.smallest_normal
    about = f"{int(relevant.sum())} inputs below {a.fmt.smallest_normal:g}"
    kinds = ("kept", "flushed", "flushed_before")
    return _decided("subnormals", kinds, a, b, relevant, about, "F-1")


def negative_zero(a: Responses, b: Behavior) -> Finding:
    """Whether -0 keeps its sign, and whether a negative number that underflows does."""
    at = int(np.flatnonzero((a.x == 0) & np.signbit(a.x))[0])
    code, shown = int(a.codes[at]), output_text(a.output, at, a.fmt)
    # A quarter of the smallest subnormal rounds to zero under every rounding to nearest.
    under = int(np.flatnonzero(a.x == np.asarray(-a.fmt.smallest_subnormal / 4, a.x.dtype))[0])
    evidence = f"-0 gives {shown}, {a.x[under]:g} gives {output_text(a.output, under, a.fmt)}"
    value = None
    if code == 0:
        value = "lost" if a.codes[under] == 0 else "lost_at_zero"
    elif code == a.fmt.sign_bit and a.fmt.negative_zero:
        value = "kept"
    right = value == ("kept" if a.fmt.negative_zero else "lost")
    witness = None if right else a.counterexample(at, b, "C-6")
    return Finding("negative_zero", value, evidence, witness=witness)


def overflow(a: Responses, b: Behavior) -> Finding:
    """What overflow gives, from the smallest input that is above max under every rounding.

    Larger inputs would be infinite in float16.
    """
    n = cast_inputs.with_next(a.fmt)
    # n[-2] is max, n[-1] would be the next number. Below it a directed rounding may give max.
    if b.rounding not in ("nearest_even", "nearest_away", "nearest_zero"):
        over = n[-1]
    else:
        over = n[-2] + (n[-1] - n[-2]) * 0.75
    at = int(np.flatnonzero(a.x == np.asarray(over, a.x.dtype))[0])
    return _beyond("overflow", a, at, b)


def infinities(a: Responses, b: Behavior) -> Finding:
    """What an infinity gives."""
    return _beyond("infinities", a, int(np.flatnonzero(np.isposinf(a.x))[0]), b)


def _beyond(name: str, a: Responses, at: int, b: Behavior) -> Finding:
    """Whether the input at this index gives max, Inf or NaN."""
    code = int(a.codes[at])
    value = {a.fmt.max_code: "max", a.fmt.inf_code: "inf"}.get(code)
    if value is None and code >= 0 and np.isnan(cast.decode(np.uint8(code), a.fmt)):
        value = "nan"
    shown, bits = number_text(a.x, at, a.source)
    wrong = None if value == "max" else a.counterexample(at, b, "C-3")
    evidence = f"{shown} ({bits}) gives {output_text(a.output, at, a.fmt)}"
    return Finding(name, value, evidence, witness=wrong)


def nans(a: Responses, b: Behavior) -> tuple[Finding, tuple[int, int] | None]:
    """The codes of NaN and of -NaN; no codes if they depend on the payload."""
    nan = np.isnan(a.x)
    by_sign = [
        sorted({int(c) for c in a.codes[nan & (np.signbit(a.x) == negative)]})
        for negative in (False, True)
    ]
    if a.fmt.has_nan and a.output.values_only and by_sign == [[a.fmt.nan_code]] * 2:
        evidence = "NaN stays NaN; values do not show its code"
        return Finding("nan_code", None, evidence, words="NaN"), (a.fmt.nan_code,) * 2
    # Codes may differ by the payload: then no pair of codes describes them.
    shown = " and ".join(
        ", ".join(f"0x{c:02X}" if c >= 0 else "no code" for c in codes) for codes in by_sign
    )
    evidence = f"{int(nan.sum())} NaNs, without and with the sign, give {shown}"
    if any(len(codes) != 1 for codes in by_sign):
        return Finding("nan_code", None, evidence), None
    pair = by_sign[0][0], by_sign[1][0]
    differs = a.mismatches(b, nan)
    wrong = (
        a.counterexample(int(np.argmax(differs)), b, "C-5" if a.fmt.has_nan else "C-9")
        if differs.any()
        else None
    )
    word = f"0x{pair[0] & 255:02X}"
    word += f", of -NaN 0x{pair[1] & 255:02X}" if pair[0] != pair[1] else ""
    return Finding("nan_code", pair[0], evidence, words=word, witness=wrong), pair


def double_rounding(
    a: Responses, b: Behavior, extra_candidate: DoubleRounding | None = None
) -> tuple[Finding, DoubleRounding | None]:
    """The intermediate format of a double rounding, from inputs just next to numbers and ties.

    extra_candidate: the intermediate format already found for another dtype, tried too.
    """
    relevant = np.isfinite(a.x)
    candidates: list[DoubleRounding | None] = [None, extra_candidate] if extra_candidate else [None]
    narrower = [d for d in WIDE if d != a.source and (d != "float32" or a.source == "float64")]
    candidates += [
        DoubleRounding(dtype=d, rounding=r)
        for r in ("nearest_even", "toward_zero")
        for d in narrower
    ]
    # Not "explains all": other decisions, such as overflow, may be wrong in this dtype too.
    tried = {c: with_double_rounding(b, a.source, c) for c in candidates}
    misses = {c: int(a.mismatches(one, relevant).sum()) for c, one in tried.items()}
    # of equals the first, which is no double rounding
    through = min(misses, key=misses.__getitem__)
    name = "double_rounding" if a.source == "float32" else f"double_rounding of {a.source}"
    if through is None:
        evidence = f"{int(relevant.sum()):,} inputs, those next to ties among them"
        return Finding(name, None, evidence, words="none"), None
    shown = a.counterexample(simplest(a.x, a.mismatches(b, relevant)), b, "C-1")
    return Finding(name, str(through), str(shown), witness=shown), through


def with_double_rounding(b: Behavior, source: str, through: DoubleRounding | None) -> Behavior:
    """b with this double rounding, or none, for inputs of dtype source."""
    kept = {s: t for s, t in b.double_rounding.items() if s != source}
    return dataclasses.replace(b, double_rounding=kept | ({source: through} if through else {}))


def decide_all(a: Responses) -> tuple[list[Finding], Behavior]:
    """All decisions, each found under those before it, and the behavior that they make up."""
    # The order matters. The rounding shows at normal numbers, where no other decision plays a part.
    # Each of the others is read off inputs that the decisions before it explain.
    b = KNOWN_CASTS["saturating"].behavior(a.fmt)
    rounding_finding = rounding(a, b)
    if rounding_finding.value:
        b = dataclasses.replace(b, rounding=rounding_finding.value)
    small = subnormals(a, b)
    zero = negative_zero(a, b)
    if zero.value not in (None, b.negative_zero):
        b = dataclasses.replace(b, negative_zero=zero.value)
        small = subnormals(a, b)
    b = dataclasses.replace(b, subnormals=small.value or "kept")
    over, infinite = overflow(a, b), infinities(a, b)
    nan, pair = nans(a, b)
    b = dataclasses.replace(b, overflow=over.value or "max", nan=pair or b.nan)
    b = dataclasses.replace(b, infinite=infinite.value or "max")
    double, through = double_rounding(a, b)
    b = with_double_rounding(b, a.source, through)
    return [rounding_finding, over, infinite, nan, small, zero, double], b
