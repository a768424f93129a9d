"""How a GEMM strings a tensor core's steps together, against integers."""

import dataclasses
import warnings
from itertools import product

import numpy as np
import pytest
from helpers.gemm import mma_integers

from fp8ref.formats import E4M3FN, E4M3FNUZ, E5M2
from fp8ref.sim.gemm import accumulate, gemm
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS, Accumulation
from fp8ref.sim.gemm.tensor_core import UNITS
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized

INTEGERS = {
    "hopper": mma_integers.HOPPER,
    "ada": mma_integers.ADA,
    "blackwell": mma_integers.BLACKWELL,
}
PAIRS = list(product((E4M3FN, E5M2), repeat=2))
HOPPER = UNITS["hopper"]
PLANS = {
    **ACCUMULATIONS,
    "promotion 64": Accumulation(name="promotion 64", unit=HOPPER, promotion=64),
    "promotion 96": Accumulation(name="promotion 96", unit=UNITS["blackwell"], promotion=96),
    "promotion beyond K": Accumulation(name="promotion beyond K", unit=HOPPER, promotion=2048),
    "split 2": Accumulation(name="split 2", unit=HOPPER, split_k=2),
    "split 3, slow": Accumulation(name="split 3, slow", unit=HOPPER, split_k=3, promotion=128),
    "split 3, promotion 96": Accumulation(
        name="split 3, promotion 96", unit=UNITS["ada"], split_k=3, promotion=96
    ),
    "split 10": Accumulation(name="split 10", unit=HOPPER, split_k=10),
    "split 3 of 64": Accumulation(name="split 3 of 64", unit=HOPPER, split_k=3, split_tile=64),
    "interleaved 3": Accumulation(
        name="interleaved 3", unit=HOPPER, split_k=3, split_order="interleaved"
    ),
    "interleaved 2 of 64, slow": Accumulation(
        name="interleaved 2 of 64, slow",
        unit=HOPPER,
        split_k=2,
        split_order="interleaved",
        split_tile=64,
        promotion=128,
    ),
}


def bits(values):
    return np.asarray(values, np.float32).view(np.uint32)


def operand(codes, fmt=E4M3FN):
    """Codes whose scale is one: a GEMM of them is its accumulator."""
    one = np.ones((), np.float32)
    return Quantized(codes, one, one, fmt, "tensorwise", -1)


def like_a_gemm(rng, shape, fmt):
    """Codes of a normal distribution over a few binades, and a few of any other exponent and
    zeros.
    """
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)
    any_code = rng.integers(0, fmt.max_code, shape, dtype=np.uint8)
    return np.where(rng.random(shape) < 0.1, any_code, cast.encode(values, fmt))


def test_the_named_plans_are_those_of_the_clause():  # G-12
    assert {
        key: (a.name, a.unit.name, a.promotion, a.split_k) for key, a in ACCUMULATIONS.items()
    } == {
        "hopper_fast": ("hopper_fast", "hopper", None, 1),
        "hopper_slow": ("hopper_slow", "hopper", 128, 1),
        "ada": ("ada", "ada", None, 1),
        "blackwell": ("blackwell", "blackwell", None, 1),
    }


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_a_plan_is_that_of_integers(pair, plan, rng):  # G-12
    """K = 1,056: nine tiles, the last one short, so that promotions and splits end raggedly."""
    a, b = (like_a_gemm(rng, (n, 1056), fmt) for n, fmt in zip((2, 3), pair, strict=True))
    how = PLANS[plan]
    expected = [
        [
            mma_integers.dot(
                x,
                y,
                (pair[0].name, pair[1].name),
                INTEGERS[how.unit.name],
                promotion=how.promotion,
                split_k=how.split_k,
                tile=how.split_tile,
                interleaved=how.split_order == "interleaved",
            )
            for y in b.tolist()
        ]
        for x in a.tolist()
    ]
    got = gemm.matmul(operand(a, pair[0]), operand(b, pair[1]), accumulate=how)
    np.testing.assert_array_equal(bits(got), np.array(expected, np.uint32))
    if plan in ACCUMULATIONS:
        np.testing.assert_array_equal(
            gemm.matmul(operand(a, pair[0]), operand(b, pair[1]), accumulate=plan), got
        )


