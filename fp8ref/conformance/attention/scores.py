"""Questions with chosen scores: q has one feature, and a key's score is a product of two of e4m3.

All operands are quantized without a rounding. A score is an exact number times the softmax scale,
so the exponent of a probability is known to the last bits of float32. Verdicts ask whether outputs
are zero, or which of two far values they are: they do not depend on an exponential's last bits.
"""

import itertools
import math

import numpy as np

from fp8ref.conformance.attention.subjects import Attention, Question

FEATURES = 64  # D of all questions; the softmax scale is 1 / 8
SCALE = 1 / math.sqrt(FEATURES)  # the softmax scale
LOG2E = math.log2(math.e)  # a power of e in powers of two

FAR = 1.75 * 2.0**8  # q and k of a key whose probability is 0 beside a score of 0

LARGE = 2.0**12  # its 2^-28 is a number of every output format


def pair(power: float) -> tuple[float, float]:
    """(q, k), whose mantissas e4m3 has, with the score nearest to power ln 2, which is above 0."""
    score = power * math.log(2) / SCALE
    exponent = math.floor(math.log2(score))
    products = itertools.product((exponent - 1, exponent), _MANTISSAS, _MANTISSAS)
    pairs = [(x * 2.0**e, y) for e, x, y in products]
    return min(pairs, key=lambda candidate: abs(candidate[0] * candidate[1] - score))


def power_of(pair: tuple[float, float]) -> float:
    """The score of such a pair, in powers of two."""
    return pair[0] * pair[1] * SCALE * LOG2E


def powers(low: float, high: float) -> list[tuple[float, float]]:
    """All pairs whose score is from low to high powers of two, ascending, one of each score."""
    ends = [scale * math.log(2) / SCALE for scale in (low, high)]
    exponents = range(math.floor(math.log2(ends[0])) - 2, math.ceil(math.log2(ends[1])) + 1)
    pairs = {
        x * y * 2.0**e: (x * 2.0**e, y)
        for e in exponents
        for x, y in itertools.product(_MANTISSAS, repeat=2)
        if ends[0] <= x * y * 2.0**e <= ends[1]
    }
    return [pairs[score] for score in sorted(pairs)]


def between(power: float) -> bool:
    """Whether 2^-power lies between numbers of bfloat16, and of FP8, also under a scale of 1.75: by
    a fifth of bfloat16's spacing at least."""
    fractions = [math.frexp(2.0**-power * factor)[0] * 256 % 1 for factor in (1.0, 1.75)]
    return all(0.2 <= fraction <= 0.8 for fraction in fractions)


def outputs(
    attention: Attention, q: float | np.ndarray, k: np.ndarray, v: np.ndarray, **options
) -> np.ndarray:
    """The outputs [B, FEATURES] of a query in each of B sequences of one head: its feature is q or
    q [B], those of the keys are k [B, Tk]; their values are v [B, Tk, columns].
    """
    q_features = np.zeros((len(k), 1, 1, FEATURES), np.float32)
    k_features, v_features = np.zeros((2, len(k), 1, k.shape[1], FEATURES), np.float32)
    q_features[:, 0, 0, 0], k_features[:, 0, :, 0] = q, k
    v_features[:, 0, :, : v.shape[2]] = v
    return attention.ask(Question(q_features, k_features, v_features, **options)).o[:, 0, 0]


def with_largest(pairs: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """q [n + 1] and k [n + 1] of pairs; the last, 1.75 2^n, leaves one scale for all."""
    q, k = (np.array(x) for x in zip(*pairs, strict=True))
    last = [1.75 * 2.0 ** math.ceil(math.log2(x.max() / 1.75)) for x in (q, k)]
    return np.append(q, last[0]), np.append(k, last[1])


_MANTISSAS = [1 + n / 8 for n in range(8)]
