"""Rules are the simulator's casts, of the dtype and by the scale that they name."""

import dataclasses

import numpy as np
import pytest
from checkpoints import made

from fp8ref.checkpoints import rule as rules
from fp8ref.formats import BFLOAT16
from fp8ref.sim.quantize import cast, scaling

X = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)


def test_names_are_a_policy_a_granularity_and_a_dtype():
    rule = rules.by_name("sglang_group:bfloat16")
    assert (rule.policy.name, rule.granularity) == ("sglang", "blockwise_1x128")
    assert (rule.source, rule.fmt.name) == (BFLOAT16, "e4m3fn")
    assert rules.by_name(rule.name) == rule
    assert rules.by_name("te_nvfp4_nv").fmt.name == "e2m1fn"
    for name, message in (("vllm", "ends with"), ("vlm_block", "Did you mean 'vllm'")):
        with pytest.raises(ValueError, match=message):
            rules.by_name(name)


def test_masters_and_their_bfloat16_copies_differ():
    masters, copies = (rules.by_name(f"vllm_block:{d}") for d in ("float32", "bfloat16"))
    rounded = cast.round_to(X, BFLOAT16)
    assert np.array_equal(copies.quantize(X).codes, masters.quantize(rounded).codes)
    share = np.mean(copies.quantize(X).codes != masters.quantize(X).codes)
    assert 0.01 < share < 0.1


def test_codes_by_the_unrounded_scale_keep_the_rounded_one():
    rule = rules.by_name("deepgemm_ue8m0_block")
    late = dataclasses.replace(rule, codes_by="unrounded")
    a, b = rule.quantize(X), late.quantize(X)
    assert np.array_equal(a.scale_inv, b.scale_inv)
    assert np.array_equal(b.codes, rules.by_name("deepgemm_block").quantize(X).codes)
    # codes for a smaller scale, read by a larger one: magnitudes are too large
    ratio = np.abs(scaling.dequantize(b)).sum() / np.abs(scaling.dequantize(a)).sum()
    assert 1.1 < ratio < 2
    with pytest.raises(ValueError, match="rounds one to a power of two"):
        dataclasses.replace(rules.by_name("vllm_block"), codes_by="unrounded")


def test_ragged_weights_have_short_last_blocks():
    q = rules.by_name("vllm_block").quantize(made.weight((130, 200)))
    assert q.scale_inv.shape == (2, 2)


def test_blocks_of_the_transpose_reduce_the_other_axis():
    rule = rules.by_name("vllm_group")
    turned = dataclasses.replace(rule, axis=0).quantize(X)
    assert np.array_equal(turned.codes, rule.quantize(X.T).codes.T)
    assert np.array_equal(turned.scale_inv, rule.quantize(X.T).scale_inv.T)
