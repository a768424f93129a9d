"""Invariants of a maximum of two amaxes, as a collective or a state merges them (P-28)."""

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fp8ref.conformance.invariants.invariant import Clause, text
from fp8ref.conformance.kit.arrays import as_numpy, equal
from fp8ref.formats import Format

_F32 = np.float32
_AMAXES = st.sampled_from([1.0, 2.0, 3.0, 0.0, 448.0, 2.0**-149, 3e38, math.inf, math.nan])

# few, so that most triples of them are drawn
_FEW = st.sampled_from([1.0, 2.0, math.nan, math.inf])


def _merged(function: Any, a: Any, b: Any) -> np.float32:
    return _F32(as_numpy(function(_F32(a), _F32(b))).reshape(-1)[0])


_TWO = st.tuples(_AMAXES, _AMAXES)

MERGES = Clause("P-28")
"""The invariants of merges (P-28)."""


@MERGES.states("any grouping gives the same", st.tuples(_FEW, _FEW, _FEW))
def _associative(function: Any, fmt: Format, inputs: tuple[float, float, float]) -> str:
    a, b, c = inputs
    left = _merged(function, _merged(function, a, b), c)
    right = _merged(function, a, _merged(function, b, c))
    if equal(left, right):
        return ""
    return (
        f"{text(a)}, {text(b)}, {text(c)} merge to {text(left)} from the left and "
        f"{text(right)} from the right"
    )


@MERGES.states("any order gives the same", _TWO)
def _commutative(function: Any, fmt: Format, inputs: tuple[float, float]) -> str:
    a, b = inputs
    first, other = _merged(function, a, b), _merged(function, b, a)
    if equal(first, other):
        return ""
    return f"{text(a)} and {text(b)} merge to {text(first)}, the other way round to {text(other)}"


@MERGES.states("an amax and itself merge to it", _AMAXES)
def _idempotent(function: Any, fmt: Format, inputs: float) -> str:
    merged = _merged(function, inputs, inputs)
    if equal(merged, _F32(inputs)):
        return ""
    return f"{text(inputs)} and {text(inputs)} merge to {text(merged)}"


@MERGES.states("an amax and 0, of an empty shard, merge to it", _AMAXES)
def _identity(function: Any, fmt: Format, inputs: float) -> str:
    merged = _merged(function, inputs, 0.0)
    if np.isnan(inputs) or equal(merged, _F32(inputs)):
        return ""
    return f"{text(inputs)} and 0 merge to {text(merged)}"


@MERGES.states("NaN and anything merge to NaN", _AMAXES)
def _keeps_nan(function: Any, fmt: Format, inputs: float) -> str:
    for a, b in ((math.nan, inputs), (inputs, math.nan)):
        if not np.isnan(merged := _merged(function, a, b)):
            return f"{text(a)} and {text(b)} merge to {text(merged)}"
    return ""


@MERGES.states("numbers and infinities merge to the larger", _TWO)
def _largest(function: Any, fmt: Format, inputs: tuple[float, float]) -> str:
    if any(map(math.isnan, inputs)):
        return ""
    merged = _merged(function, *inputs)
    if merged == _F32(max(inputs)):
        return ""
    return f"{text(inputs[0])} and {text(inputs[1])} merge to {text(merged)}"
