"""Softcaps and sinks of a function under test, and wrong orders of both, are told apart and named
(spec A-22, A-23, A-27).
"""

import dataclasses
import inspect
import math

import numpy as np
import pytest
from helpers.attention.simulated_attention import simulated

from fp8ref.conformance.attention import (
    identify_attention,
    logits,
    probe,
    require_attention,
    subjects,
)
from fp8ref.sim.attention import attention
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import FULL, Mask

F32 = np.float32


def planted(*, cap=None, sink=None, order="right", sinks_are="right", takes=()):
    """Attention in float64, rounded to float32: fn(q, k, v, causal=False, softcap=None, sinks=None)
    -> (o, lse), without arguments not in takes.

    cap, sink   of all scores, without an argument.
    order       of the cap: right, before the scale, after the mask, powers of two, ignored,
                clipped, not multiplied back.
    sinks_are   right, ignored, scaled, powers of two, reversed, outside the log-sum-exp, left to
                overflow.
    """

    def attend(q, k, v, causal=False, softcap=None, sinks=None):
        softcap = cap if softcap is None else softcap
        sinks = np.full(q.shape[1], sink, float) if sinks is None and sink is not None else sinks
        group, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[3])
        s = q.astype(np.float64) @ np.repeat(k, group, axis=1).swapaxes(-1, -2).astype(np.float64)
        position = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        hidden = np.arange(k.shape[2]) > position if causal else np.zeros(s.shape[-2:], bool)
        if order == "after the mask":
            s = np.where(hidden, -np.inf, s)
        if softcap is not None and order != "ignored":
            if order == "before the scale":
                s = softcap * np.tanh(s / softcap) * scale
            elif order == "clipped":
                s = np.clip(s * scale, -softcap, softcap)
            elif order == "powers of two":
                s = softcap * np.tanh(s * scale / math.log(2) / softcap) * math.log(2)
            else:
                s = np.tanh(s * scale / softcap) * (
                    1 if order == "not multiplied back" else softcap
                )
        else:
            s = s * scale
        if order != "after the mask":
            s = np.where(hidden, -np.inf, s)
        m = s.max(axis=-1, keepdims=True)
        p = np.exp(s - m)
        total = p.sum(axis=-1, keepdims=True)
        of_keys = total
        if sinks is not None and sinks_are != "ignored":
            a = np.asarray(sinks, np.float64)[
                None, :: -1 if sinks_are == "reversed" else 1, None, None
            ]
            a = a * (
                scale
                if sinks_are == "scaled"
                else math.log(2)
                if sinks_are == "powers of two"
                else 1
            )
            with np.errstate(over="ignore"):
                of_sink = np.exp(
                    (a - m).astype(F32)
                    if sinks_are == "left to overflow"
                    else np.minimum(a - m, 700)
                )
            total = total + of_sink
            p = p * of_sink / of_sink if sinks_are == "left to overflow" else p
        o = (p / total) @ np.repeat(v, group, axis=1).astype(np.float64)
        lse = (m + np.log(of_keys if sinks_are == "outside the log-sum-exp" else total))[..., 0]
        return o.astype(F32), lse.astype(F32)

    # The kit reads the names of arguments.
    kept = ("q", "k", "v", "causal", *takes)
    attend.__signature__ = inspect.Signature(
        [one for name, one in inspect.signature(attend).parameters.items() if name in kept]
    )
    return attend


def found(function):
    asked = subjects.wrap(function, name="mine")
    return {one.what: one for one in logits.findings(asked)}


def test_a_function_without_either():
    of = found(planted())
    assert {what: one.value for what, one in of.items()} == {"softcap": "none", "sinks": "none"}


@pytest.mark.parametrize("cap", [2.0, 15.0, 30.0, 50.0, 1000.0])
def test_a_hidden_softcap_is_measured(cap):
    one = found(planted(cap=cap))["softcap"]
    assert one.value == cap
    assert "two keys of scores 25088 and " in str(one.witness)
    assert "(A-22)" in str(one.witness)


@pytest.mark.parametrize(
    ("cap", "value", "words"),
    [
        (16.0, 16.0, "16 (15.55 to 16.43)"),
        (128.0, 128.0, "128 (126 to 129.9)"),
        (512.0, 512.0, "512 (503.2 to 520.1)"),
        (48.0, None, "46.95 to 48.99"),  # 47 is as short as 48
        (1.0, None, "0.5164 to 1.325"),
        (0.7, None, "at most 1.095"),
        (0.05, None, "at most 0.9534"),
        (5000.0, None, "at least 3366"),
    ],
)
def test_a_softcap_is_named_where_one_round_number_explains_it(cap, value, words):
    one = found(planted(cap=cap))["softcap"]
    assert (one.value, one.text) == (value, words)


