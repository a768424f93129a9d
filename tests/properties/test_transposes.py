"""Transposes: scaling commutes with one where the groups do, and otherwise not."""

import numpy as np
import pytest
from hypothesis import strategies as st
from properties.domains import F32, caught, for_all, spread_out, tensors

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.quantize import scaling
from fp8ref.spec.granularity import GRANULARITIES

seeds, formats = st.integers(0, 1 << 32), st.sampled_from([E4M3FN, E5M2])


def assert_transposed(q, of_transpose):
    np.testing.assert_array_equal(of_transpose.codes, q.codes.T)
    for scale, transposed in ((q.scale, of_transpose.scale), (q.scale_inv, of_transpose.scale_inv)):
        np.testing.assert_array_equal(transposed, scale.T)


def commutes(x, granularity, fmt=E4M3FN):
    """Whether one cast serves both GEMMs that reduce different axes, each as its last one."""
    q, of_transpose = (scaling.quantize(v, fmt, granularity=granularity) for v in (x, x.T))
    return np.array_equal(of_transpose.codes, q.codes.T)


@for_all(60, x=tensors((5, 7)), fmt=formats)
def test_tensorwise(x, fmt):
    """Any finite tensor (S-6)."""
    assert_transposed(*(scaling.quantize(v, fmt) for v in (x, x.T)))


@for_all(
    10,
    shape=st.tuples(st.sampled_from([128, 256]), st.sampled_from([128, 384])),
    seed=seeds,
    fmt=formats,
)
def test_blockwise_128x128(shape, seed, fmt):
    """Both dims multiples of 128 (S-6)."""
    x = spread_out(seed, shape)
    assert_transposed(
        *(scaling.quantize(v, fmt, granularity="blockwise_128x128") for v in (x, x.T))
    )


@pytest.mark.parametrize("granularity", list(GRANULARITIES))
@for_all(
    10,
    shape=st.tuples(st.sampled_from([1, 50, 128, 200]), st.sampled_from([128, 256])),
    seed=seeds,
    fmt=formats,
)
def test_every_granularity_if_the_axis_goes_along(granularity, shape, seed, fmt):
    """The reduced axis a multiple of the block, the other any: quantize(x.T, axis=0) is the
    transpose of quantize(x, axis=1) (S-6).
    """
    x = spread_out(seed, shape)
    q, of_transpose = (
        scaling.quantize(v, fmt, granularity=granularity, axis=axis)
        for v, axis in ((x, 1), (x.T, 0))
    )
    assert_transposed(q, of_transpose)


def test_not_rowwise():
    """Two elements are enough, and one is not: [1, 2] is one row, its transpose two (L-3)."""
    assert commutes(np.array([[3]], F32), "rowwise")
    assert not commutes(np.array([[1, 2]], F32), "rowwise")


@pytest.mark.parametrize(("granularity", "size"), [("blockwise_1x128", 128), ("mx_1x32", 32)])
def test_not_by_blocks_of_one_row(granularity, size):
    """One element other than the rest, in the least tensor that has blocks both ways (L-3)."""
    x = np.ones((size, size), F32)
    assert commutes(x, granularity)
    x[0, 1] = 3
    assert not commutes(x, granularity)
    assert granularity == "mx_1x32" or commutes(x, "blockwise_128x128")


def test_a_ragged_block_does_not_transpose():
    """The last block may be shorter along the other axis, not along the reduced one (S-6)."""
    x = np.ones((129, 128), F32)
    scaling.quantize(x, E4M3FN, granularity="blockwise_128x128")
    with pytest.raises(ValueError, match="divisible by 128"):
        scaling.quantize(x.T, E4M3FN, granularity="blockwise_128x128")


def test_planted_faults_are_caught(monkeypatch):
    """Blocks scaled by their first row, and one scale that the last column has no part in."""
    true_amax = scaling.amax

    def of_the_first(x, granularity, *, axis=-1, ragged=False):
        if granularity == "tensorwise":
            return true_amax(x[:, :-1])
        return true_amax(
            np.where(np.arange(len(x))[:, None] % 128 == 0, x, F32(0)), granularity, axis=axis
        )

    monkeypatch.setattr(scaling, "amax", of_the_first)
    assert caught(test_blockwise_128x128)
    assert caught(test_tensorwise)
