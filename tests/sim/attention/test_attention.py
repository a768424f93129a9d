"""Attention, forward: real arithmetic against an oracle, masks, scales, and two published faults
(spec A).
"""

import dataclasses
import math

import numpy as np
import pytest
from helpers.attention.attention_cases import call_options

from fp8ref.formats import E4M3FN
from fp8ref.sim import threads
from fp8ref.sim.attention import attention
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask

F = np.float32
MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(window=(30, 5)),
    Mask(causal=True, window=(40, None)),
    Mask(causal=True, alignment="start"),
]


def inputs(b=1, h=4, heads=2, tq=70, tk=150, d=64, *, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(
        rng.normal(size=(b, n, t, d)).astype(F) for n, t in ((h, tq), (heads, tk), (heads, tk))
    )


def sees(i: int, j: int, tq: int, tk: int, mask: Mask) -> bool:
    at = i + (tk - tq if mask.alignment == "end" else 0)
    left, right = mask.window or (None, None)
    return not (
        (mask.causal and j > at)
        or (left is not None and j < at - left)
        or (right is not None and j > at + right)
    )


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_exact(mask):
    """A row at a time, by math.fsum.

    Each of 150 terms has an error of 2^-50, beside one rounding to float32.
    """
    q, k, v = inputs(tq=5, h=2, heads=1)
    documents = (np.array([[0, 0, 1, 1, 7]]), np.repeat([0, 1, 2], 50)[None])
    found = attention.forward(q, k, v, variant="exact", mask=mask, documents=documents)
    for h in range(2):
        for i in range(5):
            keys = [
                j
                for j in range(150)
                if sees(i, j, 5, 150, mask) and documents[0][0, i] == documents[1][0, j]
            ]
            if not keys:
                assert not found.o[0, h, i].any()
                assert found.lse[0, h, i] == -np.inf
                continue
            s = [
                math.fsum(q[0, h, i].astype(float) * k[0, 0, j].astype(float)) * float(F(1 / 8))
                for j in keys
            ]
            total = math.fsum(map(math.exp, s))
            assert found.lse[0, h, i] == pytest.approx(math.log(total), rel=2.0**-23)
            for n in range(0, 64, 9):
                expected = (
                    math.fsum(
                        math.exp(x) * float(v[0, 0, j, n]) for x, j in zip(s, keys, strict=True)
                    )
                    / total
                )
                assert found.o[0, h, i, n] == pytest.approx(expected, rel=2.0**-23, abs=2.0**-40)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in ("exact", "fa4_threshold4")])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_variants_are_near_real_arithmetic(name, mask):
    """e4m3 rounds q, k, v and P by at most 2^-4 each; scores of size |s| move by 2 x 2^-4 |s| at
    the very most, and far less in the mean: an error of a twentieth in the norm separates a
    rounding from a fault."""
    q, k, v = inputs()
    exact, found = (attention.forward(q, k, v, variant=n, mask=mask) for n in ("exact", name))
    assert np.linalg.norm(found.o - exact.o) < 0.06 * np.linalg.norm(exact.o)
    np.testing.assert_array_equal(np.isfinite(found.lse), np.isfinite(exact.lse))
    assert found.saturated == 0
    assert found.o.dtype == found.lse.dtype == np.float32


@pytest.mark.parametrize(
    "name", ["fa3", "fa4 with promotion 2", "fa4", "cudnn", "mxfp8", "fa3_paper", "bf16"]
)
# tiles that a block of rows skips change no bit
def test_rows_and_threads_do_not_affect_each_other(name, monkeypatch):
    q, k, v = inputs(tq=140, tk=300, h=2)
    mask = Mask(causal=True)
    variant = (
        dataclasses.replace(VARIANTS["fa4"], promotion=2)
        if name == "fa4 with promotion 2"
        else VARIANTS[name]
    )
    kwargs = {"variant": variant, "mask": mask, "keep_p": name != "bf16"}
    if variant.granularity in ("tensor", "head"):  # the scale of all rows, for some of them
        kwargs["scales"] = {
            "q": attention.forward(q, k, v, **call_options(**kwargs)).tensors["q"].scale
        }
    whole = attention.forward(q, k, v, **call_options(**kwargs))
    if name != "fa3_paper":  # whose blocks of q would begin elsewhere
        part = attention.forward(q[:, :, -100:], k, v, **call_options(**kwargs))
        np.testing.assert_array_equal(part.lse, whole.lse[:, :, -100:])
        if variant.out.bits != 8:  # whose scale is of all rows
            np.testing.assert_array_equal(part.o, whole.o[:, :, -100:])
        if name != "bf16":
            np.testing.assert_array_equal(part.p_codes, whole.p_codes[:, :, -100:])
    for count, rows in ((1, 64), (3, 128)):
        monkeypatch.setattr(attention, "_ROWS", rows)
        with threads.using(count):
            again = attention.forward(q, k, v, **call_options(**kwargs))
        np.testing.assert_array_equal(again.o, whole.o)
        np.testing.assert_array_equal(again.lse, whole.lse)


# A-8: O is the codes' product with v, where one tile has all keys
def test_codes_of_probabilities():
    q, k, v = inputs(tk=100)
    found = attention.forward(q, k, v, variant=Call(variant="fa4", keep_p=True))
    p, v8 = cast.decode(found.p_codes, E4M3FN), found.tensors["v"]
    sums = np.einsum(
        "bhqk,bhkd->bhqd", p.astype(np.float64), (v8.values * v8.scale_inv).repeat(2, axis=1)
    )
    m_and_sum = np.exp(found.lse[..., None].astype(np.float64))
    s = np.einsum(
        "bhqd,bhkd->bhqk", found.tensors["q"].values, found.tensors["k"].values.repeat(2, axis=1)
    )
    s = s * (found.tensors["q"].scale_inv * found.tensors["k"].scale_inv).repeat(2, axis=1) / 8
    # 100 roundings of a float32 sum, and the bfloat16 result.
    np.testing.assert_allclose(
        found.o,
        sums / 256 / (m_and_sum / np.exp(s.max(axis=-1, keepdims=True))),
        rtol=2.0**-8,
        atol=2.0**-12,
    )
    assert p.max() == 256


