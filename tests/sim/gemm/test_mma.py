"""One tensor-core instruction against integers, an emulator and published outputs of hardware."""

import warnings
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers.gemm import mma_integers
from helpers.gemm.mma_integers import ADA, BLACKWELL, HOPPER

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.gemm import gemm, tensor_core
from fp8ref.sim.gemm.tensor_core import UNITS
from fp8ref.sim.quantize import cast

INTEGERS = {"hopper": HOPPER, "ada": ADA, "blackwell": BLACKWELL}
PAIRS = list(product((E4M3FN, E5M2), repeat=2))
PUBLISHED = Path(__file__).parents[3].parent / "shared/data/tensor_core_vectors.npz"
# What the models are not: none of them gives the same bits on the cases below.
HOPPER_VARIANTS = {
    "12 fraction bits": HOPPER._replace(fraction=12),
    "14 fraction bits": HOPPER._replace(fraction=14),
    "23 output bits": HOPPER._replace(output=23),
    "two steps of 16": HOPPER._replace(width=16),
    "normalized products": HOPPER._replace(normalized=True),
    "terms rounded to nearest": HOPPER._replace(nearest=True),
    "terms rounded down": HOPPER._replace(floor=True),
}
FLOAT32_ENDS = [
    0,
    1,
    0x7FFFFF,
    0x800000,
    0x1E800000,
    0x3F800001,
    0x40490FDB,
    0x4E000000,
    0x7F000000,
    0x7F7FFFFF,
]


def bits(values):
    return np.asarray(values, np.float32).view(np.uint32)


def from_bits(values):
    return np.asarray(values, np.uint32).view(np.float32)


def codes(values, fmt=E4M3FN):
    """The codes of values that the format holds, padded with zeros to an instruction's 32."""
    padded = np.zeros(32)
    padded[: len(values)] = values
    result = cast.encode(padded, fmt)
    np.testing.assert_array_equal(cast.decode(result, fmt), padded)
    return result


def hostile(fmt, rng):
    """Rows of 32 finite codes: subnormals, zeros, maxima, cancellation, one huge number among tiny
    ones, anything.
    """
    tiny, subnormal, top = 1, (1 << fmt.mantissa_bits) - 1, fmt.max_code
    rows = [
        np.full(32, code)
        for code in (
            0,
            0x80,
            tiny,
            0x80 | tiny,
            subnormal,
            fmt.bias << fmt.mantissa_bits,
            top,
            0x80 | top,
        )
    ]
    rows += [
        np.resize(pair, 32)
        for pair in (
            (tiny, 0x80 | tiny),
            (top, 0x80 | top),
            (0, 0x80),
            (subnormal, tiny),
            (top, tiny),
        )
    ]
    for at in (0, 15, 16, 31):
        rows.append(np.where(np.arange(32) == at, top, tiny))
    half = rng.integers(0, 0x70, 16)
    rows += [
        np.r_[half, half | 0x80],
        np.r_[half, (half | 0x80)[::-1]],
        rng.integers(0, subnormal + 1, 32) | 0x80 * rng.integers(0, 2, 32),
    ]
    rows += [finite(rng, 32, fmt) for _ in range(6)]
    return np.array(rows, np.uint8)


def finite(rng, shape, fmt):
    drawn = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where(np.isfinite(cast.decode(drawn, fmt)), drawn, np.uint8(0))


def accumulators(rng, shape):
    """Zeros, subnormals, 2^127, the largest float32, infinities, NaNs, any float32, and such as a
    GEMM has.
    """
    ends = np.array([*FLOAT32_ENDS, 0x7F800000, 0x7FC00000, 0x7F800001], np.uint32)
    any_float32 = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    likely = bits(rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 36, shape))
    signed = rng.choice(np.r_[ends, ends | 0x80000000], shape)
    return from_bits(np.choose(rng.integers(0, 4, shape), [signed, any_float32, likely, likely]))


def by_integers(a, b, c, fmts, unit):
    """Bits of a chain for every row of a against every row of b."""
    names = tuple(fmt.name for fmt in fmts)
    rows = [
        [
            mma_integers.chain(x.tolist(), y.tolist(), int(z), names, unit)
            for y, z in zip(b, line, strict=True)
        ]
        for x, line in zip(a, bits(c), strict=True)
    ]
    return np.array(rows, np.uint32)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_an_instruction_is_that_of_integers(pair, unit, rng):  # G-10, G-11
    a, b = (hostile(fmt, rng) for fmt in pair)
    c = accumulators(rng, (len(a), len(b)))
    got = gemm.mma(a, b, c, fmt_a=pair[0], fmt_b=pair[1], unit=unit)
    np.testing.assert_array_equal(bits(got), by_integers(a, b, c, pair, INTEGERS[unit]))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_specials_are_those_of_integers(pair, unit, rng):  # G-11
    operands = []
    for fmt in pair:
        rows = finite(rng, (24, 32), fmt)
        special = rng.choice(
            np.array([0x7C, 0xFC, 0x7F, 0xFF, 0, 0x80, 1], np.uint8),
            rows.shape,
            p=[0.25, 0.25, 0.05, 0.05, 0.2, 0.1, 0.1],
        )
        operands.append(np.where(rng.random(rows.shape) < 0.06, special, rows))
    c = accumulators(rng, (24, 24))
    got = bits(gemm.mma(*operands, c, fmt_a=pair[0], fmt_b=pair[1], unit=unit))
    np.testing.assert_array_equal(got, by_integers(*operands, c, pair, INTEGERS[unit]))
    assert E5M2 not in pair or {0x7FFFFFFF, 0x7F800000, 0xFF800000} <= set(got.flat)


