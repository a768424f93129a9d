"""From a cast's answers to what it is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from fp8ref import formats
from fp8ref.conformance import subject as subjects
from fp8ref.conformance.cast import behaviour, decisions, describe, inputs, layout_invariance, outputs, stochastic
from fp8ref.conformance.cast import exhaustive as everything
from fp8ref.conformance.cast.behaviour import KNOWN_CASTS
from fp8ref.conformance.cast.outputs import Responses
from fp8ref.conformance.counterexample import Counterexample, bits_of, rounded, show
from fp8ref.conformance.explain import simplest
from fp8ref.conformance.finding import Finding, Outcome
from fp8ref.conformance.subject import ConformanceError, RefusedError, Subject
from fp8ref.formats import Format
from fp8ref.sim import cast


def identify_cast(
    function: Callable[..., Any],
    fmt: Format,
    *,
    name: str | None = None,
    expect: str | None = None,
    framework: str | None = None,
    device: str = "cpu",
    exhaustive: bool = False,
) -> Outcome:
    """What a cast does, by what it gives for some twenty thousand inputs, or for all float32 ones.

    function   one array [n], float32 or bfloat16 and, if it takes them, float16 and float64, -> [n]: codes uint8, float8, or values.
    expect     a name of ``behaviour.KNOWN`` that it is held to, NaN codes being one (C-5).
    framework  of the arrays it is given; by default the first that it takes of numpy, torch, jax.
    exhaustive all 2^32 float32 inputs are held to what was found.

    Raises:    ValueError: fmt not an FP8 format, an unknown name; ConformanceError: the function is none.
    """
    check_format(fmt)
    wanted = None if expect is None else behaviour.by_name(expect)
    name = name or subjects.name_of(function)
    subject = subjects.wrap(name, function, framework=framework, device=device, shape=(16,))
    source = subjects.first_dtype(subject)
    if exhaustive and source != "float32":
        raise ConformanceError(f"{name} takes no float32, of which all inputs would be asked. Leave --exhaustive out.")
    found_fmt, found_format = _format(subject, fmt, source)
    findings = [found_format]
    if found_fmt is None:
        return _unknown(subject, fmt, source, findings, expect)
    first, position = _ask(subject, source, found_fmt)
    _check_keeps(subject, first)
    if position is not None or stochastic.varies(subject, source, found_fmt):
        if exhaustive:
            raise ConformanceError(f"{name} gives equal inputs unequal codes: none that all of float32 is held to. Leave --exhaustive out.")
        return stochastic.identify(subject, first, position, fmt, findings, expect)
    more, found = decisions.decide_all(first, found_fmt)
    findings += more
    responses = {source: first}
    for other in subjects.DTYPES:
        if other == source:
            continue
        try:
            subject.ask(np.ones(16), other)
        except RefusedError as error:
            findings.append(Finding(what=f"double_rounding of {other}", value=None, words="not asked", evidence=str(error)))
            continue
        responses[other] = _deterministic(subject, other, found_fmt)
        more_found, through = decisions.double_rounding(responses[other], found, found.double_rounding.get(source))
        findings.append(more_found)
        found = decisions.with_double_rounding(found, other, through)
    # In other sources NaNs are one (C-5): libraries emit other codes there, XLA 0x7F from float16 and 0x7E from float32
    # and so where a NaN's payload has a part in its code
    by_payload = next(f for f in more if f.what == "nan_code").value is None
    wrong = {a: a.mismatches(found, canonical=by_payload or a.source != source) for a in responses.values()}
    unlike = [a.counterexample(simplest(a.x, differs), found, "by what was found") for a, differs in wrong.items() if differs.any()]
    total, right = sum(a.x.size for a in wrong), sum(int((~differs).sum()) for differs in wrong.values())
    findings.append(
        Finding(
            what="answers",
            value=right,
            evidence=f"of {total:,} are those of this{'' if exhaustive else '; --exhaustive asks all of float32'}",
            words=f"{right:,}",
        )
    )
    if exhaustive:
        checked = everything.compare(subject, found_fmt, found)
        findings.append(checked.finding)
        unlike += checked.unlike
    untaken = [s for s in ("bfloat16", "float16") if s != source and s not in responses]
    names = [k for k, known in KNOWN_CASTS.items() if not first.mismatches(known.behaviour(found_fmt)).any()]
    names_but_for_nan = [k for k, known in KNOWN_CASTS.items() if not first.mismatches(known.behaviour(found_fmt), canonical=True).any()]
    complete = None not in (found.rounding, found.overflow, found.infinite) and not unlike
    elsewhere = []
    for of, a in (
        (of, a) for of, a in responses.items() if of != "float64" and a not in (b for b, differs in wrong.items() if differs.any())
    ):
        _check_keeps(subject, a)
        for check in (layout_invariance.check_shapes, layout_invariance.check_strides):
            finding, wrong_there = check(subject, a, found)
            findings.append(finding if of == source else dataclasses.replace(finding, what=f"{finding.what} of {of}"))
            elsewhere += wrong_there
    unlike += elsewhere
    differences = describe.differences_from(responses, wanted.behaviour(fmt), fmt, found_fmt, findings) if wanted else []
    return Outcome(
        name=name,
        kind="cast",
        fmt=fmt,
        framework=subject.framework,
        found=describe.result_dict(found, findings, found_fmt, first, names if not unlike else [], names_but_for_nan if not unlike else []),
        findings=findings,
        identified=complete and not elsewhere,
        named=bool(names_but_for_nan),
        summary=describe.summary(found, found_fmt, fmt, names, names_but_for_nan, complete, not elsewhere)
        + ("" if complete or found_fmt is fmt else _scaled(subject, fmt, source))
        + (f"; it takes no {', no '.join(untaken)}" if untaken else ""),
        unlike=unlike,
        expected=expect,
        differences=differences,
    )


def _check_keeps(subject: Subject, a: Responses) -> None:
    some = a.x[:: a.x.size // 64]  # of every exponent and both signs
    subjects.check_no_reuse(subject, some, some[::-1], a.source, _read)


def _read(found: Any) -> list[np.ndarray]:
    made = subjects.read_array(found)
    return [made[0]] if made else []


def check_format(fmt: Format) -> None:
    formats.check(fmt)
    if fmt.name not in formats.FP8_FORMATS:
        raise ValueError(f"a cast is to one of {', '.join(formats.FP8_FORMATS)}; got {fmt}.")


def _format(subject: Subject, fmt: Format, source: str) -> tuple[Format | None, Finding]:
    x = rounded(inputs.all_numbers(), source)
    output, position = outputs.ask_twice(subject, x, source)
    if output.values_only and np.array_equal(output.array, x):
        evidence = f"all {x.size} numbers of {len(behaviour.CAST_FORMATS)} formats come back as themselves: it rounds to none of them"
        return None, Finding(what="format", value=None, evidence=evidence)
    found_fmt, evidence = outputs.identify_format(output, x, fmt)
    if found_fmt is None and position is not None:
        raise ConformanceError(
            f"{subject.name} does not repeat itself, and is no stochastic rounding: {source} {show(x[position])} "
            f"({bits_of(x[position], source)}) gave other codes the second time. Make it a function of its input."
        )
    witness = None
    if found_fmt is not fmt:
        codes, expected = output.codes(fmt), behaviour.encode(x, fmt, KNOWN_CASTS["saturating"].behaviour(fmt)).astype(np.int64)
        at = simplest(x, codes != expected)
        expected_output = outputs.Output(array=expected.astype(np.uint8), dtype="uint8")
        witness = Counterexample(
            input=show(x[at]),
            bits=(bits_of(x[at], source),),
            dtype=source,
            got=outputs.output_text(output, at, found_fmt or fmt),
            expected=outputs.output_text(expected_output, at, fmt),
            clause="F-2" if fmt.specials != "fnuz" else "F-3",
        )
        evidence += f"; {witness}"
    text = "" if found_fmt is None else f"{found_fmt}" if found_fmt is fmt else f"{found_fmt}, max {found_fmt.max:g}, not {fmt}"
    return found_fmt, Finding(what="format", value=found_fmt and found_fmt.name, words=text, evidence=evidence, witness=witness)


def _ask(subject: Subject, source: str, found_fmt: Format) -> tuple[Responses, int | None]:
    x = inputs.inputs(found_fmt, source)
    output, position = outputs.ask_twice(subject, x, source)
    return Responses(x=x, source=source, output=output, fmt=found_fmt, codes=output.codes(found_fmt)), position


def _deterministic(subject: Subject, source: str, found_fmt: Format) -> Responses:
    responses, position = _ask(subject, source, found_fmt)
    if position is not None:
        raise ConformanceError(
            f"{subject.name} does not repeat itself for {source} {show(responses.x[position])} ({bits_of(responses.x[position], source)}), "
            "though it does for others. Make it a function of its input."
        )
    return responses


def _scaled(subject: Subject, fmt: Format, source: str) -> str:
    """Whether its numbers are all the same number of times what they were, in words."""
    x = rounded(inputs.numbers(fmt)[1:-1], source)
    codes = outputs.ask(subject, x, source).codes(fmt)
    with np.errstate(all="ignore"):
        ratio = np.where(codes >= 0, cast.decode((codes & 255).astype(np.uint8), fmt), np.nan) / x
    most = float(np.median(ratio[np.isfinite(ratio)])) if np.isfinite(ratio).any() else 1.0
    half = np.mean(ratio == most) > 0.5 and most not in (0, 1)
    return f"; read as {fmt}, most of {fmt}'s numbers come back as {most:g} times themselves" if half else ""


def _unknown(subject: Subject, fmt: Format, source: str, findings: list[Finding], expect: str | None) -> Outcome:
    witness = findings[0].witness
    return Outcome(
        name=subject.name, kind="cast", fmt=fmt, framework=subject.framework, found={"format": None}, findings=findings, identified=False,
        summary=f"no cast to a format that is known: {findings[0].evidence}{_scaled(subject, fmt, source)}", expected=expect,
        differences=[witness] if expect and witness else [],
    )  # fmt: skip
