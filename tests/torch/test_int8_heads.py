"""INT8 q and k in PyTorch: which elements share a scale, and what is not a number (spec A-26)."""

import numpy as np
import torch

from fp8ref.formats import E4M3FN
from fp8ref.sim import int8_heads as sim
from fp8ref.torch import int8_heads


def test_codes_and_scales_are_the_simulators():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, t, 8)).astype(np.float32) for n, t in ((4, 37), (2, 130), (2, 130)))
    k += 3
    v[:, :, :, 2] = 0
    wanted = sim.quantize(q, k, v, E4M3FN)
    found = int8_heads.quantize(*map(torch.from_numpy, (q, k, v)), E4M3FN)
    for role, one in wanted.items():
        mine = found[role]
        np.testing.assert_array_equal(mine.codes.view(torch.uint8).numpy(), one.codes.view(np.uint8), err_msg=role)
        for name in ("amax", "scale", "scale_inv"):
            np.testing.assert_array_equal(getattr(mine, name).numpy(), getattr(one, name), err_msg=f"{role} {name}")
    np.testing.assert_array_equal(int8_heads.taken(torch.from_numpy(q), torch.from_numpy(k)).numpy(), sim.taken(q, k))


def test_a_nan_reaches_its_group():
    q = torch.ones(1, 1, 32, 4)
    q[0, 0, 3, 1] = torch.nan
    found = int8_heads.quantize(q, torch.ones(1, 1, 4, 4), torch.ones(1, 1, 4, 4), E4M3FN)
    assert torch.nonzero(found["q"].scale_inv[0, 0, :, 0].isnan()).flatten().tolist() == [3]
