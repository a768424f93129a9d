"""AdamW with narrow states: the worked examples, and what holds for any gradient (spec O)."""

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.states.sim_states import (
    F32,
    HYPER,
    LAYOUT,
    SEED,
    assert_same,
    bits,
    run,
    scalars,
    under,
)
from helpers.states.state_layouts import ALL, BLOCKS, MASTERED, gradients
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8ref.formats import BFLOAT16, FLOAT32
from fp8ref.sim import delayed
from fp8ref.sim.states import health, moments, states
from fp8ref.spec.states import layouts as data
from fp8ref.spec.states.layouts import LAYOUTS, Layout, Moment


def test_the_worked_example():  # O-4, O-6, O-7
    p, state = np.float32([4, 1, -2, 0.5]), states.init((4,), "sqrt_e4m3")
    found = []
    for g in ([1, -0.3, 1e-4, 0], [0, 0.5, -1e-4, 1e-20]):
        p, state = states.step(
            p, np.float32(g), state, states.AdamW(learning_rate=0.25, weight_decay=0.5)
        )
        found.append(
            [
                bits(x)
                for x in (p, state.m.codes, state.v.codes, state.m.scale_inv, state.v.scale_inv)
            ]
        )
    assert found == [
        [
            ["40500000", "3F900000", "BFFFFF2E", "3EE00000"],
            ["7E", "F0", "13", "00"],
            ["7E", "70", "13", "00"],
            ["396A0EA1"],
            ["3A02D788"],
        ],
        [
            ["402B2442", "3F680A4E", "BFDDA5B8", "3EC40000"],
            ["7E", "6F", "83", "00"],
            ["7E", "78", "18", "00"],
            ["3952A6C4"],
            ["39FF0ECE"],
        ],
    ]
    assert state.step == 2


def test_the_first_step_is_the_same_in_every_layout():  # O-6
    g = gradients(3, 700, 1)
    first = run(g, "float32")[0]
    for name, layout in ALL.items():
        if layout.average == "products":
            np.testing.assert_array_equal(run(g, layout)[0], first, err_msg=name)


def casts(x: np.ndarray, fmt) -> np.ndarray:
    """float32 numbers of a format, saturated, by ml_dtypes and NumPy."""
    dtype = {
        "e4m3fn": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
    }[fmt.name]
    return np.clip(x, -F32(fmt.max), F32(fmt.max)).astype(dtype).astype(F32)


@pytest.mark.parametrize("name", ["bfloat16", "fishman", "sqrt_e5m2", "sqrt_e4m3", "float16", "te"])
def test_against_a_second_implementation(name):  # O-2 to O-8
    """Float64 operations, each rounded to float32, which rounds once; casts by ml_dtypes; groups by
    reshape.
    """
    layout, size = ALL[name], 512
    g, p = gradients(7, size, 12), np.random.default_rng(1).standard_normal(size).astype(F32)
    weights, state, _ = run(g, layout)

    def rn(x):
        with np.errstate(all="ignore"):
            return np.asarray(x, np.float64).astype(F32).astype(np.float64)

    stored, wide = {"m": np.zeros(size), "v": np.zeros(size)}, p.astype(np.float64)
    for t, row in enumerate(g, 1):
        s = data.scalars(t, learning_rate=1e-3, weight_decay=0.1, **HYPER)
        row = np.where(np.abs(row) < 2.0**-56, 0, row).astype(np.float64)
        m = rn(rn(s.b1 * stored["m"]) + rn(s.a1 * row))
        v = rn(rn(s.b2 * stored["v"]) + rn(s.a2 * rn(row * row)))
        m, v = (np.where(np.abs(x) < 2.0**-125, 0, x) for x in (m, v))
        ratio = rn(rn(m * s.inverse1) / rn(rn(rn(np.sqrt(v)) * s.inverse2) + s.eps))
        ratio = np.clip(ratio, -s.bound, s.bound) if layout.bounded else ratio
        change = rn(s.learning_rate * rn(ratio + rn(s.weight_decay * wide)))
        wide = rn(wide - np.where(np.abs(change) < 2.0**-90, 0, change))
        for key, x in (("m", m), ("v", v)):
            moment = getattr(layout, key)
            x = rn(np.sqrt(x)) if moment.root else x
            blocks = x.reshape(-1, moment.block or size)
            if moment.scaling is None:
                scale = inverse = np.ones((len(blocks), 1))
            else:
                amax = np.maximum(np.abs(blocks).max(1, keepdims=True), 2.0**-90)
                scale = (
                    rn(1 / rn(amax / moment.fmt.max))
                    if moment.scaling == "reciprocal"
                    else rn(moment.fmt.max / amax)
                )
                inverse = rn(1 / scale)
            code = casts(rn(blocks * scale).astype(F32), moment.fmt).astype(np.float64)
            if moment.keep:
                code = np.where((blocks != 0) & (code == 0), moment.fmt.smallest_subnormal, code)
            y = rn(code * inverse).reshape(-1)
            y = rn(y * y) if moment.root else y
            stored[key] = np.where(np.abs(y) < 2.0**-125, 0, y)
    np.testing.assert_array_equal(weights, wide.astype(F32))
    for found, key in zip(states.decode(state, layout), "mv", strict=True):
        np.testing.assert_array_equal(found, stored[key].astype(F32), err_msg=key)


