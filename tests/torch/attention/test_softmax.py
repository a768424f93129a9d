"""One tile of the online softmax, bit for bit the simulator's definition (spec A-4 to A-8)."""

import dataclasses

import numpy as np
import pytest
import torch

from fp8ref.sim.attention import softmax as sim
from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.torch.attention import softmax as online_softmax

F = np.float32
OTHERS = {
    "fa3 with threshold 4": dataclasses.replace(VARIANTS["fa3"], threshold=4.0),
    "cudnn with threshold 4": dataclasses.replace(VARIANTS["cudnn"], threshold=4.0),
    "cudnn packed": dataclasses.replace(VARIANTS["cudnn"], sum_order="packed"),
}
KINDS = {name: v for name, v in VARIANTS.items() if name not in ("exact", "mxfp8")} | OTHERS


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_steps(name, masked, rng):
    """Three tiles of 64 keys; rows that see none, then some.

    Scores of a size at which maxima stay behind and do not.
    """
    variant, rows, keys = KINDS[name], 40, 64
    raw = variant.scores == "raw"
    factor, factors = F(0.37), [] if raw else [F(0.3), F(1.25)]
    right = sim.start(rows)
    state = online_softmax.start((rows,), variant.sum_order, torch.device("cpu"))
    for n in range(3):
        s = (rng.normal(size=(rows, keys)) * 8).astype(F)
        low, high = np.zeros(rows, np.int64), np.full(rows, keys)
        if masked:
            low, high = rng.integers(0, 40, rows), rng.integers(20, 65, rows)
            high[: 20 - 10 * n] = 0
        seen = sim.Seen(low, high, np.zeros(rows, np.int64), np.zeros(keys, np.int64))
        p, c = sim.step_plain(s, right, seen, variant, np.array(factors, F), factor)
        at = torch.arange(keys)
        visible = (
            (at >= torch.from_numpy(low)[:, None]) & (at < torch.from_numpy(high)[:, None])
            if masked
            else None
        )
        given = [float(factor)] if raw else [float(x) for x in factors]
        found, of_before, state = online_softmax.step(
            torch.from_numpy(s), state, visible, variant, given, "stated"
        )
        np.testing.assert_array_equal(found.numpy(), p)
        started = np.isfinite(right.maximum)  # before, there is nothing to multiply
        np.testing.assert_array_equal(of_before.numpy()[started], c[started])
        np.testing.assert_array_equal(state.maximum.numpy(), right.maximum)
        np.testing.assert_array_equal(
            online_softmax.total(state.sums, variant.sum_order).numpy(),
            sim.total(right, variant.sum_order),
        )


def test_a_nan_score_makes_nan_of_its_row():
    for name in ("fa3", "fa4_threshold4", "cudnn"):
        variant, s = VARIANTS[name], torch.zeros(2, 8)
        s[1, 3] = torch.nan
        state = online_softmax.start((2,), variant.sum_order, s.device)
        for _ in range(2):  # and it stays NaN
            _, _, state = online_softmax.step(s, state, None, variant, [1.0], "fast")
            s = torch.zeros(2, 8)
        total = online_softmax.total(state.sums, variant.sum_order)
        assert total.isnan().tolist() == [False, True], name


@pytest.mark.parametrize(("bias", "count"), [("fused", 1), ("separate", 2)])
def test_a_bias_is_computed_in_one_way(bias, count, monkeypatch):
    """Maxima are multiplied once for what is behind, and again for a separate bias alone."""
    calls, times = [], online_softmax.times
    monkeypatch.setattr(online_softmax, "times", lambda *pair: calls.append(pair) or times(*pair))
    variant = next(v for v in KINDS.values() if v.scores == "raw" and v.bias == bias)
    state = online_softmax.start((2,), variant.sum_order, torch.device("cpu"))
    online_softmax.step(torch.zeros(2, 8), state, None, variant, [1.0], "stated")
    # both times with the factor, which nothing else is multiplied by
    assert sum(factor == 1.0 for _, factor in calls if isinstance(factor, float)) == count
