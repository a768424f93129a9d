"""Quantizers with one planted fault each, for the conformance kit to name."""

import numpy as np

from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.sim.quantize import cast, scaling

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
    return {
        "codes": q.codes,
        "scale": q.scale,
        "scale_inv": np.maximum(np.abs(x).max(), EPS) / np.float32(448),
    }


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


def blocks(x, scale_of, size=128):
    """Codes and the scale of each block of a line, by scale_of(amax [M, n]); the last block may be
    shorter.
    """
    missing = -x.shape[1] % size
    padded = np.pad(np.asarray(x, np.float32), ((0, 0), (0, missing)))
    with np.errstate(all="ignore"):
        scale = np.asarray(scale_of(np.abs(padded).reshape(len(x), -1, size).max(-1)), np.float32)
    return codes(padded, np.repeat(scale, size, axis=1))[:, : x.shape[1]], scale


def torchao_scale(amax):
    with np.errstate(all="ignore"):
        return np.float32(448) / np.maximum(amax, EPS)


def ragged_blocks(x):
    """Right in ragged last blocks too."""
    return blocks(x, torchao_scale)


def stale_ragged_scale(x):
    """A ragged last block takes the scale of the block before it."""
    codes_, scale = ragged_blocks(x)
    if x.shape[1] % 128 and x.shape[1] > 128:
        whole = x.shape[1] // 128 * 128
        scale[:, -1] = scale[:, -2]
        codes_[:, whole:] = codes(np.asarray(x[:, whole:], np.float32), scale[:, -1:])
    return codes_, scale


def reads_beyond(x):
    """A ragged last block is read to its full length, into the next row; the last row ends with
    zeros.
    """
    missing = -x.shape[1] % 128
    flat = np.concatenate([np.asarray(x, np.float32).reshape(-1), np.zeros(missing, np.float32)])
    rows = np.stack(
        [flat[i * x.shape[1] : i * x.shape[1] + x.shape[1] + missing] for i in range(len(x))]
    )
    found, scale = ragged_blocks(rows)
    return found[:, : x.shape[1]], scale


def leaves_the_tail(x):
    """A ragged last block stays zeros."""
    found, scale = ragged_blocks(x)
    found[:, x.shape[1] // 128 * 128 :] = 0
    return found, scale


def no_scale_of_the_tail(x):
    """A scale of every whole block alone; a shorter one is cast unscaled."""
    whole = x.shape[1] // 128 * 128
    found, scale = ragged_blocks(x)
    if whole:
        found[:, whole:] = codes(np.asarray(x[:, whole:], np.float32), np.float32(1))
    return found, scale[:, : max(1, x.shape[1] // 128)]


def eps_is_added(x):
    return blocks(x, lambda amax: np.float32(448) / (amax + EPS))


def a_large_eps_is_added(x):
    return blocks(x, lambda amax: np.float32(448) / (amax + np.float32(1e-5)))


def block_amax_in_bfloat16(x):
    return blocks(x, lambda amax: torchao_scale(_bfloat16(amax)))


def block_scale_in_bfloat16(x):
    return blocks(x, lambda amax: _bfloat16(torchao_scale(amax)))


def stores_in_bfloat16(x):
    """The scales of FP8 activations of COAT: an eps is added, and what is stored is rounded to
    bfloat16.
    """
    found, _ = blocks(
        x, lambda amax: np.float32(1) / ((amax + np.float32(1e-10)) / np.float32(448))
    )
    with np.errstate(all="ignore"):
        padded = (
            np.pad(np.abs(np.asarray(x, np.float32)), ((0, 0), (0, -x.shape[1] % 128)))
            .reshape(len(x), -1, 128)
            .max(-1)
        )
        return found, _bfloat16((padded + np.float32(1e-10)) / np.float32(448))


def stores_the_ratio(x):
    """amax / max is stored, next to codes of max / amax."""
    found, scale = ragged_blocks(x)
    padded = (
        np.pad(np.abs(np.asarray(x, np.float32)), ((0, 0), (0, -x.shape[1] % 128)))
        .reshape(len(x), -1, 128)
        .max(-1)
    )
    return {"codes": found, "scale": scale, "scale_inv": np.maximum(padded, EPS) / np.float32(448)}


def rounds_blocks_up(x):
    return blocks(x, lambda amax: np.exp2(np.ceil(np.log2(torchao_scale(amax)))))
