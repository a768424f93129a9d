"""Delayed scaling: how far a scale made of past amaxes can be from the one that this step's would
give (spec H).

Of amaxes that grow by at most g and shrink by at most r a step, with a history of L and an update
at every n-th step, the scaled amax must be between max * r^-(L + n - 1) and max * g^n: above, the
excess saturates; below, the low exponents go unused.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import strategies as st
from properties.domains import F32, caught, for_all

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim import delayed
from fp8ref.sim.delayed import DELAYED
from fp8ref.sim.quantize import cast, scaling

each_config = pytest.mark.parametrize("name", list(DELAYED))
lengths, formats = st.integers(1, 6), st.sampled_from([E4M3FN, E5M2])


@st.composite
def traces(draw, least: int = 2):
    """Positive float32 amaxes, each up to 8 times more or less than the one before; between 2^-50
    and 2^50.
    """
    steps = draw(
        st.lists(st.floats(-3, 3) | st.sampled_from([0.0, 3.0, -3.0]), min_size=least, max_size=14)
    )
    return np.exp2(np.cumsum([draw(st.floats(-8, 8)), *steps])).astype(F32)


def config_of(name, length, interval=1, algorithm="max"):
    return dataclasses.replace(
        DELAYED[name], history_length=length, interval=interval, amax_compute=algorithm
    )


def scales_of(amaxes, config, fmt, state=None):
    """The scale that each step's tensor is quantized by; None is a step without a use."""
    state, used = state or delayed.init(config), []
    for amax in amaxes:
        uses = [] if amax is None else [delayed.observe(F32(amax))]
        state, scales = delayed.step(state, *uses, config=config, fmt=fmt)
        used.append(float(scales.scale))
    return np.array(used)


@each_config
@for_all(100, amaxes=traces(), length=lengths, fmt=formats)
def test_the_scale_is_that_of_the_last_amaxes(name, amaxes, length, fmt):
    """Positive finite amaxes, from the second step on: torchao's formula on the largest of the last
    L, and none of it this step's (H-1, H-3).
    """
    used = scales_of(amaxes, config_of(name, length), fmt)
    largest = np.array([amaxes[max(0, t - length) : t].max() for t in range(1, len(amaxes))])
    np.testing.assert_array_equal(used[1:], scaling.scale_from_amax(largest, fmt))
    assert used[0] == 1


@each_config
@for_all(100, amaxes=traces(), length=lengths, fmt=formats)
def test_only_growth_saturates(name, amaxes, length, fmt):
    """Positive finite amaxes, from the second step on: unless amax exceeds the last L, its product
    fits, unclipped (H-1, S-5).
    """
    used = scales_of(amaxes, config_of(name, length), fmt).astype(F32)
    for t in range(1, len(amaxes)):
        if amaxes[t] <= amaxes[max(0, t - length) : t].max():
            assert np.isfinite(
                cast.decode(cast.encode(amaxes[t] * used[t], fmt, saturate=False), fmt)
            )


@pytest.mark.grid(2)
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@for_all(100, amaxes=traces(), length=lengths, fmt=formats)
def test_staleness_is_bounded(algorithm, interval, amaxes, length, fmt):
    """Positive finite amaxes, from the second step on; ``most_recent`` is as a history of 1 (H-3,
    H-6).

    The scale in use was made after step u, at most n steps ago, of the steps from u - L + 1 to u.
    The largest of these is at least this step's amax / g^n; and at most r^(n + L - 1) times it. The
    scale rounds once, 2^-24; the float64 arithmetic here is finer by far.
    """
    used = scales_of(amaxes, config_of("delayed", length, interval, algorithm), fmt)
    ratio = amaxes[1:].astype(np.float64) / amaxes[:-1]
    grow, shrink = max(1, ratio.max()), max(1, 1 / ratio.min())
    scaled = (amaxes * used)[1:] / fmt.max
    memory = interval + (length if algorithm == "max" else 1) - 1
    assert (scaled <= grow**interval * (1 + 2.0**-23)).all()
    assert (scaled >= shrink**-memory * (1 - 2.0**-23)).all()