def test_the_plans_differ(rng):
    """On positive data, where what is cut off adds up.

    (Parts of K that are added exactly make some plans coincide.)
    """
    a, b = (operand(like_a_gemm(rng, (8, 1056), E4M3FN) & 0x7F) for _ in range(2))
    results = {name: gemm.matmul(a, b, accumulate=plan).tobytes() for name, plan in PLANS.items()}
    apart = [
        *ACCUMULATIONS,
        "promotion 64",
        "promotion 96",
        "split 2",
        "split 3, promotion 96",
        "split 3 of 64",
        "interleaved 3",
        "interleaved 2 of 64, slow",
    ]
    assert len({results[name] for name in apart}) == len(apart)
    assert results["promotion beyond K"] == results["hopper_fast"]
    # a chain for every tile; the tenth part is empty
    assert results["split 10"] == results["hopper_slow"]


@pytest.mark.parametrize("accumulation", ["exact", "f32", *ACCUMULATIONS])
def test_zeros_along_k_change_no_bit(accumulation, rng):  # G-12
    a, b = (like_a_gemm(rng, (n, 288), E4M3FN) for n in (5, 7))
    a[0], b[0] = 0x80, 0  # a sum of zeros stays +0
    expected = gemm.matmul(operand(a), operand(b), accumulate=accumulation)
    assert bits(expected)[0, 0] == 0
    for more, zero in ((32, 0), (160, 0x80), (736, 0)):
        padded = [np.pad(v, ((0, 0), (0, more)), constant_values=zero) for v in (a, b)]
        np.testing.assert_array_equal(
            bits(gemm.matmul(*map(operand, padded), accumulate=accumulation)), bits(expected)
        )


def test_zeros_along_k_move_the_cut_of_a_split(rng):
    """Two tiles of 128 in two parts; with a third, of zeros, the first part has both."""
    a, b = (like_a_gemm(rng, (16, 256), E4M3FN) & 0x7F for _ in range(2))
    padded = [operand(np.pad(v, ((0, 0), (0, 128)))) for v in (a, b)]
    split = gemm.matmul(operand(a), operand(b), accumulate=PLANS["split 2"])
    assert (split != gemm.matmul(*padded, accumulate=PLANS["split 2"])).any()
    np.testing.assert_array_equal(
        gemm.matmul(*padded, accumulate=PLANS["split 2"]),
        gemm.matmul(operand(a), operand(b), accumulate="hopper_fast"),
    )


