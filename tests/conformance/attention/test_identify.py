"""An attention function is named by the variant that explains its bits, or by where the nearest
departs (spec A-17).
"""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from helpers.attention import planted_attention
from helpers.attention.simulated_attention import simulated

from fp8ref.conformance.attention import identify_attention, require_attention
from fp8ref.sim.attention import attention
from fp8ref.sim.attention import exponentials as elementary
from fp8ref.spec.attention.variants import VARIANTS, Mask

F32 = np.float32


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_variant_is_identified(name):
    found = identify_attention(simulated(name), expect=name)
    assert (found.variant, found.exact, found.ok, found.departures) == (name, True, True, ())
    assert found.agreement.compared == found.agreement.equal > 60_000
    assert "bit for bit" in found.message
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        ("fa3", {"promotion": 4}, "promotion=4"),
        ("fa4", {"finish": "divide"}, "finish=divide"),
        ("cudnn", {"p_scale": 64.0, "descending": True}, "p_scale=64.0, descending=True"),
        ("fa4_threshold4", {"threshold": 2.0}, "threshold=2.0"),
    ],
)
def test_a_variation_is_named_by_its_base(base, changes, said):
    found = identify_attention(
        simulated(dataclasses.replace(VARIANTS[base], name="mine", **changes))
    )
    assert found.variant == f"{base} with {said}"
    assert (found.exact, found.ok) == (True, False)
    assert found.reference.variant.name == base
    assert found.reference.first is not None
    assert "of variant" in found.message


@pytest.mark.grid(1)
@pytest.mark.parametrize("wrong", ["fa4", "fa4_threshold4"])
def test_another_variant_than_expected(wrong):
    other = {"fa4": "fa4_threshold4", "fa4_threshold4": "fa4"}[wrong]
    found = identify_attention(simulated(wrong), expect=other)
    assert (found.variant, found.ok) == (wrong, False)
    assert f"is not {other!r}, but {wrong!r}, bit for bit" in found.message
    assert {one.partition(":")[0] for one in found.departures} == {"threshold", "range of P"}
    assert re.search(
        r"o\[0, 0, \d+, \d+\] of case 'ordinary'.*got .* expected .* of variant", found.message
    )


def test_threshold_4_is_at_fault():
    found = identify_attention(simulated("fa4_threshold4"))
    assert (found.variant, found.exact, found.ok) == ("fa4_threshold4", True, False)
    assert "at fault: range of P: left, and clipped" in found.message


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("faults", "departs"),
    [
        ({"dropped": 1}, "keys: keys 128 to 255 are missing"),
        ({"rounded_denominator": True}, "denominator: rounded, in the variant unrounded"),
        ({"threshold": 4.0, "saturates": False}, "range of P: left, without saturation"),
    ],
    ids=str,
)
def test_planted_faults_are_named_with_their_first_element(faults, departs):
    found = identify_attention(planted_attention.planted(**faults), name="mine", expect="fa4")
    assert (found.variant, found.ok) == (None, False)
    assert any(departs in one for one in found.departures), found.departures
    assert found.reference.first is not None
    assert found.message.startswith("mine is not 'fa4'")
    assert found.reference.error > 1e-5
    assert found.to_dict()["first"]["expected"].endswith("of variant 'fa4'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "argument", "words"),
    [
        ({"shift": 1}, "causal mask", "off by one: right edge +1"),
        ({"modulo_heads": True}, "heads", "query head j uses head j mod Hkv"),
    ],
    ids=str,
)
def test_a_fault_of_an_argument_is_named_beside_the_variation(faults, argument, words):
    found = identify_attention(planted_attention.planted(**faults), name="mine", expect="fa4")
    assert (found.variant, found.ok) == ("fa4 with plan=exact, promotion=1", False)
    assert found.wrong_arguments == [argument]
    assert f"  {argument}: {words}" in found.message
    assert found.message.startswith("mine is not 'fa4', but 'fa4 with plan=exact, promotion=1'")
    assert f"is near 'fa4 with plan=exact, promotion=1'; its {argument}" in found.message


