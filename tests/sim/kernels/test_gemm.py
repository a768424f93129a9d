"""The compiled GEMMs against the plain ones, bit for bit."""

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FP8_FORMATS
from fp8ref.sim import threads as parallel
from fp8ref.sim.gemm import accumulate, gemm
from fp8ref.sim.kernels import gemm as kernels
from fp8ref.sim.quantize import cast
from fp8ref.spec.epilogue import EPILOGUES


def bits(values):
    assert values.dtype == np.float32
    return values.view(np.uint32)


def values(rng, shape, fmt, zeros=0.1):
    """Any finite numbers of the format, many of them zeros of either sign; some rows all positive,
    where sums grow.
    """
    drawn = cast.decode(rng.integers(0, 256, shape, dtype=np.uint8), fmt)
    drawn = np.where(
        np.isfinite(drawn) & (rng.random(shape) >= zeros), drawn, np.copysign(np.float32(0), drawn)
    )
    return np.where(rng.random((shape[0], 1)) < 0.5, drawn, np.abs(drawn))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads, rng):
    a, b = values(rng, (5, 288), E4M3FN), values(rng, (333, 288), E4M3FN)
    with parallel.using(threads):
        in_order = accumulate.f32(b, a)
    np.testing.assert_array_equal(bits(in_order), bits(accumulate.f32_plain(b, a)))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 300)),
    pair=st.tuples(*[st.sampled_from(list(FP8_FORMATS.values()))] * 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_f32_is_the_plain_one(shape, pair, seed):  # G-3
    m, n, k = shape
    rng = np.random.default_rng(seed)
    a, b = (values(rng, (rows, k), fmt) for rows, fmt in zip((m, n), pair, strict=True))
    np.testing.assert_array_equal(bits(accumulate.f32(a, b)), bits(accumulate.f32_plain(a, b)))


def test_f32_of_infinities_and_nans_is_the_plain_one(rng):  # G-6
    a, b = (cast.decode(rng.integers(0, 256, (40, 5), dtype=np.uint8), E5M2) for _ in range(2))
    got, expected = accumulate.f32(a, b), accumulate.f32_plain(a, b)
    np.testing.assert_array_equal(got, expected)
    assert {np.inf, -np.inf} <= set(expected.flat)
    assert np.isnan(expected).any()


def test_operands_are_read_in_any_memory_order_and_not_changed(rng):
    a, b = values(rng, (6, 64), E4M3FN), values(rng, (7, 64), E4M3FN)
    expected = accumulate.f32(a, b)
    for x, y in (
        (np.asfortranarray(a), np.asfortranarray(b)),
        (np.repeat(a, 2, 1)[:, ::2], np.repeat(b, 2, 0)[::2]),
    ):
        np.testing.assert_array_equal(accumulate.f32(x, y), expected)
        np.testing.assert_array_equal(x, a)
        np.testing.assert_array_equal(y, b)


def test_kernels_are_compiled_once_and_cached_on_disk():
    """A fresh import finds what another compiled.

    A kernel with another one in its closure would never be found.
    """
    ones = np.ones((3, 32), np.float32)
    out = np.empty((3, 3), np.float32)
    for _ in range(2):
        fresh = importlib.util.module_from_spec(kernels.__spec__)
        kernels.__spec__.loader.exec_module(fresh)
        fresh.in_order(ones, ones.T.copy(), out, 0, 3)
    assert sum(fresh.in_order.stats.cache_hits.values()) == 1
    assert not fresh.in_order.stats.cache_misses


# the last two are ties
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38, 1.00390625, 1.01171875], np.float32
)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    "name", ["scale_then_round", "product_then_round", "unit_round_scale_round"]
)
@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (64, 32), (600, 5)])
def test_the_compiled_epilogue_equals_the_definition(rng, name, rows, turned, shape):
    m, n = shape
    acc = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)  # of every exponent
    acc.ravel()[: min(acc.size, SPECIAL.size)] = SPECIAL[: acc.size]
    acc = np.asfortranarray(acc) if turned else acc
    scales = np.exp2(rng.uniform(-20, 20, (m + n))).astype(np.float32)
    a, b = (
        (scales[:m, None], scales[None, m:])
        if rows
        else (scales[:1].reshape(()), scales[1:2].reshape(()))
    )
    given = {"epilogue": EPILOGUES[name], "out_dtype": BFLOAT16}
    found, expected = gemm.finish(acc, a, b, **given), gemm.finish_plain(acc, a, b, **given)
    assert found.shape == shape
    equal = (found.view(np.uint32) == np.ascontiguousarray(expected).view(np.uint32)) | (
        np.isnan(found) & np.isnan(expected)
    )
    assert equal.all()
