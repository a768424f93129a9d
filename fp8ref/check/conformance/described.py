"""What was found, as ``is`` of --json and in one line."""

from typing import Any

import numpy as np

from fp8ref.check.conformance import influence
from fp8ref.check.conformance import subject as subjects
from fp8ref.check.conformance.asking import Sharing
from fp8ref.check.conformance.behaviour import Behaviour, Through
from fp8ref.check.conformance.decisions import Answers
from fp8ref.check.conformance.matching import Matched
from fp8ref.check.conformance.outcome import Finding
from fp8ref.check.conformance.policies import Candidate
from fp8ref.check.conformance.quantized import Quantizer, Reading
from fp8ref.formats import Format
from fp8ref.sim.cast import decode


def cast(found: Behaviour, findings: list[Finding], layout: Format, a: Answers, names: list[str], alike: list[str]) -> dict[str, Any]:
    by = {f.what: f.value for f in findings}
    inf = int(a.codes[np.flatnonzero(np.isposinf(a.x))[0]])
    return {
        "format": layout.name,
        "behaviour": names,
        "behaviour_but_for_nan_codes": alike,
        "rounding": by["rounding"],
        "saturates": None if by["overflow"] is None else by["overflow"] == "max",
        "overflow": by["overflow"],
        "infinities": by["infinities"],
        "inf_code": inf if inf >= 0 else None,
        "nan_code": by["nan_code"],
        "nan_code_of_negative": None if a.reply.values_only or by["nan_code"] is None else found.nan[1],
        "subnormals": by["subnormals"],
        "negative_zero": by["negative_zero"],
        "double_rounding": _dtype(found.through.get(a.source)),
        "double_roundings": {s: _dtype(found.through.get(s)) for s in subjects.DTYPES if _was_asked(s, a.source, by, findings)},
        "policy": None,
        "gives": a.reply.dtype,
    }


def _was_asked(source: str, first: str, by: dict[str, Any], findings: list[Finding]) -> bool:
    return source == first or any(f.what == f"double_rounding of {source}" and f.said != "not asked" for f in findings)


def _dtype(through: Through | None) -> str | None:
    return None if through is None else str(through)


def cast_in_words(
    found: Behaviour, layout: Format, fmt: Format, names: list[str], alike: list[str], complete: bool, everywhere: bool
) -> str:
    of = f"a cast to {layout}" + (f" (max {layout.max:g}), not {fmt} (max {fmt.max:g})," if layout is not fmt else "")
    if complete and not everywhere:
        return f"{of} that gives other codes in arrays of other shapes"
    if not complete:
        return f"{of} that is none of those known: see where it is unlike what was found"
    how = f"rounds {found.rounding}, overflow gives {found.overflow}, infinities {found.infinite}"
    how += f", subnormals are {found.subnormals.replace('_', ' ')}" if found.subnormals != "kept" else ""
    how += ", -0 becomes 0" if found.negative_zero != "kept" and layout.specials != "fnuz" else ""
    if not np.isnan(decoded := decode(np.array(found.nan, np.uint8), layout)).all():
        how += f", NaN becomes {decoded[0]:g}"
    how += "".join(f", {source} is rounded to {through} first" for source, through in found.through.items())
    if names:
        return f"{of} that is {' and '.join(names)}: {how}"
    return f"{of} that is {' and '.join(alike)} but for NaN codes: {how}" if alike else f"{of} that {how}"


def quantizer(
    matched: Matched, chosen: Candidate, group: influence.Group, sharing: Sharing, rounding: Behaviour | None,
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


def quantizer_in_words(
    matched: Matched,
    chosen: Candidate,
    group: influence.Group,
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
