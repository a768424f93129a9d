"""From a quantiser's answers to what it is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from fp8ref import policy as policy_data
from fp8ref.conformance import subject as subjects
from fp8ref.conformance.cast.behaviour import LAYOUTS, Behaviour
from fp8ref.conformance.cast.identify import check_format
from fp8ref.conformance.counterexample import Witness
from fp8ref.conformance.finding import Outcome
from fp8ref.conformance.inputs import amaxes
from fp8ref.conformance.quantizer import candidates, counterexamples, describe, inner_cast, layout_invariance, policy_match, queries
from fp8ref.conformance.quantizer import granularity as influence
from fp8ref.conformance.quantizer.candidates import Candidate
from fp8ref.conformance.quantizer.granularity import SHAPE
from fp8ref.conformance.quantizer.outputs import Quantizer, Reading, smallest_shape
from fp8ref.conformance.subject import RefusedError
from fp8ref.formats import Format

_ASKED_IN = ((1, 32), (16, 16), (16, 128), (128, 128), SHAPE)


def identify_quantizer(
    function: Callable[..., Any],
    fmt: Format,
    *,
    name: str | None = None,
    expect: str | None = None,
    granularity: str | None = None,
    axis: int | None = None,
    framework: str | None = None,
    device: str = "cpu",
) -> Outcome:
    """What a quantiser does: which elements share a scale, which policy makes it, what is returned, and how it rounds.

    function   x [M, K], float32 or bfloat16, -> codes (uint8 or float8) or values of that shape, alone or in a tuple, a dict or an
               object beside a scale, scale_inv or both.
    expect     a policy's name that it is held to, with granularity and axis if they are given.

    Raises:    ValueError: fmt not an FP8 format, an unknown name; ConformanceError: the function is none.
    """
    check_format(fmt)
    wanted = None if expect is None else policy_data.by_name(expect)
    if wanted is None and (granularity is not None or axis is not None):
        raise ValueError("a granularity and an axis are expected along with a policy. Name it: --expect.")
    name = name or subjects.name_of(function)
    try:
        subject = subjects.of(name, function, framework=framework, device=device, shape=SHAPE)
    except RefusedError as error:
        raise RefusedError(f"{error}\nA quantizer is asked with x [M, K]: two axes, of which scales may reduce either (S-6).") from error
    quantizer = Quantizer(subject=subject, dtype=subjects.first_source(subject, SHAPE))
    quantizer, remembered = influence.memory(quantizer)
    group = influence.group(quantizer)
    reading = quantizer.ask(np.ones(SHAPE, np.float32))
    layout = _layout(reading, fmt)
    findings = [describe.format_finding(reading, layout, fmt), remembered, group.finding]
    if group.granularity is None:
        return describe.unscaled(quantizer, fmt, layout, findings, expect, group.finding)
    at, along = group.granularity, -1 if group.axis is None else group.axis
    what = amaxes.questions(layout, quantizer.dtype)
    shape = smallest_shape(quantizer, _ASKED_IN, lambda s: True) if at == "tensorwise" else SHAPE
    asked = queries.ask(quantizer, what, shape, at, along)
    sharing = queries.returned(asked, at, along)
    considered = queries.considered(quantizer, asked, sharing)
    fixed, flushing = reading.dtype.startswith("float8"), subject.framework == "jax"
    matched = policy_match.match(asked, sharing, layout, considered, fixed=fixed, flushing=flushing)
    chosen = matched.nearest.candidate
    unlike = [] if matched.agreements else counterexamples.witnesses(quantizer, matched, matched.nearest, sharing)
    findings += [
        describe.axis(quantizer, group.axis, chosen, sharing),
        describe.returned(sharing, reading),
        describe.policy_finding(matched, quantizer.memory),
    ]
    rounding: Behaviour | None = None
    different: list[Witness] = []
    if matched.agreements:
        groups = amaxes.groups(SHAPE, at, along)
        more, rounding, answers = inner_cast.cast_of(quantizer, chosen.fmt, chosen.top, groups)
        findings += more
        different = inner_cast.differences(answers, chosen.fmt, chosen.policy.compute)
        wrong = matched.wrong(matched.nearest)
        if not inner_cast.explains(answers, rounding) or (not different and wrong.any()):
            unlike = counterexamples.witnesses(quantizer, matched, matched.nearest, sharing) or different
    if different and not unlike:  # whatever else is wrong is so beside that
        own = candidates.agreement(dataclasses.replace(chosen, rounding=rounding, source=quantizer.dtype), asked, sharing)
        unlike = counterexamples.witnesses(quantizer, matched, own, sharing) if (~own.both & matched.considered).any() else []
    misnamed = counterexamples.misnamed(asked, sharing, chosen.policy)
    unlike = [*unlike, *misnamed]
    beyond: list[Witness] = []
    if matched.agreements and not unlike and not different:
        for agreed in sorted(matched.agreements, key=lambda a: a.candidate.policy != wanted):  # those that only other tensors tell apart
            more, beyond = layout_invariance.hold(quantizer, agreed.candidate, sharing, shape)
            if not beyond:
                break
        findings += more
        unlike = list(beyond)
    differences = []
    if wanted is not None:
        differences = counterexamples.unexpected_policy(quantizer, wanted, fmt, asked, sharing, matched, layout)
        differences += counterexamples.layout_of(
            quantizer, group, granularity, axis, Candidate(policy=wanted, top=fmt, fmt=layout), sharing
        )
        differences += counterexamples.scales_shapes(reading, sharing)
        differences += [] if differences else different
        # te_delayed and flax keep a scale, that of an amax before
        differences += [remembered.witness] if remembered.witness and not wanted.keeps else []
        differences += [w for w in misnamed if w not in differences]
    identified = bool(matched.agreements) and not unlike
    untaken = [f.what.removeprefix("from ") for f in findings if f.said == "not taken"]
    found = describe.as_data(matched, chosen, group, sharing, rounding, quantizer, reading, layout, identified)
    return Outcome(
        name=name, kind="quantizer", fmt=fmt, framework=subject.framework, found=found, findings=findings, identified=identified,
        summary=describe.in_words(matched, chosen, group, found, fmt, quantizer.memory, not beyond, identified)
        + (f"; it takes no {', no '.join(untaken)}" if untaken else ""),
        named=bool(matched.agreements) and not different and chosen.top.max == fmt.max,
        unlike=unlike, expected=expect, differences=differences,
    )  # fmt: skip


def _layout(reading: Reading, fmt: Format) -> Format:
    return LAYOUTS.get(reading.dtype.removeprefix("float8_"), fmt)
