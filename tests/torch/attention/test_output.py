"""Parts of the forward pass, against the simulator's: the cast of probabilities, the log-sum-exp
(spec A-8, A-11).
"""

import dataclasses

import numpy as np
import pytest
import torch

from fp8ref.formats import E5M2
from fp8ref.sim.attention import attention as sim
from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.torch.attention import output as attention_forward
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands.kept import Tally

F = np.float32
E5M2_VARIANT = dataclasses.replace(VARIANTS["cudnn"], name="e5m2", fmt=E5M2)


@pytest.mark.parametrize(
    "variant",
    [VARIANTS["fa3"], VARIANTS["cudnn"], VARIANTS["mxfp8"], E5M2_VARIANT, VARIANTS["bf16"]],
    ids=lambda v: v.name,
)
def test_probabilities_are_cast_and_counted(variant, rng):
    p = (2.0 ** rng.uniform(-20, 18, 5000)).astype(F)
    scale = F({"cudnn": 448, "e5m2": 57344, "mxfp8": 16}.get(variant.name, 1))
    values, lost, _ = sim.round_probabilities(p, scale, variant.fmt)
    given = None if variant.p_scale == 1 else torch.tensor(scale)
    found = heads.codes(torch.from_numpy(p), variant.fmt, given)
    np.testing.assert_array_equal(found.float().numpy(), values)
    tally = Tally(variant.fmt, "all", torch.device("cpu"))
    tally.count(torch.from_numpy(p), torch.tensor(scale))
    assert tally.saturated == lost
    assert (lost > 0) == (variant.fmt.bits == 8)


@pytest.mark.parametrize("name", ["fa3", "fa4", "cudnn", "fa3_paper"])
def test_log_sums(name, rng):
    variant = VARIANTS[name]
    factor = F(0.0173 if variant.scores == "raw" else 1)
    maximum = (rng.normal(size=500) * 100).astype(F)
    total = (rng.uniform(1, 5000, 500)).astype(F)
    maximum[:3], total[:3] = -np.inf, 0
    right = sim.log_sum(maximum, total, factor, variant)
    for given in (torch.tensor(factor), float(factor)):
        found = attention_forward.log_sum(
            torch.from_numpy(maximum), torch.from_numpy(total), given, variant
        )
        np.testing.assert_array_equal(found.numpy(), right)
    assert np.isneginf(right[:3]).all()
