"""Shifted scores in PyTorch: a step is the simulator's, and so is the last tile of 64 queries (spec A-26)."""

import numpy as np
import torch

from fp8ref.attention import VARIANTS, Mask
from fp8ref.sim import attention_inputs, online_softmax
from fp8ref.sim import shifted_softmax as sim
from fp8ref.torch import shifted_softmax
from fp8ref.torch.attention_inputs import Shape, Spec
from fp8ref.torch.online_softmax import Rows


def test_a_step_is_the_simulators():
    rng = np.random.default_rng(0)
    state = online_softmax.start(5)
    mine = Rows(torch.full((5,), -torch.inf), torch.zeros(5, 4))
    for high in (32, 20):
        s, factor = rng.integers(-(2**20), 2**20, (5, 32)).astype(np.float32), rng.uniform(1e-6, 2e-6, (5, 32)).astype(np.float32)
        zeros = np.zeros(5, np.int64)
        p, c = sim.step(s, factor, state, online_softmax.Seen(zeros, np.full(5, high), zeros, np.zeros(32, np.int64)), np.float32(8.807))
        seen = (torch.arange(32) < high).expand(5, 32)
        found, of_before, mine = shifted_softmax.step(torch.from_numpy(s), torch.from_numpy(factor), mine, seen, 8.807, "stated")
        for got, wanted in ((found, p), (of_before, c), (mine.maximum, state.maximum), (mine.sums, state.sums)):
            np.testing.assert_array_equal(got.numpy(), wanted)


def test_last_tiles_are_the_simulators():
    for mask in (Mask(), Mask(causal=True), Mask(causal=True, alignment="start"), Mask(window=(9, 70))):
        spec, shape = Spec(variant=VARIANTS["sage"], mask=mask), Shape(1, 1, 1, 150, 400, 64)
        _, high = attention_inputs.visible(150, 400, mask)
        assert shifted_softmax.last_tiles(spec, shape) == sim.last_tiles(high, 400, 128)[::64].tolist()