@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_float32_states_are_adamw(b2):  # O-5, O-6
    """Against float64 AdamW, T-1's formula."""
    rng = np.random.default_rng(0)
    p, g = rng.standard_normal(300), rng.standard_normal((40, 300)) * 0.1
    q, state, m, v = p.astype(F32), states.init((300,), "float32"), np.zeros(300), np.zeros(300)
    p = q.astype(np.float64)
    for t, row in enumerate(g.astype(F32), 1):
        q, state = states.step(
            q,
            row,
            state,
            states.AdamW(learning_rate=0.01, b2=b2, weight_decay=0.1, layout="float32"),
        )
        m, v = 0.9 * m + 0.1 * row, b2 * v + (1 - b2) * row.astype(np.float64) ** 2
        p = p - 0.01 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8) + 0.1 * p)
    # a step rounds the weight once, and a change of at most 0.02 some twenty times: 40 (|p| 2^-24 +
    # 0.02 * 20 * 2^-24)
    np.testing.assert_allclose(q, p, rtol=0, atol=40 * (4 + 0.4) * 2.0**-24)


@settings(max_examples=60, deadline=None)
@given(layout=LAYOUT, seed=SEED, cuts=st.sets(st.integers(1, 699), max_size=5))
def test_any_cut_gives_the_same(layout, seed, cuts):  # O-8, O-9, O-10, O-11
    g = gradients(seed, 700, 4)
    whole, cut = run(g, layout, seed=seed), run(g, layout, seed=seed, cuts=sorted(cuts))
    np.testing.assert_array_equal(whole[0], cut[0])
    for one, two in zip(whole[1][1:3], cut[1][1:3], strict=True):
        assert_same(one, two)


def test_the_shape_of_a_tensor_does_not_matter():  # O-1, O-11
    g = gradients(5, 600, 3)
    for layout in ALL.values():
        p = np.ones(600, F32)
        flat, deep = states.init((600,), layout), states.init((2, 3, 100), layout)
        q = p.reshape(2, 3, 100)
        for row in g:
            p, flat = states.step(p, row, flat, states.AdamW(learning_rate=0.1, layout=layout))
            q, deep = states.step(
                q,
                np.asfortranarray(row.reshape(2, 3, 100)),
                deep,
                states.AdamW(learning_rate=0.1, layout=layout),
            )
        np.testing.assert_array_equal(p, q.reshape(-1))
        np.testing.assert_array_equal(flat.v.codes, deep.v.codes.reshape(-1))


