import numpy as np
import pytest

from fp8ref.formats import E4M3FN
from fp8ref.sim import groups, scaling

SHAPES = {"tensorwise": (7, 24), "rowwise": (7, 24), "blockwise_1x128": (256, 256), "blockwise_128x128": (256, 384), "mx_1x32": (64, 96)}


def measure(x, q):
    yield "amax", np.maximum, np.abs(x)
    yield "positive", np.add, x > 0
    yield "scales", np.maximum, np.broadcast_to(scaling.spread(q.scale, x.shape, q.granularity, q.axis), x.shape)
    yield "sum", np.add, np.round(x * 8).astype(np.float64)  # integers: the order of the sum does not matter


@pytest.mark.parametrize("slab", [1, 200, 300, 1 << 20])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("granularity", SHAPES)
def test_slabs_change_nothing(granularity, axis, slab, rng, monkeypatch):
    monkeypatch.setattr(groups, "SLAB", slab)
    x = rng.standard_normal(SHAPES[granularity]).astype(np.float32)
    q = scaling.quantize(x, E4M3FN, granularity=granularity, axis=axis)
    each = groups.reduce_groups(x, q, measure, per_group=True)
    assert {value.shape for value in each.values()} == {q.scale.shape}
    np.testing.assert_array_equal(each["amax"], scaling.amax(x, granularity, axis=axis))
    np.testing.assert_array_equal(each["scales"], q.scale)
    whole = groups.reduce_groups(x, q, measure, per_group=False)
    assert whole["amax"] == np.abs(x).max()
    assert whole["positive"] == each["positive"].sum() == (x > 0).sum()
    assert whole["sum"] == each["sum"].sum() == np.round(x * 8).sum(dtype=np.float64)
    assert whole["positive"].dtype == each["positive"].dtype == np.int64


def test_a_scalar_is_one_group():
    x = np.float32(-3)
    assert groups.reduce_groups(x, scaling.quantize(x, E4M3FN), measure, per_group=True)["amax"] == 3
