"""Narrow accumulators against loops in the format itself."""

import ml_dtypes
import numpy as np
import pytest

from fp8ref.conformance.gemm.grade.accumulators import TF32, Narrow, candidates, fitting
from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32
from fp8ref.sim.quantize import cast


def integers(k):
    return np.random.default_rng(0).integers(-225, 226, (3, 4, k)).astype(np.float64) + 60


@pytest.mark.parametrize(("fmt", "dtype"), [(BFLOAT16, ml_dtypes.bfloat16), (FLOAT16, np.float16)])
@pytest.mark.parametrize(
    ("every", "promotion", "split_k"),
    [(1, None, 1), (16, None, 1), (16, 64, 1), (32, 32, 1), (8, None, 3)],
)
def test_against_a_loop(fmt, dtype, every, promotion, split_k):
    products = integers(384)
    total = np.zeros((3, 4), np.float32)
    for part in np.split(products, split_k, axis=-1):
        for chain in (
            np.split(part, range(promotion, part.shape[-1], promotion), axis=-1)
            if promotion
            else [part]
        ):
            acc = np.zeros((3, 4), dtype)
            for k in range(0, chain.shape[-1], every):
                acc = (
                    acc.astype(np.float32) + chain[..., k : k + every].sum(-1).astype(np.float32)
                ).astype(dtype)
            total = total + acc.astype(np.float32)
    found = Narrow(fmt=fmt, every=every, promotion=promotion, split_k=split_k).sums(products, 384)
    assert np.array_equal(found, total)


def test_toward_zero():
    found = Narrow(fmt=TF32, every=32, rounding="toward_zero").sums(integers(64), 64)
    assert np.array_equal(found, cast.round_to(found, TF32))
    assert (np.abs(found) <= np.abs(integers(64).sum(-1))).all()


def test_zeros_at_the_end_of_k_change_no_sum():
    products = integers(128)
    whole = np.concatenate([products, np.zeros((3, 4, 384))], axis=-1)
    for one in (
        Narrow(fmt=BFLOAT16, every=16),
        Narrow(fmt=BFLOAT16, every=16, promotion=64),
        Narrow(fmt=BFLOAT16, every=8, split_k=2, narrow_sum=True),
    ):
        assert np.array_equal(one.sums(products, 512), one.sums(whole, 512))


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "planted",
    [
        Narrow(fmt=BFLOAT16, every=4),
        Narrow(fmt=FLOAT16, every=128, rounding="toward_zero"),
        Narrow(fmt=BFLOAT16, every=8, promotion=64),
        Narrow(fmt=BFLOAT16, every=None, split_k=3, narrow_sum=True),
    ],
)
def test_a_planted_accumulator_is_among_the_first_that_fit(planted):
    products = integers(1024)
    found = cast.round_to(planted.sums(products, 1024).astype(np.float32), FLOAT32)
    fits = next(
        fits
        for tried in candidates(1024)
        if (fits := fitting(products, found, 1024, 1.0, FLOAT32, tried))
    )
    assert planted in fits
    assert all(np.array_equal(one.sums(products, 1024), found) for one in fits)