def test_a_number_is_stepped_as_a_tensor_of_one_element():  # O-1
    for layout in ALL.values():
        optimizer = states.AdamW(learning_rate=0.1, layout=layout)
        (number, of_number), (row, of_row) = (
            states.step(
                np.ones(shape, F32), np.full(shape, 0.5, F32), states.init(shape, layout), optimizer
            )
            for shape in ((), (1,))
        )
        assert number.shape == of_number.m.codes.shape == of_number.v.codes.shape == ()
        assert number == row[0]
        assert of_number.v.codes == of_row.v.codes[0]


@settings(max_examples=60, deadline=None)
@given(
    seed=SEED,
    betas=st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.0, 0.9), (0.95, 0.95), (0.8, 0.65)]),
    size=st.just(64),
    hard=st.booleans(),
)
def test_float32_states_stay_below_the_bound(seed, betas, size, hard):  # O-3, O-6
    """Also for the gradients that Cauchy-Schwarz's inequality is sharp for: powers of b1 / b2."""
    b1, b2 = betas
    steps = 30
    sharp = np.tile(((b1 / b2) ** np.arange(steps)[::-1])[:, None].astype(F32), (1, size))
    g = sharp if hard else gradients(seed, size, steps, widest=4)
    state = states.init((size,), "float32")
    p = np.zeros(size, F32)
    bounded = dataclasses.replace(LAYOUTS["float32"], bounded=True)
    q, other = p, under(state, bounded)
    for row in g:
        before = other
        p, state = states.step(
            p, row, state, states.AdamW(learning_rate=1e-3, b1=b1, b2=b2, layout="float32")
        )
        q, other = states.step(
            q, row, other, states.AdamW(learning_rate=1e-3, b1=b1, b2=b2, layout=bounded)
        )
        assert health.measure(row, before, other, b1=b1, b2=b2, layout=bounded).bounded == 0
    np.testing.assert_array_equal(p, q)
    if hard:  # the bound is sharp, up to its factor of 1 + 2^-7 and eps
        at = scalars(steps, b1=b1, b2=b2)
        m, v = states.decode(state, "float32")
        assert moments.ratio(m, v, at)[0] == pytest.approx(at.bound / (1 + 2**-7), rel=1e-5)


def test_the_bound_stops_an_explosion():  # O-6
    """v rounded to 0 beside m: without a bound the weight jumps by m / eps."""
    g = np.zeros((3, 128), F32)
    g[0], g[0, 0] = 1, 1e3
    plain = Layout(name="plain", m=BLOCKS, v=BLOCKS)
    assert np.abs(run(g, plain)[0]).max() > 10
    assert np.abs(run(g, dataclasses.replace(plain, bounded=True))[0]).max() < 4


