"""What the descales of q, k and v multiply: each entry [sequence, head of keys] is doubled, one
after another (spec A-2, A-17).

All codes have descales of 1. A descale of q or k doubles its head's scores, that of v the outputs.
"""

import dataclasses

import numpy as np

from fp8ref.conformance.attention.comparison import random_operands
from fp8ref.conformance.attention.scores import SCALE
from fp8ref.conformance.attention.subjects import Attention, Question
from fp8ref.conformance.kit.finding import Counterexample, Finding
from fp8ref.sim.quantize import cast

HEADS, TOKENS = 2, 32  # of the question, which has as many sequences as heads

SCORES, OUTPUTS, KEPT = "doubles the scores", "doubles the outputs", "changes nothing"
_HALVED = "halves the scores"


def findings(attention: Attention) -> list[Finding]:
    """A finding for each descale of a function that has them."""
    if attention.descale_names is None:
        return []
    rng = np.random.default_rng(2)
    operands = random_operands(rng, (HEADS, HEADS, HEADS), TOKENS, TOKENS, 64)
    q, k, v = (cast.round_to(x, attention.fmt) for x in operands)
    question = Question(q, k, v)
    alone = dataclasses.replace(attention, ones=True)
    base = alone.ask(question).o
    return [
        _finding(alone, question, base, role, name)
        for role, name in zip("qkv", attention.descale_names, strict=True)
    ]


def _finding(
    attention: Attention, question: Question, base: np.ndarray, role: str, name: str
) -> Finding:
    expected_effect = OUTPUTS if role == "v" else SCORES
    effects = {}  # {(entry, head): what doubling it did to the head}
    for entry in np.ndindex(HEADS, HEADS):
        ones = np.ones((HEADS, HEADS), np.float32)
        ones[entry] = 2
        o = attention.ask(question._replace(descales={role: ones})).o
        for head in np.ndindex(HEADS, HEADS):
            effects[entry, head] = _effect(question, head, base[head], o[head])
    right = {(e, h): expected_effect if h == e else KEPT for e, h in effects}
    if effects == right:
        evidence = f"each of {HEADS**2} entries doubled, codes of {attention.fmt}"
        return Finding(name, expected_effect, evidence)
    kinds = set(effects.values()) - {KEPT}
    own = {effect for (entry, head), effect in effects.items() if head == entry}
    if not kinds:
        words = "ignored"
    elif kinds == {expected_effect}:
        words = "of another sequence or head"
    elif own == kinds and len(kinds) == 1:
        words = kinds.pop()
    else:
        words = "no factor of its head"
    entry, head = at = next(at for at in effects if effects[at] != right[at])
    shown = f"{name}{list(entry)} doubled: sequence {head[0]}, head {head[1]}"
    return Counterexample(shown, effects[at], right[at], "A-2").finding(name, words)


def _effect(
    question: Question, head: tuple[int, ...], before: np.ndarray, after: np.ndarray
) -> str:
    """What doubling a descale did to a head.

    Doubled outputs are exact in every format; scores are near those of real arithmetic.
    """
    if np.array_equal(before, after):
        return KEPT
    if np.array_equal(2 * before, after):
        return OUTPUTS
    q, k, v = (x[head].astype(np.float64) for x in question[:3])
    errors = {}
    for name, factor in ((SCORES, 2.0), (_HALVED, 0.5)):
        p = np.exp(q @ k.T * (SCALE * factor))
        errors[name] = np.abs(p / p.sum(axis=1, keepdims=True) @ v - after).mean()
    return min(errors, key=lambda name: errors[name])
