"""Describe an identified quantizer: as findings, as JSON, and in one line."""

import dataclasses
from typing import Any

import numpy as np

from fp8ref.conformance.cast.behavior import Behavior
from fp8ref.conformance.kit.finding import Counterexample, Finding, Outcome
from fp8ref.conformance.kit.subject import SHAPE
from fp8ref.conformance.quantizer import counterexamples
from fp8ref.conformance.quantizer.granularity import FoundGranularity
from fp8ref.conformance.quantizer.outputs import Quantizer, QuantizerOutput, ScaleLayout
from fp8ref.conformance.quantizer.policy_match import Answers, PolicyMatch
from fp8ref.formats import Format
from fp8ref.sim.quantize import cast
from fp8ref.spec import profiles

_ROWS = ScaleLayout(granularity="rowwise", axis=-1)


def result_dict(
    matched: PolicyMatch,
    group: FoundGranularity,
    rounding: Behavior | None,
    output: QuantizerOutput,
    identified: bool,
) -> dict[str, Any]:
    """``is`` of --json."""
    chosen, scale_layout = matched.chosen, matched.answers.scale_layout
    quantizer = matched.answers.quantizer
    through = rounding.double_rounding.get(quantizer.dtype) if rounding else None
    scales = {}
    for name, kind in scale_layout.kinds.items():
        shape = output.scales[name].shape
        transposed = scale_layout.is_transposed(shape, output.tensor.shape)
        scales[name] = {"is": kind, "shape": list(shape), "transposed": transposed}
    names = matched.names if matched.agreements else []
    fitting = [profile for name in names for profile in profiles.policy_profiles(name)]
    return {
        "format": (chosen if matched.agreements else matched.answers).fmt.name,
        "granularity": group.granularity,
        "axis": group.axis,
        "returns": " and ".join(dict.fromkeys(scale_layout.kinds.values())) or None,
        "scales": scales,
        "policy": matched.names[0] if matched.agreements else None,
        "same_policies": matched.names[1:],
        "profiles": list(dict.fromkeys(fitting)),
        "nearest_policy": matched.nearest.candidate.policy.name,
        "deviation": matched.deviation or None,
        "scales_to": chosen.scale_fmt.max if matched.agreements else None,
        "flushes_subnormal_scales": chosen.flushes if matched.agreements else None,
        "memory": quantizer.memory,
        "rounding": rounding and rounding.rounding,
        "double_rounding": through and str(through),
        "subnormals": rounding and rounding.subnormals,
        "negative_zero": rounding and rounding.negative_zero,
        "saturates": True if identified else None,
        "inf_code": None,
        "nan_code": _nan_code(matched.answers),
        "gives": output.dtype,
    }


def _nan_code(answers: Answers) -> int | None:
    """The code of NaN inputs, if it is one; None without codes."""
    for a in answers.responses:
        at = np.isnan(a.x)
        if a.output.codes is not None and at.any():
            codes = set(a.output.codes[at].tolist())
            return codes.pop() if len(codes) == 1 else None
    return None


def summary(
    matched: PolicyMatch,
    group: FoundGranularity,
    fields: dict[str, Any],
    fmt: Format,
    everywhere: bool,
    identified: bool,
) -> str:
    """The quantizer in one line.

    everywhere  other shapes, dtypes and strides follow the policy too.
    """
    chosen, memory = matched.chosen, matched.answers.quantizer.memory
    where = f"{group.granularity}" + ("" if group.axis is None else f", axis {group.axis}")
    transposed = ""
    if any(f["transposed"] for f in fields["scales"].values()):
        transposed = ", transposed"
    title = (
        f"a quantizer to {chosen.fmt}, {where}, that returns "
        f"{fields['returns'] or 'no scale'}{transposed}"
    )
    if not matched.agreements and not matched.deviation:
        return f"{title}, by no known policy; nearest is {chosen.policy.name}"
    names = " or ".join(matched.names) or f"{chosen.policy.name}, but {matched.deviation}"
    names += f" ({matched.departs})" if matched.departs else ""
    if matched.basis is None:
        return f"{title}: policy {names}"
    notes = ""
    if chosen.scale_fmt.max != fmt.max:
        notes = f", scales to {chosen.scale_fmt.max:g}, not {fmt.max:g}"
    notes += ", subnormals are zeros" if chosen.flushes else ""
    zeros = chosen.quantize(np.zeros((1, 1), np.float32), _ROWS)
    notes += (
        "; a block of zeros is NaN" if np.isnan(cast.decode(zeros.codes, chosen.fmt)).all() else ""
    )
    if fields["rounding"] not in ("nearest_even", None):
        notes += f", rounds {fields['rounding']}"
    if fields["double_rounding"]:
        notes += f", rounds to {fields['double_rounding']} first"
    if fields["subnormals"] not in ("kept", None):
        notes += f", subnormals are {fields['subnormals'].replace('_', ' ')}"
    if memory:
        notes += (
            f"; its amax is stale, from {memory} earlier call{'s' if memory > 1 else ''}; only "
            "ordinary amaxes were compared"
        )
    if fields["negative_zero"] not in ("kept", None) and chosen.fmt.negative_zero:
        notes += ", -0 becomes 0"
    notes += "" if everywhere else "; it gives other results for other tensors"
    if everywhere and not identified and not matched.deviation:
        notes += ", except for the differences below"
    return f"{title}: policy {names}{notes}"


