"""Each decision of an attention function is found by inputs of its own (spec A-17)."""

import dataclasses
import functools

import numpy as np
import pytest
from helpers.attention import planted_attention
from helpers.attention.simulated_attention import simulated

from fp8ref.conformance.attention import decisions, probe
from fp8ref.sim.attention import attention
from fp8ref.spec.attention.variants import VARIANTS

FA3, FA4 = VARIANTS["fa3"], VARIANTS["fa4"]


@functools.cache
def probed(variant):
    return probe(simulated(variant), name=getattr(variant, "name", variant))


def planted(**faults):
    return probe(planted_attention.planted(**faults), name="planted")


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_decisions_of_named_variants(name):
    found = probed(name)
    assert found.departures(VARIANTS[name]) == []
    others = [
        other for other in VARIANTS if other != name and not found.departures(VARIANTS[other])
    ]
    assert others == []
    assert [fault.what for fault in found.faults] == (
        ["range of P"] if name == "fa4_threshold4" else []
    )


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("what", "base", "changes", "value"),
    [
        (
            "tiles",
            FA4,
            {"tiles": (dataclasses.replace(FA4.tiles[0], full=176),)},
            "176 keys, descending",
        ),
        ("tiles", FA4, {"descending": False}, "128 keys, ascending"),
        ("threshold", FA4, {"threshold": 2.0}, 2.0),
        ("threshold", VARIANTS["cudnn"], {"threshold": 3.0}, 3.0),
        ("largest P", VARIANTS["cudnn"], {"p_scale": 64.0}, 64.0),
        ("largest P", FA3, {"offset": 5}, 32.0),
        ("promotion", FA3, {"promotion": 4}, 4),
        ("promotion", FA4, {"promotion": 2}, 2),
        ("sums of P v", FA4, {"plan": "ada"}, 13),
        ("output", FA3, {"out": VARIANTS["exact"].fmt}, "float32"),
        ("scales of v", FA3, {"granularity": "tensor"}, "tensor"),
    ],
    ids=lambda value: value.name if hasattr(value, "lse") else str(value)[:24],
)
#
def test_one_decision_changed_is_the_one_that_departs(what, base, changes, value):
    found = probed(dataclasses.replace(base, name="changed", **changes))
    assert found[what].value == value
    allowed = (
        {what, "range of P"}
        | ({"scales of k"} if what == "scales of v" else set())
        | ({"sums of q k"} if "plan" in changes else set())
    )
    departing = {one.partition(":")[0] for one in found.departures(base)}
    assert what in departing
    assert departing <= allowed


def test_the_threshold_is_bracketed():
    for threshold in (0.5, 1.0, 3.0, 6.0, 8.0):
        found = probed(dataclasses.replace(FA4, name="changed", threshold=threshold)).threshold
        assert found.agrees(threshold)
        assert found.high < 1.3 * found.low


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    ("faults", "what", "words", "evidence"),
    [
        ({"threshold": 4.0}, "threshold", "4 powers of two", "4.1"),
        ({"threshold": 4.0, "saturates": False}, "range of P", "left, without saturation", "nan"),
        ({"threshold": 4.0}, "range of P", "left, and clipped", "in real arithmetic"),
        (
            {"offset": 9},
            "range of P",
            "left, and clipped",
            "one key: 0.875 of its value, in real arithmetic 1",
        ),
        (
            {"offset": 9, "saturates": False},
            "range of P",
            "left, without saturation",
            "one key: nan",
        ),
        ({"rounded_denominator": True}, "denominator", "rounded", "0% of what casts take off"),
        (
            {"shift": 1},
            "causal mask",
            "off by one: right edge +1, aligned to the end",
            "query 0, key 1: got seen, expected not seen (A-3)",
        ),
        (
            {"shift": -1},
            "causal mask",
            "off by one: right edge -1, aligned to the end",
            "query 0, key 0: got not seen, expected seen (A-3)",
        ),
        ({"start": True}, "causal mask", "aligned to the start", "250 queries"),
        (
            {"dropped": 2},
            "keys",
            "keys 256 to 383 are missing, 128 of 1000",
            "query 0, key 256: got not seen, expected seen (A-3)",
        ),
        (
            {"modulo_heads": True},
            "heads",
            "query head j uses head j mod Hkv",
            "query head 1: got head 1 of k, expected head 0",
        ),
        (
            {"nan_rows": True},
            "causal mask",
            "a query without keys has an output that is not 0",
            "60 queries, 20 keys",
        ),
        (
            {"every_maximum": False},
            "range of P",
            "left, and clipped",
            "key 0 28.1 powers of two above all others",
        ),
        ({"ascending": True}, "tiles", "128 keys, ascending", "keys before 128 and no others"),
        ({"length": 100}, "tiles", "100 keys, descending", "keys from 100 on"),
    ],
    ids=str,
)
def test_planted_faults_are_named(faults, what, words, evidence):
    found = planted(**faults)
    assert words in found[what].text
    assert evidence in found[what].evidence
    if what in (*decisions.STRUCTURE, "range of P") and not faults.get("start"):
        assert what in [fault.what for fault in found.faults]
        assert not found.ok
        assert what in found.message


def test_a_sound_function_has_no_faults():
    found = planted()
    assert found.faults == []
    assert {one.partition(":")[0] for one in found.departures(FA4)} <= {
        "sums of q k",
        "sums of P v",
        "promotion",
    }
    assert found["promotion"].text == "no sum loses 2^-26 of a product"


def test_findings_as_json():
    found = planted(shift=1).to_dict()
    assert not found["ok"]
    one = next(finding for finding in found["findings"] if finding["what"] == "causal mask")
    assert one["witness"]["expected"] == "not seen"
    assert all(isinstance(finding["text"], str) for finding in found["findings"])


def test_a_function_of_another_scale_is_no_variant():
    def doubled(q, k, v):
        return attention.forward(2 * np.asarray(q), k, v, variant="fa4").o

    found = probe(doubled)
    assert found["largest P"].value != 256.0
