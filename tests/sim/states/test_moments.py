"""How moments are scaled, rounded and read back (spec O-7 to O-10)."""

import dataclasses

import numpy as np
import pytest
from helpers.states.sim_states import F32, SEED, assert_same, bits, run, scalars
from helpers.states.state_layouts import ALL, TENSOR, changed, gradients
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.sim.states import health, moments, states
from fp8ref.spec.states import layouts as data
from fp8ref.spec.states.layouts import LAYOUTS, Layout, Moment


@settings(max_examples=40, deadline=None)
@given(layout=st.sampled_from([x for x in ALL.values() if not x.stochastic]), seed=SEED)
def test_elements_of_a_block_may_be_permuted(layout, seed):  # O-7
    g = gradients(seed, 512, 3)
    order = np.concatenate(
        [128 * i + np.random.default_rng(seed).permutation(128) for i in range(4)]
    )
    straight, permuted = run(g, layout), run(g[:, order], layout)
    for one, two in zip(straight[1][1:3], permuted[1][1:3], strict=True):
        assert_same(one._replace(codes=one.codes[order]), two)


@settings(max_examples=40, deadline=None)
@given(layout=st.sampled_from([x for x in ALL.values() if not x.stochastic]), seed=SEED)
def test_rounding_is_monotone(layout, seed):  # O-8
    """Of one group: a larger moment is never stored as a smaller one."""
    g = gradients(seed, 128, 1)
    _, state, before = run(g, layout)
    m, v = (
        x.reshape(-1)
        for x in moments.averages(
            states.in_range(g[0]), *states.decode(before, layout), scalars(1), layout
        )
    )
    for x, stored in zip((m, v), states.decode(state, layout), strict=True):
        assert (np.diff(stored[np.argsort(x, kind="stable")]) >= 0).all()


@settings(max_examples=40, deadline=None)
@given(layout=st.sampled_from([x for x in ALL.values() if x.m.keep or x.v.keep]), seed=SEED)
def test_keep_stores_no_zero(layout, seed):  # O-8
    layout = dataclasses.replace(
        layout, m=layout.m if layout.m.fmt == BFLOAT16 else changed(layout.m, keep=True)
    )
    g = gradients(seed, 256, 3, widest=60)
    _, state, before = run(g, layout, seed=seed)
    new = moments.averages(
        states.in_range(g[-1]), *states.decode(before, layout), scalars(3), layout
    )
    for x, stored, moment in zip(new, state[1:3], (layout.m, layout.v), strict=True):
        if moment.keep:
            codes = stored.codes & 0x7F if stored.codes.dtype == np.uint8 else stored.codes
            assert ((codes != 0) == (x != 0)).all()
            assert (
                np.signbit(stored.codes.view(np.int8) if codes.dtype == np.uint8 else codes)
                == np.signbit(x)
            )[x != 0].all()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["predicted", "predicted_v"]),
    seed=SEED,
    b2=st.sampled_from([0.5, 0.95, 0.999]),
)
def test_a_predicted_amax_is_never_violated(name, seed, b2):  # O-9
    layout, size = ALL[name], 300
    g, state = gradients(seed, size, 6, widest=8), states.init((300,), layout)
    g[4] = 0
    p = np.zeros(size, F32)
    for t, row in enumerate(g, 1):
        s, row = scalars(t, b2=b2), states.in_range(row)
        m, v = moments.averages(row, *states.decode(state, layout), s, layout)
        for x, stored, moment in ((m, state.m, layout.m), (v, state.v, layout.v)):
            group = np.zeros(size, int) if moment.block is None else np.arange(size) // moment.block
            largest = np.array([np.abs(row[group == i]).max() for i in range(group[-1] + 1)])
            kept = np.atleast_1d(stored.amax)
            assert (
                np.abs(
                    moments._values(stored.codes, moment) * np.atleast_1d(stored.scale_inv)[group]
                )
                <= kept[group]
            ).all()
            kept = kept * kept if moment.root else kept
            b, a, new = (
                (s.b1, s.a1, largest) if moment is layout.m else (s.b2, s.a2, largest * largest)
            )
            assert (np.abs(x) <= (F32(b) * kept + F32(a) * new)[group]).all()
        before = state
        p, state = states.step(
            p, row, state, states.AdamW(learning_rate=1e-3, b2=b2, layout=layout)
        )
        found = health.measure(row, before, state, b2=b2, layout=layout)
        assert (found.clipped_m, found.clipped_v) == (0, 0)


