"""Identify a cast, by ``identify_cast``: its format and every decision, from chosen inputs.

The format comes first, then the decisions for one dtype, then double rounding from other dtypes,
last the same codes in arrays of other shapes and strides. Every output must be explained.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref import formats
from fp8ref.conformance import exhaustive as all_inputs
from fp8ref.conformance.cast import (
    behavior,
    decisions,
    describe,
    identify_e8m0,
    layout_invariance,
    mistakes,
    outputs,
    stochastic,
)
from fp8ref.conformance.cast.behavior import KNOWN_CASTS, Behavior
from fp8ref.conformance.cast.outputs import Responses
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.conformance.inputs.dtypes import rounded
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.explain import simplest
from fp8ref.conformance.kit.finding import Counterexample, Finding, Outcome, bits_of, show
from fp8ref.conformance.kit.subject import ConformanceError, RefusedError, Subject
from fp8ref.formats import Format
from fp8ref.shared import errors
from fp8ref.sim.quantize import cast


def identify_cast(
    function: Callable[..., Any],
    fmt: Format | str,
    *,
    name: str | None = None,
    expect: str | None = None,
    framework: str | None = None,
    device: str = "cpu",
    exhaustive: bool = False,
) -> Outcome:
    """Identify a cast from its outputs for some twenty thousand inputs, or for all float32 inputs.

    function   array [n] -> array [n] of codes (uint8 or float8) or values. It takes float32 or
               bfloat16; float16 and float64 are tried too. Codes of 4 bits may be pairs [n / 2]
               (F-5).
    expect     a name of ``behavior.known_casts(fmt)`` that it must equal, all NaN codes being one
               (C-5) but in e2m1fn, which has no NaN (C-9).
    framework  whose arrays it is given; by default the first that it takes of numpy, torch, jax.
    exhaustive compare all 2^32 float32 inputs with the behavior found; of FP8.

    Raises:    ValueError: fmt neither FP8 nor e2m1fn, an unknown name; ConformanceError: no valid
               cast: it raises, gives another shape or type, changes its input, is not repeatable.
    """
    fmt = formats.by_name(fmt)
    check_format(fmt)
    if exhaustive and fmt.name not in formats.FP8_FORMATS:
        raise ValueError(
            f"exhaustive is of casts to FP8; {fmt} is asked at every number, midpoint and "
            "neighbor of these. Leave it out."
        )
    if expect is not None:
        behavior.by_name(expect, fmt)
    name = name or subjects.name_of(function)
    subject = subjects.wrap(name, function, framework=framework, device=device, shape=(16,))
    source = subjects.first_dtype(subject)
    subject = outputs.narrow(subject, fmt, source)
    if not fmt.signed:
        return identify_e8m0.identify(subject, source, expect)
    if exhaustive and source != "float32":
        raise ConformanceError(
            f"--exhaustive tests all float32 inputs; {name} takes no float32. Leave "
            "--exhaustive out."
        )
    found_fmt, format_finding = _format(subject, fmt, source)
    if found_fmt is None:
        return _without_format(subject, fmt, source, format_finding, expect)
    first, position = _ask(subject, source, found_fmt)
    _check_no_reuse(subject, first)
    # A stochastic cast may repeat itself call by call: a fixed seed shows only within an array.
    if position is not None or stochastic.varies(subject, source, found_fmt):
        if exhaustive:
            raise ConformanceError(
                f"--exhaustive needs a deterministic cast; {name} gives different codes for "
                "equal inputs. Leave --exhaustive out."
            )
        return stochastic.identify(subject, first, position, fmt, [format_finding], expect)
    return _identify_repeating(subject, first, fmt, format_finding, expect, exhaustive)


def require_cast(
    function: Callable[..., Any],
    fmt: Format | str = "e4m3fn",
    *,
    expect: str | None = "saturating",
    exhaustive: bool = False,
    **options: Any,
) -> Outcome:
    """Require a function to be the cast of a name, else raise AssertionError with simplest inputs.

    exhaustive also compare all 2^32 float32 inputs, of FP8; options: others of ``identify_cast``.
    Raises:    as ``identify_cast``.
    Source:    spec C-8.
    """
    exhaustive = exhaustive and formats.by_name(fmt).name in formats.FP8_FORMATS
    return identify_cast(function, fmt, expect=expect, exhaustive=exhaustive, **options).require()


@dataclass(frozen=True, kw_only=True)
class _Explained:
    """The behavior found of a cast, and the responses to inputs of each dtype, the first one first.

    wrong  for each dtype, where a code is not that of the behavior.
    """

    behavior: Behavior
    findings: list[Finding]
    responses: dict[str, Responses]
    wrong: dict[str, np.ndarray]

    @property
    def right(self) -> list[Responses]:
        """The responses that it explains."""
        return [a for source, a in self.responses.items() if not self.wrong[source].any()]

    @property
    def unlike(self) -> list[Counterexample]:
        """The simplest input that it does not explain, of each dtype."""
        pairs = [(a, self.wrong[s]) for s, a in self.responses.items() if self.wrong[s].any()]
        by = "by the behavior found"
        places = [(a, simplest(a.x, wrong)) for a, wrong in pairs]
        return [a.counterexample(at, self.behavior, by) for a, at in places]

    def answers(self, exhaustive: bool) -> Finding:
        """The finding on how many codes it explains."""
        total = sum(differs.size for differs in self.wrong.values())
        right = total - sum(int(differs.sum()) for differs in self.wrong.values())
        first = next(iter(self.responses.values()))
        asked = f"{first.x.size:,} of the {first.source} inputs"
        evidence = f"of {total:,} are those of this"
        if not exhaustive and first.fmt.name in formats.FP8_FORMATS:
            evidence += "; --exhaustive asks all of float32"
        unasked = () if exhaustive else (f"all but {asked}",)
        return Finding("answers", right, evidence, words=f"{right:,}", unasked=unasked)


def _explained(subject: Subject, first: Responses) -> _Explained:
    """Decide the behavior by the inputs of the first dtype, then double roundings by the others."""
    decided, cast_behavior = decisions.decide_all(first)
    others, dtype_findings, cast_behavior = _other_dtypes(subject, first, cast_behavior)
    responses = {first.source: first} | others
    # NaN codes count as equal (C-5) in the other dtypes, where libraries emit other codes: XLA 0x7F
    # from float16 and 0x7E from float32. So they do where the code depends on the payload.
    by_payload = next(f for f in decided if f.what == "nan_code").value is None
    wrong = {
        s: a.mismatches(cast_behavior, canonical=by_payload or s != first.source)
        for s, a in responses.items()
    }
    findings = [*decided, *dtype_findings]
    return _Explained(behavior=cast_behavior, findings=findings, responses=responses, wrong=wrong)


def _identify_repeating(
    subject: Subject,
    first: Responses,
    fmt: Format,
    format_finding: Finding,
    expect: str | None,
    exhaustive: bool,
) -> Outcome:
    """Identify a cast that gives equal codes for equal inputs.

    first  its responses to the inputs of the first dtype, in the format found.
    """
    found_fmt, explained = first.fmt, _explained(subject, first)
    b, unlike = explained.behavior, explained.unlike
    for a in explained.right:
        unlike += layout_invariance.check_every_16_bit(subject, a, b)
    findings = [format_finding, *explained.findings, explained.answers(exhaustive)]
    if exhaustive:
        finding, simplest_unexplained = check_all_inputs(subject, found_fmt, b)
        findings.append(finding)
        unlike += simplest_unexplained
    complete = None not in (b.rounding, b.overflow, b.infinite) and not unlike
    layout_findings, elsewhere = _other_layouts(subject, first.source, explained.right, b)
    findings += layout_findings
    unlike += elsewhere
    names, names_but_for_nan = describe.names(first)
    mistake = "" if complete else mistakes.name(first)
    findings = describe.without_guesses(findings, explained.wrong)
    summary = describe.summary(
        b, first, fmt, complete=complete, everywhere=not elsewhere, mistake=mistake
    )
    summary += "" if complete or found_fmt is fmt else _scaled(subject, fmt, first.source)
    untaken = [s for s in ("bfloat16", "float16") if s not in explained.responses]
    differences = list[Counterexample]()
    if expect:
        expected = behavior.by_name(expect, fmt)
        differences = describe.differences_from(explained.responses, expected, fmt, format_finding)
    named = {"behavior": names, "behavior_but_for_nan_codes": names_but_for_nan}
    packing = dict[str, str]()
    if isinstance(subject, outputs.NarrowSubject) and fmt.bits == 4:
        packing = {"packing": subject.packing}
        findings.append(Finding("packing", subject.packing, "the shape of its output"))
    if unlike:
        named = {key: [] for key in named}
    return Outcome(
        name=subject.name,
        kind="cast",
        fmt=fmt,
        framework=subject.framework,
        found=describe.result_dict(b, findings, first) | named | packing,
        findings=findings,
        identified=complete and not elsewhere,
        named=bool(names_but_for_nan),
        summary=summary + (f"; it does not accept {' or '.join(untaken)}" if untaken else ""),
        unlike=unlike,
        expected=expect,
        differences=differences,
        limits=subject.other_devices,
    )


def _other_dtypes(
    subject: Subject, first: Responses, cast_behavior: Behavior
) -> tuple[dict[str, Responses], list[Finding], Behavior]:
    """The responses in each other dtype that it takes, and the behavior with double roundings."""
    source, found_fmt = first.source, first.fmt
    responses, findings = dict[str, Responses](), list[Finding]()
    for other in subjects.DTYPES:
        if other == source:
            continue
        try:
            subject.ask(np.ones(16), other)
        except RefusedError as error:
            what = f"double_rounding of {other}"
            unasked = (f"{other}, for which it raises",) if other != "float64" else ()
            findings.append(Finding(what, None, str(error), words="not tested", unasked=unasked))
            continue
        responses[other] = _deterministic(subject, other, found_fmt)
        finding, through = decisions.double_rounding(
            responses[other], cast_behavior, cast_behavior.double_rounding.get(source)
        )
        findings.append(finding)
        cast_behavior = decisions.with_double_rounding(cast_behavior, other, through)
    return responses, findings, cast_behavior


def _other_layouts(
    subject: Subject, source: str, explained: list[Responses], cast_behavior: Behavior
) -> tuple[list[Finding], list[Counterexample]]:
    """Check other shapes and strides in each dtype that is explained, except float64."""
    findings, wrong = list[Finding](), list[Counterexample]()
    for a in explained:
        if a.source == "float64":
            continue
        _check_no_reuse(subject, a)
        for check in (layout_invariance.check_shapes, layout_invariance.check_strides):
            finding, counterexamples = check(subject, a, cast_behavior)
            what = finding.what if a.source == source else f"{finding.what} of {a.source}"
            findings.append(dataclasses.replace(finding, what=what))
            wrong += counterexamples
    return findings, wrong


def check_all_inputs(
    subject: Subject, fmt: Format, cast_behavior: Behavior, *, inputs: int | None = None
) -> tuple[Finding, list[Counterexample]]:
    """Compare all float32 inputs, or the first so many bits, with the behavior found.

    Returns:  how many agree, and a counterexample of the simplest one that does not.
    """

    def differing(x: np.ndarray) -> tuple[np.ndarray, Callable[[int], Counterexample]]:
        output = outputs.ask(subject, x, "float32")
        codes = output.codes(fmt) if output.values_only else output.array
        responses = Responses(x=x, source="float32", output=output, fmt=fmt)
        # Nearly always all are equal: one comparison then, without those of NaNs and infinities.
        same = np.array_equal(codes, behavior.encode(x, fmt, cast_behavior))
        differs = np.zeros(x.shape, bool) if same else responses.mismatches(cast_behavior)
        by = "by the behavior found"
        return differs, lambda at: responses.counterexample(at, cast_behavior, by)

    wrong, example = all_inputs.simplest_difference(differing, inputs=inputs)
    total = all_inputs.INPUTS if inputs is None else inputs
    evidence = f"of {total:,} float32 inputs match the behavior found"
    finding = Finding("all inputs", total - wrong, evidence, words=f"{total - wrong:,}")
    return finding, [example] if example else []


def _check_no_reuse(subject: Subject, a: Responses) -> None:
    """ConformanceError where a later call overwrites the output of an earlier one."""
    # a.x is sorted by its bits: these have all exponents and both signs
    some = a.x[:: a.x.size // 64]
    subjects.check_no_reuse(subject, some, some[::-1], a.source)


def check_format(fmt: Format) -> None:
    """ValueError unless fmt is a format of at most 8 bits that tensors are cast to."""
    formats.check(fmt)
    names = ", ".join([*formats.NARROW_FORMATS, "e8m0fnu"])
    errors.require(fmt.bits <= 8, f"a cast is to one of {names}; got {fmt}.")


def _format(subject: Subject, fmt: Format, source: str) -> tuple[Format | None, Finding]:
    """The format that it casts to, from the numbers of every format; None if there is none."""
    x = rounded(cast_inputs.all_numbers(fmt), source)
    output, position = outputs.ask_twice(subject, x, source)
    # The identity would be taken for a cast to any format.
    if output.values_only and np.array_equal(output.array, x):
        tried = cast_inputs.CAST_FORMATS | {fmt.name: fmt}
        evidence = (
            f"all {x.size} numbers of {len(tried)} formats come back unchanged: it rounds to none "
            "of them"
        )
        return None, Finding("format", None, evidence)
    found_fmt, evidence = outputs.identify_format(output, x, fmt)
    if found_fmt is None and position is not None:
        raise ConformanceError(
            f"{subject.name} does not repeat itself, and does not round stochastically: "
            f"{source} {show(x[position])} ({bits_of(x[position], source)}) gave different "
            "codes on the second call. Make its result depend on its input alone."
        )
    witness = None
    if found_fmt is not fmt:
        codes = output.codes(fmt)
        expected = behavior.encode(x, fmt, KNOWN_CASTS["saturating"].behavior(fmt)).astype(np.int64)
        at = simplest(x, codes != expected)
        expected_output = outputs.Output(array=expected.astype(np.uint8), dtype="uint8")
        witness = Counterexample(
            show(x[at]),
            outputs.output_text(output, at, found_fmt or fmt),
            outputs.output_text(expected_output, at, fmt),
            _CLAUSES.get(fmt.name, "F-1"),
            bits=(bits_of(x[at], source),),
            dtype=source,
        )
        evidence += f"; {witness}"
    if found_fmt is None:
        return None, Finding("format", None, evidence, witness=witness)
    text = f"{found_fmt}"
    text += f", max {found_fmt.max:g}, not {fmt}" if found_fmt is not fmt else ""
    return found_fmt, Finding("format", found_fmt.name, evidence, words=text, witness=witness)


_CLAUSES = {"e4m3fn": "F-2", "e5m2": "F-2", "e4m3fnuz": "F-3", "e5m2fnuz": "F-3"}


def _ask(subject: Subject, source: str, found_fmt: Format) -> tuple[Responses, int | None]:
    """The responses to all chosen inputs, and the first index where a second call differs."""
    x = cast_inputs.identifying(found_fmt, source)
    output, position = outputs.ask_twice(subject, x, source)
    return Responses(x=x, source=source, output=output, fmt=found_fmt), position


def _deterministic(subject: Subject, source: str, found_fmt: Format) -> Responses:
    """As _ask; ConformanceError where a second call differs."""
    responses, position = _ask(subject, source, found_fmt)
    if position is not None:
        raise ConformanceError(
            f"{subject.name} does not repeat itself for {source} {show(responses.x[position])} "
            f"({bits_of(responses.x[position], source)}), though it does for other dtypes. "
            "Make its result depend on its input alone."
        )
    return responses


def _scaled(subject: Subject, fmt: Format, source: str) -> str:
    """In words, the factor by which most numbers of fmt are scaled; empty if there is none."""
    x = rounded(cast_inputs.with_next(fmt)[1:-1], source)
    codes = outputs.ask(subject, x, source).codes(fmt)
    # A format with another bias, read as fmt, looks like a constant factor.
    with np.errstate(all="ignore"):
        numbers = cast.decode(np.maximum(codes, 0).astype(np.uint8), fmt)
        ratio = np.where(codes >= 0, numbers, np.nan) / x
    finite = np.isfinite(ratio)
    most = float(np.median(ratio[finite])) if finite.any() else 1.0
    if np.mean(ratio == most) <= 0.5 or most in (0, 1):
        return ""
    return f"; read as {fmt}, most of {fmt}'s numbers come back multiplied by {most:g}"


def _without_format(
    subject: Subject, fmt: Format, source: str, finding: Finding, expect: str | None
) -> Outcome:
    """The outcome for a cast whose format is unknown."""
    witness = finding.witness
    return Outcome(
        name=subject.name,
        kind="cast",
        fmt=fmt,
        framework=subject.framework,
        found={"format": None},
        findings=[finding],
        identified=False,
        summary=f"not a cast to a known format: {finding.evidence}{_scaled(subject, fmt, source)}",
        expected=expect,
        differences=[witness] if expect and witness else [],
    )