def test_caps_beyond_the_limit_of_detection():
    """In e4m3 the second key's weight is cast to 0 under a cap of 4000; in float32 under one of
    6000.
    """
    for cap, value in ((3000.0, 3000.0), (4000.0, "none")):
        capped = Call(variant="fa3", softcap=cap)

        def function(q, k, v, mask=FULL, call=capped):
            return attention.forward(q, k, v, variant=dataclasses.replace(call, mask=mask))

        assert found(function)["softcap"].value == value
    assert found(planted(cap=6000.0))["softcap"].value == "none"


@pytest.mark.parametrize(
    ("low", "high", "value"),
    [
        (15.6, 16.4, 16),
        (29.4, 30.6, 30),
        (14.6, 15.4, 15),
        (490, 520, None),
        (2.2, 2.8, None),
        (123, 127, None),
        (0.0, 1.0, None),
        (3e3, 1e9, None),
    ],
)
def test_the_roundest_number_is_the_only_one(low, high, value):
    assert logits.roundest(low, high) == value


def test_a_sink_under_an_uncertain_cap_is_a_range():
    of = found(planted(cap=48.0, sink=40.0))
    assert of["softcap"].value is None
    low, high = map(float, of["sinks"].words.split(" to "))
    assert of["sinks"].value is None
    assert low <= 40 <= high
    assert found(planted(cap=48.0, sink=0.0))["sinks"].value == 0


@pytest.mark.parametrize("sink", [-30.0, 0.0, 1.5, 300.0])
def test_a_hidden_sink_is_measured(sink):
    one = found(planted(sink=sink))["sinks"]
    assert one.value == sink
    assert "one key of score" in str(one.witness)


def test_no_tanh_is_named():
    one = found(planted(cap=30.0, order="clipped"))["softcap"]
    assert (one.value, one.words) == (None, "large scores are capped, by no hyperbolic tangent")


def test_a_mask_before_a_hidden_cap_is_named():
    of = found(planted(cap=50.0, order="after the mask"))
    assert of["softcap"].value == 50
    assert (
        str(of["mask and softcap"].witness)
        == "causal, all scores -25088 before the cap: query 0, key 57: got seen, expected not "
        "seen (A-22)"
    )
    assert "mask and softcap" not in found(planted(cap=50.0))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("right", "after the scale, before the mask"),
        ("before the scale", "before the softmax scale"),
        ("after the mask", "after the mask: hidden keys have the score -cap"),
        ("powers of two", "of scores in powers of two"),
        ("not multiplied back", "not multiplied back: scores end at 1"),
        ("ignored", "ignored"),
    ],
)
def test_the_order_of_a_softcap_argument(order, words):
    one = found(planted(order=order, takes=("softcap",)))["softcap argument"]
    assert one.text == words if order == "right" else (one.value, one.words) == (None, words)
    assert order == "right" or "expected" in str(one.witness)


@pytest.mark.parametrize(
    ("sinks_are", "words"),
    [
        ("right", "joins the sum"),
        ("ignored", "ignored"),
        ("scaled", "multiplied by the softmax scale"),
        ("powers of two", "a power of two"),
        ("reversed", "of another head"),
        ("outside the log-sum-exp", "not in the log-sum-exp"),
        ("left to overflow", "overflows"),
    ],
)
def test_what_a_sinks_argument_does(sinks_are, words):
    one = found(planted(sinks_are=sinks_are, takes=("sinks",)))["sinks argument"]
    assert (one.value, one.words)[sinks_are != "right"] == words
    assert sinks_are == "right" or "(A-23)" in str(one.witness)


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ["cudnn", "fa3", "mxfp8", "fa4", "fa3_paper", "bf16", "exact"])
def test_both_arguments_of_the_simulator_are_right(name):
    """Casts of P and of o move a weight by less than the bound that findings have."""
    of = found(simulated(name))
    assert {what: one.value for what, one in of.items()} == {
        "softcap": "none",
        "sinks": "none",
        "softcap argument": "after the scale, before the mask",
        "sinks argument": "joins the sum",
    }


@pytest.mark.slow
def test_the_nearest_variant_departs_by_them():
    def mine(q, k, v, softcap=None):
        return attention.forward(
            q,
            k,
            v,
            variant=Call(variant="fa4", softcap=None if softcap is None else softcap / 8),
            sinks=np.full(q.shape[1], 2.0, F32),
        ).o

    outcome = identify_attention(mine, expect="fa4")
    assert (outcome.variant, outcome.ok) == (None, False)
    said = "\n".join(outcome.departures)
    assert (
        "softcap argument: before the softmax scale; softcap 16, two keys of scores 25088 and"
        in said
    )
    assert "sinks: about 2.0, in the variant none; one key of score" in said
    assert not probe(mine).ok


def test_require_attention_with_both():
    fa3 = simulated("fa3")
    require_attention(fa3, "fa3", Mask(causal=True), softcap=30.0, sinks=True)
    with pytest.raises(AssertionError, match="outputs differ"):
        require_attention(
            lambda q, k, v, softcap=8.0: fa3(q, k, v, softcap=softcap / 8), "fa3", softcap=30.0
        )
    with pytest.raises(ValueError, match="has no argument for softcap"):
        require_attention(lambda q, k, v: fa3(q, k, v), "fa3", softcap=30.0)