@pytest.mark.grid(4)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_every_product_alone_is_exact(pair, unit):
    """Alone, a product of two FP8 numbers loses nothing in any unit; its zero is +0 whatever the
    signs (G-11).
    """
    a, b = np.zeros((2, 256, 32), np.uint8)
    a[:, 20] = b[:, 20] = np.arange(256)
    x, y = (cast.decode(np.arange(256, dtype=np.uint8), fmt) for fmt in pair)
    with np.errstate(invalid="ignore"):
        expected = np.outer(x, y) + np.float32(0)
    got = gemm.mma(a, b, np.zeros((256, 256), np.float32), fmt_a=pair[0], fmt_b=pair[1], unit=unit)
    np.testing.assert_array_equal(
        bits(got), np.where(np.isnan(expected), 0x7FFFFFFF, bits(expected))
    )


TINY = 2.0**-13
CASES = {  # a, b, c, what hopper gives, what other models give
    "the term at 2^-13 of the largest stays": (
        [1, 2**-9],
        [1, 2**-4],
        0,
        1 + TINY,
        {"12 fraction bits": 1},
    ),
    "the terms at 2^-14 are cut off": (
        [1, 2**-9, 2**-9],
        [1, 2**-5, 2**-5],
        0,
        1,
        {"14 fraction bits": 1 + TINY},
    ),
    "the sum is cut off at its own exponent": (
        [1, 1, 2**-9],
        [1, 1, 2**-4],
        0,
        2,
        {"23 output bits": 2 + TINY},
    ),
    "all 32 products are one step": (
        [*[0] * 15, 2**-9, 1, 2**-9],
        [*[0] * 15, 2**-5, 1, 2**-5],
        0,
        1,
        {"14 fraction bits": 1 + TINY},
    ),
    "small terms of a half cannot meet": (
        [2**-9, 2**-9, *[0] * 14, 1],
        [2**-5, 2**-5, *[0] * 14, 1],
        0,
        1,
        {"two steps of 16": 1 + TINY},
    ),
    "1.5 * 1.5 counts as 2^0": (
        [1.5, 1.5, 2**-9],
        [1.5, -1.5, 2**-4],
        0,
        TINY,
        {"normalized products": 0},
    ),
    "a subnormal counts as 2^-6": (
        [2**-9],
        [1],
        2.0**-20,
        2.0**-9,
        {"normalized products": 2.0**-9 + 2.0**-20},
    ),
    "half a unit more is cut off": (
        [1, 2**-9],
        [1, 1.5 * 2**-4],
        0,
        1 + TINY,
        {"terms rounded to nearest": 1 + 2 * TINY},
    ),
    "cutting off is towards zero": (
        [1, 2**-9],
        [1, -(2**-5)],
        0,
        1,
        {"terms rounded down": 1 - TINY},
    ),
}


@pytest.mark.parametrize(("a", "b", "c", "expected", "others"), CASES.values(), ids=CASES)
def test_a_step_by_hand(a, b, c, expected, others):  # G-10
    x, y, c = codes(a), codes(b), np.full((1, 1), c, np.float32)
    assert gemm.mma(x[None], y[None], c, fmt_a=E4M3FN, fmt_b=E4M3FN) == np.float32(expected)
    for name, value in others.items():
        other = mma_integers.chain(
            x.tolist(), y.tolist(), int(bits(c)[0, 0]), ("e4m3fn", "e4m3fn"), HOPPER_VARIANTS[name]
        )
        assert other == bits(value) != bits(expected)


def test_every_variant_has_a_case_by_hand():
    assert {name for *_, others in CASES.values() for name in others} == set(HOPPER_VARIANTS)


def test_a_zero_factor_takes_no_part():
    """Were 0 * 448 aligned as 2^-6 * 2^8, the term at 2^-13 would be lost; and so with a zero
    accumulator (G-11).
    """
    a, b = codes([0, 1, 2**-9]), codes([448, 1, 2**-4])
    zeros = np.array([[0.0]], np.float32), np.array([[-0.0]], np.float32)
    for c in zeros:
        assert gemm.mma(a[None], b[None], c, fmt_a=E4M3FN, fmt_b=E4M3FN) == np.float32(1 + TINY)
        # +0
        assert bits(gemm.mma(a[None], codes([0])[None] | 0x80, c, fmt_a=E4M3FN, fmt_b=E4M3FN)) == 0
    counted = HOPPER._replace(zeros_count=True)
    assert mma_integers.chain(a.tolist(), b.tolist(), 0, ("e4m3fn", "e4m3fn"), counted) == bits(1)