@pytest.mark.slow
def test_another_exponential_is_near():
    """The same but for exponentials within 2 units in the last place: fa4 in NumPy, with sums that
    round otherwise.
    """
    found = identify_attention(planted_attention.planted(), name="mine")
    assert (found.variant, found.exact) == ("fa4 with plan=exact, promotion=1", False)
    assert found.agreement.near > 0.99 * found.agreement.compared
    assert "but for exponentials" in found.message


@pytest.mark.slow
def test_a_wrong_threshold_is_named():
    found = identify_attention(planted_attention.planted(threshold=6.0), name="mine", expect="fa4")
    assert (found.variant, found.ok) == (
        "fa4_threshold4 with threshold=6.0, plan=exact, promotion=1",
        False,
    )
    assert any("threshold: 6 powers of two, in the variant 0.0" in one for one in found.departures)
    assert found.reference.first is not None


def test_require_attention_passes_and_fails():
    causal = Mask(causal=True)
    require_attention(simulated("fa3"), "fa3", causal)
    require_attention(simulated("fa4"), VARIANTS["fa4"], features=128)
    require_attention(planted_attention.planted(), "fa4", causal, exponentials="hardware")
    with pytest.raises(AssertionError, match=r"is not 'fa4': [\d,]+ of [\d,]+ outputs differ"):
        require_attention(planted_attention.planted(), "fa4", causal)
    with pytest.raises(AssertionError) as raised:
        require_attention(
            planted_attention.planted(shift=-1), "fa4", causal, exponentials="hardware"
        )
    text = str(raised.value)
    assert (
        "causal mask: off by one: right edge -1, aligned to the end; causal, 150 queries, 150 "
        "keys, all scores 0: query 0, key 0" in text
    )
    assert re.search(r"o\[0, 0, 0, \d+\] of case", text)


def test_require_attention_refuses():
    with pytest.raises(ValueError, match="exponentials are 'exact' or 'hardware'; got 'any'"):
        require_attention(simulated("fa3"), "fa3", exponentials="any")
    with pytest.raises(ValueError, match="variant is a Variant or"):
        require_attention(simulated("fa3"), "fa5")
    with pytest.raises(ValueError, match="takes no such mask; name an argument mask, causal"):
        require_attention(
            lambda q, k, v: attention.forward(q, k, v, variant="fa3"), "fa3", Mask(causal=True)
        )
    with pytest.raises(ValueError, match="expect is one of exact, bf16"):
        identify_attention(simulated("fa3"), expect="fa5")


def test_a_softmax_without_tiles():
    """Attention as papers write it, in float32: near ``exact``, which it is but for roundings."""

    def plain(q, k, v):
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        s = q @ k.transpose(0, 1, 3, 2) / F32(math.sqrt(q.shape[3]))
        p = elementary.exp(s - s.max(axis=-1, keepdims=True))
        return (p / p.sum(axis=-1, keepdims=True)) @ v

    found = identify_attention(plain)
    assert (found.variant, found.exact, found.ok) == ("exact", False, True)
    assert "is 'exact', but for roundings" in found.message


def test_attention_of_torch_on_a_cpu():
    """Its tiles in bfloat16 have 512 keys (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp,
    kv_split_size), and its causal mask is aligned to the start, as its documentation says."""
    import torch

    def mine(query, key, value, is_causal=False):
        bfloat16 = [x.bfloat16() for x in (query, key, value)]
        return torch.nn.functional.scaled_dot_product_attention(
            *bfloat16, is_causal=is_causal, enable_gqa=True
        )

    found = identify_attention(mine, framework="torch")
    assert (found.variant, found.reference.variant.name) == (None, "bf16")
    rows = found.probed
    assert (rows["tiles"].text, rows["causal mask"].text) == (
        "512 keys, ascending",
        "aligned to the start",
    )
    assert (rows["format"].value, rows["output"].value, rows["denominator"].value) == (
        "bfloat16",
        "bfloat16",
        "unrounded",
    )
    assert rows.faults == []
