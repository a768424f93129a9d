"""What a cast was found to be, as ``is`` of --json and in one line."""

from typing import Any

import numpy as np

from fp8ref.conformance import subject as subjects
from fp8ref.conformance.cast.behaviour import Behaviour, Through
from fp8ref.conformance.cast.decisions import Answers
from fp8ref.conformance.finding import Finding
from fp8ref.formats import Format
from fp8ref.sim.cast import decode


def as_data(found: Behaviour, findings: list[Finding], layout: Format, a: Answers, names: list[str], alike: list[str]) -> dict[str, Any]:
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


def in_words(found: Behaviour, layout: Format, fmt: Format, names: list[str], alike: list[str], complete: bool, everywhere: bool) -> str:
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
