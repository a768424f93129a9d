"""The textbook's attention has the bits of the variant that it states (spec A-1 to A-11)."""

import dataclasses

import numpy as np
import pytest

from fp8ref.formats import FLOAT32
from fp8ref.sim.attention import attention
from fp8ref.sim.attention.plain import attention_plain
from fp8ref.spec.attention.variants import VARIANTS, Mask

CUDNN = dataclasses.replace(VARIANTS["cudnn"], out=FLOAT32)


@pytest.mark.parametrize("spread", [1, 30])
@pytest.mark.parametrize(("queries", "keys"), [(5, 7), (130, 300), (64, 128)])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=(40, 0))], ids=str)
def test_it_has_the_bits_of_the_simulator(rng, mask, queries, keys, spread):
    q = (spread * rng.standard_normal((queries, 48))).astype(np.float32)
    k, v = rng.standard_normal((2, keys, 48)).astype(np.float32)
    position = np.arange(queries)[:, None] + keys - queries  # of a query among the keys
    behind = position - np.arange(keys)
    visible = np.ones((queries, keys), bool)
    if mask.causal or mask.window:
        visible = behind >= 0
    if mask.window:
        visible &= behind <= 40
    o, lse = attention_plain(q, k, v, visible)
    expected = attention.forward(*(x[None, None] for x in (q, k, v)), variant=CUDNN, mask=mask)
    np.testing.assert_array_equal(o, expected.o[0, 0])
    np.testing.assert_array_equal(lse, expected.lse[0, 0])


def test_a_row_without_keys_is_zero(rng):
    q, k, v = rng.standard_normal((3, 9, 16)).astype(np.float32)
    visible = np.ones((9, 9), bool)
    visible[3] = False
    o, lse = attention_plain(q, k, v, visible)
    assert not o[3].any()
    assert lse[3] == -np.inf
    assert np.isfinite(lse[visible.any(axis=1)]).all()
