"""How q, k and v become numbers of a format, and how o is returned (A-2, A-10, A-11, A-13)."""

import math
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.attention.scores import FAR, FEATURES, LOG2E
from fp8ref.conformance.attention.subjects import Attention, Question
from fp8ref.conformance.kit.finding import Finding
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT32, Format
from fp8ref.sim.quantize import cast

FORMATS = (E5M2, E4M3FN, BFLOAT16, FLOAT32)  # the formats of v that are told apart

SMALL, GIANT = 2.0**-3, 448 * 2.0**20
"""A number and another that makes it 0 where both share a scale to FP8."""

PLACES = {
    "another sequence": (1, 0, 0, 0),
    "another head": (0, 1, 0, 0),
    "150 tokens before": (0, 0, -150, 0),
    "60 tokens before": (0, 0, -60, 0),
    "the next token": (0, 0, 1, 0),
    "another feature, 36 before": (0, 0, 0, -36),
    "the next feature": (0, 0, 0, 1),
}
"""Where the giant is: sequences, heads, tokens and features from the small number."""

_NAMES = tuple(PLACES)
_TOKEN, _FEATURE = 190, 40

SHARED = {_NAMES: "tensor", _NAMES[2:]: "head", _NAMES[3:]: "rows_128"}
"""The granularity of q, k and v in which all of these places share a scale, and no others."""

MX_OF = {"k": _NAMES[6:], "v": _NAMES[4:5]}
"""The places that share a scale in blocks of 32: of k along the features, of v along the tokens."""


class Operands(NamedTuple):
    """The format of v, whether scores of exact numbers are exact, and the findings."""

    fmt: Format
    exact: bool
    findings: list[Finding]


def operands(attention: Attention) -> Operands:
    """The format, the rotation, and what shares a scale."""
    fmt, format_finding = _format(attention)
    exact, score_finding = _rotation(attention)
    findings = [format_finding, score_finding]
    if fmt.bits == 8 and not attention.takes_codes:
        findings += [_granularity(attention, role) for role in (("k", "v") if exact else ("v",))]
    return Operands(fmt, exact, findings)


def _format(attention: Attention) -> tuple[Format, Finding]:
    """The format of v: two keys of equal probabilities, whose values are 1 + 2^-m and -1. Their sum
    is 0 if the first was rounded to 1, in an output of any format."""
    bits = np.arange(1, 11)
    v = np.zeros((1, 1, 2, FEATURES), np.float32)
    v[0, 0, 0, bits], v[0, 0, 1, bits] = 1 + 2.0**-bits, -1
    v[0, 0, :, 0] = 1.75, -1.75
    zeros = np.zeros((1, 1, 2, FEATURES), np.float32)
    outputs = attention.ask(Question(zeros[:, :, :1], zeros, v)).o[0, 0, 0, bits]
    nonzero = np.flatnonzero(outputs)
    if not np.array_equal(nonzero, np.arange(nonzero.size)):
        listed = ", ".join(f"{x:.3g}" for x in outputs)
        return FLOAT32, Finding("format", None, f"1 + 2^-m less 1: {listed}")
    # beyond the format's last bit 1 + 2^-m is a tie, or below one, and rounded to the even 1
    kept = nonzero.size
    fmt = next((one for one in FORMATS if min(one.mantissa_bits, len(bits)) == kept), None)
    evidence = f"1 + 2^-m less 1 is no zero for m up to {kept}"
    if fmt is None:
        return FLOAT32, Finding("format", None, evidence)
    words = "wider than bfloat16" if fmt == FLOAT32 else ""
    return fmt, Finding("format", fmt.name, f"v: {evidence}", words=words)


def _rotation(attention: Attention) -> tuple[bool, Finding]:
    """Whether two keys have equal scores, 1 x 1.25 and 1.25 x 1, all numbers of e4m3 under a scale
    of 1.75's. A rotation makes other numbers of them, whose roundings differ."""
    q, k, v = (np.zeros((1, 1, n, FEATURES), np.float32) for n in (1, 3, 3))
    # every score is 2^9 x 1.25 / 8 = 80: a difference of 1 in 100 shows
    q[0, 0, 0, :3] = np.array([1, 1.25, 1.75]) * 2.0**4
    k[0, 0, 0, 0], k[0, 0, 1, 1], k[0, 0, 2, 3] = 1.25 * 2.0**5, 2.0**5, 1.75 * 2.0**5
    k[0, 0, 2, 0] = -1.75 * 2.0**5
    v[0, 0, :2, 0] = 1, -1
    difference = float(attention.ask(Question(q, k, v)).o[0, 0, 0, 0])
    evidence = f"two keys of equal scores and opposite values: {difference:.3g}"
    words = "rotated, or rounded to a format without 1.25 of 1.75"
    if difference == 0:
        words = "as they are"
    return difference == 0, Finding("q and k", difference == 0, evidence, words=words)