def test_lost_probabilities_are_counted():
    """One tile and D = 64: P times 448 is 0 in e4m3 up to 2^-10, unless it is below 2^-126."""
    q, k, v = inputs()
    k = k[:, :, :100] * F(8)
    found = attention.forward(
        q, k, v[:, :, :100], variant=Call(variant="cudnn", keep_p=True, keep_s=True)
    )
    p = np.exp(found.scores.astype(np.float64) - found.scores.max(axis=-1, keepdims=True))
    lost = (p * 448 <= 2.0**-10) & (p >= 2.0**-126)
    assert 100 < found.lost == lost.sum() < p.size
    assert (found.p_codes[lost] == 0).all()


def test_delayed_scales_are_taken():  # H-1
    q, k, v = inputs()
    current = attention.forward(q, k, v, variant="cudnn")
    given = {role: current.tensors[role].scale for role in ("q", "k", "v", "o")} | {"s": F(448)}
    again = attention.forward(q, k, v, variant="cudnn", scales=given)
    np.testing.assert_array_equal(again.o, current.o)
    late = attention.forward(
        q, k, v, variant="cudnn", scales=given | {"s": F(1024), "q": given["q"] * F(4)}
    )
    assert late.saturated > 0
    assert late.amaxes["q"] == current.amaxes["q"] == np.abs(q).max()
    assert current.amaxes["s"] == 1


# ---- Two published faults


@pytest.mark.parametrize("fmt_fault", [True, False], ids=["threshold 4", "threshold 0"])
def test_a_threshold_of_4_saturates_probabilities(fmt_fault):
    """Dao-AILab/flash-attention #2577, #2716: P reaches 2^(8 + 4) = 4096 > 448, and the denominator
    counts it in full.

    Keys in the first tile that is taken, the last, score 0. In the next tile the score of one key
    is 3.9 in units of the exponent: below the threshold, so that the maximum stays, and its
    probability is 256 2^3.9.
    """
    d, tk = 64, 256
    k, v = np.zeros((1, 1, tk, d), F), np.zeros((1, 1, tk, d), F)
    q = np.zeros((1, 1, 1, d), F)
    q[..., 0] = 1
    k[0, 0, 5, 0] = 3.9 * math.log(2) * 8  # softmax scale 1 / 8
    v[0, 0, 5, 0] = 1
    name = "fa4_threshold4" if fmt_fault else "fa4"
    found, exact = (attention.forward(q, k, v, variant=n) for n in (name, "exact"))
    assert exact.o[0, 0, 0, 0] == pytest.approx(2**3.9 / (2**3.9 + 255), rel=1e-5)
    np.testing.assert_allclose(found.lse, exact.lse, rtol=0.01)  # the denominator is right
    if fmt_fault:
        assert found.amaxes["s"] == pytest.approx(256 * 2**3.9, rel=0.02)
        assert found.saturated == 1
        # a ninth of the true weight
        assert found.o[0, 0, 0, 0] == pytest.approx(448 / 256 / (2**3.9 + 255), rel=0.02)
    else:
        assert found.amaxes["s"] == 256
        assert found.saturated == 0
        assert found.o[0, 0, 0, 0] == pytest.approx(exact.o[0, 0, 0, 0], rel=2.0**-4)


# on random data, several times the error of the format
def test_the_error_of_a_threshold_of_4():
    q, k, v = inputs(tq=64, tk=512)
    exact, right, wrong = (
        attention.forward(q, k, v, variant=n) for n in ("exact", "fa4", "fa4_threshold4")
    )
    error = [float(np.sqrt(np.mean((x.o - exact.o) ** 2))) for x in (right, wrong)]
    assert error[1] > 2.5 * error[0]
    assert wrong.amaxes["s"] > 2048
    assert wrong.saturated > 100
    assert right.saturated == 0
    np.testing.assert_allclose(right.lse, wrong.lse, rtol=1e-5)  # which counts all of P


def long_keys(tk: int):
    """Even attention to tk keys whose values are positive: a sum of tk terms of one size."""
    rng = np.random.default_rng(0)
    q, k = np.zeros((1, 1, 1, 64), F), np.zeros((1, 1, tk, 64), F)
    v = np.abs(rng.normal(size=(1, 1, tk, 64))).astype(F)
    return q, k, v


@pytest.mark.parametrize("tk", [8192, pytest.param(131072, marks=pytest.mark.slow)])
def test_one_chain_on_hopper_loses_long_keys(tk):  # A-9, G-10
    """Dao-AILab/flash-attention #2250: the accumulator of a Hopper chain keeps 13 fraction bits, so
    that each of tk / 32 steps drops up to 33 units of 2^-13. A promotion in every tile leaves the
    error of one tile."""
    q, k, v = long_keys(tk)
    exact = attention.forward(q, k, v, variant="exact").o
    errors = {}
    for name, every in (("one chain", None), ("every tile", 1), ("every 4", 4)):
        variant = dataclasses.replace(VARIANTS["fa3"], promotion=every)
        errors[name] = float(
            np.abs(attention.forward(q, k, v, variant=variant).o / exact - 1).mean()
        )
    assert errors["one chain"] > (0.05 if tk == 8192 else 0.4)
    assert errors["every tile"] < errors["every 4"] < 0.02
    assert errors["every tile"] < 0.01
