"""Identify a cast to e8m0fnu: every decision of ``e8m0``, from numbers at the ends of each."""

from dataclasses import asdict, replace

import numpy as np

from fp8ref.conformance.cast import behavior, layout_invariance, outputs
from fp8ref.conformance.cast.e8m0 import DECISIONS, E8m0Behavior
from fp8ref.conformance.cast.outputs import Responses
from fp8ref.conformance.inputs import cast_inputs, dtypes
from fp8ref.conformance.kit.explain import simplest
from fp8ref.conformance.kit.finding import Counterexample, Finding, Outcome
from fp8ref.conformance.kit.subject import ConformanceError, RefusedError, Subject
from fp8ref.formats import E8M0FNU

# Mantissa fields: those of 1 and 1.5 with their neighbors, those next to sqrt(2), and between; of
# a subnormal number 0x400000 is 2^-127, and 0x600000 the tie above it. Then each bit alone.
_MANTISSAS = (
    *(0, 1, 0x200000, 0x3504F3, 0x3504F4, 0x380000, 0x3FFFFF, 0x400000, 0x400001),
    *(0x500000, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF),
    *(1 << bit for bit in range(23)),
)

CLAUSES = dict.fromkeys(DECISIONS, "C-7") | {"overflow": "C-3", "infinite": "C-3"}
"""{decision: the clause that decides it}."""


def inputs(source: str) -> np.ndarray:
    """_MANTISSAS at every exponent of float32, subnormals too, with random ones; both signs; zeros,
    infinities and NaNs; as numbers of a dtype, each once.
    """
    fields = np.arange(255, dtype=np.uint32)[:, None] << np.uint32(23)
    random = np.random.default_rng(0).integers(0, 1 << 23, (255, 16), dtype=np.uint32)
    bits = np.concatenate(
        [fields | np.array(_MANTISSAS, np.uint32), fields | random], axis=1
    ).ravel()
    positive = np.append(np.unique(bits), np.uint32(0x7F800000)).view(np.float32)
    with np.errstate(over="ignore"):
        x = dtypes.rounded(np.concatenate([positive, -positive]), source)
    x = np.unique(x.view(np.uint32)).view(np.float32)
    return np.concatenate([x, cast_inputs.nans(source, E8M0FNU)])


def parts(x: np.ndarray) -> dict[str, np.ndarray]:
    """{decision: where x shows it, once those before it are known}; each input is in one."""
    positive = np.isfinite(x) & (x > 0)
    return {
        "rounding": positive & (x >= 2.0**-126) & (x <= 2.0**127),
        "subnormals": positive & (x < 2.0**-126),
        "overflow": positive & (x > 2.0**127),
        "infinite": np.isposinf(x),
        "zero": x == 0,
        "negative": x < 0,
    }


def decide(a: Responses) -> tuple[list[Finding], E8m0Behavior]:
    """Each decision by its inputs: the value that contradicts the fewest, the specification's
    first; and the behavior of them all. A value that contradicts some is shown, and is None.
    """
    b, findings = _with_numbers(a), list[Finding]()
    for decision, among in parts(a.x).items():
        values = DECISIONS[decision]
        tried = {v: replace(b, **{decision: v}) for v in values}  # type: ignore[arg-type]
        wrong = {value: a.mismatches(other, among) for value, other in tried.items()}
        value = min(wrong, key=lambda value: int(wrong[value].sum()))
        unlike_default = wrong[values[0]]
        evidence, witness = f"{int(among.sum()):,} inputs", None
        if unlike_default.any():
            at = simplest(a.x, unlike_default)
            witness = a.counterexample(at, tried[values[0]], CLAUSES[decision])
            evidence = f"{evidence}: {witness}"
        decided = None if wrong[value].any() else value
        b = tried[value]
        words = b.rounding_words if decision == "rounding" and decided else ""
        findings += [Finding(decision, decided, evidence, words=words, witness=witness)]
    return findings, b


def _with_numbers(a: Responses) -> E8m0Behavior:
    """The specification's behavior with the NUMBERS that let a rounding explain the numbers from
    2^-60 to 2^60, where no other decision has a part; with its own, if they do or if none do.
    """
    middle = (a.x >= 2.0**-60) & (a.x <= 2.0**60)
    m, exponent = np.frexp(np.where(middle, a.x, 1).astype(np.float64))
    plain, bias = E8m0Behavior(), int(a.codes[a.x == 1][0])
    above = middle & (a.codes >= exponent + bias)
    bits = sum(1 << k for k in range(23) if above[a.x == 1 + 2.0 ** (k - 23)].any())
    last, first = m[middle & ~above].max(initial=0), m[above].min(initial=1)
    ties = (float(np.floor(first * 2.0**bit) / 2.0 ** (bit - 1)) for bit in range(25))
    shifted = replace(plain, bias=bias)
    tied = replace(shifted, tie=next((tie for tie in ties if tie >= 2 * last), 1.5))
    logs = [replace(shifted, log2_in=d) for d in ("float32", "bfloat16", "float16")]
    for b in (plain, shifted, replace(shifted, bits=bits), tied, *logs):
        tried = (replace(b, rounding=rounding) for rounding in DECISIONS["rounding"])
        if not all(a.mismatches(other, middle).any() for other in tried):
            return b
    return plain


