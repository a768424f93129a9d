"""The backward pass of attention in MX blocks (spec A-16); tests/parity holds it to the
simulator.
"""

import jax
import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.attention.gradients import mx as mx
from fp8ref.sim.attention.operands import heads as head_scaling


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("axis", [3, 4])
def test_blocks_of_ds(axis, fmt):  # A-16, step 5
    rng = np.random.default_rng(0)
    ds = (
        rng.standard_normal((1, 2, 2, 64, 96)) * np.exp(4 * rng.standard_normal((1, 2, 2, 64, 96)))
    ).astype(np.float32)
    ds[0, 0, 0, :32] = 0  # blocks of zeros have a scale too
    found = jax.jit(lambda x: mx.blocks(x, fmt, "mx_rceil", axis))(ds)
    for g in range(2):
        wanted = head_scaling.quantize(
            ds[:, :, g], fmt, "mx_1x32", "mx_rceil", heads=2, along_tokens=axis == 3
        )
        values = wanted.values * head_scaling.spread(
            wanted.scale_inv, ds[:, :, g].shape, "mx_1x32", along_tokens=axis == 3
        )
        np.testing.assert_array_equal(np.asarray(found[:, :, g].astype(np.float32)), values)
