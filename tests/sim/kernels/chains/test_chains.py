"""The compiled chains against the plain ones, bit for bit."""

import importlib.util
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim import threads as parallel
from fp8ref.sim.gemm import accumulate
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS, Accumulation
from fp8ref.sim.gemm.tensor_core import UNITS, TensorCore
from fp8ref.sim.kernels.chains import chains as kernels
from fp8ref.sim.kernels.chains.vectors import LANES
from fp8ref.sim.quantize import cast

PAIRS = list(product((E4M3FN, E5M2), repeat=2))


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


def units():
    """Units of every width, at and next to the numbers at which the kernel changes its
    arithmetic.
    """
    return st.builds(
        TensorCore,
        name=st.just("any"),
        fused_width=st.sampled_from([4, 8, 16, 32]),
        fraction_bits=st.sampled_from([1, 2, 12, 13, 14, 15, 16, 17, 18, 19, 20, 22, 23, 24, 25]),
        output_bits=st.sampled_from([1, 2, 12, 13, 14, 22, 23]),
        evidence=st.just("none"),
    )


@settings(max_examples=400, deadline=None)
@given(
    unit=st.one_of(st.sampled_from(list(UNITS.values())), units()),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 17)),
    promotion=st.sampled_from([None, 32, 64, 96, 128, 160]),
    split_k=st.integers(1, 6),
    split_order=st.sampled_from(["contiguous", "interleaved"]),
    split_tile=st.sampled_from([32, 64, 128]),
    pair=st.sampled_from(PAIRS),
    zeros=st.sampled_from([0.1, 0.9]),
    seed=st.integers(0, 2**32 - 1),
)
# G-10, G-11, G-12
def test_chains_are_the_plain_ones(
    unit, shape, promotion, split_k, split_order, split_tile, pair, zeros, seed
):
    m, n, steps = shape
    rng = np.random.default_rng(seed)
    a, b = (
        values(rng, (rows, 32 * steps), fmt, zeros) for rows, fmt in zip((m, n), pair, strict=True)
    )
    plan = Accumulation(
        name="any",
        unit=unit,
        promotion=promotion,
        split_k=split_k,
        split_order=split_order,
        split_tile=split_tile,
    )
    np.testing.assert_array_equal(
        bits(accumulate.chains(a, b, *pair, plan)), bits(accumulate.chains_plain(a, b, *pair, plan))
    )


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 32), (2, 255, 64), (1, 256, 32), (3, 257, 96), (2, 700, 160)]
)
@pytest.mark.parametrize("plan", ACCUMULATIONS)
def test_chains_of_several_tiles_of_columns(plan, m, n, k, rng):
    a, b = values(rng, (m, k), E5M2), values(rng, (n, k), E4M3FN)
    plan = ACCUMULATIONS[plan]
    np.testing.assert_array_equal(
        bits(accumulate.chains(a, b, E5M2, E4M3FN, plan)),
        bits(accumulate.chains_plain(a, b, E5M2, E4M3FN, plan)),
    )


def test_chains_of_the_largest_sums(rng):
    """Maxima only: the sums that come nearest to the limits of the kernel's integers, in every
    unit.
    """
    for pair, unit in product(PAIRS, UNITS.values()):
        a, b = (np.full((2, 4096), fmt.max, np.float32) for fmt in pair)
        b[1] = -b[1]
        plan = Accumulation(name="own", unit=unit)
        np.testing.assert_array_equal(
            bits(accumulate.chains(a, b, *pair, plan)),
            bits(accumulate.chains_plain(a, b, *pair, plan)),
        )


def test_chains_of_the_smallest_sums():
    """Subnormals only: multiples of the smallest unit that an accumulator can have."""
    for pair, unit in product(PAIRS, UNITS.values()):
        a, b = (np.full((1, 96), fmt.smallest_subnormal, np.float32) for fmt in pair)
        b[0, ::3] *= -2
        plan = Accumulation(name="own", unit=unit, promotion=32)
        np.testing.assert_array_equal(
            bits(accumulate.chains(a, b, *pair, plan)),
            bits(accumulate.chains_plain(a, b, *pair, plan)),
        )