@pytest.mark.parametrize(
    ("k", "count"), [(384, 2), (256, 3), (32, 1), (1056, 4), (128, 128), (0, 2)]
)
@pytest.mark.parametrize("tile", [32, 128, 256])
@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
def test_parts_are_tiles_that_cover_k(order, tile, k, count):  # G-12
    tiles = -(-k // tile)
    each = -(-tiles // count)
    owners = [i // each if order == "contiguous" else i % count for i in range(tiles)]
    expected = [
        [
            tile * i + j
            for i in range(tiles)
            if owners[i] == part
            for j in range(tile)
            if tile * i + j < k
        ]
        for part in range(count)
    ]
    plan = Accumulation(name="own", unit=HOPPER, split_k=count, split_order=order, split_tile=tile)
    assert [part.tolist() for part in accumulate.parts(k, plan)] == expected


def test_truncation_costs_what_was_measured(rng):
    """Half-normal data at K = 8,192: outputs some 13 % too small under fast accumulation and 0.06 %
    under promotion every 128.
    """
    a, b = (
        operand(cast.encode(np.abs(rng.standard_normal((16, 8192))) * 100, E4M3FN))
        for _ in range(2)
    )
    reference = gemm.matmul(a, b).astype(np.float64)
    lost = {
        how: float((1 - gemm.matmul(a, b, accumulate=how) / reference).mean())
        for how in ACCUMULATIONS
    }
    assert 0.12 < lost["hopper_fast"] < 0.14
    assert 0.0005 < lost["hopper_slow"] < 0.0008
    assert lost["hopper_fast"] < lost["ada"]  # twice as many steps
    assert 0 < lost["blackwell"] < 2.0**-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"promotion": 0}, "promotion is None or a multiple of 32; got 0"),
        ({"promotion": 16}, "got 16"),
        ({"promotion": 100}, "got 100"),
        ({"promotion": -32}, "got -32"),
        ({"promotion": 128.0}, "got 128.0"),
        ({"split_k": 0}, "split_k is an integer of at least 1; got 0"),
        ({"split_k": 1.5}, "got 1.5"),
        ({"split_k": True}, "got True"),
        ({"split_order": "random"}, "split_order is one of contiguous, interleaved; got 'random'"),
        ({"split_tile": 48}, "split_tile is a multiple of 32; got 48"),
        ({"split_tile": 0}, "got 0"),
        ({"unit": "hopper"}, r"UNITS\['hopper'\]; got 'hopper'"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLANS["promotion 64"], **change)
    assert dataclasses.replace(PLANS["promotion 64"], promotion=32).promotion == 32


@pytest.mark.parametrize("what", ["fast", None, 128, HOPPER])
def test_an_unknown_accumulation_is_refused_with_the_known_ones(what):
    a = operand(np.zeros((2, 32), np.uint8))
    with pytest.raises(ValueError, match="an Accumulation, 'exact', 'f32' or one of") as error:
        gemm.matmul(a, a, accumulate=what)
    assert all(name in str(error.value) for name in (*ACCUMULATIONS, repr(what)))


@pytest.mark.parametrize("k", [16, 31, 48, 1])
def test_a_tensor_core_needs_whole_instructions(k):
    a = operand(np.zeros((2, k), np.uint8))
    with pytest.raises(ValueError, match=f"divisible by 32; got {k}. Pad both operands with zeros"):
        gemm.matmul(a, a, accumulate="hopper_fast")


@pytest.mark.parametrize("fmts", [(E4M3FNUZ, E4M3FN), (E5M2, E4M3FNUZ)], ids=str)
def test_a_tensor_core_takes_two_formats(fmts):
    a, b = (operand(np.zeros((2, 32), np.uint8), fmt) for fmt in fmts)
    with pytest.raises(
        ValueError, match=f"got {fmts[0]} and {fmts[1]}. Use accumulate 'exact' or 'f32'"
    ):
        gemm.matmul(a, b, accumulate="ada")


@pytest.mark.grid(9)
@pytest.mark.parametrize("use_fast_accum", [True, False])
@pytest.mark.parametrize(("profile", "splits"), [("hopper", 1), ("hopper", 3), ("ada", 1)])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_a_plan_is_that_of_mmaemu(pair, profile, splits, use_fast_accum, rng):  # G-11, G-12
    """Its chains, promotion and hopper's split-K, on any codes: e5m2's infinities and NaNs are
    there too.
    """
    import mmaemu
    import torch

    a, b = (like_a_gemm(rng, (n, 672), fmt) for n, fmt in zip((40, 50), pair, strict=True))
    for codes, fmt in ((a, pair[0]), (b, pair[1])):
        codes[:6, ::97] = rng.choice(
            np.array([fmt.nan_code, fmt.inf_code or 0, (fmt.inf_code or 0) | 0x80], np.uint8),
            codes[:6, ::97].shape,
        )
    tensors = [
        torch.from_numpy(v).view(getattr(torch, f"float8_{fmt}"))
        for v, fmt in zip((a, b), pair, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mmaemu.UnverifiedSplitWarning)
        theirs = mmaemu.accumulate(
            *tensors,
            use_fast_accum=use_fast_accum,
            profile=profile,
            splitk=1 if splits == 1 else (splits, "contiguous"),
            backend="reference",
        )
    how = Accumulation(
        name="own", unit=UNITS[profile], promotion=None if use_fast_accum else 128, split_k=splits
    )
    got = gemm.matmul(operand(a, pair[0]), operand(b, pair[1]), accumulate=how)
    np.testing.assert_array_equal(bits(got), bits(theirs.numpy()))
