"""What a quantizer was found to be, as ``is`` of --json and in one line."""

from typing import Any

import numpy as np

from fp8ref.conformance.cast.behaviour import Behaviour
from fp8ref.conformance.quantizer import granularity
from fp8ref.conformance.quantizer.matching import Matched
from fp8ref.conformance.quantizer.outputs import Quantizer, Reading
from fp8ref.conformance.quantizer.policy_match import Candidate
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
