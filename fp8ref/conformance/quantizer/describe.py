"""What a quantizer was found to be, as ``is`` of --json and in one line."""

import dataclasses
from typing import Any

import numpy as np

from fp8ref.conformance.cast.behaviour import Behaviour
from fp8ref.conformance.counterexample import Witness
from fp8ref.conformance.finding import Finding, Outcome
from fp8ref.conformance.quantizer import counterexamples, granularity, policy_match
from fp8ref.conformance.quantizer.candidates import Candidate
from fp8ref.conformance.quantizer.granularity import SHAPE
from fp8ref.conformance.quantizer.outputs import Quantizer, Reading
from fp8ref.conformance.quantizer.policy_match import Matched
from fp8ref.conformance.quantizer.queries import Sharing
from fp8ref.formats import Format


def as_data(
    matched: Matched, chosen: Candidate, group: granularity.Group, sharing: Sharing, rounding: Behaviour | None,
    asked: Quantizer, reading: Reading, layout: Format, identified: bool,
) -> dict[str, Any]:  # fmt: skip
    through = rounding.through.get(asked.dtype) if rounding else None
    return {
        "format": chosen.fmt.name if matched.agreements else layout.name,
        "granularity": group.granularity,
        "axis": group.axis,
        "returns": " and ".join(dict.fromkeys(sharing.kinds.values())) or None,
        "scales": {
            name: {
                "is": kind,
                "shape": list(shape := reading.scales[name].shape),
                "transposed": sharing.turned(shape, reading.tensor.shape),
            }
            for name, kind in sharing.kinds.items()
        },
        "policy": matched.names[0] if matched.agreements else None,
        "same_policies": matched.names[1:],
        "nearest_policy": matched.nearest.candidate.policy.name,
        "deviation": matched.deviation or None,
        "scales_to": chosen.top.max if matched.agreements else None,
        "flushes_subnormal_scales": chosen.flushes if matched.agreements else None,
        "memory": asked.memory,
        "rounding": rounding and rounding.rounding,
        "double_rounding": through and str(through),
        "subnormals": rounding and rounding.subnormals,
        "negative_zero": rounding and rounding.negative_zero,
        "saturates": True if identified else None,
        "inf_code": None,
        "nan_code": _nan_code(matched, chosen),
        "gives": reading.dtype,
    }


def _nan_code(matched: Matched, chosen: Candidate) -> int | None:
    """The code under a NaN, where all of a NaN's group are one."""
    for a in matched.asked:
        at = np.isnan(a.x)
        if a.reading.codes is not None and at.any():
            codes = set(a.reading.codes[at].tolist())
            return codes.pop() if len(codes) == 1 else None
    return None


def in_words(
    matched: Matched,
    chosen: Candidate,
    group: granularity.Group,
    found: dict[str, Any],
    fmt: Format,
    memory: int,
    everywhere: bool,
    identified: bool,
) -> str:
    where = f"{group.granularity}" + ("" if group.axis is None else f", axis {group.axis}")
    turned = ", transposed" if any(f["transposed"] for f in found["scales"].values()) else ""
    what = f"a quantizer to {chosen.fmt}, {where}, that returns {found['returns'] or 'no scale'}{turned}"
    if not matched.agreements:
        if matched.deviation:
            return f"{what}: policy {chosen.policy.name}, but {matched.deviation}"
        return f"{what}, by none of the policies that are known; nearest is {chosen.policy.name}"
    how = f", scales to {chosen.top.max:g}, not {fmt.max:g}" if chosen.top.max != fmt.max else ""
    how += ", subnormals are zeros" if chosen.flushes else ""
    how += "" if found["rounding"] == "nearest_even" else f", rounds {found['rounding']}"
    how += f", rounds to {found['double_rounding']} first" if found["double_rounding"] else ""
    how += f", subnormals are {found['subnormals'].replace('_', ' ')}" if found["subnormals"] != "kept" else ""
    how += f"; its amax is stale, of {memory} earlier call{'s' if memory > 1 else ''}; told by ordinary amaxes alone" if memory else ""
    how += ", -0 becomes 0" if found["negative_zero"] != "kept" and chosen.fmt.specials != "fnuz" else ""
    how += "" if everywhere else "; of other tensors it gives something else"
    how += "" if identified or not everywhere else ", but for what is unlike that"
    return f"{what}: policy {' or '.join(matched.names)}{how}"


def format_finding(reading: Reading, layout: Format, fmt: Format) -> Finding:
    said = layout.name if layout is fmt else f"{layout}, max {layout.max:g}, not {fmt}"
    evidence = f"it gives {reading.dtype}" + ("" if reading.dtype.startswith("float8") else f", taken for {layout}'s")
    return Finding(what="format", value=layout.name, words=said, evidence=evidence)


def axis(quantizer: Quantizer, axis: int | None, chosen: Candidate, sharing: Sharing) -> Finding:
    if axis is None:
        return Finding(what="axis", value=None, words="either", evidence=f"{sharing.granularity} scales are the same along both")
    if axis == -1:
        return Finding(what="axis", value=-1, evidence="scales are along the last axis")
    witness = counterexamples.layout(quantizer, chosen, dataclasses.replace(sharing, axis=-1))
    return Finding(what="axis", value=axis, evidence=str(witness) if witness else "scales are along the first axis", witness=witness)


def returned(sharing: Sharing, reading: Reading) -> Finding:
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


def unscaled(quantizer: Quantizer, fmt: Format, layout: Format, findings: list[Finding], expect: str | None, finding: Finding) -> Outcome:
    witness = Witness(
        input=finding.evidence, bits=(), dtype=quantizer.dtype, got=finding.said, expected="a granularity of S-6", clause="S-6"
    )
    return Outcome(
        name=quantizer.subject.name, kind="quantizer", fmt=fmt, framework=quantizer.subject.framework, findings=findings, identified=False,
        found={"format": layout.name, "granularity": None, "axis": None, "policy": None, "memory": quantizer.memory},
        summary=f"a quantizer with {finding.said}", unlike=[witness], expected=expect, differences=[witness] if expect else [],
    )  # fmt: skip


def policy_finding(matched: Matched, memory: int) -> Finding:
    count, of = policy_match.score(matched.nearest, matched.considered)[0], int(matched.considered.sum())
    by = (
        "scales"
        if matched.nearest.scales is not None
        else "codes or values: no scale is returned, so that policies of equal codes look alike"
    )
    kept = " Only ordinary amaxes: what it keeps for others one call cannot tell." if memory else ""
    evidence = f"{count} of {of} amaxes have its {by}." + kept
    if matched.agreements:
        flushed = ", with subnormals as zeros (S-12)" if matched.nearest.candidate.flushes else ""
        top = matched.nearest.candidate
        other = f", of max {top.top.max:g}, not {top.fmt.max:g}" if top.top is not top.fmt else ""
        said = matched.names[0] + other + flushed
        same = f", or the same by {', '.join(matched.names[1:])}" if matched.names[1:] else ""
        return Finding(what="policy", value=matched.names[0], words=said + same, evidence=evidence)
    nearest = matched.nearest.candidate.policy.name
    said = f"{nearest}, but {matched.deviation}" if matched.deviation else f"none of them; nearest {nearest}"
    return Finding(what="policy", value=None, words=said, evidence=evidence)
