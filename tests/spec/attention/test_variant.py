"""Decisions of attention that contradict each other, and masks, are refused (spec A-1, A-3)."""

import dataclasses

import pytest

from fp8ref.formats import BFLOAT16, E5M2
from fp8ref.spec.attention.variant import Mask, Tiles, Variant
from fp8ref.spec.attention.variants import VARIANTS

FA3 = VARIANTS["fa3"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scores": "folded"}, "scores is one of"),
        ({"policy": "largest"}, "policy"),
        ({"offset": -1}, "offset"),
        ({"threshold": -1.0}, "threshold"),
        ({"promotion": 0}, "promotion is an integer of at least 1 or None; got 0"),
        ({"p_scale": 0.0}, "p_scale"),
        ({"tiles": ()}, "tiles ascend"),
        ({"tiles": (Tiles(features=64, full=100, causal=96, local=96),)}, "multiple of 16"),
        ({"plan": "exact"}, "promotion=1"),
        ({"granularity": None}, "granularity"),
        ({"fmt": BFLOAT16, "granularity": None}, "plan='f32'"),
        ({"granularity": "rows_128"}, "raw scores"),
        ({"base": "e"}, "raw scores"),
        ({"scores": "scaled", "bias": "separate"}, "no bias"),
        ({"scores": "scaled", "base": "e"}, "needs base '2'"),
        ({"out_scales": "tile"}, "promotion=1"),
        ({"offset": 8.5}, "offset"),
        ({"finish": "feature"}, "finish is one of"),
    ],
)
def test_contradictions_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(FA3, **change)


def test_scales_of_blocks_belong_into_tiles_of_128():
    paper = VARIANTS["fa3_paper"]
    with pytest.raises(ValueError, match="tiles of 128"):
        dataclasses.replace(paper, tiles=FA3.tiles)
    with pytest.raises(ValueError, match="out_scales='tile'"):
        dataclasses.replace(paper, out_scales="end")


def test_high_precision_has_no_scales():
    with pytest.raises(ValueError, match="no p_scale and no rotation"):
        Variant(name="mine", fmt=BFLOAT16, granularity=None, plan="f32", rotated=True)


def test_other_variants_can_be_made():
    assert dataclasses.replace(FA3, name="mine", fmt=E5M2, promotion=4).promotion == 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"alignment": "middle"}, "alignment"),
        ({"window": (1,)}, "window"),
        ({"window": (-1, 0)}, "window"),
        ({"causal": 1}, "causal"),
    ],
)
def test_masks_that_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        Mask(**fields)


def test_each_tensor_has_a_format():
    variant = dataclasses.replace(VARIANTS["cudnn"], gradient_fmt=E5M2, out=BFLOAT16)
    assert {variant.format_of(role) for role in ("q", "k", "v", "p", "s")} == {variant.fmt}
    assert {variant.format_of(role) for role in ("do", "ds")} == {E5M2}
    assert {variant.format_of(role) for role in ("o", "dq", "dk", "dv")} == {BFLOAT16}
