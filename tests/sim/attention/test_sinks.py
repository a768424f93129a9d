"""Attention sinks in the simulator: FlashAttention's formula a number at a time, real arithmetic,
finite differences (spec A-23).
"""

import numpy as np
import pytest
from helpers.attention import attention_sources as source
from helpers.attention.attention_cases import backward_options, call_options

from fp8ref.sim.attention import attention
from fp8ref.sim.attention import sinks as attention_sinks
from fp8ref.sim.attention.gradients.gradients import backward
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.variants import VARIANTS, Mask

F = np.float32
SINKS = np.array([0.5, -1.0, 3.0, 8.0], F)


def inputs(h=4, heads=2, tq=7, tk=21, d=64, *, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(
        rng.normal(size=(1, n, t, d)).astype(F)
        for n, t in ((h, tq), (heads, tk), (heads, tk), (h, tq))
    )


def of_head(x):
    scale = F(F(448) / np.abs(x).max())
    return np.vectorize(source.e4m3)(x * scale), F(F(1) / scale)


@pytest.mark.parametrize("name", ["fa3", "fa4"])
@pytest.mark.parametrize("sink", [1.5, -3.0, 12.25])
# exp2(sink log2e - row_max scale + offset) joins the sum
def test_flash_attention_with_a_sink(name, sink):
    q, k, v, _ = inputs(1, 1, tq=3, tk=181, seed=1)
    q[0, 0, 1] *= 20  # a row whose maximum is far above the sink
    documents = np.array([[0, 0, 5]]), np.zeros((1, 181), int)  # the last row sees no key
    found = attention.forward(q, k, v, variant=name, documents=documents, sinks=np.array([sink], F))
    (dq, of_q), (dk, of_k), (dv, of_v) = (of_head(x) for x in (q, k, v))
    more = (
        {"unit": source.HOPPER, "order": "quad"}
        if name == "fa3"
        else {"unit": source.BLACKWELL, "order": "packed", "separate": True}
    )
    given = {
        "scale": F(1 / 8),
        "dq": of_q,
        "dk": of_k,
        "dv": of_v,
        "tile": 160 if name == "fa3" else 128,
        "sink": F(sink),
        **more,
    }
    o, lse, most = source.flash_attention(
        dq[0, 0], dk[0, 0], dv[0, 0][:, :4], lambda i, j: i < 2, **given
    )
    np.testing.assert_array_equal(found.o[0, 0][:, :4], cast.round_to(o, VARIANTS["bf16"].fmt))
    np.testing.assert_array_equal(found.lse[0, 0], lse)
    assert found.amaxes["s"] == F(most)  # a sink is not cast
    assert not found.o[0, 0, 2].any()
    assert found.lse[0, 0, 2] == pytest.approx(sink, rel=2.0**-21)


def wide_attention(q, k, v, sinks, seen):
    """(o, log-sum-exp) in float64, straight from the definition: the sink is one more key, whose
    value is 0.
    """
    o, lse = np.zeros(q.shape), np.zeros(q.shape[:3])
    for j in range(q.shape[1]):
        g = j // (q.shape[1] // k.shape[1])
        s = np.concatenate(
            [np.where(seen, q[0, j] @ k[0, g].T / 8, -np.inf), np.full((q.shape[2], 1), sinks[j])],
            axis=1,
        )
        total = np.log(np.exp(s - s.max(axis=1, keepdims=True)).sum(axis=1)) + s.max(axis=1)
        o[0, j], lse[0, j] = np.exp(s - total[:, None])[:, :-1] @ v[0, g], total
    return o, lse


@pytest.mark.parametrize(
    "name", [name for name in VARIANTS if name != "fa4_threshold4"]
)  # it clips its largest P
def test_every_variant_is_near_real_arithmetic(name):
    """q, k, v and P are rounded to 2^-4 of a number at most, independently: as
    test_attention_gradients' fifth of the norm. An absent sink of 8 would leave o five times too
    large."""
    q, k, v, _ = inputs(tq=20, tk=150)
    seen = np.arange(150) <= np.arange(20)[:, None] + 130
    o, lse = wide_attention(*(x.astype(np.float64) for x in (q, k, v)), SINKS, seen)
    found = attention.forward(q, k, v, variant=name, mask=Mask(causal=True), sinks=SINKS)
    of_norm = {"exact": 2.0**-22, "bf16": 0.02}.get(name, 0.2)
    assert np.linalg.norm(found.o - o) < of_norm * np.linalg.norm(o)
    np.testing.assert_allclose(found.lse, lse, atol={"exact": 1e-6, "bf16": 0.02}.get(name, 0.2))


def test_a_sink_far_above_all_keys_leaves_nothing_of_them():
    q, k, v, _ = inputs()
    for name in ("fa4", "cudnn", "fa3_paper"):
        found = attention.forward(
            q, k, v, variant=name, sinks=np.array([1000.0, 200.0, -1000.0, 0.0], F)
        )
        assert not found.o[0, :2].any()
        np.testing.assert_allclose(found.lse[0, :2], [[1000.0] * 7, [200.0] * 7], rtol=2.0**-21)
        plain = attention.forward(q, k, v, variant=name)
        np.testing.assert_array_equal(found.lse[0, 2], plain.lse[0, 2])
        assert np.isfinite(found.o).all()


def test_exact_gradients_are_those_of_finite_differences():
    """Central differences with h = 2^-12: h^2 / 6 of a third derivative of size 10, beside 2^-52 /
    h.
    """
    q, k, v, do = inputs()
    how = {"variant": "exact", "mask": Mask(causal=True), "sinks": SINKS}
    found = backward(
        do, q, k, v, attention.forward(q, k, v, **call_options(**how)), **backward_options(**how)
    )
    seen = np.arange(21) <= np.arange(7)[:, None] + 14
    wide, rng, h = (
        [x.astype(np.float64) for x in (q, k, v, SINKS)],
        np.random.default_rng(1),
        2.0**-12,
    )
    for n, gradient in enumerate((*found[:3], found.dsinks)):
        for _ in range(6):
            at = tuple(int(rng.integers(0, size)) for size in gradient.shape)
            sides = []
            for sign in (1, -1):
                moved = [x.copy() for x in wide]
                moved[n][at] += sign * h
                sides.append((wide_attention(*moved, seen)[0] * do).sum())
            assert gradient[at] == pytest.approx(
                (sides[0] - sides[1]) / (2 * h), abs=2e-6, rel=1e-6
            )


@pytest.mark.parametrize("name", ["bf16", "cudnn", "mxfp8"])
# as without sinks (test_attention_gradients)
def test_cast_gradients_are_near_real_ones(name):
    q, k, v, do = inputs(tq=40, tk=70)
    how = {"mask": Mask(causal=True), "sinks": SINKS, "softcap": 4.0}
    real, found = (
        backward(
            do,
            q,
            k,
            v,
            attention.forward(q, k, v, **call_options(variant=n, **how)),
            **backward_options(variant=n, **how),
        )
        for n in ("exact", name)
    )
    for mine, right in zip((*found[:3], found.dsinks), (*real[:3], real.dsinks), strict=True):
        assert np.linalg.norm(mine - right) < (0.02 if name == "bf16" else 0.25) * np.linalg.norm(
            right
        )


def test_the_gradient_of_a_sink_by_its_steps():
    rng = np.random.default_rng(3)
    d, lse = rng.normal(size=(2, 2, 5)).astype(F), (rng.normal(size=(2, 2, 5)) + 3).astype(F)
    found = attention_sinks.gradient(d, lse, SINKS[:2])
    for j in range(2):
        products = [
            F(source.exponential(F(SINKS[j] - lse[i, j, r]), "e") * d[i, j, r])
            for i in range(2)
            for r in range(5)
        ]
        assert found[j] == F(-float(sum(map(source.Fraction, map(float, products)))))


def test_what_is_refused():
    q, k, v, _ = inputs()
    for sinks in (SINKS[:2], SINKS[None], SINKS.astype(np.float64), np.array([1, 2, 3, np.inf], F)):
        with pytest.raises(
            ValueError,
            match=r"sinks are finite float32, float16 or bfloat16 \[4\], one for each "
            "query head",
        ):
            attention.forward(q, k, v, variant="fa3", sinks=sinks)
