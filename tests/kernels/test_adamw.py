"""The kernel of AdamW, interpreted, makes the simulator's bits: weights, moments, codes, amax (spec
O-2 to O-6)."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

from fp8ref.formats import E4M3FN
from fp8ref.kernels import adamw
from fp8ref.kernels.jit import interpret
from fp8ref.sim.quantize import cast
from fp8ref.sim.states import states
from fp8ref.spec.states import layouts

SHAPE = (35, 70)
NUMBERS = {"learning_rate": 1e-2, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def run(launch, inputs, outputs):
    arrays = [*inputs, *outputs]
    interpret(launch, arrays, [str(x.dtype) for x in arrays])
    return outputs


def numbers(step, factor=1.0):
    scalars = layouts.scalars(step, **NUMBERS)._asdict() | {"factor": factor}
    return np.float32([scalars[name] for name in adamw.NUMBERS])


def gradients(steps):
    """Of many magnitudes, with what is out of range at last (O-2)."""
    rng = np.random.default_rng(0)
    for step in range(steps):
        g = (rng.standard_normal(SHAPE) * 10.0 ** rng.integers(-20, 3, SHAPE)).astype(np.float32)
        if step == steps - 1:
            g[0, :4] = np.nan, np.inf, 2.0**57, -(2.0**-57)
        yield g


def empty():
    return [np.zeros(SHAPE, np.float32) for _ in range(3)]


def test_steps_codes_and_amax():
    p = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    m, v = np.zeros_like(p), np.zeros_like(p)
    expected, state = p, states.init(SHAPE, "float32")
    scale, optimizer = np.float32([100]), states.AdamW(layout="float32", **NUMBERS)
    for i, g in enumerate(gradients(4)):
        expected, state = states.step(expected, g, state, optimizer)
        weight = np.zeros(SHAPE, ml_dtypes.bfloat16)
        codes, transposed = np.zeros(SHAPE, np.uint8), np.zeros(SHAPE[::-1], np.uint8)
        launch = adamw.step_and_cast(SHAPE, e5m2=False)
        amaxes = np.zeros(launch.programs, np.int32)
        p, m, v, *_ = run(
            launch,
            [p, g, m, v, numbers(i + 1), scale],
            [*empty(), weight, codes, transposed, amaxes],
        )
        for mine, theirs in ((p, expected), (m, state.m.codes), (v, state.v.codes)):
            assert (mine.view(np.int32) == np.asarray(theirs).view(np.int32)).all()
        rounded = p.astype(ml_dtypes.bfloat16)
        assert (weight.view(np.int16) == rounded.view(np.int16)).all()
        wide = rounded.astype(np.float32)
        with np.errstate(all="ignore"):
            assert (codes == cast.encode(wide * scale, E4M3FN)).all()
        assert (transposed == codes.T).all()
        if i < 3:
            assert amaxes.max().view(np.float32) == np.abs(wide).max()
    assert np.isnan(amaxes.max().view(np.float32))


def test_gradients_are_scaled_and_a_nan_factor_skips_the_step():
    p, g = (
        np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32) for seed in (0, 1)
    )
    launch = adamw.step(SHAPE)
    results = []
    for gradient, factor in ((g, 0.5), (g * np.float32(0.5), 1.0), (g, np.nan)):
        amaxes = np.zeros(launch.programs, np.int32)
        m = v = np.ones_like(p)
        weight = np.zeros(SHAPE, np.float32)
        inputs = [p, gradient, m, v, numbers(3, factor)]
        results.append(run(launch, inputs, [*empty(), weight, amaxes]))
    for one, other in zip(*results[:2], strict=True):
        assert (one == other).all()
    assert all((x == y).all() for x, y in zip(results[2], [p, m, v, p], strict=False))
