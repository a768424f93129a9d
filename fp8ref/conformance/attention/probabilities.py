"""The cast of probabilities: their scale, the rescale threshold, whether they saturate, and the
denominator (spec A-5, A-7, A-8).

Each question has a score or two that are not 0, as ``scores.pair`` makes them.
"""

import math
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.attention import scores
from fp8ref.conformance.attention.subjects import Attention
from fp8ref.conformance.attention.tiles import SEEN, Tiling
from fp8ref.conformance.kit.finding import Finding
from fp8ref.formats import Format

THRESHOLDS = (0.25, 17.0)  # the lags of the maximum that are tried, in powers of two

FAR_ABOVE = 28  # a lag in powers of two that no following maximum has

CLIPPED = 0.9
"""Below this part of the real output, a probability was clipped: its rounding takes off 2^-4 at
most in e4m3 and 2^-3 in e5m2.
"""


class Between(NamedTuple):
    """A number that lies above ``low`` and is at most ``high``, and how it is reported."""

    low: float
    high: float
    finding: Finding

    def agrees(self, value: float) -> bool:
        """Whether it may be that number."""
        return self.low <= value <= self.high


def threshold(attention: Attention, tiling: Tiling) -> Between | None:
    """Powers of two by which a tile's maximum passes the row's unrescaled; None without tiles.

    A key of each of two tiles has the score 0, with opposite values; a third, in the second tile,
    has a larger score. If the maximum stays, both are cast alike and their sum is 0.
    """
    if tiling.length is None:
        return None
    pairs = scores.powers(*THRESHOLDS)
    pairs = [pair for pair in pairs if scores.between(scores.power_of(pair))]
    q, k = scores.with_largest(pairs)
    keys = 2 * tiling.length
    (first, _), (second, _) = tiling.place(keys)
    k_features, v = np.zeros((len(q), keys)), np.zeros((len(q), keys, 1))
    k_features[:, second] = k
    v[:-1, first, 0], v[:-1, second + 1, 0] = scores.LARGE, -scores.LARGE
    o = scores.outputs(attention, q, k_features, v)[:-1, 0]
    powers = np.array([scores.power_of(pair) for pair in pairs])
    part = scores.LARGE * 2.0**-powers / (1 + (keys - 1) * 2.0**-powers)
    rescaled = np.abs(o) > SEEN * part
    stays = powers[~rescaled]
    if not stays.size:
        evidence = f"a score {powers[0]:.3g} powers of two above the maximum rescales, and all of "
        evidence += f"{len(pairs)} up to {powers[-1]:.3g} do"
        return Between(0.0, powers[0], Finding("threshold", 0.0, evidence))
    low, high = float(stays.max()), float(powers[rescaled].min(initial=np.inf))
    if low > high:
        evidence = f"{low:.4g} powers of two above the maximum do not rescale, {high:.4g} do"
        finding = Finding("threshold", None, evidence, words="not one number")
        return Between(math.nan, math.nan, finding)
    above = "powers of two above the maximum"
    evidence = f"a score {low:.4g} {above} does not rescale, {high:.4g} does"
    nice, unit = _nice(low, high)
    words = f"{low:.3g} to {high:.3g} powers of two"
    if nice is not None:
        words = f"{nice:g} powers of {unit}"
    return Between(low, high, Finding("threshold", nice, evidence, words=words))


def _nice(low: float, high: float) -> tuple[float | None, str]:
    """The number with at most a half as fraction, in powers of two or of e, from low to high."""
    if math.isinf(high):
        return None, ""
    for unit, factor in (("two", 1.0), ("e", scores.LOG2E)):
        for step in (1.0, 0.5):
            value = math.floor(high / factor / step) * step
            if value * factor >= low:
                return value, unit
    return None, ""


def largest(attention: Attention, fmt: Format) -> Between | None:
    """What probabilities of 1 are multiplied by before the cast to ``fmt``: half its smallest
    number is that times the largest probability that is cast to 0. None if none is.

    A key has the largest score, and another one a chosen lower one: its value is 0 in the output if
    it was cast to 0.
    """
    if fmt.bits != 8:
        return None
    tiny = math.log2(fmt.smallest_subnormal) - 1  # and at the tie itself the even code, 0
    pairs = scores.powers(-tiny - 2, -tiny + 10)
    q, k = scores.with_largest(pairs)
    k_features, v = np.stack([k, 0 * k], axis=1), np.zeros((len(q), 2, 1))
    v[:-1, 1, 0] = scores.LARGE
    o = scores.outputs(attention, q, k_features, v)[:-1, 0]
    powers = np.array([scores.power_of(pair) for pair in pairs])
    kept, lost = powers[o != 0], powers[o == 0]
    if not lost.size or not kept.size or kept.max() > lost.min():
        return None
    low, high = 2.0 ** (tiny + kept.max()), 2.0 ** (tiny + lost.min())
    smallest, zero = f"2^-{kept.max():.4g}", f"2^-{lost.min():.4g}"
    evidence = f"a probability of {smallest} is not cast to 0, one of {zero} is"
    words, high = f"{low:.4g} to {high:.4g}", high * (1 + 2.0**-20)
    candidates = [2.0**n for n in range(-4, 18)] + [fmt.max * 2.0**-n for n in range(9)]
    value = next((value for value in candidates if low < value <= high), None)
    finding = Finding("largest P", value, evidence, words="" if value else words)
    return Between(low, high, finding)


