"""Vectors of attention, for programs in any language (spec A)."""

import numpy as np
import pytest
from helpers.attention import planted_attention
from helpers.attention.attention_cases import call_options

from fp8ref.conformance.vectors import attention as asked
from fp8ref.conformance.vectors.operations import generate, judge
from fp8ref.sim.attention import attention
from fp8ref.spec.attention.variants import VARIANTS

SHAPE = "1,2,1,3,200,32"


def tensors(shape, q, k, v):
    b, h, kv, tq, tk, d = map(int, shape.split(","))
    bits = [
        np.array([int(x, 16) << 16 for x in field.split(",")], np.uint32).view(np.float32)
        for field in (q, k, v)
    ]
    return [
        x.reshape(of)
        for x, of in zip(bits, ((b, h, tq, d), (b, kv, tk, d), (b, kv, tk, d)), strict=True)
    ]


def written(x):
    return ",".join(
        f"{n:08X}" for n in np.ascontiguousarray(x, np.float32).view(np.uint32).ravel().tolist()
    )


def simulated(variant, **options):
    def answer(*fields):
        found = attention.forward(*tensors(*fields), **call_options(variant=variant, **options))
        return f"{written(found.o)} {written(found.lse)}"

    return answer


def judged(settings, answer, **rules):
    lines = [
        line if line.startswith("#") else f"{line} {answer(*line.split())}"
        for line in generate("attention", settings)
    ]
    return judge("attention", [f"{line}\n".encode() for line in lines], settings={}, rules=rules)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_the_simulator_answers_its_own_vectors(name):
    question = asked.Attention(variant=name, mask="causal", window="64,-1", shape=SHAPE, count=4)
    verdict = judged(
        {"variant": name, "mask": "causal", "window": "64,-1", "shape": SHAPE, "count": 4},
        simulated(name, mask=question.parsed_mask),
    )
    assert verdict.ok, verdict.text()
    assert dict(verdict.compared) == dict.fromkeys(asked.PATTERNS, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"softcap": None}, "no softcap"),
        ({"softcap": 2 / 32**0.5}, "a softcap before the softmax scale"),
        ({"sinks": None}, "no sinks"),
        ({"sinks": np.array([1, 0.25], np.float32)}, "sinks of the heads in reverse"),
    ],
)
def test_softcap_and_sinks_are_judged(changes, said):
    settings = {"variant": "fa4", "softcap": "2", "sinks": "0.25,1", "shape": SHAPE, "count": 2}
    options = {"softcap": 2.0, "sinks": np.array([0.25, 1], np.float32)} | changes
    verdict = judged(settings, simulated("fa4", **options))
    assert verdict.ok == (said is None)
    assert said is None or verdict.first[-1]["rule"].endswith(f"The answer is what {said} gives.")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"softcap": "-1"}, "a softcap is one positive float32 number"),
        ({"softcap": "1,2"}, "a softcap is one positive float32 number"),
        ({"sinks": "x"}, "sinks are a finite float32 number for each of"),
        ({"sinks": "1_0,2"}, "sinks are a finite float32 number for each of"),
        ({"softcap": "nan"}, "a softcap is one positive float32 number"),
        ({"sinks": "1e39,2"}, "sinks are a finite float32 number for each of"),
        ({"softcap": "1e39"}, "a softcap is one positive float32 number"),
        ({"sinks": "1,2,3"}, "for each of 2 query heads"),
    ],
)
def test_softcaps_and_sinks_that_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        asked.Attention(**{"variant": "fa4", "shape": SHAPE} | settings)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("fa3", "fa3_promoted"), ("fa4", "fa4_threshold4"), ("fa4", "fa3"), ("cudnn", "fa4")],
)
def test_another_variant_is_named_with_its_first_element(right, wrong):
    verdict = judged({"variant": right, "count": 4}, simulated(wrong))
    assert not verdict.ok
    said = verdict.first[-1]
    assert said["rule"].startswith(f"variant {right} (A-1). ")
    assert said["rule"].endswith(f"The answer is what variant {wrong} gives.")
    assert "o [0, " in said["vector"]


def test_zero_scores_need_no_exponential():
    """q is 0, and v has small integers: all probabilities are equal, and all sums are exact."""
    verdict = judged({"variant": "exact", "shape": SHAPE, "count": 1}, simulated("exact"))
    assert verdict.ok
    (pattern, (q, _, v)), *_ = asked.Attention(variant="exact", shape=SHAPE, count=1).problems()
    assert (pattern, q.any()) == ("zero scores", False)
    numbers = (v.astype(np.uint32) << 16).view(np.float32)
    assert set(np.unique(numbers)) == set(range(-7, 8))


def test_log_sum_exps_may_be_left_out():
    def without(*fields):
        return simulated("fa4")(*fields).split()[0] + " -"

    def wrong(*fields):
        o, lse = simulated("fa4")(*fields).split()
        return f"{o} {lse[:-1]}{'0' if lse[-1] != '0' else '1'}"

    assert judged({"variant": "fa4", "count": 2}, without).ok
    verdict = judged({"variant": "fa4", "count": 2}, wrong)
    assert [said["vector"] for said in verdict.first] == [
        "zero scores, lse [0, 1, 3]",
        "ordinary, lse [0, 1, 3]",
    ]


def test_exponentials_of_hardware():
    fa4 = planted_attention.planted()

    def answer(*fields):
        o, _ = fa4(*tensors(*fields))
        return f"{written(o)} -"

    verdict = judged({"variant": "fa4", "count": 8}, answer, exponentials="hardware")
    assert verdict.ok, verdict.text()
    rounded = planted_attention.planted(rounded_denominator=True)
    verdict = judged(
        {"variant": "fa4", "count": 8},
        lambda *fields: f"{written(rounded(*tensors(*fields))[0])} -",
        exponentials="hardware",
    )
    assert set(verdict.differ) >= {"ordinary", "one large score"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"variant": "fa5"}, "a variant is one of exact, bf16"),
        (
            {"variant": "fa3", "mask": "band"},
            "a mask is one of full, causal, causal_start; got 'band'",
        ),
        (
            {"variant": "fa3", "window": "5"},
            "a window is left,right, -1 for an open side, or none; got '5'",
        ),
        ({"variant": "fa3", "shape": "1,3,2,4,200,32"}, "Hkv dividing H; got 1,3,2,4,200,32"),
        (
            {"variant": "fa3", "shape": "4,200"},
            "a shape is B,H,Hkv,Tq,Tk,D, .* Write it like 4,4,4,4,4,256",
        ),
        ({"variant": "mxfp8", "shape": "1,2,1,4,200,40"}, "needs D divisible by 32"),
        ({"variant": "fa3", "shape": "1,2,1,4,200,512"}, "at most 256 features; got 512"),
    ],
)
def test_sets_that_cannot_be(settings, said):
    with pytest.raises(ValueError, match=said):
        asked.Attention(**settings)


def test_unknown_exponentials_are_refused():
    with pytest.raises(ValueError, match="exponentials is one of exact, hardware; got 'any'"):
        asked.Rules(exponentials="any")
