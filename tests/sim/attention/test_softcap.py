"""Softcap in the simulator: the sources' formulas a number at a time, real arithmetic, and finite
differences (spec A-22).
"""

import numpy as np
import pytest
from helpers.attention import attention_sources as source
from helpers.attention.attention_cases import backward_options, call_options

from fp8ref.sim.attention import attention
from fp8ref.sim.attention.gradients.gradients import backward
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask

F = np.float32
CAP = 5.0
"""Of scores of a standard deviation of 4: most are changed."""


def inputs(h=4, heads=2, tq=7, tk=21, d=64, *, size=2.0, seed=0):
    rng = np.random.default_rng(seed)
    sizes = (size, size, 1, 1)
    return tuple(
        (rng.normal(size=(1, n, t, d)) * of).astype(F)
        for (n, t), of in zip(((h, tq), (heads, tk), (heads, tk), (h, tq)), sizes, strict=True)
    )


def of_head(x):
    scale = F(F(448) / np.abs(x).max())
    return np.vectorize(source.e4m3)(x * scale), F(F(1) / scale)


@pytest.mark.parametrize("name", ["fa3", "fa4", "bf16"])
# tanh before the mask, then one factor of the exponent
def test_flash_attention_with_a_softcap(name):
    q, k, v, _ = inputs(1, 1, tq=3, tk=181, seed=1)
    more = (
        {"unit": source.HOPPER, "order": "quad"}
        if name == "fa3"
        else {"unit": source.BLACKWELL, "order": "packed", "separate": True}
    )
    if name == "bf16":
        more = {"unit": None, "order": "quad", "offset": 0, "narrow": source.bfloat16}
        q, k, v = (cast.round_to(x, VARIANTS["bf16"].fmt) for x in (q, k, v))
    found = attention.forward(
        q, k, v, variant=Call(variant=name, mask=Mask(causal=True), softcap=CAP)
    )
    (dq, of_q), (dk, of_k), (dv, of_v) = (
        of_head(x) if name != "bf16" else (x, F(1)) for x in (q, k, v)
    )
    tile = {"fa3": 160, "fa4": 128, "bf16": 128}[name]
    given = {
        "scale": F(1 / 8),
        "dq": of_q,
        "dk": of_k,
        "dv": of_v,
        "tile": tile,
        "softcap": CAP,
        **more,
    }
    o, lse, most = source.flash_attention(
        dq[0, 0], dk[0, 0], dv[0, 0][:, :4], lambda i, j: j <= i + 178, **given
    )
    np.testing.assert_array_equal(found.o[0, 0][:, :4], cast.round_to(o, VARIANTS["bf16"].fmt))
    np.testing.assert_array_equal(found.lse[0, 0], lse)
    assert found.amaxes["s"] == F(most)


# the scale over the cap among the factors, tanh, then the cap
def test_cudnn_with_a_softcap():
    q, k, v, _ = inputs(1, 1, tq=3, tk=150, seed=2)
    found = attention.forward(q, k, v, variant=Call(variant="cudnn", softcap=CAP))
    (dq, of_q), (dk, of_k), (dv, of_v) = (of_head(x) for x in (q, k, v))

    def values(p, start, n):
        return F(
            F(source.exact_sum(p, dv[0, 0, start : start + len(p), n]) * of_v) * F(F(1) / F(448))
        )

    factors = F(F(1 / 8) / F(CAP)), of_q, of_k
    given = {
        "factors": lambda i, j: factors,
        "s_scale": 448,
        "of_values": values,
        "columns": (0, 5),
        "softcap": CAP,
    }
    o, lse = source.cudnn(dq[0, 0], dk[0, 0], lambda i, j: True, **given)
    tensors = found.tensors["o"]
    np.testing.assert_array_equal(
        tensors.values[0, 0][:, (0, 5)], np.vectorize(source.e4m3)(o * tensors.scale)
    )
    np.testing.assert_array_equal(found.lse[0, 0], lse)


def loss(q, k, v, do, seen, cap) -> float:
    """The sum of o times do, in float64, straight from the definition."""
    total = 0.0
    for j in range(q.shape[1]):
        g = j // (q.shape[1] // k.shape[1])
        s = np.where(seen, np.tanh(q[0, j] @ k[0, g].T / 8 / cap) * cap, -np.inf)
        e = np.exp(s - s.max(axis=1, keepdims=True))
        total += (e / e.sum(axis=1, keepdims=True) @ v[0, g] * do[0, j]).sum()
    return total


