"""What storing the moments of a step cost, on the simulator's states (spec O-12)."""

import numpy as np
import pytest
from helpers.states.state_layouts import ALL, BLOCKS, gradients, idle_and_stalling

from fp8ref.sim.states import health, moments, states
from fp8ref.spec.states import layouts as data
from fp8ref.spec.states.layouts import Layout

F32 = np.float32


def run(g: np.ndarray, layout):
    """(state, state before) after a step for each row of g."""
    p, state = np.ones(g.shape[1], F32), states.init((g.shape[1],), layout)
    before = state
    for row in g:
        before = state
        p, state = states.step(p, row, state, states.AdamW(learning_rate=1e-3, layout=layout))
    return state, before


def test_health_counts():  # O-12
    g = np.zeros((1, 128), F32)
    g[0], g[0, 0] = 1e-3, 1e3
    plain = Layout(name="plain", m=BLOCKS, v=BLOCKS)
    state, before = run(g, plain)
    found = health.measure(g[0], before, state, layout=plain)
    # both moments are lost
    assert (found.count, found.v_lost, found.bounded, found.clipped_m, found.clipped_v) == (
        128,
        0,
        0,
        0,
        0,
    )
    g[0, 1:] = 1
    state, before = run(g, plain)
    found = health.measure(g[0], before, state, layout=plain)
    assert found.v_lost == 127
    assert found.largest_ratio > 1e5
    assert found.update_error > 1e5
    assert found.root_bias == pytest.approx(1000 / 1127 - 1, rel=0.01)
    assert found.bytes_per_parameter == 2 + 8 / 128
    perfect = health.measure(g[0], *run(g, "float32")[::-1], layout="float32")
    assert (
        perfect.v_lost,
        perfect.root_bias,
        perfect.update_error,
        perfect.stalled_m,
        perfect.stalled_v,
    ) == (0, 0, 0, 0, 0)


def test_nearest_roots_stall_and_stochastic_ones_do_not():  # O-12
    """sqrt(0.95) shrinks a root by 2.5 %: less than half of the smallest step of a normal number,
    3.1 %.
    """
    g = gradients(3, 512, 2, widest=2) + F32(0.1)
    state, before = run(g, "sqrt_e4m3")
    found = health.measure(g[-1], before, state, layout="sqrt_e4m3")
    assert found.stalled_v == 512
    assert found.stalled_m < 300
    state, before = run(g, ALL["stochastic"])
    assert health.measure(g[-1], before, state, layout=ALL["stochastic"]).stalled_v == 0


def test_v_of_sqrt_e4m3_is_never_lost():  # O-12
    g = gradients(9, 4096, 10, widest=16)
    lost = {}
    for name in ("sqrt_e4m3", "sqrt_e5m2", "te", "torchao"):
        state, before = run(g, name)
        lost[name] = health.measure(g[-1], before, state, layout=name).v_lost
    assert lost["sqrt_e4m3"] == lost["sqrt_e5m2"] == 0
    assert lost["te"] > 0
    assert lost["torchao"] > 0


@pytest.mark.parametrize("name", ["sqrt_e4m3", "previous", "fishman"])
def test_counts_by_a_second_implementation(name):  # O-12
    """Element by element, in Python's numbers."""
    layout, g = ALL[name], gradients(5, 300, 4, widest=8)
    g[-1] *= 64  # above the range of a previous scale
    state, before = run(g, layout)
    found = health.measure(g[-1], before, state, layout=layout)
    at = data.scalars(4, learning_rate=0.0, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0)
    m, v = moments.averages(states.in_range(g[-1]), *states.decode(before, layout), at, layout)
    read_m, read_v = states.decode(state, layout)
    counted = dict.fromkeys(
        ("v_lost", "bounded", "clipped_m", "clipped_v", "stalled_m", "stalled_v"), 0
    )
    for i in range(300):
        counted["v_lost"] += bool(read_v[i] == 0 and read_m[i] != 0)
        ratio = F32(m[i] * F32(at.inverse1)) / F32(
            F32(np.sqrt(v[i]) * F32(at.inverse2)) + F32(at.eps)
        )
        counted["bounded"] += layout.bounded and bool(abs(ratio) > F32(at.bound))
        for which, x, moment, stored, read, decay in (
            ("m", m, layout.m, state.m, read_m, at.b1),
            ("v", v, layout.v, state.v, read_v, at.b2),
        ):
            inverse = (
                stored.scale_inv if moment.block is None else stored.scale_inv[i // moment.block]
            )
            value, idle = x[i], F32(F32(decay) * read[i])
            value, idle = (np.sqrt(value), np.sqrt(idle)) if moment.root else (value, idle)
            limit = {"e4m3fn": 464, "e5m2": 61440}[moment.fmt.name]
            counted[f"clipped_{which}"] += bool(abs(value) > F32(limit) * inverse)
            same = (
                moments.round_codes(np.array([F32(idle) / inverse], F32), moment, 0, None)[0]
                == stored.codes[i]
            )
            counted[f"stalled_{which}"] += bool(same and stored.codes[i] & 0x7F)
    assert {key: getattr(found, key) for key in counted} == counted
    assert (counted["clipped_m"] > 0) == (name == "previous")


@pytest.mark.parametrize("case", idle_and_stalling())
def test_bounded_and_stalled_have_one_reading(case):  # O-6, O-12
    layout, g, counts = idle_and_stalling()[case]
    state, before = run(g, layout)
    found = health.measure(g[-1], before, state, layout=layout)
    assert {key: getattr(found, key) for key in counts} == counts
    at = data.scalars(2, learning_rate=0.0, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0)
    m, v = moments.averages(states.in_range(g[-1]), *states.decode(before, layout), at, layout)
    # the scale of O-7, of which the kept one is the reciprocal, has two codes more
    if case == "stalled":
        scale, inverse = moments.scales(np.abs(m).max(), layout.m)
        assert inverse == state.m.scale_inv[0]
        codes = state.m.codes
        by_scale = moments.round_codes(
            F32(at.b1) * states.decode(state, layout)[0] * scale, layout.m, 0, None
        )
        assert ((codes & 0x7F != 0) & (by_scale == codes)).sum() == counts["stalled_m"] + 2
    else:
        assert (np.abs(moments.ratio(m, v, at)) > F32(at.bound)).sum() == 63


def test_it_is_of_one_step():  # O-12
    state = states.init((4,))
    with pytest.raises(ValueError, match="health compares one step"):
        health.measure(np.zeros(4, F32), state, state)
