"""The kernel of AdamW with moments in blocks, interpreted, makes the simulator's bits (spec O)."""

import numpy as np
import pytest

pytest.importorskip("triton")

from helpers.states.state_layouts import differing

from fp8ref.kernels import adamw_blocks
from fp8ref.kernels.jit import interpret
from fp8ref.sim.states import states
from fp8ref.spec.states import layouts

SHAPE = (9, 512)  # 36 blocks of 128: the last program has some past the end
HYPER = {"learning_rate": 1e-2, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def gradients(steps):
    """Of many magnitudes, a block of zeros, and at last what is out of range (O-2)."""
    rng = np.random.default_rng(0)
    for step in range(steps):
        g = (rng.standard_normal(SHAPE) * 10.0 ** rng.integers(-6, 3, SHAPE)).astype(np.float32)
        g[3, :256] = 0
        # rows whose expansions have every exponent (O-10)
        g[5], g[6] = (rng.uniform(1, most, SHAPE[1]) for most in (9, 200))
        if step == steps - 1:
            g[0, 7], g[2, 200], g[4, 0] = np.nan, 1e30, -np.inf
        yield g


def fields(state):
    return [np.asarray(x) for x in state if x is not None]


class Stepper:
    """A weight and its moments, which a launch changes in place."""

    def __init__(self, layout, p):
        self.layout, self.p = layout, p.copy()
        state = states.init(SHAPE, layout)
        self.kept = [x.copy() for x in (*fields(state.m), *fields(state.v))]

    def run(self, g, step, finite=1.0, factor=1.0):
        at = layouts.scalars(step, **HYPER)
        numbers = np.float32([*at, factor, finite, 1, 1])
        launch = adamw_blocks.step(self.p.size // self.layout.v.block, self.layout)
        half = len(self.kept) // 2
        kept = [*self.kept[:half], *self.kept[half:]]
        if half == 2:
            for place in (2, 2, 6, 6):
                kept.insert(place, np.zeros(1, np.float32))
        arrays = [self.p, g, numbers, *kept, self.p, *kept, np.zeros(1, np.int32)]
        arrays = [x if x.dtype.itemsize > 1 else x.view(np.uint8) for x in arrays]
        interpret(launch, arrays, [str(x.dtype) for x in arrays])


@pytest.mark.parametrize("name", ["sqrt_e4m3", "torchao", "coat"])
def test_bits_are_the_simulators(name):
    layout = layouts.LAYOUTS[name]
    p = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    mine, expected, state = Stepper(layout, p), p, states.init(SHAPE, layout)
    optimizer = states.AdamW(layout=layout, **HYPER)
    for i, g in enumerate(gradients(4)):
        mine.run(g / np.float32(2), i + 1, factor=2.0)
        expected, state = states.step(expected, g, state, optimizer)
        assert differing(mine.p, expected) == 0
        for x, y in zip(mine.kept, [*fields(state.m), *fields(state.v)], strict=True):
            assert differing(x, y) == 0


def test_a_step_that_is_not_finite_writes_nothing():  # T-4
    p = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    mine = Stepper(layouts.LAYOUTS["sqrt_e4m3"], p)
    g = next(gradients(2))
    mine.run(g, 1)
    before = [x.tobytes() for x in (mine.p, *mine.kept)]
    mine.run(g, 2, finite=0.0)
    assert [x.tobytes() for x in (mine.p, *mine.kept)] == before
