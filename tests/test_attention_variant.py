"""Decisions of attention that contradict each other, and masks, are refused (spec A-1, A-3)."""

import dataclasses

import pytest

from fp8ref.attention import VARIANTS
from fp8ref.attention_variant import Mask, Tiles, Variant
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT32

FA3 = VARIANTS["fa3"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scores": "folded"}, "scores is one of"),
        ({"policy": "largest"}, "policy"),
        ({"offset": -1}, "offset"),
        ({"threshold": -1.0}, "threshold"),
        ({"promotion": 0}, "promotion"),
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
        ({"finish": "feature"}, "of granularity 'int8_thread'"),
        ({"granularity": "int8_thread"}, "Start from VARIANTS"),
    ],
)
def test_contradictions_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(FA3, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy": "torchao"}, "no use for policy"),
        ({"factors": ("scale",)}, "no use for factors"),
        ({"bias": "separate"}, "no use for bias"),
        ({"descending": True}, "ascending tiles"),
        ({"promotion": 2}, "promotion 1"),
        ({"promotion": None}, "promotion 1"),
        ({"out": E4M3FN}, "output in high precision"),
        ({"offset": 8.9}, "at most 8.807"),
        ({"offset": 16.0}, "at most 8.807"),
        ({"fmt": E5M2, "offset": 15.9}, "at most 15.81"),
    ],
    ids=str,
)
def test_what_int8_has_no_use_for_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(VARIANTS["sage"], **change)


@pytest.mark.parametrize(
    "change", [{"fmt": E5M2, "offset": 15.8}, {"offset": 0}, {"plan": "exact"}, {"out": FLOAT32}, {"backward": "bf16"}], ids=str
)
def test_what_may_vary_beside_int8(change):
    made = dataclasses.replace(VARIANTS["sage"], name="mine", **change)
    assert made.largest_probability <= made.fmt.max


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
    [({"alignment": "middle"}, "alignment"), ({"window": (1,)}, "window"), ({"window": (-1, 0)}, "window"), ({"causal": 1}, "causal")],
)
def test_masks_that_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        Mask(**fields)
