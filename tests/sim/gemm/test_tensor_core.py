"""Tensor cores as data: their steps against integers."""

import dataclasses
from itertools import product

import numpy as np
import pytest
from helpers.gemm import mma_integers

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16
from fp8ref.sim.gemm import gemm, tensor_core
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import UNITS, TensorCore
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized

PAIRS = list(product((E4M3FN, E5M2), repeat=2))
HOPPER = UNITS["hopper"]
# What a probe may find a tensor core to be (G-18), and the same in integers
VARIANTS = {
    "terms rounded down": ({"rounding": "toward_negative"}, {"floor": True}),
    "terms rounded to nearest": ({"rounding": "nearest_even"}, {"nearest": True}),
    "results rounded down": (
        {"output_rounding": "toward_negative"},
        {"output_rounding": "toward_negative"},
    ),
    "results rounded to nearest": (
        {"output_rounding": "nearest_even"},
        {"output_rounding": "nearest_even"},
    ),
    "normalized factors": ({"exponents": "factors"}, {"factors": True}),
    "normalized products": ({"exponents": "products"}, {"normalized": True}),
    "zeros that count": ({"zeros": "counted"}, {"zeros_count": True}),
    "no subnormals": ({"subnormals": "flushed"}, {"flushed": True}),
    "floor everywhere, no subnormals": (
        {
            "rounding": "toward_negative",
            "output_rounding": "toward_negative",
            "subnormals": "flushed",
        },
        {"floor": True, "output_rounding": "toward_negative", "flushed": True},
    ),
}


def bits(values):
    return np.asarray(values, np.float32).view(np.uint32)


def drawn(rng, shape, fmt):
    """Finite codes of any kind, a third of any exponent, a third near 1, a third subnormals and
    zeros; half of the rows are of one kind.
    """
    near_one = cast.encode(rng.standard_normal(shape), fmt)
    small = rng.integers(0, 1 << fmt.mantissa_bits, shape, dtype=np.uint8) | rng.choice(
        np.array([0, 0x80], np.uint8), shape
    )
    any_code = rng.integers(0, fmt.max_code + 1, shape, dtype=np.uint8)
    kind = np.where(
        np.arange(shape[0])[:, None] % 2,
        rng.integers(0, 3, shape),
        rng.integers(0, 3, (shape[0], 1)),
    )
    return np.choose(kind, [near_one, small, any_code])


@pytest.mark.grid(9)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_a_variant_is_that_of_integers(pair, variant, rng):  # G-18
    """From any accumulator, in two steps of 16; and it is not Hopper's on the same numbers."""
    fields, integers = VARIANTS[variant]
    a, b = (drawn(rng, (16, 32), fmt) for fmt in pair)
    c = (rng.standard_normal((16, 16)) * 2.0 ** rng.integers(-40, 40, (16, 16))).astype(np.float32)
    c[rng.random(c.shape) < 0.3] = 0
    for width in (32, 16):
        unit = dataclasses.replace(HOPPER, fused_width=width, **fields)
        assert not unit.compiled
        own = mma_integers.Unit(width, 13, 13)._replace(**integers)
        names = (pair[0].name, pair[1].name)
        expected = [
            [
                mma_integers.chain(x, y, int(bits(c[i, j])), names, own)
                for j, y in enumerate(b.tolist())
            ]
            for i, x in enumerate(a.tolist())
        ]
        got = gemm.mma(a, b, c, fmt_a=pair[0], fmt_b=pair[1], unit=unit)
        np.testing.assert_array_equal(bits(got), np.array(expected, np.uint32))
    plain = gemm.mma(
        a, b, c, fmt_a=pair[0], fmt_b=pair[1], unit=dataclasses.replace(HOPPER, fused_width=16)
    )
    assert (bits(plain) != bits(got)).any()


def test_what_is_compiled_is_g_10s():
    assert all(unit.compiled for unit in UNITS.values())
    assert dataclasses.replace(HOPPER, fused_width=8, fraction_bits=9, output_bits=7).compiled