def run_masters(g: np.ndarray, layout, *, start=None, seed: int = 0, cuts=(), **hyper):
    """(master, state) after a step for each row of g."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal(g.shape[1]).astype(F32) if start is None else start
    p, state = states.master(w, layout), states.init(w.shape, layout)
    for row in g:
        given = {
            **HYPER,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "layout": layout,
            "seed": seed,
            **hyper,
        }
        p, state = states.step(p, row, state, states.AdamW(**given), cuts=cuts)
    return p, state


@pytest.mark.parametrize("name", MASTERED)
def test_masters_against_a_second_implementation(name):  # O-14, O-15
    """A step from float32 weights, the next from what was stored of them, rounded here by other
    means.
    """
    layout, size = MASTERED[name], 512
    g, w = gradients(5, size, 6), np.random.default_rng(1).standard_normal(size).astype(F32)
    master, state = states.master(w, layout), states.init((size,), layout)
    plain = dataclasses.replace(layout, master=Moment())
    amax = np.abs(states.weight(master, layout)).max()
    for t, row in enumerate(g, 1):
        before = states.weight(master, layout)
        new, expected = states.step(
            before,
            row,
            under(state, plain),
            states.AdamW(learning_rate=1e-2, weight_decay=0.1, layout=plain, seed=7),
        )
        master, state = states.step(
            master,
            row,
            state,
            states.AdamW(learning_rate=1e-2, weight_decay=0.1, layout=layout, seed=7),
        )
        for one, two in zip(state[1:3], expected[1:3], strict=True):
            assert_same(one, two)
        s, scale, fmt = (
            scalars(t, eps=1e-8)._replace(learning_rate=float(F32(1e-2))),
            1.0,
            layout.master.fmt,
        )
        if layout.master.scaling:
            largest = np.float64(np.abs(new).max())
            if layout.master.amax == "predicted":
                change = F32(s.learning_rate) * (F32(s.bound) + F32(s.weight_decay) * amax)
                largest = np.float64(amax + change)
                assert largest >= np.abs(new).max()
            scale = 2.0 ** np.floor(np.log2(fmt.max / largest))
            assert master.scale_inv == 1 / scale
        scaled = np.float64(new) * scale
        if layout.master.rounding == "nearest_even":
            np.testing.assert_array_equal(master.codes, casts(scaled.astype(F32), fmt))
        else:  # next to what it rounds, and one of the format
            spacing = 2.0 ** (np.maximum(np.frexp(scaled)[1] - 1, fmt.emin) - fmt.mantissa_bits)
            assert (np.abs(master.codes - scaled) < spacing).all()
            np.testing.assert_array_equal(master.codes, casts(master.codes, fmt))
        np.testing.assert_array_equal(
            states.weight(master, layout), (np.float64(master.codes) / scale).astype(F32)
        )
        amax = np.abs(states.weight(master, layout)).max()
        if layout.master.amax == "predicted":
            assert master.amax == amax


@settings(max_examples=30, deadline=None)
@given(
    layout=st.sampled_from(list(MASTERED.values())),
    seed=SEED,
    cuts=st.sets(st.integers(1, 699), max_size=5),
)
def test_any_cut_gives_the_same_masters(layout, seed, cuts):  # O-11, O-15
    g = gradients(seed, 700, 3)
    whole, cut = (
        run_masters(g, layout, seed=seed),
        run_masters(g, layout, seed=seed, cuts=sorted(cuts)),
    )
    for one, two in zip((whole[0], *whole[1][1:3]), (cut[0], *cut[1][1:3]), strict=True):
        assert_same(one, two)


@settings(max_examples=60, deadline=None)
@given(
    seed=SEED,
    rate=st.sampled_from([1e-3, 1.0, 100.0]),
    decay=st.sampled_from([0.0, 0.1, 3.0]),
    betas=st.sampled_from([0.5, 0.95, 0.999]),
)
def test_a_predicted_amax_of_a_master_is_never_violated(seed, rate, decay, betas):  # O-15
    layout = MASTERED["sqrt_e4m3_f16"]
    b1 = min(0.9, betas)
    g, p, state = gradients(seed, 300, 6, widest=8), None, states.init((300,), layout)
    p = states.master(np.random.default_rng(seed).standard_normal(300).astype(F32), layout)
    for t, row in enumerate(g, 1):
        given = {"learning_rate": rate, "weight_decay": decay, "b1": b1, "b2": betas}
        exact = states.step(
            states.weight(p, layout),
            row,
            under(state, LAYOUTS["sqrt_e4m3"]),
            states.AdamW(**given, layout="sqrt_e4m3"),
        )[0]
        s = data.scalars(t, eps=1e-8, **given)
        bound = p.amax + moments.change(F32(s.bound), p.amax, s)
        assert np.abs(exact).max() <= bound
        p, state = states.step(p, row, state, states.AdamW(**given, layout=layout))
        assert (
            np.abs(p.codes).max() < layout.master.fmt.max
            or bound * (1 / p.scale_inv) <= layout.master.fmt.max
        )


def test_idle_steps_leave_a_master_of_a_power_of_two_alone():  # O-15
    """Codes and scale, bit for bit; a free scale would drift, as each step divides what it
    multiplied.
    """
    for name in ("msamp_o2", "sqrt_e4m3_f16", "bfloat16_master"):
        layout, w = MASTERED[name], np.random.default_rng(3).standard_normal(512).astype(F32)
        first = states.master(w, layout)
        last = run_masters(np.zeros((40, 512), F32), layout, start=w, weight_decay=0.0)[0]
        for one, two in zip(first[:2], last[:2], strict=True):
            np.testing.assert_array_equal(one, two) if one is not None else None


def test_stochastic_masters_move_where_nearest_ones_stand_still():  # O-15
    """A change of 2^-11 of a bfloat16 weight is a quarter of half a spacing: nearest rounding loses
    each, stochastic rounding keeps the mean.
    """
    w, g, rate = np.ones(4096, F32), np.ones((8, 4096), F32), 2.0**-11
    moved = {}
    for rounding in ("nearest_even", "stochastic"):
        layout = dataclasses.replace(
            LAYOUTS["float32"], name="mine", master=Moment(fmt=BFLOAT16, rounding=rounding)
        )
        p, _ = run_masters(g, layout, start=w, learning_rate=rate, weight_decay=0.0, seed=5)
        moved[rounding] = float(np.mean(1 - np.float64(states.weight(p, layout))))
    assert moved["nearest_even"] == 0
    # 8 changes of 2^-11, each rounded to a spacing of 2^-8 below 1: at most 2^-8 / 2 of deviation
    # each, 4096 elements, six of the mean
    assert moved["stochastic"] == pytest.approx(8 * rate, abs=6 * 2.0**-9 * 8**0.5 / 4096**0.5)


def test_copies_are_quantized_weights():  # O-16
    """Against ml_dtypes' casts; by the recipe's policy, of the weight in the dtype that the model
    computes in.
    """
    p, _ = run_masters(gradients(3, 512, 2), MASTERED["msamp_o2"])
    w = states.weight(p, "msamp_o2")
    narrow = w.astype(ml_dtypes.bfloat16).astype(F32)
    scale = F32(448) / np.abs(narrow).max()
    found = states.copy(p, "msamp_o2", "tensorwise")
    assert (found.scale, found.scale_inv) == (scale, 1 / scale)
    np.testing.assert_array_equal(
        found.codes,
        np.clip(narrow * scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
    )
    assert (states.copy(p, "msamp_o2", "tensorwise", FLOAT32).codes != found.codes).any()
    for recipe in ("rowwise", "bf16", "delayed", "blockwise", "mxfp8"):
        with pytest.raises(ValueError, match=f"recipe '{recipe}' does not. Use 'tensorwise'"):
            states.copy(p, "msamp_o2", recipe)


def test_wrong_masters_are_refused():  # O-14
    w, g = np.ones(4, F32), np.ones(4, F32)
    with pytest.raises(
        ValueError,
        match=r"layout 'msamp_o2' takes masters: states.master\(p, layout\); got ndarray",
    ):
        states.step(
            w, g, states.init((4,), "msamp_o2"), states.AdamW(learning_rate=1e-3, layout="msamp_o2")
        )
    p = states.master(w, "msamp_o2")
    with pytest.raises(ValueError, match="layout 'msamp' takes weights; got MomentState"):
        states.step(
            p, g, states.init((4,), "msamp"), states.AdamW(learning_rate=1e-3, layout="msamp")
        )
    with pytest.raises(ValueError, match="masters of layout 'te' are the float32 weights"):
        states.master(w, "te")
    with pytest.raises(ValueError, match="weights are float32; got float64"):
        states.master(np.ones(4), "msamp_o2")
    with pytest.raises(ValueError, match="has amax of the master"):
        states.weight(p, "sqrt_e4m3_f16")


def test_a_gradient_that_is_not_finite_makes_nan_of_a_scaled_master():  # O-15
    g = np.ones((2, 256), F32)
    g[0, 3] = np.inf
    for name in ("msamp_o2", "sqrt_e4m3_f16"):
        p, _ = run_masters(g, MASTERED[name])
        assert np.isnan(p.codes).all()
    assert np.isnan(run_masters(g, MASTERED["bfloat16_master"])[0].codes).sum() == 1


def test_random_numbers_differ_by_seed_step_tensor_and_moment():  # O-8
    assert [f"{states._key(*key):016X}" for key in ((42, 1, 0), (42, 1, 1), (42, 2, 6))] == [
        "F753E8255558D87A",
        "F13D91F0858E5CA0",
        "B53BED8ACBC50256",
    ]
    keys = [
        states._key(seed, step, stream)
        for seed, step, stream in itertools.product((0, 1), (1, 2), (0, 1, 2, 3))
    ]
    assert len(set(keys)) == len(keys)
    g = gradients(1, 256, 1)
    layout = ALL["stochastic"]
    found = [
        states.step(
            np.zeros(256, F32),
            g[0],
            states.init((256,), layout),
            states.AdamW(learning_rate=0.0, layout=layout, seed=seed),
            tensor=tensor,
        )[1].m.codes
        for seed, tensor in ((0, 0), (1, 0), (0, 1), (0, 0))
    ]
    assert (found[0] != found[1]).any()
    assert (found[0] != found[2]).any()
    assert (found[0] == found[3]).all()


@pytest.mark.parametrize("name", list(ALL))
def test_flushing_subnormals_changes_nothing(name):  # O-2, O-4 to O-7
    """The same steps with the processor's flush-to-zero on, as XLA sets it: tiny gradients, idle
    steps, tiny weights.
    """
    layout = ALL[name]
    rng = np.random.default_rng(2)
    g = (rng.standard_normal((8, 512)) * 2.0 ** rng.uniform(-75, -40, (8, 512))).astype(F32)
    g[3:6] = 0
    g[:, :128] *= F32(2.0**40)
    p = (rng.standard_normal(512) * 2.0 ** rng.uniform(-120, 0, 512)).astype(F32)
    p[np.abs(p) < 2.0**-126] = 0

    def steps(hyper):
        q, state = p, states.init(p.shape, layout)
        for row in g:
            q, state = states.step(
                q,
                row,
                state,
                states.AdamW(
                    learning_rate=hyper, weight_decay=0.1, eps=2.0**-50, layout=layout, seed=3
                ),
            )
        return q, state

    for learning_rate in (1e-3, 2.0**-80):
        kept = steps(learning_rate)
        assert torch.set_flush_denormal(True), "needs a processor that flushes"
        try:
            assert F32(2.0**-126) / F32(2) == 0
            flushed = steps(learning_rate)
        finally:
            torch.set_flush_denormal(False)
        np.testing.assert_array_equal(kept[0].view(np.uint32), flushed[0].view(np.uint32))
        for one, two in zip(kept[1][1:3], flushed[1][1:3], strict=True):
            assert_same(one, two)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**57])
@pytest.mark.parametrize("name", list(ALL))
def test_what_is_not_finite_is_loud(name, value):  # O-2, O-7
    layout = ALL[name]
    g = np.ones((1, 512), F32)
    g[0, 200] = value
    p, state, _ = run(g, layout)
    assert np.isnan(p[200])
    assert np.isfinite(np.delete(p, 200)).all()
    for x, moment in zip(
        states.decode(state, layout), (layout.of(512).m, layout.of(512).v), strict=True
    ):
        size = 1 if moment.scaling is None or moment.amax == "predicted" else moment.block or 512
        first = 200 // size * size
        assert np.isnan(x[first : first + size]).all()
        if moment.block:
            assert np.isfinite(x[:128]).all() or moment.block == 256


def test_gradients_out_of_range():  # O-2
    found = states.in_range(
        np.float32(
            [
                2.0**-56,
                np.nextafter(F32(2.0**-56), F32(0)),
                -(2.0**-57),
                2.0**56,
                -(2.0**56),
                np.nextafter(F32(2.0**56), F32(1e38)),
                -0.0,
            ]
        )
    )
    np.testing.assert_array_equal(
        found, np.float32([2.0**-56, 0, 0, 2.0**56, -(2.0**56), np.nan, 0])
    )


WRONG = [
    ({"p": np.zeros(4)}, "weights are float32; got float64"),
    ({"g": np.zeros(4)}, "a gradient is float32, float16 or bfloat16 .*; got"),
    ({"g": np.zeros(5, F32)}, r"a gradient .* \(4,\); got float32 \(5,\)"),
    ({"layout": "bfloat16"}, "a state of layout 'bfloat16' and shape .* States of another layout"),
    ({"state": None}, "a state is a states.State"),
    ({"cuts": (2, 2)}, "cuts ascend strictly"),
    ({"cuts": (4,)}, "cuts ascend strictly"),
    ({"seed": -1}, r"seed is an integer in \[0, 2\^64\)"),
    ({"tensor": 1 << 31}, r"tensor is an integer in \[0, 2\^31\)"),
    ({"eps": 0.0}, "eps is in"),
    ({"b1": 0.99}, "bounded"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_input_is_refused(changes, message):  # O-1, O-2
    given = {"p": np.zeros(4, F32), "g": np.zeros(4, F32), "state": states.init((4,)), **changes}
    names = ("p", "g", "state", "tensor", "cuts")
    operands = {name: given.pop(name) for name in names if name in given}
    with pytest.raises(ValueError, match=message):
        states.step(optimizer=states.AdamW(learning_rate=1e-3, **given), **operands)


def test_wrong_states_are_refused():  # O-4
    with pytest.raises(ValueError, match="at least one element"):
        states.init((0, 3))
    state = states.init((4,))
    with pytest.raises(ValueError, match="has scale_inv of m"):
        states.decode(state._replace(m=state.m._replace(scale_inv=np.ones(2, F32))))


def test_states_of_a_changed_layout_of_the_same_name_are_refused():  # O-17
    """Of equal dtypes and shapes: nothing but the text says that the codes are other moments."""
    named = LAYOUTS["sqrt_e4m3"]
    changed = dataclasses.replace(
        named, m=dataclasses.replace(named.m, scaling="divide"), bounded=False
    )
    state, w, g = states.init((4,), changed), np.zeros(4, F32), np.ones(4, F32)
    said = (
        r"layout 'sqrt_e4m3' has m.scaling = 'multiply', saved 'divide'; bounded = True, saved "
        r"False\. States of another"
    )
    for refused in (
        lambda: states.step(w, g, state, states.AdamW(learning_rate=1e-3)),
        lambda: states.decode(state),
        lambda: health.measure(
            g, state, states.step(w, g, state, states.AdamW(learning_rate=1e-3, layout=changed))[1]
        ),
    ):
        with pytest.raises(ValueError, match=said):
            refused()
    # a name decides nothing
    states.step(
        w,
        g,
        state,
        states.AdamW(learning_rate=1e-3, layout=dataclasses.replace(changed, name="mine")),
    )
    with pytest.raises(
        ValueError, match=r"holds the decisions of its layout as text; got 'sqrt_e4m3'\. Use init"
    ):
        states.decode(state._replace(decisions="sqrt_e4m3"))


def test_bfloat16_gradients_are_widened():
    g = gradients(1, 256, 1)[0].astype(ml_dtypes.bfloat16)
    state = states.init((256,))
    one, two = (
        states.step(np.ones(256, F32), x, state, states.AdamW(learning_rate=0.1))[0]
        for x in (g, g.astype(F32))
    )
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("shape", [4, "4", (-1,), (2.0,), np.ones((2, 3)), None])
def test_what_is_no_shape(shape):
    for init in (states.init, lambda shape: delayed.init("delayed", shape)):
        with pytest.raises(ValueError, match="a shape is a tuple of non-negative integers"):
            init(shape)