def saturation(attention: Attention, tiling: Tiling, threshold: Between | None) -> Finding:
    """What becomes of probabilities above max of the format, if there are any: the output of the
    key with the largest score, against real arithmetic, under the largest lag that does not
    rescale; without tiles at the first and the last key."""
    what, real, got = "one key", 1.0, _largest_key(attention, 1, 0, (0.0, 0.0))
    if not got >= CLIPPED:
        return _range(what, got, real, kept=False)
    if tiling.length is None:
        keys, places, chosen = 1024, [0, 1023], scores.pair(FAR_ABOVE)
    elif threshold is not None and 0 < threshold.low < math.inf:
        keys = 2 * tiling.length
        near = threshold.low * (1 - 1e-9), threshold.low * (1 + 1e-9)
        places, chosen = [tiling.place(keys)[1][0]], scores.powers(*near)[0]
    else:
        evidence = f"one key gives {got:.4g} of its value; no maximum stays behind"
        return Finding("range of P", "kept", evidence)
    power = scores.power_of(chosen)
    real = 1 / (1 + (keys - 1) * 2.0**-power)
    for place in places:
        got = _largest_key(attention, keys, place, chosen)
        what = f"{keys} keys, the score of key {place} {power:.3g} powers of two above all others"
        if not got >= CLIPPED * real:
            return _range(what, got, real, kept=False)
    return _range(what, got, real, kept=True)


def _largest_key(attention: Attention, keys: int, place: int, chosen: tuple[float, float]) -> float:
    """The part of its value in the output, of the key that has the largest score."""
    k, v = np.zeros((1, keys)), np.zeros((1, keys, 1))
    k[0, place], v[0, place, 0] = chosen[1], scores.LARGE
    return float(scores.outputs(attention, chosen[0], k, v)[0, 0]) / scores.LARGE


def _range(what: str, got: float, real: float, *, kept: bool) -> Finding:
    if kept:
        evidence = f"{what}: {got:.4g} of its value, in real arithmetic {real:.4g}"
        return Finding("range of P", "kept", evidence)
    shown, words = f"{got:.4g} of its value", "left, and clipped"
    if not math.isfinite(got):
        shown, words = f"{got}", "left, without saturation"
    evidence = f"{what}: {shown}, in real arithmetic {real:.4g} (A-8)"
    return Finding("range of P", False, evidence, words=words)


def denominator(attention: Attention, fmt: Format, scale: float) -> Finding:
    """Whether the sum adds probabilities before they are cast to ``fmt`` times ``scale``, or after.

    All values are equal. If the sum adds what was cast, the output is that value. Else it is off by
    the roundings of the keys' equal probabilities, which are known: 15 keys of a chosen score, and
    one with the largest.
    """
    if fmt.mantissa_bits > 7:
        words = "cannot tell: probabilities are not rounded"
        return Finding("denominator", None, f"operands in {fmt}", words=words)
    rows = []
    for pair in scores.powers(0.05, 3):
        p = 2.0 ** -scores.power_of(pair)
        unit = 2.0 ** (math.floor(math.log2(p * scale)) - fmt.mantissa_bits)
        by = np.round(p * scale / unit) * unit / scale - p
        rows.append((abs(by) / p, by, pair, p))
    # at most 0.45 of a unit, whose half is the least: the tie would depend on the exponential
    most = 2.0 ** -(fmt.mantissa_bits + 1) * 0.9
    rows = sorted((row for row in rows if row[0] <= most), reverse=True)[:8]
    top, explained, total = 0.0, 0.0, 0.0
    for _, by, (a, b), p in rows:
        k = np.append(np.full(15, -b), 0.0)
        v = np.ones((1, 16, scores.FEATURES))
        if fmt.bits != 8:
            # several significands: bfloat16 outputs show a part of a unit on average
            v = v + np.arange(scores.FEATURES) / scores.FEATURES
        o = scores.outputs(attention, a, k[None], v)[0]
        got = float(o.sum() / v[0, 0].sum()) - 1
        expected = 15 * by / (1 + 15 * p)
        top = max(top, abs(got))
        total = total + expected * expected
        explained = explained + got * expected
    part = explained / total
    evidence = f"16 equal values, {len(rows)} scores: outputs differ from that value by up to "
    evidence += f"{top:.2g}, {part:.0%} of what casts take off"
    # 1 if unrounded, 0 if rounded; in bfloat16 an average over 64 significands is within a quarter
    value = "unrounded" if abs(part - 1) < 0.3 else "rounded" if abs(part) < 0.3 else None
    return Finding("denominator", value, evidence)
