"""Quantizers with one planted fault each, for the conformance kit to name."""

import numpy as np

from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.sim import cast, scaling

EPS = np.float32(1e-12)


def codes(x, scale, **options):
    with np.errstate(all="ignore"):
        return cast.encode(np.clip(x * scale, -448, 448), E4M3FN, **options)


def torchao(x):
    return tuple(scaling.quantize(x, E4M3FN)[:2])


def ties_away(x):
    scale = scaling.quantize(x, E4M3FN).scale
    return codes(x, scale, rounding="nearest_away"), scale


def truncation(x):
    scale = scaling.quantize(x, E4M3FN).scale
    return codes(x, scale, rounding="toward_zero"), scale


def flushes_subnormals(x):
    q = scaling.quantize(x, E4M3FN)
    return np.where((q.codes & 0x7F) < 8, q.codes & 0x80, q.codes), q.scale


def scales_by_exp2_log2(x):
    with np.errstate(all="ignore"):
        scale = np.float32(448) / np.maximum(np.abs(x).max(), EPS)
        scale = np.exp2(np.floor(np.log2(scale)))
    return codes(x, scale), scale


def scales_to_240(x):
    with np.errstate(all="ignore"):
        scale = np.float32(np.float32(240) / np.maximum(np.abs(x).max(), EPS))
    return codes(x, scale), scale


def divides(x):
    """scale_inv = amax / max, rounded once, and not the reciprocal of a rounded scale."""
    with np.errstate(all="ignore"):
        scale_inv = np.maximum(np.abs(x).max(), EPS) / np.float32(448)
        return cast.encode(np.clip(x / scale_inv, -448, 448), E4M3FN), scale_inv


def separate_scale_inv(x):
    """scale_inv = amax / max, next to the scale by which x is multiplied."""
    q = scaling.quantize(x, E4M3FN)
    return {"codes": q.codes, "scale": q.scale, "scale_inv": np.maximum(np.abs(x).max(), EPS) / np.float32(448)}


def wrong_axis(x):
    q = scaling.quantize(x, E4M3FN, granularity="rowwise", axis=0)
    return q.codes, q.scale


def no_zero_amax(x):
    """Zero amax divides by zero."""
    with np.errstate(all="ignore"):
        scale = np.float32(448) / np.abs(x).max()
    return codes(x, scale), scale


def stale(calls=1):
    """A quantizer that scales by the amax of the call that many calls before, 1 at first."""
    amaxes = [np.float32(1)] * calls

    def quantize(x):
        amaxes.append(np.abs(x).max())
        scale = scaling.scale_from_amax(amaxes.pop(0), E4M3FN)
        return codes(x, scale), scale

    return quantize


def static(x):
    return codes(x, np.float32(16)), np.float32(16)


def by(amax, scaled=lambda scale: scale):
    """torchao's, of another amax, or with something done to the scale."""

    def quantize(x):
        with np.errstate(all="ignore"):
            scale = np.float32(scaled(np.float32(448) / np.maximum(amax(x), EPS)))
        return codes(x, scale), scale

    return quantize


def _largest(x):
    return np.abs(x).max()


def reciprocal(x):
    """max * (1 / amax), as PyTorch divides a number by a tensor."""
    with np.errstate(all="ignore"):
        scale = np.float32(448) * (np.float32(1) / np.maximum(_largest(x), EPS))
    return codes(x, scale), scale


def _bfloat16(x):
    return cast.round_to(np.asarray(x, np.float32), BFLOAT16)


forgets_abs = by(lambda x: x.max())
minus_min = by(lambda x: -x.min())
amax_in_bfloat16 = by(lambda x: _bfloat16(_largest(x)))
scale_in_bfloat16 = by(_largest, _bfloat16)
up_to_a_power_of_two = by(_largest, lambda scale: np.exp2(np.ceil(np.log2(scale))))
twice = by(_largest, lambda scale: 2 * scale)
nearly_240 = by(_largest, lambda scale: np.float32(240 / 448) * scale)
one_and_a_half = by(_largest, lambda scale: np.float32(1.5) * scale)
