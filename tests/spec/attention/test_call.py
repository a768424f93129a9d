"""One call of attention: what its constructor refuses, and the numbers that follow from it."""

import dataclasses

import numpy as np
import pytest

from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask

REFUSED = [
    ({"variant": "fa5"}, "variant is a Variant or one of exact"),
    ({"mask": "causal"}, "mask is a Mask of fp8ref.spec.attention.variants; got 'causal'"),
    ({"arithmetic": "exact"}, "arithmetic is one of fast, stated; got 'exact'"),
    ({"layout": "BTHD"}, "layout is one of bhtd, bthd; got 'BTHD'"),
    ({"scale": 0.0}, "the softmax scale is positive and finite; got 0.0"),
    ({"scale": 1e39}, "the softmax scale is positive and finite"),
    ({"scale": np.ones(())}, "the softmax scale is a number; got ndarray. Pass a float"),
    ({"softcap": np.ones(())}, "the softcap is a number; got ndarray. Pass a float"),
    ({"seed": 1}, "variant 'cudnn' has no rotation; got seed=1"),
    ({"variant": "fa3_paper", "seed": 1 << 64}, r"a seed is an integer in \[0, 2\^64\)"),
    ({"variant": "fa3_paper", "seed": True}, "a seed is an integer"),
    ({"variant": "bf16", "keep_p": True}, "keep_p keeps codes of FP8 probabilities"),
    ({"variant": "exact", "keep_s": True}, "keep_s keeps float32 scores"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Call(**{"variant": "cudnn"} | change)


def test_a_call_of_arguments():
    causal = Mask(causal=True)
    call = Call.resolve("fa3", causal)
    assert call == Call(variant=VARIANTS["fa3"], mask=causal) == Call.resolve(call)
    assert hash(call) == hash(Call(variant="fa3", mask=causal))
    assert Call.resolve(VARIANTS["fa3"]).mask == Mask()
    with pytest.raises(ValueError, match=r"a Call has its mask; got .* too\. Use"):
        Call.resolve(call, causal)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed(Call):
    axes: tuple[str, ...] = ()


def test_a_backends_call():
    call = Call(variant="cudnn", softcap=30.0)
    placed = Placed.resolve(call)
    assert placed == Placed(variant="cudnn", softcap=30.0)
    assert Placed.resolve(placed) is placed
    with pytest.raises(ValueError, match="variant is a Call here; got a Placed"):
        Call.resolve(placed)


def test_numbers_of_scores():
    scale = np.float32(1 / np.sqrt(80))
    assert (
        Call(variant="cudnn").score_factor(80) == Call(variant="cudnn").softmax_scale(80) == scale
    )
    under_two = np.float32(np.float64(scale) * np.log2(np.e))
    assert Call(variant="fa3").score_factor(80) == under_two
    capped = Call(variant="fa3", softcap=30.0, scale=0.3)
    assert capped.score_factor(80) == np.float32(0.3) / np.float32(30)
    assert capped.cap == np.float32(30 * np.log2(np.e))
    with pytest.raises(ValueError, match="a softcap is positive, with normal float32 numbers"):
        Call(variant="fa3", softcap=-1.0).check_features(64)
    with pytest.raises(ValueError, match="at most 256 features; got 257"):
        Call(variant="fa3").check_features(257)


def test_the_first_querys_position():
    assert Call(variant="fa3").offset(3, 5) == 2
    assert Call(variant="fa3", mask=Mask(alignment="start")).offset(3, 5) == 0


def test_the_backward_pass_in_bf16():
    rotated = Call(variant="fa3_paper", seed=3, keep_p=True, scale=0.5)
    assert rotated.in_bf16() == Call(variant="bf16", scale=0.5)