def test_previous_amaxes_make_the_scale_of_the_next_step():  # O-9
    layout = Layout(name="mine", m=changed(TENSOR, amax="previous"), v=Moment())
    g = np.float32([[1, 0.5], [4, 1], [0, 0]])
    state, p, found = states.init((2,), layout), np.zeros(2, F32), []
    for row in g:
        p, new = states.step(p, row, state, states.AdamW(learning_rate=0.0, b1=0.0, layout=layout))
        found.append(
            (
                float(new.m.scale_inv),
                float(new.m.amax),
                health.measure(row, state, new, b1=0.0, layout=layout).clipped_m,
            )
        )
        state = new
    unit = 0.0022321427  # 1 / 448
    assert found == [
        (pytest.approx(unit), 1.0, 0),
        (pytest.approx(unit), 4.0, 1),
        (pytest.approx(4 * unit), 0.0, 0),
    ]
    assert bits(state.m.codes) == ["00", "00"]


def test_stochastic_rounding_is_unbiased():  # O-8
    layout = ALL["stochastic"]
    g, p = gradients(11, 64, 1, widest=3)[0] + F32(0.01), np.zeros(64, F32)
    exact = states.step(
        p, g, states.init((64,), "float32"), states.AdamW(learning_rate=0.0, layout="float32")
    )[1]
    trials = 400
    found = [
        states.step(
            p, g, states.init((64,), layout), states.AdamW(learning_rate=0.0, layout=layout, seed=i)
        )[1]
        for i in range(trials)
    ]
    m = np.mean([states.decode(s, layout)[0].astype(np.float64) for s in found], axis=0)
    roots = np.mean(
        [np.sqrt(states.decode(s, layout)[1].astype(np.float64)) for s in found], axis=0
    )
    for mean, wanted, fmt in ((m, exact.m.codes, E4M3FN), (roots, np.sqrt(exact.v.codes), E5M2)):
        # a spacing is at most 2^-mantissa_bits of the value, or the smallest subnormal at amax's
        # scale; six standard errors
        spacing = (
            np.abs(wanted) * 2.0**-fmt.mantissa_bits
            + np.abs(wanted).max() / fmt.max * fmt.smallest_subnormal
        )
        assert (
            np.abs(mean - wanted) < 6 * spacing / 2 / np.sqrt(trials) + 1e-6 * np.abs(wanted)
        ).all()


def test_expansions_by_hand():  # O-10
    layout = LAYOUTS["coat"]
    assert [bits(F32(data.EXPANDED_RANGE ** (1 / k)))[0] for k in (4, 2, 1)] == [
        "418E632B",
        "439E6455",
        "47C40000",
    ]
    for ratio, k in (
        (1, 4),
        (17, 4),
        (18, 2),
        (316, 2),
        (317, 1),
        (100352, 1),
        (100353, 0.5),
        (1e9, 0.5),
    ):
        g = np.float32([1, 1 / ratio, 0, 0])
        _, state = states.step(
            np.zeros(4, F32),
            g,
            states.init((4,), layout),
            states.AdamW(learning_rate=0.0, layout=layout, b1=0.5),
        )
        assert float(state.m.exponent[0]) == k, ratio
        m, _ = states.decode(state, layout)
        np.testing.assert_allclose(m, g / 2, rtol=0.13, atol=0)
        assert bits(state.m.codes)[0] == "7E"
    assert (states.decode(run(np.zeros((1, 4), F32), layout)[1], layout)[0] == 0).all()