@for_all(60, before=st.tuples(traces(1), traces(1)), after=traces(6), length=lengths, fmt=formats)
def test_a_scale_forgets_after_its_history(before, after, length, fmt):
    """Positive finite amaxes, an update each step: pasts that share the last L amaxes share the
    scale, bit for bit (H-3).
    """
    assert len(after) > length
    a, b = (
        scales_of([*past, *after], config_of("delayed", length), fmt)[len(past) :]
        for past in before
    )
    np.testing.assert_array_equal(a[length:], b[length:])


@pytest.mark.parametrize("grow", [1.0, 4.0, 64.0])
def test_growth_by_g_saturates_by_g(grow):
    """The bound is reached: after a steady 1, an amax g reads back as 1 (H-1)."""
    used = scales_of([1, grow], config_of("delayed", 16), E4M3FN)[1]
    scales = scaling.Scales(F32(used), F32(1) / F32(used))
    assert scaling.dequantize(scaling.quantize_with(np.array([grow], F32), scales, E4M3FN)) == F32(
        448
    ) * (F32(1) / F32(448))


def test_an_outlier_stays_for_sixteen_steps_and_no_longer():
    """The other bound is reached: the 16 scales after an outlier of 1000 are its own, the 17th is
    that of 1 (H-1, H-3).
    """
    used = scales_of([1000] + [1] * 17, DELAYED["delayed"], E4M3FN)
    assert used[1:].tolist() == [float(F32(0.448))] * 16 + [448]


def test_the_first_step_has_no_bound():
    """An empty history scales by 1, whatever comes (H-2): 2^20 saturates by 2^20 / 448, and 2^-20
    underflows.
    """
    assert (
        scales_of([2.0**20], DELAYED["delayed"], E4M3FN)
        == scales_of([2.0**-20], DELAYED["delayed"], E4M3FN)
        == 1
    )


def test_steps_without_a_use_and_zeros_do_not_age_what_is_kept():
    """ "After L steps" means of observed ones; and a history of nothing but zeros keeps the scale
    it had (H-5, S-11).
    """
    config = config_of("delayed", 2)
    assert scales_of([1000, None, None, None, 1, 1, 1], config, E4M3FN)[-3:].tolist() == [
        float(F32(0.448))
    ] * 2 + [448]
    assert (scales_of([1000] + [0] * 5, config, E4M3FN)[1:] == F32(0.448)).all()
    # which skips a zero: it does not even push the outlier out (H-7)
    te = config_of("te_delayed", 2)
    assert scales_of([1000, 0, 0, 1, 1], config, E4M3FN)[-1] == 448
    assert scales_of([1000, 0, 0, 1, 1], te, E4M3FN)[-1] == F32(0.448)


def test_an_interval_makes_growth_compound():
    """Updated at every second step, doubling each step: 4 times max, which one factor g does not
    bound (H-6).
    """
    used = scales_of([1, 2, 4], config_of("delayed", 16, interval=2), E4M3FN)
    assert (used * [1, 2, 4])[1:].tolist() == [2 * 448, 4 * 448]


def test_planted_faults_are_caught(monkeypatch):
    """A history that is one short, a scale that knows this step's amax, and one that comes a step
    late.
    """
    true_config, true_step, true_scales = config_of, delayed.step, scales_of
    with monkeypatch.context() as planted:
        planted.setitem(
            globals(), "config_of", lambda name, length: true_config(name, max(1, length - 1))
        )
        assert caught(test_only_growth_saturates, name="delayed")
        assert caught(test_the_scale_is_that_of_the_last_amaxes, name="delayed")

    def eager(state, *uses, config, fmt):
        state, _ = true_step(state, *uses, config=config, fmt=fmt)
        return state, delayed.scales(state, config, fmt)

    with monkeypatch.context() as planted:
        planted.setattr(delayed, "step", eager)
        assert caught(test_the_scale_is_that_of_the_last_amaxes, name="delayed")

    def late(amaxes, config, fmt):
        used = true_scales(amaxes, config, fmt)
        return np.append(used[:1], used[:-1])

    with monkeypatch.context() as planted:
        planted.setitem(globals(), "scales_of", late)
        assert caught(test_staleness_is_bounded, algorithm="max", interval=1)
