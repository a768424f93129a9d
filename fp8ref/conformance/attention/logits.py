"""What a function does to its scores before the softmax: softcap and sinks (A-22, A-23, A-27).

Without such an argument both are looked for. With one it is passed, and its order is asked: scale,
cap, mask; a sink that joins the sum. All operands are numbers of e4m3; weights are read from values
of one key, within the roundings of its probability and of o.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from fp8ref.conformance.attention import scores, visibility
from fp8ref.conformance.attention.scores import FAR, FEATURES, LARGE, SCALE
from fp8ref.conformance.attention.subjects import SINKS as SINK_NAMES
from fp8ref.conformance.attention.subjects import SOFTCAPS, Attention, Question
from fp8ref.conformance.kit.finding import Counterexample, Finding
from fp8ref.conformance.kit.subject import RefusedError
from fp8ref.spec.attention.variants import FULL, Mask

CAP = 16.0  # is passed: not CAP times the softmax scale, nor times ln 2

SINKS = (0.0, 3.0)  # the sinks that are passed, of two heads

DESCALES = (2.0, 0.25)
"""Those of q and of k beside sinks, whose scores of 0 they leave as they are: neither they nor
their product is the softmax scale."""

ABOVE = 200.0
"""A sink so far above a score of 0 that no key is left, and whose e^x float32 does not have."""

ROUNDED = math.log(1.3)
"""In ln of a weight: the casts of P and of o, 2^-3 each in e5m2, and all else."""

LEAST = 2.0**-6
"""A weight below it may be a subnormal number of e4m3, with a larger error: it says that the cap is
no smaller, and no more.
"""

BOUNDS = (0.0, 1e9)
"""The range of caps: either end as a bound of a measured cap says that no output shows it.
"""

_LN2 = math.log(2)
_LARGEST = FAR * FAR * SCALE
_KEYS = [m * 2.0**e for e in range(-6, 8) for m in (1, 1.25, 1.5, 1.75)]


def findings(attention: Attention) -> list[Finding]:
    """A finding for a softcap and for sinks, and for each of both arguments that it takes."""
    cap, low, high = _softcap(attention)
    capped = low <= high < math.inf
    sinks = _own_sinks_within(attention, low, high) if capped else own_sinks(attention)
    findings = [cap, sinks]
    if attention.argument(SOFTCAPS):
        findings.append(_softcap_argument(attention))
    elif cap.value != "none" and (hidden := _hidden(attention, None)) is not None:
        findings.append(hidden.finding("mask and softcap", "the mask comes before the cap"))
    if attention.argument(SINK_NAMES):
        findings.append(_sinks_argument(attention))
    return findings


def _softcap(attention: Attention) -> tuple[Finding, float, float]:
    """(the softcap of a function that is given none, the least and the largest cap that explain the
    outputs). The finding has a number, with these caps; or only these; or ``none``.
    """
    low, high, evidence, witness = _caps(attention, None)
    if high == math.inf:
        return Finding("softcap", "none", evidence), low, high
    if not low <= high:
        words = "large scores are capped, by no hyperbolic tangent"
        finding = Finding("softcap", None, evidence, words=words, witness=witness)
        return finding, low, high
    value, words = roundest(low, high), within(low, high)
    if value is not None:
        words = f"{value:g} ({words})"
    finding = Finding("softcap", value, str(witness), words=words, witness=witness)
    return finding, low, high


def _caps(
    attention: Attention, softcap: float | None
) -> tuple[float, float, str, Counterexample | None]:
    """(the least and the largest cap that explain the outputs, evidence, the first output that
    shows a cap); infinity: there is none.

    Two keys, of which one has the largest score. A cap brings the other near it: their distance is
    a function of the cap that grows with it.
    """
    weights, others = _second_weights(attention, softcap)
    if not (weights != 0).any():
        both = f"{_LARGEST:g} and {others[-1]:g}"
        evidence = f"scores of {both}: the second has no weight"
        return math.inf, math.inf, evidence, None
    if (odd := ~np.isfinite(weights)).any():
        evidence = f"scores of {_LARGEST:g} and {others[0]:g}: {weights[odd][0]}"
        return math.nan, math.nan, evidence, None
    low, high = BOUNDS
    for x, w in zip(others, weights, strict=True):
        distance = math.log((1 - w) / w) if LEAST <= w < 1 else math.log(1 / LEAST)
        low = max(low, _cap(x, distance - ROUNDED))
        high = min(high, _cap(x, distance + ROUNDED)) if w >= LEAST else high
    i = int(np.flatnonzero(weights)[0])
    both, weight = f"{_LARGEST:g} and {others[i]:g}", f"{weights[i]:.4g}"
    evidence = f"scores of {both}: the second has the weight {weight}"
    shown, got = f"two keys of scores {both}", f"{weight} of the second's value"
    return low, high, evidence, Counterexample(shown, got, "0", "A-22")


def _second_weights(attention: Attention, softcap: float | None) -> tuple[np.ndarray, list[float]]:
    """(the weight of a second key, of both keys' weights; its scores); the first is the largest."""
    k = np.array([[FAR, key] for key in _KEYS])
    v = np.zeros((len(k), 2, 2))
    v[:, 0, 0] = v[:, 1, 1] = LARGE
    o = scores.outputs(attention, FAR, k, v, softcap=softcap)
    with np.errstate(invalid="ignore"):
        return o[:, 1] / (o[:, 0] + o[:, 1]), [FAR * key * SCALE for key in _KEYS]


def _cap(x: float, distance: float) -> float:
    """The cap under which the score x is so far below the largest one; by bisection."""
    if distance <= 0:
        return 0.0
    low, high = 1e-3, BOUNDS[1]
    for _ in range(100):
        middle = math.sqrt(low * high)
        if middle * (math.tanh(_LARGEST / middle) - math.tanh(x / middle)) < distance:
            low = middle
        else:
            high = middle
    return high


def _softcap_argument(attention: Attention) -> Finding:
    """Whether the argument caps scores as A-22 does."""
    what = "softcap argument"
    try:
        low, high, evidence, witness = _caps(attention, CAP)
        hidden = _hidden(attention, CAP)
    except RefusedError as error:
        return Finding(what, None, str(error), words=visibility.REFUSED)
    if low <= CAP <= high and hidden is None:
        return Finding(what, "after the scale, before the mask", f"{CAP:g}: {evidence}")
    before, of_powers = CAP * SCALE, CAP * _LN2
    wrong: dict[str, Callable[[float], float]] = {
        "ignored": lambda x: x,
        "before the softmax scale": lambda x: before * math.tanh(x / before),
        "of scores in powers of two": lambda x: of_powers * math.tanh(x / of_powers),
        "not multiplied back: scores end at 1": lambda x: math.tanh(x / CAP),
    }
    if low <= CAP <= high:
        assert hidden is not None
        return hidden.finding(what, "after the mask: hidden keys have the score -cap")
    weights, others = _second_weights(attention, CAP)
    names = [name for name, of in wrong.items() if _explains(of, weights, others)]
    words = names[0] if names else "another function of the scores"
    shown, got = (witness.input, witness.got) if witness else ("two keys", evidence)
    right = f"the weights of a cap of {CAP:g}"
    shown = f"softcap {CAP:g}, {shown}"
    return Counterexample(shown, got, right, "A-22").finding(what, words)


def _explains(of: Callable[[float], float], weights: np.ndarray, others: list[float]) -> bool:
    """Whether all weights are those of scores after this function, within roundings."""
    for x, w in zip(others, weights, strict=True):
        distance = of(_LARGEST) - of(x)
        tells = w >= LEAST or distance < math.log(1 / LEAST) - ROUNDED
        if tells and not (0 < w < 1 and abs(math.log((1 - w) / w) - distance) <= ROUNDED):
            return False
    return True


def _hidden(attention: Attention, softcap: float | None) -> Counterexample | None:
    """A hidden key with weight where all scores are far below zero, so that those of a mask before
    the cap are no lower; None without.
    """
    mask, queries, keys = Mask(causal=True), 8, FEATURES
    if not attention.takes(mask):
        return None
    q, k, v = (np.zeros((1, 1, n, FEATURES), np.float32) for n in (queries, keys, keys))
    q[..., 0], k[..., 0] = FAR, -FAR
    v[0, 0, np.arange(keys), np.arange(keys)] = 256
    seen = attention.ask(Question(q, k, v, mask, softcap=softcap)).o[0, 0] != 0
    start = dataclasses.replace(mask, alignment="start")
    aligned = [visibility.expected(one, queries, keys) for one in (mask, start)]
    if any((seen <= one).all() for one in aligned):
        return None
    i, j = (int(x) for x in np.argwhere(seen & ~aligned[0])[0])
    shown = f"causal, all scores {-_LARGEST:g} before the cap: query {i}, key {j}"
    return Counterexample(shown, "seen", "not seen", "A-22")


def own_sinks(attention: Attention, cap: float | None = None) -> Finding:
    """The sink of a function that is given none: a number, or ``none``.

    One key, whose score goes up until it has weight; what is left of its value is the sink's.

    cap       of the function's own scores.
    """
    parts: list[float] = []
    tried = [sign * 2.0**e for sign in (1, -1) for e in range(-6, 9)]
    witness, estimates = None, None
    for _ in range(4):
        x = [FAR * SCALE * (sum(parts) + one) for one in tried]
        x = x if cap is None else [cap * math.tanh(one / cap) for one in x]
        weights = _single_weights(attention, parts, tried)
        whole = np.abs(weights - 1) < 1 - math.exp(-ROUNDED)
        if not parts and whole.all():
            evidence = f"one key has all of the weight, of scores from {min(x):g} to {max(x):g}"
            return Finding("sinks", "none", evidence)
        if not parts and np.ptp(weights) < 2.0**-6 * np.abs(weights).max():
            words = f"none: o is {np.median(weights):.4g} times what it is"
            evidence = f"one key has that weight, of scores from {min(x):g} to {max(x):g}"
            return Finding("sinks", None, evidence, words=words)
        if witness is None:
            i = int(np.argmax(~whole))
            shown, got = f"one key of score {x[i]:g}", f"{weights[i]:.4g} of its value"
            witness = Counterexample(shown, got, "its value", "A-23")
        pairs = zip(x, weights, strict=True)
        estimates = [one + math.log((1 - w) / w) for one, w in pairs if 0.02 < w < 0.98]
        below = [one for one, w in zip(tried, weights, strict=True) if w < 0.5]
        above = [one for one, w in zip(tried, weights, strict=True) if not w < 0.5]
        if estimates or not below or not above or max(below) >= min(above):
            break
        parts.append(max(below))
        width = min(above) - max(below)
        tried = [m / 8 * 2.0**e for e in range(-9, 9) for m in range(8, 16)]
        tried = [one for one in tried if one < width]
    value = round(float(np.median(estimates)), 1) if estimates else None
    words = f"about {value}" if estimates else "a row's weights do not add up to 1"
    return Finding("sinks", value, str(witness), words=words, witness=witness)


def _own_sinks_within(attention: Attention, low: float, high: float) -> Finding:
    """``own_sinks`` under a cap from low to high: a number where both agree, else the range."""
    least, most = (own_sinks(attention, max(one, 1e-3)) for one in (low, high))
    if least.value == most.value:
        return least
    if least.value is None or most.value is None:
        return least if least.value is None else most
    words = " to ".join(f"{one:g}" for one in sorted((least.value, most.value)))
    return Finding("sinks", None, least.evidence, words=words, witness=least.witness)


def _single_weights(attention: Attention, parts: list[float], tried: list[float]) -> np.ndarray:
    """The weight of a single key of the scores ``parts``, beside another of ``tried``."""
    rows = [*tried, FAR]  # the last one's scale rounds no other
    q, k, v = np.zeros((3, len(rows), 1, 1, FEATURES), np.float32)
    q[..., : len(parts) + 1], v[..., 0] = FAR, LARGE
    k[..., : len(parts)], k[:, 0, 0, len(parts)] = parts, rows
    # of several numbers in a row none is rounded under a scale of its own; q has no such feature
    if parts:
        k[..., FEATURES - 1] = FAR
    return attention.ask(Question(q, k, v)).o[:-1, 0, 0, 0] / LARGE


def _sinks_argument(attention: Attention) -> Finding:
    """Whether the argument's sinks join the sum as A-23 has it."""
    what, heads = "sinks argument", len(SINKS)
    q, k, v = np.zeros((3, 1, heads, 1, FEATURES), np.float32)
    v[..., 0] = LARGE
    descales = dict(zip("qk", DESCALES, strict=True)) if attention.takes_codes else {}
    shape = (1, heads)
    arrays = {role: np.full(shape, x, np.float32) for role, x in descales.items()}
    question = Question(q, k, v, FULL, descales=arrays or None)
    try:
        answer = attention.ask(question._replace(sinks=np.array(SINKS, np.float32)))
        high = attention.ask(question._replace(sinks=np.full(heads, ABOVE, np.float32)))
        above = high.o[0, :, 0, 0]
    except RefusedError as error:
        return Finding(what, None, str(error), words=visibility.REFUSED)
    weights = answer.o[0, :, 0, 0] / LARGE
    explanations = {
        "joins the sum": [1 / (1 + math.exp(a)) for a in SINKS],
        "ignored": [1.0] * heads,
        "of another head": [1 / (1 + math.exp(a)) for a in SINKS[::-1]],
        "a power of two": [1 / (1 + 2.0**a) for a in SINKS],
    }
    factors = {"the softmax scale": SCALE, "log2(e)": 1 / _LN2, "ln 2": _LN2}
    factors |= {f"{role}_descale": x for role, x in descales.items()}
    factors |= {"q_descale and k_descale": math.prod(DESCALES)} if descales else {}
    for name, factor in factors.items():
        expected_weights = [1 / (1 + math.exp(a * factor)) for a in SINKS]
        explanations[f"multiplied by {name}"] = expected_weights
    names = [name for name, of in explanations.items() if _near(weights, of)]
    words = names[0] if names else "weights of no sink"
    got = ", ".join(f"{w:.4g}" for w in weights)
    expected = ", ".join(f"{w:.4g}" for w in explanations["joins the sum"])
    shown = f"sinks {', '.join(f'{a:g}' for a in SINKS)}, one key of score 0"
    if words == "joins the sum" and above.any():
        bounded = np.isfinite(above).all()
        words = "bounded" if bounded else "overflows"
        first = above[above != 0 if bounded else ~np.isfinite(above)][0]
        shown = f"sinks {ABOVE:g}, one key of score 0"
        got, expected = f"{first:.4g}", "0"
    elif words == "joins the sum" and answer.lse is not None:
        logs = [float(x) for x in answer.lse[0, :, 0]]
        right = [math.log1p(math.exp(a)) for a in SINKS]
        if max(abs(x - y) for x, y in zip(logs, right, strict=True)) > 2.0**-10:
            words = "not in the log-sum-exp"
            both = (logs, right)
            got, expected = (", ".join(f"{x:.4g}" for x in one) for one in both)
    if words == "joins the sum":
        return Finding(what, words, f"{shown}: {got} of its value")
    return Counterexample(shown, got, expected, "A-23").finding(what, words)


def _near(weights: np.ndarray, expected: list[float]) -> bool:
    logs = np.log(np.maximum(weights, 1e-9) / expected)
    return bool((np.abs(logs) < ROUNDED / 2).all())


def roundest(low: float, high: float) -> float | None:
    """The one power of two or number of one decimal digit from low to high; without any the one of
    two digits. None if there are several.
    """
    if low <= BOUNDS[0] or high >= BOUNDS[1]:
        return None
    tens = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    short = {float(f"{digit}e{e}") for e in tens for digit in range(1, 10)}
    least, most = math.floor(math.log2(low)), math.ceil(math.log2(high))
    short |= {2.0**e for e in range(least, most + 1)}
    longer = {float(f"{digits}e{e}") for e in tens for digits in range(10, 100)}
    for candidates in (short, longer):
        numbers = [number for number in candidates if low <= number <= high]
        if numbers:
            return numbers[0] if len(numbers) == 1 else None
    return None


def within(low: float, high: float) -> str:
    """The caps from low to high in words."""
    if low > BOUNDS[0] and high < BOUNDS[1]:
        return f"{low:.4g} to {high:.4g}"
    if low > BOUNDS[0]:
        return f"at least {low:.4g}"
    return f"at most {high:.4g}" if high < BOUNDS[1] else "of any size"