def test_exact_gradients_are_those_of_finite_differences():
    """Central differences with h = 2^-12: h^2 / 6 of a third derivative of size 10, beside 2^-52 /
    h.
    """
    q, k, v, do = inputs()
    how = {"variant": "exact", "mask": Mask(causal=True), "softcap": CAP}
    found = backward(
        do, q, k, v, attention.forward(q, k, v, **call_options(**how)), **backward_options(**how)
    )
    seen = np.arange(21) <= np.arange(7)[:, None] + 14
    wide, do, rng, h = (
        [x.astype(np.float64) for x in (q, k, v)],
        do.astype(np.float64),
        np.random.default_rng(1),
        2.0**-12,
    )
    for n, gradient in enumerate(found[:3]):
        for _ in range(8):
            at = tuple(int(rng.integers(0, size)) for size in gradient.shape)
            sides = []
            for sign in (1, -1):
                moved = [x.copy() for x in wide]
                moved[n][at] += sign * h
                sides.append(loss(*moved, do, seen, CAP))
            assert gradient[at] == pytest.approx(
                (sides[0] - sides[1]) / (2 * h), abs=1e-6, rel=1e-6
            )


@pytest.mark.parametrize("name", ["bf16", "cudnn", "mxfp8"])
# as without a cap (test_attention_gradients)
def test_cast_gradients_are_near_real_ones(name):
    q, k, v, do = inputs(tq=40, tk=70)
    # Without the slope dq is off by half of its norm.
    for mask in (Mask(), Mask(causal=True)):
        how = {"mask": mask, "softcap": CAP}
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
        for mine, right in zip(found[:3], real[:3], strict=True):
            assert np.linalg.norm(mine - right) < (
                0.02 if name == "bf16" else 0.25
            ) * np.linalg.norm(right)


# A-22, step by step, in bfloat16 of one head
def test_the_gradient_of_scores_has_the_slope_of_tanh():
    q, k, v, do = (cast.round_to(x, VARIANTS["bf16"].fmt) for x in inputs(1, 1, tq=3, tk=9))
    forward = attention.forward(q, k, v, variant=Call(variant="bf16", softcap=CAP))
    found = backward(do, q, k, v, forward, variant=Call(variant="bf16", softcap=CAP))
    argument, factor = F(F(1 / 8) / F(CAP)), F(float(F(CAP)) * np.log2(np.e))

    def ordered(a, b):
        return np.array([[source.in_order(x, y, 0) for y in b.T] for x in a], F)

    t = np.vectorize(source.tanh)(ordered(q[0, 0], k[0, 0].T) * argument).astype(F)
    bias = -(forward.lse[0, 0] * F(np.log2(np.e)))
    p = np.array(
        [
            [source.exponential(source.fma(x, factor, b), "2") for x in row]
            for row, b in zip(t, bias, strict=True)
        ],
        F,
    )
    d = np.array(
        [source.in_order(x, y, 0) for x, y in zip(do[0, 0], forward.o[0, 0], strict=True)], F
    )
    ds = (ordered(do[0, 0], v[0, 0].T) - d[:, None]) * p * (F(1) - t * t) * F(1 / 8)
    narrow = np.vectorize(source.bfloat16)
    np.testing.assert_array_equal(found.dq[0, 0], narrow(ordered(narrow(ds), k[0, 0])))


def test_a_large_cap_changes_little_and_a_small_one_levels_scores():
    q, k, v, _ = inputs(tk=40)
    plain = attention.forward(q, k, v, variant="exact")
    # tanh(x) = x - x^3 / 3: scores below 20 change by at most 20^3 / (3 cap^2), o by twice as much
    # of its largest.
    np.testing.assert_allclose(
        attention.forward(q, k, v, variant=Call(variant="exact", softcap=1e4)).o,
        plain.o,
        atol=2 * 20**3 / 3e8 * 4,
    )
    level = attention.forward(q, k, v, variant=Call(variant="exact", softcap=1e-4))
    np.testing.assert_allclose(
        level.o[0, 0], np.broadcast_to(v[0, 0].mean(axis=0), (7, 64)), atol=2e-4 * 4
    )


def test_what_is_refused():
    q, k, v, do = inputs()
    for cap in (0.0, -1.0, float("nan"), float("inf"), 1e-60):
        with pytest.raises(ValueError, match="a softcap is positive, with normal float32 numbers"):
            attention.forward(q, k, v, variant=Call(variant="fa3", softcap=cap))
    with pytest.raises(ValueError, match="a softcap is positive"):
        backward(
            do,
            q,
            k,
            v,
            attention.forward(q, k, v, variant="cudnn"),
            variant=Call(variant="cudnn", softcap=0.0),
        )