def test_the_units_are_those_of_the_table():  # G-10
    assert {u.name: (u.fused_width, u.fraction_bits, u.output_bits) for u in UNITS.values()} == {
        "hopper": (32, 13, 13),
        "ada": (16, 13, 13),
        "blackwell": (32, 25, 23),
    }
    assert {key: unit.name for key, unit in UNITS.items()} == {key: key for key in UNITS}


def test_what_no_recording_confirms_says_so():
    assert {name for name, unit in UNITS.items() if "unconfirmed" in unit.evidence} == {
        "ada",
        "blackwell",
    }
    assert "published" not in UNITS["blackwell"].evidence
    # tests/evidence computes them again
    assert "recorded in tests/evidence" in UNITS["hopper"].evidence
    for said in ("Recordings of an H100", "evidence"):
        assert said in gemm.mma.__doc__


def operand(codes, fmt):
    """Codes whose scale is one: a GEMM of them is its accumulator."""
    one = np.ones((), np.float32)
    return Quantized(codes, one, one, fmt, "tensorwise", -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fused_width": 12}, "fused_width is at least 4 and divides 32.* got 12"),
        ({"fused_width": 2}, "at least 4 .*; got 2"),
        ({"fused_width": 64}, "got 64"),
        ({"fused_width": 16.0}, "got 16.0"),
        ({"fraction_bits": 0}, r"fraction_bits is an integer in \[1, 25\]; got 0"),
        ({"fraction_bits": 26}, "got 26"),
        ({"fraction_bits": 13.5}, "got 13.5"),
        ({"fraction_bits": True}, "got True"),
        ({"output_bits": 0}, r"output_bits is an integer in \[1, 23\]; got 0"),
        ({"output_bits": 24}, "got 24"),
        (
            {"rounding": "floor"},
            "rounding is one of toward_zero, toward_negative, nearest_even; got 'floor'",
        ),
        ({"output_rounding": None}, "output_rounding is one of .*; got None"),
        (
            {"exponents": "normalized"},
            "exponents is one of coded, factors, products; got 'normalized'",
        ),
        ({"zeros": True}, "zeros is one of excluded, counted, least; got True"),
        (
            {"zeros": "counted", "exponents": "products"},
            "zeros 'counted' needs exponents 'coded'; got 'products'",
        ),
        (
            {"zeros": "least", "exponents": "factors"},
            "zeros 'least' needs exponents 'coded'; got 'factors'",
        ),
        ({"subnormals": "flush"}, "subnormals is one of kept, flushed; got 'flush'"),
        (
            {"accumulator": BFLOAT16},
            "the accumulator is float32, or float16 with at most 10 output_bits; got bfloat16",
        ),
        ({"accumulator": FLOAT16}, "at most 10 output_bits; got float16, output_bits=13"),
    ],
)
def test_a_unit_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(HOPPER, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"fused_width": 4, "fraction_bits": 1, "output_bits": 1},
        {"fraction_bits": 25, "output_bits": 23},
    ],
)
def test_a_unit_at_its_limits(change, rng):
    unit = dataclasses.replace(HOPPER, **change)
    integers = mma_integers.Unit(unit.fused_width, unit.fraction_bits, unit.output_bits)
    a, b = (drawn(rng, (4, 64), E5M2) for _ in range(2))
    got = gemm.matmul(
        operand(a, E5M2), operand(b, E5M2), accumulate=Accumulation(name="own", unit=unit)
    )
    expected = [
        [mma_integers.dot(x, y, ("e5m2", "e5m2"), integers) for y in b.tolist()] for x in a.tolist()
    ]
    np.testing.assert_array_equal(bits(got), np.array(expected, np.uint32))


def test_by_name_finds_names_and_returns_units_themselves():
    assert tensor_core.by_name("ada") is UNITS["ada"]
    assert tensor_core.by_name(HOPPER) is HOPPER
    for what in ("turing", None, 1):
        with pytest.raises(
            ValueError,
            match="unit is a TensorCore or one of hopper, ada, blackwell, hopper_f16, ada_f16, "
            f"blackwell_mx; got {what!r}",
        ):
            tensor_core.by_name(what)


def test_units_are_frozen_and_take_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        HOPPER.rounding = "nearest_even"
    with pytest.raises(TypeError):
        TensorCore("own", 32, 13, 13, "none")
