"""What PTX shall not have, so that a GPU computes the bits that the interpreter shows."""

import re

from helpers.kernels.compiled import Compiled
from helpers.kernels.forms import Form

VECTOR = 16
"""Bytes of the widest access of a thread."""


def faults(form: Form, built: Compiled) -> list[str]:
    """What is wrong with a compiled launch, in a few words each; [] if nothing is."""
    operations = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)", built.ptx, re.MULTILINE)
    return [
        *(f"{name}: rounds otherwise" for name in _approximate(operations)),
        *(f"{name}: contracts a product and a sum" for name in _named(operations, r"fma\..*f\d+")),
        *(f"{name}: flushes subnormals" for name in _named(operations, _FLUSHES)),
        *(f"{name}: a maximum of floats" for name in _named(operations, r"(min|max)\..*NaN.*")),
        *_casts(form, operations),
        *_accesses(form, operations),
        *([f"{built.local} bytes of a thread's memory spill"] if built.local else []),
    ]


_FLUSHES = r"(add|sub|mul|div|fma|sqrt|cvt)\..*ftz.*"


def _named(operations: list[str], pattern: str) -> list[str]:
    return sorted({name for name in operations if re.fullmatch(pattern, name)})


def _approximate(operations: list[str]) -> list[str]:
    """Quotients and roots that are not rounded to nearest even, and products and sums of another
    rounding."""
    divisions = _named(operations, r"(div|sqrt|rcp|rsqrt)\.(?!rn\.).*f\d+.*|div\.full.*")
    return divisions + _named(operations, r"(add|sub|mul)\.(rz|rm|rp)\..*f\d+.*")


def _casts(form: Form, operations: list[str]) -> list[str]:
    """Casts to FP8 by another instruction than cvt.rn.satfinite, of two numbers at a time."""
    casts = [name for name in operations if re.fullmatch(r"cvt\..*(e4m3x2|e5m2x2)\..*", name)]
    wrong = sorted({name for name in casts if not name.startswith("cvt.rn.satfinite.")})
    faults = [f"{name}: another cast" for name in wrong]
    numbers, needed = 2 * len(casts) * _threads(form), form.codes * form.tile
    once = needed // 2  # codes that both orders share
    if form.codes > 1 and numbers not in (once, needed):
        faults.append(f"{numbers} numbers are cast by cvt, of {once} or {needed}")
    return faults


def _accesses(form: Form, operations: list[str]) -> list[str]:
    """Tensors and codes that are not read and written by 16 bytes of a thread at a time."""
    faults = []
    for verb, what, needed in (
        ("ld", "read", form.read),
        ("st", "written as codes", form.codes * form.tile),
    ):
        wide = sum(
            name.startswith(f"{verb}.global") and name.endswith((".v4.b32", ".v2.b64"))
            for name in operations
        )
        moved = wide * VECTOR * _threads(form)
        if moved < needed:
            faults.append(f"{moved} of {needed} bytes are {what} 16 at a time")
    return faults


def _threads(form: Form) -> int:
    return form.launch.warps * 32