@pytest.mark.parametrize(
    ("m", "n", "k"), [(2, 3, 0), (0, 3, 64), (3, 0, 64), (0, 0, 64), (0, 3, 0)]
)
@pytest.mark.parametrize("plan", ACCUMULATIONS)
def test_chains_of_nothing_are_zeros_of_their_shape(plan, m, n, k, monkeypatch):  # G-12
    monkeypatch.setenv("FP8REF_COMPILE", "always")
    a, b = np.ones((m, k), np.float32), np.ones((n, k), np.float32)
    for chains in (accumulate.chains, accumulate.chains_plain):
        found = chains(a, b, E4M3FN, E4M3FN, ACCUMULATIONS[plan])
        assert found.shape == (m, n)
        assert not bits(found).any()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_rows_of_nothing_are_packed(shape):
    rows = kernels.pack(np.ones(shape, np.uint8), E4M3FN, 32, 13, 13)
    assert rows.numbers.shape == rows.exponents.shape == (shape[1] // 32, shape[0], 32)
    assert rows.signs.shape == (shape[1] // 32, shape[0])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("plan", ["hopper_slow", "blackwell"])
def test_the_number_of_threads_changes_nothing(plan, threads, rng):
    a, b = values(rng, (5, 288), E4M3FN), values(rng, (333, 288), E4M3FN)
    with parallel.using(threads):
        chains = accumulate.chains(a, b, E4M3FN, E4M3FN, ACCUMULATIONS[plan])
    np.testing.assert_array_equal(
        bits(chains), bits(accumulate.chains_plain(a, b, E4M3FN, E4M3FN, ACCUMULATIONS[plan]))
    )


def test_operands_are_read_in_any_memory_order_and_not_changed(rng):
    a, b = values(rng, (6, 64), E4M3FN), values(rng, (7, 64), E4M3FN)
    plan = ACCUMULATIONS["hopper_fast"]
    expected = accumulate.chains(a, b, E4M3FN, E4M3FN, plan)
    for x, y in (
        (np.asfortranarray(a), np.asfortranarray(b)),
        (np.repeat(a, 2, 1)[:, ::2], np.repeat(b, 2, 0)[::2]),
    ):
        np.testing.assert_array_equal(accumulate.chains(x, y, E4M3FN, E4M3FN, plan), expected)
        np.testing.assert_array_equal(x, a)
        np.testing.assert_array_equal(y, b)


@pytest.mark.parametrize("plan", ["hopper_fast", "blackwell"])
def test_the_rounding_mode_is_to_nearest_afterwards(plan, rng):
    a, b = values(rng, (5, 96), E4M3FN), values(rng, (LANES + 3, 96), E4M3FN)
    with parallel.using(1):  # in this thread
        accumulate.chains(a, b, E4M3FN, E4M3FN, ACCUMULATIONS[plan])
    one = np.float32(1)
    # to nearest: toward zero it would be 1
    assert one + np.float32(0.75 * 2.0**-23) == np.nextafter(one, np.float32(2))
    assert one - np.float32(0.75 * 2.0**-25) == one  # toward zero it would be the number below


def test_the_kernel_is_compiled_once_and_cached_on_disk():
    """A fresh import finds what another compiled.

    A kernel with another one in its closure would never be found.
    """
    ones, ends = cast.encode(np.ones((3, 32)), E4M3FN), np.full(1, 3, np.uint8)
    for _ in range(2):
        out = np.zeros((3, 3), np.float32)
        fresh = importlib.util.module_from_spec(kernels.__spec__)
        kernels.__spec__.loader.exec_module(fresh)
        fresh.columns(
            fresh.pack(ones, E4M3FN, 32, 13, 13), fresh.tiles(ones), E4M3FN, ends, out, 0, 3
        )
        np.testing.assert_array_equal(out, 32)
    assert sum(fresh.chains.stats.cache_hits.values()) == 1
    assert not fresh.chains.stats.cache_misses
