"""fp8ref's own delayed scaling against a plain replay; the libraries' are in
test_delayed_libraries.py.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8ref.formats import E2M1FN, E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.sim import delayed
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec.delayed import DELAYED, DelayedScaling

OWN = DELAYED["delayed"]
F32 = np.float32
amax_values = st.sampled_from(
    [0.0, 2.0**-149, 1e-36, 2.0**-20, 1.0, 1.5, 448.0, 3e38, np.inf, np.nan]
)


def run(config, trace, fmt=E4M3FN, state=None):
    """Scales and states of a trace of steps, each a list of observations."""
    state, used, states = state or delayed.init(config), [], []
    for observations in trace:
        state, scales = delayed.step(state, *observations, config=config, fmt=fmt)
        used.append(scales.scale)
        states.append(state)
    return used, states


def seen(*amaxes):
    return [[delayed.observe(F32(a))] for a in amaxes]


def replay(amaxes, *, length=16, most_recent=False, interval=1, margin=0, limit=448.0):
    """H-1 to H-6 for one tensor in Python: None is an unused step.

    Yields (scale of the step, history after it).
    """
    scale, history, updates = 1.0, [], 0
    for a in amaxes:
        before = scale
        if a is not None and np.isfinite(a):
            history = [a, *history][:length]
            largest = history[0] if most_recent else max(history)
            if updates % interval == 0 and largest > 0:
                with np.errstate(over="ignore"):
                    scale = float(min(F32(limit * 2.0**-margin / largest), np.finfo(F32).max))
            updates += 1
        yield before, history + [0.0] * (length - len(history))


@given(
    st.lists(st.none() | amax_values, max_size=24),
    st.sampled_from([1, 2, 3, 16]),
    st.booleans(),
    st.integers(1, 4),
    st.integers(0, 2),
)
# H-1 to H-6
def test_any_trace_equals_a_plain_replay(amaxes, length, most_recent, interval, margin):
    policy = dataclasses.replace(POLICIES["te_delayed"], margin=margin)
    algorithm = "most_recent" if most_recent else "max"
    config = DelayedScaling(
        name="mine", history_length=length, amax_compute=algorithm, interval=interval, policy=policy
    )
    amaxes = [None if a is None else float(F32(a)) for a in amaxes]
    trace = [[] if a is None else [delayed.observe(F32(a))] for a in amaxes]
    scales, states = run(config, trace)
    expected = list(
        replay(amaxes, length=length, most_recent=most_recent, interval=interval, margin=margin)
    )
    assert [float(s) for s in scales] == [s for s, _ in expected]
    assert [s.amax_history.tolist() for s in states] == [h for _, h in expected]


def test_the_first_scale_is_one_and_each_comes_from_the_steps_before():  # H-1, H-2
    scales, _ = run(OWN, seen(2, 8, 4))
    assert scales == [1, 224, 56]


def test_an_empty_history_leaves_the_scale_one():  # H-2
    for config in DELAYED.values():
        scales, states = run(config, [[], []])
        assert scales[0] == 1, config.name
        assert not states[-1].amax_history.any()


def test_a_history_is_newest_first_and_forgets():  # H-3
    config = dataclasses.replace(OWN, history_length=2)
    scales, states = run(config, seen(8, 1, 2, 1))
    assert scales == [1, 56, 56, 224]
    assert states[-1].amax_history.tolist() == [1, 2]


def test_most_recent_and_interval_and_margin():  # H-6
    assert run(dataclasses.replace(OWN, amax_compute="most_recent"), seen(8, 1, 2, 1))[0] == [
        1,
        56,
        448,
        224,
    ]
    assert run(dataclasses.replace(OWN, interval=3), seen(8, 16, 32, 64, 1))[0] == [
        1,
        56,
        56,
        56,
        7,
    ]
    policy = dataclasses.replace(POLICIES["te_delayed"], margin=2)
    assert run(dataclasses.replace(OWN, policy=policy), seen(8, 1))[0] == [1, 14]


def test_what_is_unused_or_not_finite_changes_nothing_and_zero_is_recorded():  # H-5
    _, (before, *after) = run(
        OWN, [*seen(8), [], *seen(np.inf, np.nan), [delayed.observe(F32(2), non_finite=True)]]
    )
    for state in after:
        for kept, was in zip(state, before, strict=True):
            np.testing.assert_array_equal(kept, was)
    _, states = run(OWN, seen(8, 0))
    assert states[-1].amax_history[:2].tolist() == [0, 8]
    assert (states[-1].stored, states[-1].step) == (56, 2)


def test_an_infinity_does_not_freeze_the_scale():  # H-5, H-7
    """As it does in TE, for as long as it stays in the history."""
    trace = seen(8, np.inf, 16, 16)
    assert run(OWN, trace)[1][-1].stored == 28
    assert (
        run(dataclasses.replace(DELAYED["te_delayed"], history_length=3), trace)[1][-1].stored == 56
    )


observations = st.builds(
    lambda a, f, s: delayed.observe(F32(a), non_finite=f, seen=s),
    amax_values,
    st.booleans(),
    st.booleans(),
)


@given(st.lists(observations, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_merging_is_in_any_order_and_grouping(parts, random):  # H-4
    whole = delayed.merge(*parts)
    random.shuffle(parts)
    cut = random.randrange(len(parts) + 1)
    grouped = delayed.merge(delayed.merge(*parts[:cut]), delayed.merge(*parts[cut:]))
    for a, b in zip(whole, grouped, strict=True):
        np.testing.assert_array_equal(a, b)
    used = [p for p in parts if p.seen]
    assert whole.seen == bool(used)
    np.testing.assert_array_equal(whole.amax, np.max([p.amax for p in used], initial=0))
    assert whole.non_finite == any(p.non_finite for p in used)


def test_microbatches_and_shards_count_as_one_step(rng):  # H-4
    """The update sees the whole batch's amax, however it was cut; a layer that takes its second
    microbatch only is used.
    """
    x = rng.standard_normal((32, 16)).astype(F32)
    whole = run(OWN, [[delayed.observe(scaling.amax(x))]])[1][0]
    cut = run(OWN, [[delayed.observe(scaling.amax(part)) for part in np.split(x, [5, 9])]])[1][0]
    late = run(OWN, [[delayed.observe(F32(0), seen=False), delayed.observe(scaling.amax(x))]])[1][0]
    for state in (cut, late):
        for a, b in zip(state, whole, strict=True):
            np.testing.assert_array_equal(a, b)


def test_states_are_vectors_of_independent_ones(rng):  # H-3
    values = np.array([0, 1e-36, 0.1, 1, 700, np.inf, np.nan], F32)
    for config in DELAYED.values():
        config = dataclasses.replace(config, history_length=3)
        state = delayed.init(config, (4, 3))
        singles = [delayed.init(config) for _ in range(12)]
        for _ in range(8):
            amax, used = rng.choice(values, (4, 3)), rng.random((4, 3)) < 0.8
            again = delayed.observe(rng.choice(values, (4, 3)), seen=rng.random((4, 3)) < 0.3)
            uses = delayed.observe(amax, seen=used), again
            state = delayed.update(state, *uses, config=config, fmt=E5M2)
            for i, place in enumerate(itertools.product(range(4), range(3))):
                each = [delayed.Observation(*(part[place] for part in use)) for use in uses]
                singles[i] = delayed.update(singles[i], *each, config=config, fmt=E5M2)
                for whole, single in zip(state, singles[i], strict=True):
                    np.testing.assert_array_equal(whole[place], single)


def test_a_tensor_is_quantized_by_the_scales_of_the_state(rng):  # H-1
    x = rng.standard_normal((4, 8)).astype(F32)
    state = delayed.update(delayed.init(OWN), delayed.observe(F32(2)), config=OWN, fmt=E4M3FN)
    q = scaling.quantize_with(x, delayed.scales(state, OWN, E4M3FN), E4M3FN, policy=OWN.policy)
    same = scaling.quantize(np.append(np.clip(x, -2, 2).ravel(), F32(2)), E4M3FN)
    assert q.scale == same.scale == 224
    np.testing.assert_array_equal(q.codes.ravel(), same.codes[:-1])


def test_decisions_combine():  # H-1, H-5, H-8
    """Those of the named configs, one by one exchanged: scale_inv stored for the next step; uses
    added up, and unused states kept.
    """
    scales, states = run(dataclasses.replace(OWN, policy=POLICIES["flax"]), seen(2, 8))
    assert scales == [1, F32(1) / (F32(1) / F32(224))]
    assert [s.stored for s in states] == [F32(1) / F32(224), F32(1) / F32(56)]
    config = dataclasses.replace(DELAYED["flax"], history_length=2, unused="keep")
    state = run(config, seen(2, 2))[1][-1]
    assert state.step == 2
    missed = delayed.observe(F32(9), seen=False)
    once = delayed.update(state, delayed.observe(F32(4)), config=config, fmt=E4M3FN)
    for uses, expected in (((missed,), state), ((missed, delayed.observe(F32(4)), missed), once)):
        for found, value in zip(
            delayed.update(state, *uses, config=config, fmt=E4M3FN), expected, strict=True
        ):
            np.testing.assert_array_equal(found, value)


def test_nothing_is_changed_in_place():
    state = delayed.init(OWN, (2,))
    use = delayed.observe(np.array([1, 2], F32))
    for array in (*state, *use):
        array.flags.writeable = False
    delayed.update(state, use, config=OWN, fmt=E4M3FN)
    assert state.stored.tolist() == [1, 1]
    assert not state.amax_history.any()


@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_orders_of_the_libraries(length):  # H-7, H-8
    history = np.arange(length, 0, -1, dtype=F32) + 10  # newest first
    rolled = np.zeros(length, F32)  # as flax does: roll by -1, then the newest to the front
    for a in history[::-1]:
        rolled = np.roll(rolled, -1)
        rolled[0] = a
    np.testing.assert_array_equal(delayed.flax_order(history), rolled)
    np.testing.assert_array_equal(delayed.flax_order(rolled), history)
    np.testing.assert_array_equal(delayed.te_order(history), [0, *history[:-1][::-1]])


@pytest.mark.parametrize(
    ("fmt", "fits", "clips"),
    [(E4M3FN, 464.0, 464.5), (E5M2, 61439.0, 61440.0), (E2M1FN, 6.9375, 7.0)],
)
def test_an_amax_is_clipped_where_it_rounds_beyond_max(fmt, fits, clips):
    amaxes = np.array([fits, clips, 2 * fits, 2 * clips, 0, np.inf, np.nan], F32)
    assert delayed.clipped(amaxes, np.array([1, 1, 0.5, 0.5, np.inf, 1, 1], F32), fmt).tolist() == [
        False,
        True,
        False,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(("fmt", "edge"), [(E4M3FN, 464.0), (E5M2, 61440.0)])
def test_what_is_clipped_is_what_saturating_changes(rng, fmt, edge):  # Q-11, C-4
    """Of the amaxes next to the last one whose product, rounded to float32, fits."""
    scale = rng.uniform(0.1, 10, 100).astype(F32)
    amaxes = (
        ((F32(edge) / scale).view(np.uint32)[:, None] + np.arange(-4, 5))
        .astype(np.uint32)
        .view(F32)
    )
    codes = [
        cast.encode(amaxes * scale[:, None], fmt, saturate=saturate) for saturate in (True, False)
    ]
    found = delayed.clipped(amaxes, scale[:, None], fmt)
    np.testing.assert_array_equal(found, codes[0] != codes[1])
    assert found.any(axis=1).all()
    assert not found.all(axis=1).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: delayed.observe(np.float64(1)), "amax is float32; got float64"),
        (lambda: delayed.observe(F32(-1)), "never negative"),
        (
            lambda: delayed.update(
                delayed.init(OWN, (2,)), delayed.observe(F32(1)), config=OWN, fmt=E4M3FN
            ),
            r"shape \(2,\), as the state",
        ),
        (
            lambda: delayed.update(delayed.init(OWN), config=DELAYED["flax"], fmt=E4M3FN),
            r"\(1024,\).*got \(16,\).*init",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_no_state():
    with pytest.raises(
        ValueError, match=r"a state is a DelayedState; got NoneType\. Make it by init"
    ):
        delayed.update(None, config="delayed", fmt=E4M3FN)
