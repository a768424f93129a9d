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
from fp8ref.conformance.finding import Finding
from fp8ref.conformance.inputs import amax_inputs
from fp8ref.conformance.outcome import Outcome
from fp8ref.conformance.quantizer import describe, inner_cast, layout_invariance, matching, minimize, mismatches, policy_match, queries
from fp8ref.conformance.quantizer import granularity as influence
from fp8ref.conformance.quantizer.granularity import SHAPE
from fp8ref.conformance.quantizer.outputs import Quantizer, Reading, smallest_shape
from fp8ref.conformance.quantizer.policy_match import Candidate
from fp8ref.conformance.quantizer.queries import Sharing
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
    findings = [_format_finding(reading, layout, fmt), remembered, group.finding]
    if group.granularity is None:
        return _unscaled(quantizer, fmt, layout, findings, expect, group.finding)
    at, along = group.granularity, -1 if group.axis is None else group.axis
    what = amax_inputs.identifying(layout, quantizer.dtype)
    shape = smallest_shape(quantizer, _ASKED_IN, lambda s: True) if at == "tensorwise" else SHAPE
    asked = queries.ask(quantizer, what, shape, at, along)
    sharing = queries.returned(asked, at, along)
    considered = queries.considered(quantizer, asked, sharing)
    fixed, flushing = reading.dtype.startswith("float8"), subject.framework == "jax"
    matched = matching.match(asked, sharing, layout, considered, fixed=fixed, flushing=flushing)
    chosen = matched.nearest.candidate
    unlike = [] if matched.agreements else mismatches.witnesses(quantizer, matched, matched.nearest, sharing)
    findings += [
        _axis(quantizer, group.axis, chosen, sharing),
        _returned(sharing, reading),
        matching.policy_finding(matched, quantizer.memory),
    ]
    rounding: Behaviour | None = None
    different: list[Witness] = []
    if matched.agreements:
        groups = amax_inputs.groups(SHAPE, at, along)
        more, rounding, answers = inner_cast.cast_of(quantizer, chosen.fmt, chosen.top, groups)
        findings += more
        different = inner_cast.differences(answers, chosen.fmt, chosen.policy.compute)
        wrong = matched.wrong(matched.nearest)
        if not inner_cast.explains(answers, rounding) or (not different and wrong.any()):
            unlike = mismatches.witnesses(quantizer, matched, matched.nearest, sharing) or different
    if different and not unlike:  # whatever else is wrong is so beside that
        own = policy_match.agreement(dataclasses.replace(chosen, rounding=rounding, source=quantizer.dtype), asked, sharing)
        unlike = mismatches.witnesses(quantizer, matched, own, sharing) if (~own.both & matched.considered).any() else []
    misnamed = mismatches.misnamed(asked, sharing, chosen.policy)
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
        differences = mismatches.policy(quantizer, wanted, fmt, asked, sharing, matched, layout)
        differences += mismatches.layout_of(quantizer, group, granularity, axis, Candidate(policy=wanted, top=fmt, fmt=layout), sharing)
        differences += mismatches.scales_shapes(reading, sharing)
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


def _format_finding(reading: Reading, layout: Format, fmt: Format) -> Finding:
    said = layout.name if layout is fmt else f"{layout}, max {layout.max:g}, not {fmt}"
    evidence = f"it gives {reading.dtype}" + ("" if reading.dtype.startswith("float8") else f", taken for {layout}'s")
    return Finding(what="format", value=layout.name, words=said, evidence=evidence)


def _axis(quantizer: Quantizer, axis: int | None, chosen: Candidate, sharing: Sharing) -> Finding:
    if axis is None:
        return Finding(what="axis", value=None, words="either", evidence=f"{sharing.granularity} scales are the same along both")
    if axis == -1:
        return Finding(what="axis", value=-1, evidence="scales are along the last axis")
    witness = minimize.layout(quantizer, chosen, dataclasses.replace(sharing, axis=-1))
    return Finding(what="axis", value=axis, evidence=str(witness) if witness else "scales are along the first axis", witness=witness)


def _returned(sharing: Sharing, reading: Reading) -> Finding:
    """Each array beside the codes: what it is, its place, and its shape for x [256, 384], which tells rows from columns."""
    shapes = {name: reading.scales[name].shape for name in sharing.kinds}
    turned = {name: sharing.turned(shape, SHAPE) for name, shape in shapes.items()}
    said = ", ".join(
        kind + (f" as {name}" if name and name != kind else "") + f" {list(shapes[name])}" + (" (transposed)" if turned[name] else "")
        for name, kind in sharing.kinds.items()
    )
    value = " and ".join(dict.fromkeys(sharing.kinds.values())) or None
    codes = f"{reading.dtype} of x's shape, {list(SHAPE)}" + (f", as {reading.place}" if reading.place else "")
    evidence = f"beside {codes}" + ("" if sharing.kinds else ", nothing that goes with the amax")
    return Finding(what="returns", value=value, words=said or "neither scale nor scale_inv", evidence=evidence)


def _unscaled(quantizer: Quantizer, fmt: Format, layout: Format, findings: list[Finding], expect: str | None, finding: Finding) -> Outcome:
    witness = Witness(
        input=finding.evidence, bits=(), dtype=quantizer.dtype, got=finding.said, expected="a granularity of S-6", clause="S-6"
    )
    return Outcome(
        name=quantizer.subject.name, kind="quantizer", fmt=fmt, framework=quantizer.subject.framework, findings=findings, identified=False,
        found={"format": layout.name, "granularity": None, "axis": None, "policy": None, "memory": quantizer.memory},
        summary=f"a quantizer with {finding.said}", unlike=[witness], expected=expect, differences=[witness] if expect else [],
    )  # fmt: skip
