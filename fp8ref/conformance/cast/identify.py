"""From a cast's answers to what it is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from fp8ref import formats
from fp8ref.conformance import subject as subjects
from fp8ref.conformance.cast import behaviour, decisions, describe, inputs, layout_invariance, outputs, stochastic
from fp8ref.conformance.cast import exhaustive as everything
from fp8ref.conformance.cast.behaviour import KNOWN
from fp8ref.conformance.cast.outputs import Answers
from fp8ref.conformance.counterexample import Witness, bits_of, rounded, show
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
    wanted = None if expect is None else behaviour.known(expect)
    name = name or subjects.name_of(function)
    subject = subjects.of(name, function, framework=framework, device=device, shape=(16,))
    source = subjects.first_source(subject)
    if exhaustive and source != "float32":
        raise ConformanceError(f"{name} takes no float32, of which all inputs would be asked. Leave --exhaustive out.")
    layout, found_format = _format(subject, fmt, source)
    findings = [found_format]
    if layout is None:
        return _unknown(subject, fmt, source, findings, expect)
    asked, position = _ask(subject, source, layout)
    _check_keeps(subject, asked)
    if position is not None or stochastic.varies(subject, source, layout):
        if exhaustive:
            raise ConformanceError(f"{name} gives equal inputs unequal codes: none that all of float32 is held to. Leave --exhaustive out.")
        return stochastic.identify(subject, asked, position, fmt, findings, expect)
    more, found = decisions.all_of(asked, layout)
    findings += more
    answers = {source: asked}
    for other in subjects.DTYPES:
        if other == source:
            continue
        try:
            subject.ask(np.ones(16), other)
        except RefusedError as error:
            findings.append(Finding(what=f"double_rounding of {other}", value=None, words="not asked", evidence=str(error)))
            continue
        answers[other] = _deterministic(subject, other, layout)
        more_found, through = decisions.double_rounding(answers[other], found, found.through.get(source))
        findings.append(more_found)
        found = decisions.with_through(found, other, through)
    # In other sources NaNs are one (C-5): libraries emit other codes there, XLA 0x7F from float16 and 0x7E from float32
    # and so where a NaN's payload has a part in its code
    by_payload = next(f for f in more if f.what == "nan_code").value is None
    wrong = {a: a.unlike(found, canonical=by_payload or a.source != source) for a in answers.values()}
    unlike = [a.witness(simplest(a.x, differs), found, "by what was found") for a, differs in wrong.items() if differs.any()]
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
        checked = everything.compare(subject, layout, found)
        findings.append(checked.finding)
        unlike += checked.unlike
    untaken = [s for s in ("bfloat16", "float16") if s != source and s not in answers]
    names = [k for k, known in KNOWN.items() if not asked.unlike(known.of(layout)).any()]
    alike = [k for k, known in KNOWN.items() if not asked.unlike(known.of(layout), canonical=True).any()]
    complete = None not in (found.rounding, found.overflow, found.infinite) and not unlike
    elsewhere = []
    for of, a in (
        (of, a) for of, a in answers.items() if of != "float64" and a not in (b for b, differs in wrong.items() if differs.any())
    ):
        _check_keeps(subject, a)
        for hold in (layout_invariance.shapes, layout_invariance.strides):
            finding, wrong_there = hold(subject, a, found)
            findings.append(finding if of == source else dataclasses.replace(finding, what=f"{finding.what} of {of}"))
            elsewhere += wrong_there
    unlike += elsewhere
    differences = describe.unexpected(answers, wanted.of(fmt), fmt, layout, findings) if wanted else []
    return Outcome(
        name=name,
        kind="cast",
        fmt=fmt,
        framework=subject.framework,
        found=describe.as_data(found, findings, layout, asked, names if not unlike else [], alike if not unlike else []),
        findings=findings,
        identified=complete and not elsewhere,
        named=bool(alike),
        summary=describe.in_words(found, layout, fmt, names, alike, complete, not elsewhere)
        + ("" if complete or layout is fmt else _scaled(subject, fmt, source))
        + (f"; it takes no {', no '.join(untaken)}" if untaken else ""),
        unlike=unlike,
        expected=expect,
        differences=differences,
    )


def _check_keeps(subject: Subject, a: Answers) -> None:
    some = a.x[:: a.x.size // 64]  # of every exponent and both signs
    subjects.check_keeps(subject, some, some[::-1], a.source, _read)


def _read(found: Any) -> list[np.ndarray]:
    made = subjects.array(found)
    return [made[0]] if made else []


def check_format(fmt: Format) -> None:
    formats.check(fmt)
    if fmt.name not in formats.FP8_FORMATS:
        raise ValueError(f"a cast is to one of {', '.join(formats.FP8_FORMATS)}; got {fmt}.")


def _format(subject: Subject, fmt: Format, source: str) -> tuple[Format | None, Finding]:
    x = rounded(inputs.all_numbers(), source)
    reply, position = outputs.repeats(subject, x, source)
    if reply.values_only and np.array_equal(reply.array, x):
        evidence = f"all {x.size} numbers of {len(behaviour.LAYOUTS)} formats come back as themselves: it rounds to none of them"
        return None, Finding(what="format", value=None, evidence=evidence)
    layout, evidence = outputs.format_of(reply, x, fmt)
    if layout is None and position is not None:
        raise ConformanceError(
            f"{subject.name} does not repeat itself, and is no stochastic rounding: {source} {show(x[position])} "
            f"({bits_of(x[position], source)}) gave other codes the second time. Make it a function of its input."
        )
    witness = None
    if layout is not fmt:
        codes, expected = reply.codes(fmt), behaviour.encode(x, fmt, KNOWN["saturating"].of(fmt)).astype(np.int64)
        at = simplest(x, codes != expected)
        expected_reply = outputs.Reply(array=expected.astype(np.uint8), dtype="uint8")
        witness = Witness(
            input=show(x[at]),
            bits=(bits_of(x[at], source),),
            dtype=source,
            got=outputs.said(reply, at, layout or fmt),
            expected=outputs.said(expected_reply, at, fmt),
            clause="F-2" if fmt.specials != "fnuz" else "F-3",
        )
        evidence += f"; {witness}"
    said = "" if layout is None else f"{layout}" if layout is fmt else f"{layout}, max {layout.max:g}, not {fmt}"
    return layout, Finding(what="format", value=layout and layout.name, words=said, evidence=evidence, witness=witness)


def _ask(subject: Subject, source: str, layout: Format) -> tuple[Answers, int | None]:
    x = inputs.inputs(layout, source)
    reply, position = outputs.repeats(subject, x, source)
    return Answers(x=x, source=source, reply=reply, fmt=layout, codes=reply.codes(layout)), position


def _deterministic(subject: Subject, source: str, layout: Format) -> Answers:
    answers, position = _ask(subject, source, layout)
    if position is not None:
        raise ConformanceError(
            f"{subject.name} does not repeat itself for {source} {show(answers.x[position])} ({bits_of(answers.x[position], source)}), "
            "though it does for others. Make it a function of its input."
        )
    return answers


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