def _granularity(attention: Attention, role: str) -> Finding:
    """Which numbers share a scale with a small one: it is 0 next to a giant elsewhere.

    The giant of v is the value of a key without probability; that of k meets a feature 0 of q.
    """
    shares = []
    for place, (sequence, head, tokens, features) in PLACES.items():
        q, k, v = (np.zeros((2, 2, n, FEATURES), np.float32) for n in (1, 256, 256))
        other_key = features == 0
        if role == "v":
            giant = (sequence, head, _TOKEN + tokens, _FEATURE + features)
            if other_key:
                q[..., 0], k[giant[:3]][0] = FAR, -FAR
            v[0, 0, _TOKEN, _FEATURE], v[giant] = SMALL, GIANT
            output = attention.ask(Question(q, k, v)).o[0, 0, 0, _FEATURE]
        else:
            q[..., _FEATURE] = 2.0**10  # times SMALL / 8, a score of 16
            k[0, 0, _TOKEN, _FEATURE] = SMALL
            feature = _FEATURE + (-1 if other_key else features)
            k[sequence, head, _TOKEN + tokens, feature] = GIANT
            v[0, 0, _TOKEN, 0], v[0, 0, _TOKEN + 10, 0] = 1, -1
            output = attention.ask(Question(q, k, v)).o[0, 0, 0, 0]
        if output == 0:
            shares.append(place)
    shared = tuple(shares)
    value = "mx_1x32" if shared == MX_OF[role] else SHARED.get(shared)
    places = ", ".join(shared)
    evidence = f"{SMALL} is 0 next to {GIANT:.3g} in {places or 'no other place'}"
    words = "" if value else f"shared with {places or 'none of these places'}"
    return Finding(f"scales of {role}", value, evidence, words=words)


def output(attention: Attention) -> list[Finding]:
    """The format of o, and what the second output is."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, 64, FEATURES)).astype(np.float32) for _ in range(3))
    answer = attention.ask(Question(q, k, v))
    findings = [_out(answer.o, answer.dtype)]
    if answer.lse is not None:
        zeros = np.zeros((1, 1, 5, FEATURES), np.float32)
        log = attention.ask(Question(zeros[:, :, :1], zeros, zeros)).lse
        assert log is not None
        log_sum_exp = float(log[0, 0, 0])
        value = None
        for name, base in (("natural", 1.0), ("base 2", LOG2E)):
            if abs(log_sum_exp - math.log(5) * base) < 1e-4:
                value = name
        words = "" if value else "neither natural nor base 2"
        evidence = f"5 scores of 0 give {log_sum_exp:.6g}; ln 5 = {math.log(5):.6g}"
        findings.append(Finding("log-sum-exp", value, evidence, words=words))
    return findings


def _out(o: np.ndarray, dtype: str) -> Finding:
    if dtype.startswith("float8_"):
        return Finding("output", dtype.removeprefix("float8_"), f"dtype {dtype}")
    if dtype not in ("float32", "float64"):
        return Finding("output", dtype, f"dtype {dtype}")
    if np.array_equal(cast.round_to(o, BFLOAT16), o):
        evidence = f"dtype {dtype}, all {o.size:,} numbers are bfloat16's"
        return Finding("output", "bfloat16", evidence)
    count = len(np.unique(np.abs(o)))
    for fmt in (E4M3FN, E5M2):
        codes = o / np.abs(o).max() * np.float32(fmt.max)
        # scale and scale_inv are rounded once each, and so is their product with a code
        if np.allclose(cast.round_to(codes, fmt), codes, rtol=2.0**-21, atol=0):
            evidence = f"dtype {dtype}, {count} magnitudes, {fmt}'s under one scale"
            return Finding("output", fmt.name, evidence)
    return Finding("output", "float32", f"dtype {dtype}")
