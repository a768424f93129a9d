"""Scales of libraries that need a GPU or are not on PyPI: transcribed from their sources, not run.

Each is a function from float32 amaxes [n] to what the library stores, by the steps of its own
source: none uses ``fp8ref.sim``. A transcription can be wrong where its library is right;
docs/libraries.md tells the two apart.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from fp8ref.formats import Format
from fp8ref.shared import package_data

Run = Callable[[np.ndarray], np.ndarray]
"""amaxes float32 [n] -> float32 [n], or e8m0 codes uint8 [n]."""

_F32 = np.float32


class Transcription(NamedTuple):
    """A library's scale.

    library   with the version from which, or up to which, it is so; variant: of several.
    call      the function in its source.
    source    repository, file and commit.
    made      ``scale``, ``scale_inv`` or ``e8m0``.
    of        format -> function of amaxes.
    """

    library: str
    variant: str
    call: str
    source: str
    made: str
    of: Callable[[Format], Run]


def _te_scale(fmt: Format, *, value_for_inf: float, masked: bool, eps: float = 0.0) -> Run:
    """compute_scale_from_amax, with a first scale of 1."""

    def scale(amax: np.ndarray) -> np.ndarray:
        amax = np.where(amax < _F32(eps), _F32(eps), amax)
        scales = _F32(fmt.max) / amax
        scales = np.where(np.isinf(scales), _F32(value_for_inf), scales)
        if masked:
            scales = (scales.view(np.uint32) & np.uint32(0xFF800000)).view(_F32)
        return np.where((amax == 0) | ~np.isfinite(amax), _F32(1), scales)

    return scale


def _te_e8m0(fmt: Format) -> Run:
    """float_to_e8m0 of amax * (1 / max): rounded up by the bits."""

    def code(amax: np.ndarray) -> np.ndarray:
        value = amax * _F32(1 / fmt.max)
        bits = value.view(np.uint32)
        exponent, mantissa = bits >> 23 & np.uint32(0xFF), bits & np.uint32(0x7FFFFF)
        # A subnormal number up to 2^-127 keeps exponent 0.
        up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
        codes = (exponent + up).astype(np.int64)
        return np.select(
            [np.isnan(value), np.isinf(value), value == 0], [0xFF, 0xFE, 0], codes
        ).astype(np.uint8)

    return code


def _deepseek(fmt: Format, *, eps: float = 0.0, ue8m0: bool = False) -> Run:
    """act_quant_kernel, with Triton's operations rounded correctly."""

    def scale_inv(amax: np.ndarray) -> np.ndarray:
        s = np.maximum(amax, _F32(eps)) / _F32(fmt.max)
        return np.exp2(np.ceil(_log2(s)).astype(np.float64)).astype(_F32) if ue8m0 else s

    return scale_inv


def _deepgemm(fmt: Format, *, gpu: bool) -> Run:
    """per_token_cast_to_fp8: on a GPU PyTorch multiplies by the number's reciprocal."""

    def scale_inv(amax: np.ndarray) -> np.ndarray:
        floored = np.maximum(amax, _F32(1e-4))
        return floored * _F32(1 / fmt.max) if gpu else floored / _F32(fmt.max)

    return scale_inv


def _deepgemm_ue8m0(fmt: Format) -> Run:
    def code(amax: np.ndarray) -> np.ndarray:
        bits = _deepgemm(fmt, gpu=True)(amax).view(np.uint32)
        return np.clip(
            (bits >> 23 & np.uint32(0xFF)) + ((bits & np.uint32(0x7FFFFF)) != 0), 1, 254
        ).astype(np.uint8)

    return code


def _microxcaling(fmt: Format) -> Run:
    """_shared_exponents less emax, as a code; more than 127 is NaN."""
    emax = {"e4m3fn": 8, "e5m2": 15}[fmt.name]

    def code(amax: np.ndarray) -> np.ndarray:
        exponent = np.floor(_log2(amax + _F32(2.0**-126) * (amax == 0))) - emax
        nan = np.isnan(exponent) | (exponent > 127)
        return np.where(nan, 255, np.where(nan, 0, np.maximum(exponent, -127)) + 127).astype(
            np.uint8
        )

    return code


def _qwix(fmt: Format, *, dtype: str = "float32") -> Run:
    """compute_scale_zero_point, absmax, of float32 arrays, or of the amaxes of bfloat16 ones.

    XLA makes a division by a constant a product with its reciprocal.
    """

    def scale_inv(amax: np.ndarray) -> np.ndarray:
        scale = amax * _F32(1 / fmt.max)
        scale = scale if dtype == "float32" else _bfloat16(scale)
        return np.where(scale < _F32(2.0**-63), _F32(1), scale)

    return scale_inv


def _qwix_mx(fmt: Format) -> Run:
    """Its mxfp8 from 2026 on: bfloat16(scale * 60 / 31) & 0x7F80."""

    def scale_inv(amax: np.ndarray) -> np.ndarray:
        halves = _bfloat16(_qwix(fmt)(amax) * _F32(60 / 31)).view(np.uint32) >> 16
        return ((halves & np.uint32(0x7F80)) << np.uint32(16)).view(_F32)

    return scale_inv


def _qwix_mx_before(fmt: Format) -> Run:
    """Its mxfp8 of 0.1.8: 2^ceil(log2(scale))."""
    return lambda amax: np.exp2(np.ceil(_log2(_qwix(fmt)(amax))).astype(np.float64)).astype(_F32)


def _msamp(fmt: Format) -> Run:
    """compute_scaling_factor, margin 0, of a previous scale of 1."""

    def scale(amax: np.ndarray) -> np.ndarray:
        quotient = _F32(fmt.max) * (_F32(1) / amax)  # PyTorch's number / tensor
        exponent = np.floor(_log2(quotient))
        powers = np.exp2(np.abs(exponent).astype(np.float64)).astype(_F32)
        powers = np.where((amax > 0) & np.isfinite(amax), powers, _F32(1))
        return np.where(exponent < 0, _F32(1) / powers, powers)

    return scale


def _log2(x: np.ndarray) -> np.ndarray:
    """The float32 logarithm, rounded correctly from float64's; libraries' is within an ulp."""
    return np.log2(x.astype(np.float64)).astype(_F32)


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even; a NaN stays one."""
    bits = np.ascontiguousarray(x, _F32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return np.where(np.isnan(x), _F32(np.nan), rounded.astype(np.uint32).view(_F32))


_STEPS: dict[str, Callable[..., Run]] = {
    steps.__name__.removeprefix("_"): steps
    for steps in (
        *(_te_scale, _te_e8m0, _deepseek, _deepgemm, _deepgemm_ue8m0),
        *(_microxcaling, _qwix, _qwix_mx, _qwix_mx_before, _msamp),
    )
}

TRANSCRIPTIONS = tuple(
    Transcription(
        *name.partition("/")[::2],
        *(row["call"], row["source"], row["made"]),
        partial(_STEPS[row["steps"]], **row.get("options", {})),
    )
    for name, row in package_data.tables(__file__, "transcriptions").items()
)
"""The transcriptions, in the order of docs/libraries.md."""
