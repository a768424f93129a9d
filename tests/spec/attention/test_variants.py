"""Attention as data: variants and masks (spec A-1, A-3, A-6, A-8)."""

from types import SimpleNamespace

import numpy as np
import pytest

from fp8ref.formats import E4M3FN
from fp8ref.spec.attention import variants as attention
from fp8ref.spec.attention.variants import VARIANTS, Mask

FA3 = VARIANTS["fa3"]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_known_by_name_and_cite_a_source(name):
    variant = attention.by_name(name)
    assert variant is VARIANTS[name] is attention.by_name(variant)
    assert variant.name == name
    assert variant.source


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("fa3", 256),
        ("fa4", 256),
        ("fa4_threshold4", 4096),
        ("cudnn", 1),
        ("mxfp8", 1),
        ("fa3_paper", 256),
    ],
)
# within the format's range, times its scale, unless the variant is at fault
def test_the_largest_probability(name, largest):
    assert VARIANTS[name].largest_probability == largest
    scale = {"cudnn": 448.0, "mxfp8": 16.0}.get(name, 1.0)
    assert (largest * scale <= E4M3FN.max) == (name != "fa4_threshold4")


@pytest.mark.parametrize(
    ("name", "features", "mask", "tile"),
    [
        ("fa3", 64, Mask(), 160),
        ("fa3", 65, Mask(), 128),
        ("fa3", 128, Mask(causal=True), 224),
        ("fa3", 256, Mask(causal=True), 128),
        ("fa3", 256, Mask(window=(9, None)), 64),
        ("bf16", 128, Mask(), 176),
        ("bf16", 128, Mask(causal=True), 128),
        ("fa4", 128, Mask(), 128),
    ],
)
def test_tiles(name, features, mask, tile):
    assert VARIANTS[name].tile(features, mask) == tile


def test_too_many_features():
    with pytest.raises(ValueError, match="at most 256 features; got 512"):
        FA3.tile(512, Mask())


def test_an_unknown_name():
    with pytest.raises(ValueError, match="variant is a Variant or one of exact, bf16, fa3"):
        attention.by_name("fa5")


def test_a_backward_pass_reads_what_its_own_variant_made():
    """What is read by no backward pass is not asked for: that of real arithmetic, and of
    bfloat16.
    """
    codes = {
        "e4m3fn": SimpleNamespace(codes=np.zeros(1, np.uint8)),
        "bfloat16": SimpleNamespace(codes=np.zeros(1, np.float32)),
    }
    cudnn, mx, bf16 = (VARIANTS[name] for name in ("cudnn", "mxfp8", "bf16"))
    made = {
        variant.name: dict.fromkeys("qkvo" if variant is cudnn else "qkv", codes[variant.fmt.name])
        for variant in (cudnn, mx, bf16)
    }
    for variant in (cudnn, mx, bf16):
        for name, tensors in (made | {"exact": {}}).items():
            if name == variant.name:
                attention.check_result(variant, tensors)
                continue
            with pytest.raises(
                ValueError, match=f"by variant '{variant.name}'; got another's, with tensors of"
            ):
                attention.check_result(variant, tensors)
    for variant in (VARIANTS["exact"], attention.differentiated("fa3", "bf16")):
        attention.check_result(variant, made["cudnn"])
