"""The optimizer states of libraries: torchao's by running it, MS-AMP's, COAT's and Transformer
Engine's from transcriptions of their sources, each operation rounded to float32 (spec O-13)."""

import dataclasses
import functools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.states.sim_states import under
from torchao.optim import AdamWFp8

from fp8ref.sim.states import moments, states
from fp8ref.spec.states import layouts as data
from fp8ref.spec.states import saved as layout_decisions

F32 = np.float32
HYPER = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def gradients(shape: tuple[int, ...], steps: int, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (
        rng.standard_t(3, (steps, *shape)) * np.exp(2 * rng.standard_normal(shape)) * 1e-3
    ).astype(F32)


def e4m3(x: np.ndarray) -> np.ndarray:
    """The codes of CUDA's saturating cast."""
    return np.clip(x, F32(-448), F32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def values(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(F32)


def bits(x) -> np.ndarray:
    return np.atleast_1d(x).view(np.uint32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
@pytest.mark.parametrize(("shape", "b2"), [((64, 128), 0.95), ((2, 4096), 0.999), ((33, 17), 0.95)])
def test_torchao_has_these_codes_and_scales(shape, b2):  # O-13
    """Compiled, as torchao always is.

    The last shape has fewer than 4096 elements: float32 moments.
    """
    start = np.random.default_rng(1).standard_normal(shape).astype(F32)
    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = AdamWFp8([weight], lr=1e-3, betas=(0.9, b2), eps=1e-8, weight_decay=0.1)
    p, state = start.copy(), states.init(shape, "torchao")
    for t, g in enumerate(gradients(shape, 12), 1):
        weight.grad, before = torch.tensor(g), p
        optimizer.step()
        p, state = states.step(
            p, g, state, states.AdamW(learning_rate=1e-3, layout="torchao", **{**HYPER, "b2": b2})
        )
        for name, mine in (("exp_avg", state.m), ("exp_avg_sq", state.v)):
            theirs = optimizer.state[weight][name]
            if math.prod(shape) < 4096:
                np.testing.assert_array_equal(bits(theirs.numpy()), bits(mine.codes))
                continue
            np.testing.assert_array_equal(theirs.codes.view(torch.uint8).numpy(), mine.codes)
            np.testing.assert_array_equal(bits(theirs.scale.numpy()), bits(mine.scale_inv))
        # Ten roundings of a change, those of the bias corrections' float32 powers, wrong by (t + 2)
        # 2^-24 of what is at least 1 - b2, and four of weights.
        after = weight.detach().numpy().copy()
        change = np.abs(after - before) + 1e-4 * np.abs(before)
        error = (
            change * (10 + (t + 2) / (1 - b2)) * 2.0**-24 + 4 * (np.abs(before) + change) * 2.0**-24
        )
        assert (np.abs(after - p) <= error).all()
        p = after


def msamp_scale(amax, largest: float) -> np.ndarray:
    """MS-AMP msamp/common/tensor/meta.py, ScalingMeta.compute_scaling_factor (commit 9746ea8), with
    scale ones and margin 0.
    """
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(F32(largest) * (F32(1) / F32(amax))).astype(F32))
    factor = np.round(np.exp2(np.abs(exponent)).astype(F32))
    factor = factor if amax > 0 and np.isfinite(amax) else F32(1)
    return F32(1) / factor if exponent < 0 else F32(factor)


def msamp_step(p, g, m8, m_inv, v16, v_inv, *, lr, b1, b2, eps, weight_decay, t):
    """msamp/optim/adamw.cu, adamw_fp8_stage1_kernel and stage2_kernel, and adamw.py's loop around
    them (commit 9746ea8).
    """
    b1_, b2_ = F32(b1), F32(b2)
    step_size, root = F32(lr / (1 - b1**t)), F32(math.sqrt(1 - b2**t))
    p = p * F32(1 - lr * weight_decay)
    m = b1_ * values(m8) * m_inv + (F32(1) - b1_) * g
    v = b2_ * v16.astype(F32) * v_inv + (F32(1) - b2_) * (g * g)
    p = p - step_size * (m / (np.sqrt(v) / root + F32(eps)))
    m_scale, v_scale = msamp_scale(np.abs(m).max(), 448.0), msamp_scale(np.abs(v).max(), 65504.0)
    return (
        p,
        e4m3(m * m_scale),
        F32(1) / m_scale,
        (v * v_scale).astype(np.float16),
        F32(1) / v_scale,
    )


@pytest.mark.parametrize("seed", range(4))
def test_ms_amps_formulas(seed):  # O-13
    """Codes and scales, of betas whose complements in float32 are the same from float64: b1 =
    0.875, b2 = 0.96875.
    """
    hyper = {**HYPER, "b1": 0.875, "b2": 0.96875}
    size, p = 2000, np.random.default_rng(1).standard_normal(2000).astype(F32)
    state, q = states.init((size,), "msamp"), p
    theirs = (np.zeros(size, np.uint8), F32(1), np.zeros(size, np.float16), F32(1))
    for t, g in enumerate(gradients((size,), 30, seed=seed), 1):
        p, state = states.step(
            p, g, state, states.AdamW(learning_rate=1e-3, layout="msamp", **hyper)
        )
        q, *theirs = msamp_step(q, g, *theirs, lr=1e-3, t=t, **hyper)
        np.testing.assert_array_equal(state.m.codes, theirs[0])
        np.testing.assert_array_equal(state.v.codes, theirs[2].astype(F32))
        assert (bits(state.m.scale_inv), bits(state.v.scale_inv)) == (
            bits(theirs[1]),
            bits(theirs[3]),
        )
        # t steps, each with a rounding of the weight, of its decay, and ten of a change of at most
        # 1e-3 * 8
        np.testing.assert_allclose(p, q, rtol=0, atol=t * (5 * 2 * 2.0**-24 + 8e-3 * 10 * 2.0**-24))


@pytest.mark.parametrize("seed", range(2))
def test_ms_amps_masters(seed):  # O-13, O-15
    """A weight in a float16 ScalingTensor: adamw.py's ``params.copy_(p.cast(kfloat16, meta))``
    gives it a scale by its own new amax, and cast of msamp/common/tensor/tensor.py is ``(x *
    scale).to(float16)``. Each step begins from fp8ref's master, as the two formulas of a change
    differ in the last places."""
    layout, size = data.WITH_MASTERS["msamp_o2"], 2000
    plain = dataclasses.replace(layout, master=data.Moment())
    p, state = (
        states.master(np.random.default_rng(1).standard_normal(size).astype(F32), layout),
        states.init((size,), layout),
    )
    for g in gradients((size,), 10, seed=seed):
        new, _ = states.step(
            states.weight(p, layout),
            g,
            under(state, plain),
            states.AdamW(learning_rate=1e-2, layout=plain, **HYPER),
        )
        p, state = states.step(
            p, g, state, states.AdamW(learning_rate=1e-2, layout=layout, **HYPER)
        )
        scale = msamp_scale(np.abs(new).max(), 65504.0)
        np.testing.assert_array_equal(p.codes, (new * scale).astype(np.float16).astype(F32))
        assert bits(p.scale_inv) == bits(F32(1) / scale)


def test_ms_amps_scales_are_powers_of_two_but_next_to_one():  # O-13
    """Where max / amax is within two float32 numbers of a power of two, its logarithm in float32 is
    an integer.
    """
    rng = np.random.default_rng(0)
    near = [
        np.nextafter(F32(448 / 2.0**k), F32(towards))
        for k in range(-20, 20)
        for towards in (0, 1e9)
    ]
    near += [
        np.nextafter(np.nextafter(F32(448 / 2.0**k), F32(towards)), F32(towards))
        for k in range(-20, 20)
        for towards in (0, 1e9)
    ]
    exact = [F32(448 / 2.0**k) for k in range(-20, 20)]
    drawn = (2.0 ** rng.uniform(-40, 40, 3000)).astype(F32)
    moment = data.LAYOUTS["msamp"].m
    differing = 0
    for amax in (*near, *exact, *drawn):
        mine, theirs = moments.scales(amax, moment)[0], msamp_scale(amax, 448.0)
        quotient = 448 / float(amax)
        nearest = 2.0 ** round(math.log2(quotient))
        if abs(quotient / nearest - 1) > 2.0**-21:
            assert mine == theirs, amax
        else:
            differing += mine != theirs
            assert float(theirs) in (float(mine), 2 * float(mine), float(mine) / 2)
    assert differing > 0


def te_state(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scale_inv): fused_adam.py, FusedAdam._apply_scale of an FP8 state (commit 04912bf);
    the quantizer's kernel keeps scale_inv = 1 / scale."""
    absmax = np.maximum(-x.min(), x.max())
    scale = F32(1) / (absmax / F32(448))
    return e4m3(x * scale), F32(1) / scale


@pytest.mark.parametrize("seed", range(4))
def test_transformer_engines_states(seed):  # O-13
    """multi_tensor_adam's averages in float32, then both moments scaled by their own absmax."""
    size = 1000
    state, p = states.init((size,), "te"), np.ones(size, F32)
    m8 = v8 = np.zeros(size, np.uint8)
    m_inv = v_inv = F32(1)
    at = data.scalars(1, learning_rate=1e-3, **HYPER)
    for g in gradients((size,), 20, seed=seed):
        p, state = states.step(p, g, state, states.AdamW(learning_rate=1e-3, layout="te", **HYPER))
        m = F32(at.b1) * (values(m8) * m_inv) + F32(at.a1) * g
        v = F32(at.b2) * (values(v8) * v_inv) + F32(at.a2) * (g * g)
        (m8, m_inv), (v8, v_inv) = te_state(m), te_state(v)
        np.testing.assert_array_equal(state.m.codes, m8)
        np.testing.assert_array_equal(state.v.codes, v8)
        assert (bits(state.m.scale_inv), bits(state.v.scale_inv)) == (bits(m_inv), bits(v_inv))


def test_transformer_engine_divides_by_a_zero_amax():  # O-13
    with np.errstate(divide="ignore", invalid="ignore"):
        codes, inverse = te_state(np.zeros(4, F32))
        assert np.isnan(values(codes) * inverse).all()
    state = states.step(
        np.ones(4, F32),
        np.zeros(4, F32),
        states.init((4,), "te"),
        states.AdamW(learning_rate=1e-3, layout="te"),
    )[1]
    assert (states.decode(state, "te")[0] == 0).all()


TINY = F32(1e-30)


def lowered(a: np.ndarray, shifted: np.ndarray) -> np.ndarray:
    """The kernel's minimum of a lane and a shifted one, which skips a zero of the shifted one
    alone.
    """
    return np.where(shifted > 0, np.fmin(a, shifted), a)


def coat_extremes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(max, min) + 1e-30 of blocks [n, 128], by the warps' reductions of
    fp8_adamw_expand_cuda_kernel.cu (commit 80ec99f).

    shfl_down of a lane that has no partner gives the lane's own value; only lane 0 is read.
    """
    lanes = np.abs(x).reshape(-1, 4, 32)
    smallest = lanes
    for offset in (16, 8, 4, 2, 1):
        shifted = np.concatenate([smallest[..., offset:], smallest[..., 32 - offset :]], -1)
        smallest = lowered(smallest, shifted)
    warps = np.concatenate([smallest[..., 0], np.full((len(lanes), 28), F32(1e9))], -1)
    for offset in (16, 8, 4, 2, 1):
        shifted = np.concatenate([warps[..., offset:], warps[..., 32 - offset :]], -1)
        warps = lowered(warps, shifted)
    return np.abs(x).reshape(-1, 128).max(1) + TINY, warps[:, 0] + TINY


def powf(x, k):
    """powf, rounded correctly but for ties of float64's."""
    return np.power(x.astype(np.float64), k.astype(np.float64)).astype(F32)


def coat_state(x: np.ndarray, exponents: str):
    """(codes, scale, exponent, center) of blocks: the second half of that kernel. exponents:
    ``kernel``, multiples of 1/16, or ``subset``, the largest of fp8ref's four that is not above the
    kernel's."""
    with np.errstate(divide="ignore"):
        most, least = coat_extremes(x)
        ratio, center = most / least, np.sqrt(most) * np.sqrt(least)
        bound = F32(448 * 448 / 2)
        exponent = np.floor(np.log2(bound) / np.log2(ratio) * F32(16)) / F32(16)
    if exponents == "subset":
        exponent = np.select(
            [exponent >= k for k in (4, 2, 1)], [F32(4), F32(2), F32(1)], F32(0.5)
        ).astype(F32)
    of, k = (np.repeat(a, 128) for a in (center, exponent))
    y = np.copysign(powf(np.abs(x) / of, k), x)
    scale = powf(most / center, exponent) / F32(448)
    return e4m3(y / np.repeat(scale, 128)), scale, exponent, center


def coat_read(codes, scale, exponent, center) -> np.ndarray:
    """Its first lines: the moment of a code."""
    x = values(codes) * np.repeat(scale, 128)
    return np.copysign(powf(np.abs(x), F32(1) / np.repeat(exponent, 128)), x) * np.repeat(
        center, 128
    )


@pytest.mark.parametrize("spread", [0.05, 0.5, 1.0, 1.6, 2.5])
def test_coats_kernel_with_exponents_of_the_subset(spread):  # O-10, O-13
    """Exponents are equal; scales and codes are, but where powf rounds once and products twice: x^4
    and x^(1/4).
    """
    rng = np.random.default_rng(0)
    size, p = 128 * 64, np.ones(128 * 64, F32)
    # no zeros, which the kernel's minimum treats by their lane, and magnitudes to which 1e-30 adds
    # nothing
    x = (
        np.exp(spread * rng.standard_normal(size)) * np.sign(rng.standard_normal(size)) * 1e-3
    ).astype(F32)
    moment = data.LAYOUTS["coat"].m
    layout = data.Layout(name="m", m=moment)
    state = states.step(
        p, x, states.init((size,), layout), states.AdamW(learning_rate=0.0, b1=0.0, layout=layout)
    )[1].m
    codes, scale, exponent, center = coat_state(x, "subset")
    np.testing.assert_array_equal(state.exponent, exponent)
    np.testing.assert_array_equal(bits(state.center), bits(center))
    exact = np.repeat(exponent != 4, 128)
    np.testing.assert_array_equal(bits(state.scale_inv[exponent != 4]), bits(scale[exponent != 4]))
    np.testing.assert_array_equal(state.codes[exact], codes[exact])
    # x^4 by two products: relative errors of 2^-24 twice and once. A code then differs only next to
    # a tie.
    np.testing.assert_allclose(state.scale_inv, scale, rtol=4 * 2.0**-24)
    assert (np.abs(state.codes.astype(int) - codes) <= 1).all()
    assert (state.codes != codes).mean() < 1e-3
    whole = states.State(
        1, state, states.MomentState(np.zeros(size, F32)), layout_decisions.written(layout)
    )
    read = states.decode(whole, layout)[0]
    np.testing.assert_allclose(
        read,
        coat_read(state.codes, state.scale_inv, state.exponent, state.center),
        rtol=4 * 2.0**-24,
    )


@functools.cache
def coat_run(exponents: str) -> float:
    """rms error of stored moments over a run, relative, of the transcription."""
    size, errors = 128 * 16, []
    m8 = v8 = np.zeros(size, np.uint8)
    m_rest = v_rest = (np.zeros(16, F32), np.ones(16, F32), np.ones(16, F32))
    at = data.scalars(1, learning_rate=1e-3, **HYPER)
    for g in gradients((size,), 20) + F32(1e-9):
        m = F32(at.b1) * coat_read(m8, *m_rest) + F32(at.a1) * g
        v = F32(at.b2) * coat_read(v8, *v_rest) + F32(at.a2) * g * g
        (m8, *m_rest), (v8, *v_rest) = coat_state(m, exponents), coat_state(v, exponents)
        kept = np.abs(v) > 0
        errors.append(np.mean((coat_read(v8, *v_rest)[kept] / v[kept] - 1) ** 2))
    return math.sqrt(np.mean(errors))


def test_coats_own_exponents_are_near():  # O-10
    """The subset's exponents are at most COAT's, above half of them or 1/2: an error of a step in
    the stored power is one of 1 / k in the moment. A half of the exponent at most doubles the error
    of numbers that are stored as normal ones."""
    mine, theirs = coat_run("subset"), coat_run("kernel")
    assert theirs < 0.2
    assert mine < 2.5 * theirs
