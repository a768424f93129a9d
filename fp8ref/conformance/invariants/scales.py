"""Invariants of a function of amaxes [n] -> scale, or (scale, scale_inv), float32 (S-18)."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fp8ref.conformance.invariants.invariant import Clause, significands, text
from fp8ref.conformance.kit.arrays import as_numpy
from fp8ref.formats import Format

_F32 = np.float32
# 2^-39 is above torchao's eps, 1e-12; scales of amaxes up to 2^100 are normal
_LOW, _HIGH = (-39, 100)


def _array(values: Iterable[float]) -> np.ndarray:
    """Numbers as float32."""
    return np.array(list(values), _F32)


def _scale(function: Any, amax: np.ndarray) -> np.ndarray:
    """The scales of amaxes; ValueError unless there is one for each."""
    output = function(amax)
    scale = as_numpy(output[0] if isinstance(output, tuple) else output)
    if scale.size != amax.size:
        raise ValueError(f"it gives {scale.size} scales for {amax.size} amaxes")
    return scale.reshape(-1)


def _amax(fmt: Format) -> st.SearchStrategy[float]:
    return significands(_LOW, _HIGH)


def _neighbors(fmt: Format) -> st.SearchStrategy[tuple[float, float]]:
    """Two amaxes, often neighbors."""
    pair = st.tuples(_amax(fmt), _amax(fmt))
    return st.one_of(
        pair, _amax(fmt).map(lambda a: (a, float(np.nextafter(_F32(a), _F32(np.inf)))))
    )


def _any_amax(fmt: Format) -> st.SearchStrategy[float]:
    """Any positive float32, small ones often."""
    return st.one_of(
        significands(-149, 127),
        st.integers(1, 0x7F7FFFFF).map(lambda bits: float(np.uint32(bits).view(_F32))),
    )


def _moved(fmt: Format) -> st.SearchStrategy[tuple[float, int, int]]:
    """A significand, an exponent e, and k, with both e and e + k in the domain."""
    ends = st.integers(0, _HIGH - _LOW - 4).map(lambda n: n if n < _HIGH - 1 else _HIGH - 2 - n)
    return st.tuples(significands(0, 0), ends, ends).map(
        lambda drawn: (drawn[0], drawn[1], drawn[2] - drawn[1])
    )


SCALES = Clause("S-18")
"""The invariants of scales (S-18)."""


@SCALES.states("2^k times an amax has 2^-k times its scale", _moved)
def _power_of_two_equivariance(function: Any, fmt: Format, inputs: tuple[float, int, int]) -> str:
    significand, e, k = inputs
    # beside the drawn one, those around max's significand: their scales are near powers of two
    near = fmt.max / 2.0 ** np.floor(np.log2(fmt.max)) * (1 + np.arange(-8, 9) * 2.0**-23)
    amax = np.ldexp(_array([significand, *near]), e)
    scales, other = _scale(function, amax), _scale(function, np.ldexp(amax, k))
    differ = np.flatnonzero(other != np.ldexp(scales, -k))
    if not differ.size:
        return ""
    i = differ[0]
    return f"amax {text(amax[i])} has scale {text(scales[i])}, and 2^{k} times it {text(other[i])}"


@SCALES.states("a larger amax has no larger scale", _neighbors)
def _monotone(function: Any, fmt: Format, inputs: tuple[float, float]) -> str:
    low, high = sorted(_array(inputs))
    scale = _scale(function, _array([low, high]))
    if scale[0] >= scale[1]:
        return ""
    return f"amaxes {text(low)} and {text(high)} have scales {text(scale[0])} and {text(scale[1])}"


@SCALES.states("an amax times its scale is at most max, but for roundings", _amax)
def _within_max(function: Any, fmt: Format, inputs: float) -> str:
    # beside the drawn one, others up to its double: a power of two may be wrong for a few of them
    amax = _array(inputs * (1 + np.arange(64) / 64))
    product = amax * _scale(function, amax)
    # RN32(log2) takes 44 numbers above a power of two for it: 2^-18.5 of it
    wrong = np.flatnonzero(~(product <= fmt.max * (1 + 2.0**-18)))
    if not wrong.size:
        return ""
    return f"amax {text(amax[wrong[0]])} times its scale is {text(product[wrong[0]])}, above max"


@SCALES.states("an amax times its scale is at least half of max", _amax)
def _range_used(function: Any, fmt: Format, inputs: float) -> str:
    # after the drawn one the least, where an eps shows
    for amax in (_array([inputs]), _array([2.0**_LOW])):
        product = amax * _scale(function, amax)
        # Half of max: powers of two round down by less than 2; and two float32 roundings of 2^-24.
        if not product[0] >= fmt.max / 2 * (1 - 2.0**-22):
            return f"amax {text(amax[0])} times its scale is {text(product[0])}, below max / 2"
    return ""


@SCALES.states("every positive amax has a positive and finite scale", _any_amax)
def _finite(function: Any, fmt: Format, inputs: float) -> str:
    amax = _array([inputs])
    scale = _scale(function, amax)[0]
    return "" if 0 < scale < np.inf else f"amax {text(amax[0])} has scale {text(scale)}"


@SCALES.states("scale_inv is RN32(1 / scale)", _amax)
def _reciprocal(function: Any, fmt: Format, inputs: float) -> str:
    # beside the drawn one, others of its two binades: of many, both orders round alike
    amax = _array(inputs * (1 + np.arange(16) / 13))
    _scale(function, amax)
    output = function(amax)
    if not isinstance(output, tuple):
        return ""
    scale, scale_inv = (as_numpy(part).reshape(-1) for part in output[:2])
    differ = np.flatnonzero(scale_inv != _F32(1) / scale)
    if not differ.size:
        return ""
    i = differ[0]
    return (
        f"amax {text(amax[i])} has scale {text(scale[i])} and scale_inv {text(scale_inv[i])}, not "
        f"{text(_F32(1) / scale[i])}"
    )


@SCALES.states("a scale depends on its own amax alone", lambda fmt: st.tuples(*[_amax(fmt)] * 3))
def _elementwise(function: Any, fmt: Format, inputs: tuple[float, float, float]) -> str:
    amax = _array(inputs)
    together = _scale(function, amax)
    alone = [_scale(function, amax[i : i + 1])[0] for i in range(len(amax))]
    if np.array_equal(together, alone):
        return ""
    return (
        f"amaxes {text(amax)} have scales {text(together)} together and "
        f"{text(np.array(alone))} alone"
    )
