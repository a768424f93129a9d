"""The quantization statistics that a run records of its FP8 operands (spec Q-8 to Q-10, Q-13).

A backend measures a device's part of an operand as float64 numbers in the order of FIELDS, and
``merged`` makes one record of all. The simulator's own are ``sim.stats``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8ref.recipe import CastSpec, Gemm, Role
from fp8ref.selection.linears import Decision
from fp8ref.spec.attention.products import AttentionOperand

__all__ = ["FIELDS"]

COUNTS = ("count", "non_finite", "underflows", "saturated", "overflows")
"""The fields of a measurement that count elements.

count       all elements
non_finite  elements that are NaN or infinite
underflows  elements other than zero whose code is a zero
saturated   codes of the largest magnitude
overflows   elements that round above max under their scale (C-4)
"""

FIELDS = (*COUNTS, "signal", "noise", "amax", "scale_min", "scale_max")
"""The numbers that a backend measures of a part of an operand, in order.

signal      sum of the squares of finite elements
noise       sum of the squared errors of finite elements
amax        the largest magnitude
scale_min   the smallest scale; scale_max: the largest
"""


class Operand(NamedTuple):
    """One FP8 operand of one GEMM of one linear."""

    layer: str
    gemm: Gemm
    role: Role
    cast: CastSpec

    @property
    def name(self) -> str:
        """``layer/gemm/role``, its key in what is recorded."""
        return f"{self.layer}/{self.gemm}/{self.role}"


def planned(decisions: Iterable[Decision]) -> list[Operand]:
    """Every operand of the FP8 GEMMs of a plan of linears, in its order."""
    return [
        Operand(d.path, gemm, role, cast)
        for d in decisions
        for gemm, role, cast, _ in d.recipe.operand_casts
        if d.recipe.gemms[gemm].fp8
    ]


def merged(
    operands: Sequence[Operand | AttentionOperand], parts: Sequence[np.ndarray]
) -> dict[str, dict]:
    """The recorded statistics of each operand, by name (Q-8, Q-13): amax, scale_min, scale_max;
    rates as fractions; non_finite, a count; sqnr in dB. Of P and dS amax, count, saturated and
    lost, and their rates.

    Shapes:   parts float64 [parts, FIELDS], one array for each operand; a part whose count is 0
              holds no element of it.
    Specials: None where JSON has no number: an amax or scale that is not finite, an SQNR without
              noise, signal or a finite x.
    """
    return {
        operand.name: (
            _counted if isinstance(operand, AttentionOperand) and operand.counted else _recorded
        )(part)
        for operand, part in zip(operands, parts, strict=True)
    }


def _recorded(parts: np.ndarray) -> dict:
    held = parts[parts[:, 0] > 0]
    assert len(held), "every planned operand is somewhere"
    total: Mapping[str, float] = dict(zip(FIELDS, held.sum(axis=0).tolist(), strict=True))
    # NaN if any is
    largest: Mapping[str, float] = dict(zip(FIELDS, held.max(axis=0).tolist(), strict=True))
    smallest: Mapping[str, float] = dict(zip(FIELDS, held.min(axis=0).tolist(), strict=True))
    count = total["count"]
    return {
        "amax": _json(largest["amax"]),
        "scale_min": _json(smallest["scale_min"]),
        "scale_max": _json(largest["scale_max"]),
        "underflow_rate": total["underflows"] / count,
        "saturation_rate": total["saturated"] / count,
        "overflow_rate": total["overflows"] / count,
        "non_finite": int(total["non_finite"]),
        "sqnr": _sqnr(total["signal"], total["noise"], nothing=total["non_finite"] == count),
    }


def _counted(parts: np.ndarray) -> dict:
    """The record of P or dS: clipped casts are overflows, casts to 0 underflows (Q-13)."""
    total: Mapping[str, float] = dict(zip(FIELDS, parts.sum(axis=0).tolist(), strict=True))
    count = total["count"]
    return {
        "amax": _json(float(parts[:, FIELDS.index("amax")].max())),
        "count": int(count),
        "saturated": int(total["overflows"]),
        "lost": int(total["underflows"]),
        "underflow_rate": total["underflows"] / count,
        "overflow_rate": total["overflows"] / count,
    }


def clipped(record: Mapping[str, Any]) -> float | None:
    """The share of elements that a recorded operand's cast saturated: of P and dS, whose casts are
    counted, those that it clipped (Q-13). None without either."""
    return record.get("saturation_rate", record.get("overflow_rate"))


def _sqnr(signal: float, noise: float, *, nothing: bool) -> float | None:
    if nothing or not 0 < noise < math.inf or not 0 < signal < math.inf:
        return None
    return 10 * math.log10(signal / noise)


def _json(value: float) -> float | None:
    """value; None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None