def identify(subject: Subject, source: str, expect: str | None) -> Outcome:
    """Identify a cast to e8m0fnu. Arguments and errors as ``identify_cast``."""
    a = _ask(subject, source)
    findings, b = decide(a)
    unlike, untaken = [*_unlike(a, b)], list[str]()
    responses = [a]
    for other in ("bfloat16", "float16"):
        if other == source:
            continue
        try:
            responses.append(_ask(subject, other))
        except RefusedError:
            untaken.append(f"{other}, for which it raises")
    for more in responses:
        unlike += layout_invariance.check_every_16_bit(subject, more, b) if not unlike else []
    if not unlike:
        for check in (layout_invariance.check_shapes, layout_invariance.check_strides):
            finding, wrong = check(subject, a, b)
            findings.append(finding)
            unlike += wrong
    casts = behavior.known_casts(E8M0FNU)
    names = [] if unlike else [name for name, other in casts.items() if other == b]
    nearest = min(casts, key=lambda name: len(_departures(b, casts[name])))
    fields = {f.what: f.value for f in findings if f.what in DECISIONS}
    differences = _differences(responses, casts[expect], fields) if expect else []
    return Outcome(
        name=subject.name,
        kind="cast",
        fmt=E8M0FNU,
        framework=subject.framework,
        found={"format": E8M0FNU.name, "behavior": names, **fields, "gives": a.output.dtype},
        findings=findings,
        identified=not unlike,
        named=bool(names),
        summary=_summary(b, names, nearest, unlike),
        unlike=unlike,
        expected=expect,
        differences=differences,
        limits=["float64", *untaken, *subject.other_devices],
    )


def _ask(subject: Subject, source: str) -> Responses:
    """The responses to ``inputs``; ConformanceError where a second call differs."""
    x = inputs(source)
    output, position = outputs.ask_twice(subject, x, source)
    if position is not None:
        raise ConformanceError(
            f"{subject.name} does not repeat itself for {source} {x[position]:.9g}. Make its "
            "result depend on its input alone."
        )
    return Responses(x=x, source=source, output=output, fmt=E8M0FNU)


def _unlike(a: Responses, b: E8m0Behavior) -> list[Counterexample]:
    """The simplest input that a behavior does not explain, with the clause of its decision."""
    wrong = a.mismatches(b)
    if not wrong.any():
        return []
    at = simplest(a.x, wrong)
    places = parts(a.x)
    clause = next((CLAUSES[decision] for decision in places if places[decision][at]), "C-5")
    return [a.counterexample(at, b, clause)]


def _departures(b: E8m0Behavior, other: E8m0Behavior) -> list[str]:
    """The decisions in which two behaviors differ."""
    return [name for name, value in asdict(b).items() if value != getattr(other, name)]


def _differences(
    responses: list[Responses], expected: E8m0Behavior, fields: dict[str, str | None]
) -> list[Counterexample]:
    """The simplest input of another code for each decision that differs; else one a dtype.

    fields   the decisions found. Where one alone differs, inputs of others may show it too.
    """
    shown: dict[str, Counterexample] = {}
    for a in responses:
        wrong = a.mismatches(expected)
        for decision, among in parts(a.x).items():
            departs = fields[decision] != getattr(expected, decision)
            if departs and decision not in shown and (wrong & among).any():
                at = simplest(a.x, wrong & among)
                shown[decision] = a.counterexample(at, expected, CLAUSES[decision])
    return list(shown.values()) or [w for a in responses for w in _unlike(a, expected)]


def _summary(b: E8m0Behavior, names: list[str], nearest: str, unlike: list[Counterexample]) -> str:
    words = b.rounding_words
    if unlike:
        partly = f"rounds {words} from 2^-60 to 2^60, and otherwise " * (words != b.rounding)
        return f"a cast to {E8M0FNU} that {partly}matches no known library: see the differences"
    decided = (
        f"rounds {words}, overflow gives {b.overflow}, infinities {b.infinite}, zero {b.zero},"
        f" negative numbers {b.negative}, subnormals are {b.subnormals.replace('_', ' ')}"
    )
    if names:
        return f"a cast to {E8M0FNU}, equal to {' and '.join(names)}: {decided}"
    of = " and ".join(_departures(b, behavior.known_casts(E8M0FNU)[nearest]))
    return f"a cast to {E8M0FNU} that {decided}; the nearest, {nearest}, differs in {of}"
