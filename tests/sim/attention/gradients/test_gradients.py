"""Attention, backward: real gradients against finite differences, cuDNN's against its graph's
formulas (spec A-14, A-15).
"""

import dataclasses

import numpy as np
import pytest
from helpers.attention import attention_sources as source

from fp8ref.formats import E5M2
from fp8ref.sim import delayed, threads
from fp8ref.sim.attention import attention
from fp8ref.sim.attention.gradients.gradients import backward
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask

F = np.float32
MASKS = [Mask(), Mask(causal=True), Mask(causal=True, window=(7, None))]


def inputs(h=4, heads=2, tq=9, tk=21, d=64, *, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(
        rng.normal(size=(1, n, t, d)).astype(F)
        for n, t in ((h, tq), (heads, tk), (heads, tk), (h, tq))
    )


def visible(tq: int, tk: int, mask: Mask) -> np.ndarray:
    at, keys = np.arange(tq)[:, None] + tk - tq, np.arange(tk)
    seen = np.ones((tq, tk), bool) if not mask.causal else keys <= at
    return seen if mask.window is None else seen & (keys >= at - mask.window[0])


def loss(q, k, v, do, seen, scale) -> float:
    """The sum of o times do, in float64, straight from the definition."""
    total = 0.0
    for j in range(q.shape[1]):
        g = j // (q.shape[1] // k.shape[1])
        s = np.where(seen, q[0, j] @ k[0, g].T * scale, -np.inf)
        e = np.exp(s - s.max(axis=1, keepdims=True))
        total += (e / e.sum(axis=1, keepdims=True) @ v[0, g] * do[0, j]).sum()
    return total


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_exact_gradients_are_those_of_finite_differences(mask):
    """Central differences with h = 2^-12: their error is h^2 / 6 of a third derivative of size 1,
    beside 2^-52 / h.
    """
    q, k, v, do = inputs()
    result = attention.forward(q, k, v, variant="exact", mask=mask)
    found = backward(do, q, k, v, result, variant="exact", mask=mask)
    seen, scale, wide = (
        visible(9, 21, mask),
        float(F(1 / 8)),
        [x.astype(np.float64) for x in (q, k, v)],
    )
    rng, h = np.random.default_rng(1), 2.0**-12
    for n, gradient in enumerate((found.dq, found.dk, found.dv)):
        for _ in range(12):
            at = tuple(int(rng.integers(0, size)) for size in gradient.shape)
            sides = []
            for sign in (1, -1):
                moved = [x.copy() for x in wide]
                moved[n][at] += sign * h
                sides.append(loss(*moved, do.astype(np.float64), seen, scale))
            assert gradient[at] == pytest.approx(
                (sides[0] - sides[1]) / (2 * h), abs=1e-6, rel=1e-6
            )


def e4m3(x) -> np.ndarray:
    return np.vectorize(source.e4m3)(x).astype(F)


def quantized(x):
    scale = F(F(448) / np.abs(x).max())
    return e4m3(x * scale), F(F(1) / scale), scale


def exact(a, b) -> np.ndarray:
    """Exact sums of products of e4m3 numbers, which float64 holds, rounded once: a [M, K], b [K,
    N].
    """
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(F)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_cudnn_has_its_graphs_formulas(mask):
    """sdpa_fp8_bwd.h of cudnn-frontend 3929da2, node by node, on whole arrays of float32."""
    q, k, v, do = inputs(tq=6, tk=17)
    forward = attention.forward(q, k, v, variant="cudnn", mask=mask)
    found = backward(do, q, k, v, forward, variant="cudnn", mask=mask)
    (q8, of_q, _), (k8, of_k, _), (v8, of_v, _), (do8, of_do, _) = (
        quantized(x) for x in (q, k, v, do)
    )
    o8, of_o = (
        cast.decode(forward.tensors["o"].codes, VARIANTS["cudnn"].fmt),
        forward.tensors["o"].scale_inv,
    )
    scale, s_scale, seen = F(1 / 8), F(448), visible(6, 17, mask)
    p, ds = {}, np.zeros((4, 6, 17), F)
    dv = np.zeros((2, 17, 64), F)
    for j in range(4):
        g = j // 2
        d = np.zeros(6, F)
        for n in range(64):
            d = d + do8[0, j, :, n] * o8[0, j, :, n]
        d = d * of_do * of_o
        s = exact(q8[0, j], k8[0, g].T) * scale * of_q * of_k - forward.lse[0, j][:, None]
        p[j] = np.where(seen, np.vectorize(lambda x: source.exponential(x, "e"))(s), F(0)).astype(F)
        dv[g] += exact(e4m3(p[j] * s_scale).T, do8[0, j]) * F(F(1) / s_scale) * of_do
        dp = exact(do8[0, j], v8[0, g].T) * of_do * of_v
        ds[j] = (dp - d[:, None]) * p[j] * scale
    ds8, of_ds, scale_ds = quantized(ds)
    dq, dk = np.zeros((4, 6, 64), F), np.zeros((2, 17, 64), F)
    for j in range(4):
        dq[j] = exact(ds8[j], k8[0, j // 2]) * of_ds * of_k
        dk[j // 2] += exact(ds8[j].T, q8[0, j]) * of_ds * of_q
    assert found.scale_ds.scale == scale_ds
    assert found.amaxes["ds"] == np.abs(ds).max()
    for role, mine, theirs in (("dq", found.dq, dq), ("dk", found.dk, dk), ("dv", found.dv, dv)):
        numbers, inverse, _ = quantized(theirs)
        assert found.amaxes[role] == np.abs(theirs).max()
        np.testing.assert_array_equal(mine[0], numbers * inverse)


def test_bfloat16_has_the_same_steps_without_scales():
    q, k, v, do = (
        cast.round_to(x, VARIANTS["bf16"].fmt) for x in inputs(h=1, heads=1, tq=4, tk=11)
    )
    forward = attention.forward(q, k, v, variant="bf16")
    found = backward(do, q, k, v, forward, variant="bf16")
    factor, narrow = F(F(float(F(1 / 8)) * np.log2(np.e)) * F(1)), np.vectorize(source.bfloat16)

    def ordered(a, b):
        return np.array([[source.in_order(x, y, 0) for y in b.T] for x in a], F)

    bias = -(forward.lse[0, 0] * F(np.log2(np.e)))
    s = ordered(q[0, 0], k[0, 0].T)
    p = np.array(
        [
            [source.exponential(source.fma(x, factor, b), "2") for x in row]
            for row, b in zip(s, bias, strict=True)
        ],
        F,
    )
    d = np.array(
        [source.in_order(x, y, 0) for x, y in zip(do[0, 0], forward.o[0, 0], strict=True)], F
    )
    ds = narrow((ordered(do[0, 0], v[0, 0].T) - d[:, None]) * p * F(1 / 8))
    np.testing.assert_array_equal(found.dv[0, 0], narrow(ordered(narrow(p).T, do[0, 0])))
    np.testing.assert_array_equal(found.dq[0, 0], narrow(ordered(ds, k[0, 0])))
    np.testing.assert_array_equal(found.dk[0, 0], narrow(ordered(ds.T, q[0, 0])))


@pytest.mark.parametrize(
    "variant",
    [
        VARIANTS["bf16"],
        VARIANTS["cudnn"],
        VARIANTS["mxfp8"],
        dataclasses.replace(VARIANTS["cudnn"], name="cudnn with e5m2 gradients", gradient_fmt=E5M2),
        dataclasses.replace(
            VARIANTS["cudnn"],
            name="cudnn by heads on Hopper",
            granularity="head",
            plan="hopper_slow",
        ),
    ],
    ids=lambda v: v.name,
)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradients_are_near_real_ones(variant, mask):
    """P, dS and five tensors are rounded, to 2^-4 (e4m3), 2^-3 (e5m2) or 2^-9 of a number at most;
    the errors of a sum's terms are independent, so that a fifth of the norm is far from a rounding
    and near to a wrong factor."""
    q, k, v, do = inputs(tq=40, tk=70)
    exact_ones, found = (
        backward(
            do, q, k, v, attention.forward(q, k, v, variant=n, mask=mask), variant=n, mask=mask
        )
        for n in ("exact", variant)
    )
    for mine, right in zip(found[:3], exact_ones[:3], strict=True):
        assert np.linalg.norm(mine - right) < (
            0.01 if variant.name == "bf16" else 0.2
        ) * np.linalg.norm(right)
    assert found.saturated == 0


def test_rows_without_keys_have_no_gradient():
    q, k, v, do = inputs()
    documents = (np.array([[0] * 5 + [3] * 4]), np.zeros((1, 21), int))
    for variant in ("exact", "cudnn", "bf16"):
        result = attention.forward(q, k, v, variant=variant, documents=documents)
        found = backward(do, q, k, v, result, variant=variant)
        assert not found.dq[:, :, 5:].any()
        assert found.dq[:, :, :5].any()
        assert np.isfinite(found.dk).all()


def test_delayed_scales_are_taken():
    q, k, v, do = inputs()
    result = attention.forward(q, k, v, variant="cudnn")
    current = backward(do, q, k, v, result, variant="cudnn")
    given = {role: current.tensors[role].scale for role in ("do", "dq", "dk", "dv")} | {
        "ds": current.scale_ds.scale,
        "s": F(448),
    }
    again = backward(do, q, k, v, result, variant="cudnn", scales=given)
    for mine, other in zip(again[:3], current[:3], strict=True):
        np.testing.assert_array_equal(mine, other)
    late = backward(do, q, k, v, result, variant="cudnn", scales=given | {"ds": given["ds"] * F(8)})
    assert late.saturated > 0
    early = backward(
        do,
        q,
        k,
        v,
        result,
        variant=Call(variant="cudnn", keep_ds=True),
        scales=given | {"ds": given["ds"] / F(4096)},
    )
    ds, codes = early.matrices["ds"], early.matrices["ds_codes"]
    assert early.lost == ((codes & 0x7F == 0) & (ds != 0)).sum() > current.lost
    assert late.amaxes["ds"] == current.amaxes["ds"]


def test_what_is_refused():
    q, k, v, do = inputs()
    result = attention.forward(q, k, v, variant="cudnn")
    with pytest.raises(ValueError, match="has no backward pass"):
        backward(do, q, k, v, result, variant="fa3")
    with pytest.raises(ValueError, match="the shape of o"):
        backward(do[:, :, :3], q, k, v, result, variant="cudnn")
    with pytest.raises(ValueError, match=r"what forward returned|that of forward"):
        backward(do, q, k, v, None, variant="cudnn")
    with pytest.raises(
        ValueError, match="by variant 'bf16'; got another's, with tensors of q, k, v, o"
    ):
        backward(do, q, k, v, result, variant="bf16")
    with pytest.raises(ValueError, match="got 'o'"):
        backward(do, q, k, v, result, variant="cudnn", scales={"o": F(1)})
    with pytest.raises(ValueError, match="gradient_fmt"):
        dataclasses.replace(VARIANTS["fa3"], gradient_fmt=E5M2)
    with pytest.raises(ValueError, match="no row scales"):
        dataclasses.replace(VARIANTS["fa3_paper"], backward="cast")
    with pytest.raises(ValueError, match="exact sums"):
        dataclasses.replace(VARIANTS["mxfp8"], plan="hopper_fast")


# A-12, H-1, H-3: the scale of a step comes from the amaxes before it
def test_states_of_all_roles_over_steps():
    roles = ("q", "k", "v", "s", "o", "do", "ds", "dq", "dk", "dv")
    config, fmt, before = (
        delayed.DELAYED["delayed"],
        VARIANTS["cudnn"].fmt,
        dict.fromkeys(roles, F(0)),
    )
    states = dict.fromkeys(roles, delayed.init(config))
    for step in range(3):
        q, k, v, do = (x * F(2.0**step) for x in inputs(seed=step))
        scales = {role: delayed.scales(states[role], config, fmt).scale for role in roles}
        forward = attention.forward(
            q, k, v, variant="cudnn", scales={role: scales[role] for role in roles[:5]}
        )
        found = backward(
            do,
            q,
            k,
            v,
            forward,
            variant="cudnn",
            scales={role: scales[role] for role in (*roles[5:], "s")},
        )
        amaxes = forward.amaxes | found.amaxes
        if step == 0:
            assert all(scale == 1 for scale in scales.values())
        else:
            assert scales["q"] == F(448 / before["q"])
            assert scales["ds"] == F(448 / before["ds"])
            assert forward.saturated == 0  # s has the amax 1 in every step
        assert forward.tensors["q"].scale == scales["q"]
        assert found.scale_ds.scale == scales["ds"]
        states = {
            role: delayed.update(
                states[role], delayed.observe(amaxes[role]), config=config, fmt=fmt
            )
            for role in roles
        }
        before = {role: F(max(amaxes[role], before[role])) for role in roles}


@pytest.mark.parametrize("variant", ["exact", "cudnn", "mxfp8"])
def test_threads_change_no_bit(variant):
    """Heads are cut over threads; the heads of a group are summed in their order."""
    q, k, v, do = inputs(h=6, heads=2, tq=40, tk=50)
    sinks = np.linspace(-1, 1, 6, dtype=F)
    result = attention.forward(q, k, v, variant=variant, sinks=sinks)
    found = []
    for count in (1, 4):
        with threads.using(count):
            found.append(backward(do, q, k, v, result, variant=variant))
    one, other = found
    for role in ("dq", "dk", "dv", "dsinks"):
        assert getattr(one, role).tobytes() == getattr(other, role).tobytes(), role
    assert (one.saturated, one.lost) == (other.saturated, other.lost)
    assert all(np.array_equal(x, other.amaxes[role]) for role, x in one.amaxes.items())