def format_finding(output: QuantizerOutput, found_fmt: Format, fmt: Format) -> Finding:
    """The finding on the format; the dtype names it, or it is taken for the one asked for."""
    text = found_fmt.name
    text += f", max {found_fmt.max:g}, not {fmt}" if found_fmt is not fmt else ""
    evidence = f"it gives {output.dtype}"
    evidence += "" if output.dtype.startswith("float8") else f", taken for {found_fmt}'s"
    return Finding("format", found_fmt.name, evidence, words=text)


def axis_finding(matched: PolicyMatch, axis: int | None) -> Finding:
    """The finding on the axis that scales reduce, with a tensor on which axis -1 would differ."""
    scale_layout = matched.answers.scale_layout
    if axis is None:
        evidence = f"{scale_layout.granularity} scales are the same along both"
        return Finding("axis", None, evidence, words="either")
    if axis == -1:
        return Finding("axis", -1, "scales are along the last axis")
    along_last = dataclasses.replace(scale_layout, axis=-1)
    comparison = dataclasses.replace(
        matched.answers.comparison(matched.chosen), scale_layout=along_last
    )
    witness = counterexamples.smallest_for_granularity(comparison)
    evidence = str(witness) if witness else "scales are along the first axis"
    return Finding("axis", axis, evidence, witness=witness)


def returned_finding(scale_layout: ScaleLayout, output: QuantizerOutput) -> Finding:
    """The finding on the returned scales: kind, place and shape for x [256, 384] of each."""
    texts = []
    for name, kind in scale_layout.kinds.items():
        shape = output.scales[name].shape
        text = kind + (f" as {name}" if name not in ("", kind) else "") + f" {list(shape)}"
        transposed = scale_layout.is_transposed(shape, SHAPE)
        texts.append(f"{text} (transposed)" if transposed else text)
    value = " and ".join(dict.fromkeys(scale_layout.kinds.values())) or None
    evidence = f"next to {output.dtype} of x's shape, {list(SHAPE)}"
    evidence += f", as {output.place}" if output.place else ""
    evidence += "" if scale_layout.kinds else ", nothing that varies with the amax"
    words = ", ".join(texts) or "neither scale nor scale_inv"
    return Finding("returns", value, evidence, words=words)


def untaken(findings: list[Finding]) -> str:
    """The end of a summary: the dtypes that it does not accept."""
    whats = [f.what for f in findings if f.text == "not taken"]
    refused = [what.removeprefix("from ") for what in whats if what.startswith("from ")]
    return f"; it does not accept {' or '.join(refused)}" if refused else ""


def limits(quantizer: Quantizer) -> list[str]:
    """What no quantizer, or none like this one, is asked."""
    kept = []
    if quantizer.memory:
        kept = ["what it keeps after zero, infinite and NaN amaxes: one call cannot show it"]
    return [*kept, *quantizer.subject.other_devices]


def without_granularity(
    quantizer: Quantizer,
    fmt: Format,
    found_fmt: Format,
    findings: list[Finding],
    expect: str | None,
) -> Outcome:
    """The outcome for a quantizer whose scales follow no granularity of S-6, the last finding."""
    finding = findings[-1]
    witness = Counterexample(
        finding.evidence, finding.text, "a granularity of S-6", "S-6", dtype=quantizer.dtype
    )
    return Outcome(
        name=quantizer.subject.name,
        kind="quantizer",
        fmt=fmt,
        framework=quantizer.subject.framework,
        findings=findings,
        identified=False,
        found={
            "format": found_fmt.name,
            "granularity": None,
            "axis": None,
            "policy": None,
            "memory": quantizer.memory,
        },
        summary=f"a quantizer with {finding.text}",
        unlike=[witness],
        expected=expect,
        differences=[witness] if expect else [],
        limits=[
            "policy, rounding, other shapes, strides and dtypes: its granularity is unknown",
            *limits(quantizer),
        ],
    )


def policy_finding(matched: PolicyMatch) -> Finding:
    """The finding on the scale policy.

    Policies that no input of bfloat16 tells apart are equal for every tensor of bfloat16 (S-16).
    """
    answers = matched.answers
    quantizer, memory = answers.quantizer, answers.quantizer.memory
    count, of = answers.score(matched.nearest)[0], int(answers.considered.sum())
    by = "codes or values: no scale is returned, so that policies of equal codes look alike"
    if matched.nearest.scales is not None:
        by = "scales"
    kept = ""
    if memory:
        kept = " Only ordinary amaxes were compared: one call cannot show what it keeps for others."
    evidence = f"{count} of {of} amaxes have its {by}." + kept
    if matched.agreements:
        flushed = ""
        if matched.nearest.candidate.flushes:
            flushed = ", with subnormals as zeros (S-12)"
        chosen = matched.nearest.candidate
        other = ""
        if chosen.scale_fmt is not chosen.fmt:
            other = f", of max {chosen.scale_fmt.max:g}, not {chosen.fmt.max:g}"
        text = matched.names[0] + other + flushed
        same = ""
        if matched.names[1:]:
            same = f", or the same by {', '.join(matched.names[1:])}"
        if same and quantizer.dtype == "bfloat16" and not memory:
            same += ": no tensor of bfloat16 tells them apart"
        return Finding("policy", matched.names[0], evidence, words=text + same)
    nearest = matched.nearest.candidate.policy.name
    text = f"no known policy; nearest {nearest}"
    if matched.deviation:
        text = f"{nearest}, but {matched.deviation}"
    return Finding("policy", None, evidence, words=text)
