"""Invariants of quantizers, and which policies and libraries break each (spec S-19)."""

import numpy as np
import pytest
import torch
from torchao.float8 import float8_utils

from fp8ref.conformance.invariants import QUANTIZERS, broken
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import cast, scaling

F32 = np.float32
EXAMPLES = 12

BREAK = {
    # elements and scale_inv are rounded to bfloat16 first (S-13)
    ("flax_bf16", "tensorwise"): {"error_bound", "saturation"},
    ("deepgemm", "rowwise"): {"power_of_two_equivariance"},  # an eps of 1e-4 (S-17)
}


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "key",
    [("torchao", "tensorwise"), ("torchao", "rowwise"), ("te_block", "tensorwise"), *BREAK],
    ids=str,
)
def test_policies(key):  # S-19
    policy, granularity = key

    def quantize(x):
        q = scaling.quantize(x, E4M3FN, policy=policy, granularity=granularity)
        return q.codes, q.scale

    # Which of them twenty examples break depends on what hypothesis draws.
    found = set(broken(quantize, QUANTIZERS, examples=20))
    assert found <= BREAK.get(key, set())
    assert bool(found) == (key in BREAK)


def of_torchao(x):
    x = torch.from_numpy(np.array(x))
    scale = float8_utils.tensor_to_scale(x, torch.float8_e4m3fn)
    return float8_utils.to_fp8_saturated(x * scale, torch.float8_e4m3fn), scale


def test_torchao_breaks_none():  # S-19
    assert broken(of_torchao, QUANTIZERS, examples=EXAMPLES) == {}


def scaled(x, scale, **how):
    with np.errstate(over="ignore"):
        return cast.encode_plain((x * F32(scale)).astype(F32), E4M3FN, **how), F32(scale)


def scale_of(x):
    return F32(448) / np.abs(x).max()


def by_position(x):
    """The first row loses its last bits."""
    codes, scale = scaled(x, scale_of(x))
    codes[0] &= 0xF8
    return codes, scale


def of_last_row(x):
    return scaled(x, scale_of(x[-1:]))


FAULTS = {
    "toward zero": (lambda x: scaled(x, scale_of(x), rounding="toward_zero"), {"error_bound"}),
    "clipped at 240": (
        lambda x: (*scaled(np.clip(x * scale_of(x), -240, 240), 1)[:1], scale_of(x)),
        {"error_bound"},
    ),
    "scale 1": (lambda x: scaled(x, 1), {"power_of_two_equivariance", "saturation"}),
    "mean for max": (lambda x: scaled(x, F32(448) / np.abs(x).mean()), {"saturation"}),
    "without sign": (lambda x: scaled(np.abs(x), scale_of(x)), {"odd", "monotone"}),
    "by position": (by_position, {"permutation", "sharding"}),
    "one sign is clipped": (
        lambda x: (scaled(np.maximum(x * scale_of(x), -240), 1)[0], scale_of(x)),
        {"odd", "error_bound"},
    ),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name):  # S-19
    made, breaks = FAULTS[name]
    assert breaks <= set(broken(made, QUANTIZERS, examples=EXAMPLES))