@pytest.mark.parametrize(
    ("unit", "cut"), [("hopper", 0x7F7FFC00), ("ada", 0x7F7FFC00), ("blackwell", 0x7F7FFFFF)]
)
def test_no_product_can_make_an_accumulator_overflow(unit, cut):
    """Next to an accumulator near 2^128 every product is cut off, and the accumulator towards zero:
    infinity (G-11) is out of reach.
    """
    top = np.full((1, 32), E5M2.max_code, np.uint8)
    c = from_bits([[0x7F7FFFFF]])
    assert bits(gemm.mma(top, top, c, fmt_a=E5M2, fmt_b=E5M2, unit=unit)) == cut
    assert (
        bits(gemm.mma(top, top | 0x80, -c, fmt_a=E5M2, fmt_b=E5M2, unit=unit)) == cut | 0x80000000
    )


def test_an_infinite_sum_stays_infinite():
    """What an accumulation of one's own may give all the same: from 2^128 on, infinity (G-11)."""
    with np.errstate(over="ignore"):
        assert tensor_core._round_result(
            np.array([2.0**128, -(2.0**200), 2.0**128 - 2.0**100]), 13, "toward_zero"
        ).astype(np.float32).tolist() == [np.inf, -np.inf, float(from_bits(0x7F7FFC00))]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_an_instruction_is_that_of_mmaemu(pair, unit, rng):  # G-10, G-11
    import mmaemu
    import torch

    # mmaemu has no model of tcgen05.mma, but takes the numbers of one.
    ours = mmaemu.Preset(
        unit, nfma=32, frac=25, frac_out=23, min_exp=-132, late_c=False, slow_chunk=None
    )
    a, b = (
        np.r_[hostile(fmt, rng), rng.integers(0, 256, (70, 32), dtype=np.uint8)] for fmt in pair
    )
    c = accumulators(rng, (len(a), len(b)))
    wide = [
        np.ascontiguousarray(np.broadcast_to(v, (len(a), len(b), 32)))
        for v in (a[:, None], b[None])
    ]
    tensors = [
        torch.from_numpy(v).view(getattr(torch, f"float8_{fmt}"))
        for v, fmt in zip(wide, pair, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mmaemu.ExperimentalPresetWarning)
        theirs = mmaemu.model.dot(
            *tensors, torch.from_numpy(c), preset=ours if unit == "blackwell" else unit
        )
    np.testing.assert_array_equal(
        bits(gemm.mma(a, b, c, fmt_a=pair[0], fmt_b=pair[1], unit=unit)), bits(theirs.numpy())
    )


@pytest.fixture(scope="module")
def published():
    if not PUBLISHED.exists():
        pytest.skip("the published outputs of tensor cores are not next to the repository")
    return np.load(PUBLISHED)


def vectors(published, gpu, fmt, *, accumulators):
    """a, b, c and the bits of d: single instructions.

    H100 and H200 outputs fit only an accumulator of 0.
    """
    a, b, c, d = (published[f"{gpu}_{fmt}_{part}"] for part in ("a", "b", "c_bits", "d_bits"))
    return a, b, c if accumulators else np.zeros_like(c), d


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize(
    ("gpu", "unit"), [("h100", "hopper"), ("h200", "hopper"), ("ada", "ada"), ("l40s", "ada")]
)
def test_every_published_output_of_hardware(published, gpu, unit, fmt):  # G-10
    a, b, c, d = vectors(published, gpu, fmt.name[:4], accumulators=unit == "ada")
    got = []
    for i in range(0, 5000, 8):  # eight rows against eight, of which the diagonal is asked for
        part = slice(i, i + 8)
        out = gemm.mma(
            a[part], b[part], np.tile(from_bits(c[part]), (8, 1)), fmt_a=fmt, fmt_b=fmt, unit=unit
        )
        got.append(np.diagonal(out))
    np.testing.assert_array_equal(bits(np.concatenate(got)), d)


@pytest.mark.parametrize("gpu", ["h100", "h200", "ada", "l40s"])
def test_published_outputs_tell_every_variant_apart(published, gpu):
    """On every 25th vector: our integers fit all, and each variant fails on more than one in
    twenty.
    """
    unit = ADA if gpu in ("ada", "l40s") else HOPPER
    variants = {name: v._replace(width=unit.width) for name, v in HOPPER_VARIANTS.items()}
    variants["two steps of 16"] = HOPPER if unit is ADA else HOPPER._replace(width=16)
    if unit is ADA:
        variants["accumulator added last"] = ADA._replace(late=True)
    failures = dict.fromkeys(variants, 0)
    for fmt in ("e4m3", "e5m2"):
        names = ("e4m3fn", "e4m3fn") if fmt == "e4m3" else ("e5m2", "e5m2")
        for a, b, c, d in zip(
            *(
                part[::25].tolist()
                for part in vectors(published, gpu, fmt, accumulators=unit is ADA)
            ),
            strict=True,
        ):
            assert mma_integers.chain(a, b, c, names, unit) == d
            for name, variant in variants.items():
                failures[name] += mma_integers.chain(a, b, c, names, variant) != d
    assert min(failures.values()) > 400 / 20, failures
