"""Epilogues as data, and what each makes of accumulators, scales and biases chosen so that they
differ.
"""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from helpers.gemm import exact

from fp8ref.formats import BFLOAT16, E4M3FN, FLOAT16, FLOAT32
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import epilogue
from fp8ref.spec.epilogue import EPILOGUES, Epilogue

FORMATS = {
    "float32": (FLOAT32, 23, -126),
    "bfloat16": (BFLOAT16, 7, -126),
    "float16": (FLOAT16, 10, -14),
}


def gemm_of(acc, sa=1.0, sb=1.0, *, name, out="float32", bias=None):
    """A 1 x 1 GEMM whose accumulator is acc, a sum of a few e4m3 numbers."""
    parts, rest = [], float(acc)
    while rest:
        parts.append(cast.encode(rest, E4M3FN, rounding="toward_zero"))
        rest -= float(cast.decode(parts[-1], E4M3FN))
    a = np.array([parts or [0]], np.uint8)
    ones = np.full_like(a, 0x38)
    operands = (
        Quantized(v, np.float32(1), np.float32(s), E4M3FN, "tensorwise", -1)
        for v, s in ((a, sa), (ones, sb))
    )
    bias = None if bias is None else np.float32([bias])
    return gemm.matmul(*operands, epilogue=name, out_dtype=FORMATS[out][0], bias=bias)[0, 0]


def rn(value, out="float32"):
    """value rounded once, as a rational."""
    _, mantissa_bits, emin = FORMATS[out]
    return exact.round_fraction(Fraction(value), mantissa_bits=mantissa_bits, emin=emin)


def by_rationals(acc, sa, sb, name, out, bias):
    """The clauses G-4, G-5, G-14 and G-15, spelled out."""
    acc, sa, sb = (Fraction(float(np.float32(v))) for v in (acc, sa, sb))
    each, product = rn(rn(acc * sa) * sb), rn(sa * sb)
    if isinstance(name, Epilogue):
        return of_ones_own(acc, sa, sb, name, out, bias)
    return {
        "scale_then_round": lambda: rn(each, out),
        "product_then_round": lambda: rn(rn(acc * product), out),
        "unit_round_scale_round": lambda: rn(rn(rn(acc, out) * product), out),
        "round_then_bias": lambda: rn(rn(each, out) + bias, out),
        "bias_then_round": lambda: rn(rn(each + bias), out),
    }[name]()


def of_ones_own(acc, sa, sb, how, out, bias):
    """The fields of G-18."""

    def output(value):
        if how.rounding == "nearest_even":
            return rn(value, out)
        nearest = rn(value, out)
        if abs(nearest) <= abs(value):
            return nearest
        down = cast.round_to(
            np.nextafter(np.float32(float(nearest)), np.float32(0)),
            FORMATS[out][0],
            rounding="toward_zero",
        )
        return Fraction(float(down))

    acc = output(acc) if how.round_first else acc
    x, y = {
        "each": (rn(acc * sa), sb),
        "b_first": (rn(acc * sb), sa),
        "product": (acc, rn(sa * sb)),
    }[how.scale]
    if how.bias == "fused":
        return output(rn(x * y + bias))
    if how.bias == "before_round":
        return output(rn(rn(x * y) + bias))
    return output(rn(output(rn(x * y)) + bias)) if how.bias == "after_round" else output(rn(x * y))


OWN = [
    Epilogue(
        name=f"{scale}, {bias}, {rounding}{', first' * round_first}",
        scale=scale,
        bias=bias,
        rounding=rounding,
        round_first=round_first,
    )
    for scale in epilogue.SCALES
    for bias in (None, *epilogue.BIASES)
    for rounding in epilogue.ROUNDINGS
    for round_first in (False, True)
]


@pytest.mark.grid(6)
@pytest.mark.parametrize("out", FORMATS)
@pytest.mark.parametrize("how", OWN, ids=lambda e: e.name)
def test_ones_own_by_rationals(how, out, rng):  # G-18
    for _ in range(20):
        acc = int(rng.integers(-1000, 1000))
        sa, sb = np.exp(rng.uniform(-2, 2, 2)).astype(np.float32)
        bias = (
            float(
                cast.round_to(np.float32(rng.standard_normal() * (1 + abs(acc))), FORMATS[out][0])
            )
            if how.bias
            else None
        )
        expected = by_rationals(acc, sa, sb, how, out, None if bias is None else Fraction(bias))
        assert gemm_of(acc, sa, sb, name=how, out=out, bias=bias) == np.float32(float(expected))


def test_the_epilogues_are_those_of_the_clauses():  # G-4, G-5, G-14, G-15
    assert {e.name: (e.scale, e.round_first, e.bias) for e in EPILOGUES.values()} == {
        "scale_then_round": ("each", False, None),
        "product_then_round": ("product", False, None),
        "unit_round_scale_round": ("product", True, None),
        "round_then_bias": ("each", False, "after_round"),
        "bias_then_round": ("each", False, "before_round"),
    }
    assert all(key == e.name for key, e in EPILOGUES.items())


ULP = 2.0**-23
CASES = [
    # 1.5 (1 + ulp) is a tie, which goes up to 1.5 + 2 ulp, and comes back to 1.5 + ulp; the scales'
    # product rounds to 1.
    (1.5, 1 + ULP, 1 - ULP / 2, "scale_then_round", "float32", None, 1.5 + ULP),
    (1.5, 1 + ULP, 1 - ULP / 2, "product_then_round", "float32", None, 1.5),
    # bfloat16 has no 257: 256 * 1.5, where 257 * 1.5 = 385.5 would have been 386.
    (257, 1.5, 1, "scale_then_round", "bfloat16", None, 386),
    (257, 1.5, 1, "unit_round_scale_round", "bfloat16", None, 384),
    # 257 rounds to 256 twice over; 257 + 1 need not round.
    (257, 1, 1, "round_then_bias", "bfloat16", 1.0, 256),
    (257, 1, 1, "bias_then_round", "bfloat16", 1.0, 258),
    # 2^-14, next to one, is lost in float16 and kept in float32.
    (2.0**-9, 2.0**-5, 1, "bias_then_round", "float16", 1.0, 1),
    (2.0**-9, 2.0**-5, 1, "bias_then_round", "float32", 1.0, 1 + 2.0**-14),
    # The sum with the bias, 1 + 2^-8 + 2^-29, is rounded to float32 first, which leaves a tie;
    # rounded once it were 1 + 2^-7.
    (1, 2.0**-9 + 2.0**-30, 2, "bias_then_round", "bfloat16", 1.0, 1),
    (69_632, 1, 1, "scale_then_round", "float16", None, np.inf),
]


@pytest.mark.parametrize(("acc", "sa", "sb", "name", "out", "bias", "expected"), CASES)
def test_by_hand(acc, sa, sb, name, out, bias, expected):  # G-4, G-5, G-14, G-15
    assert gemm_of(acc, sa, sb, name=name, out=out, bias=bias) == np.float32(expected)
    if np.isfinite(expected):
        assert by_rationals(acc, sa, sb, name, out, bias and Fraction(bias)) == Fraction(expected)


@pytest.mark.grid(4)
@pytest.mark.parametrize("out", FORMATS)
@pytest.mark.parametrize("name", EPILOGUES)
def test_by_rationals(name, out, rng):  # G-4, G-5, G-14, G-15
    for _ in range(60):
        acc = int(rng.integers(-1000, 1000))
        # products stay below float16's max
        sa, sb = np.exp(rng.uniform(-2, 2, 2)).astype(np.float32)
        bias = None
        if EPILOGUES[name].bias:
            bias = float(
                cast.round_to(np.float32(rng.standard_normal() * abs(acc)), FORMATS[out][0])
            )
        expected = by_rationals(acc, sa, sb, name, out, None if bias is None else Fraction(bias))
        assert gemm_of(acc, sa, sb, name=name, out=out, bias=bias) == np.float32(float(expected))


def test_how_often_the_scales_order_matters(rng):
    """A quarter of float32 outputs, hardly any bfloat16 ones (G-14)."""
    differ = {"float32": 0, "bfloat16": 0}
    codes = rng.integers(0, 0x7F, (60, 32), dtype=np.uint8)
    for out in differ:
        for sa, sb in np.exp(rng.standard_normal((20, 2))).astype(np.float32):
            a, b = (Quantized(codes, np.float32(1), s, E4M3FN, "tensorwise", -1) for s in (sa, sb))
            each, product = (
                gemm.matmul(a, b, epilogue=e, out_dtype=FORMATS[out][0])
                for e in ("scale_then_round", "product_then_round")
            )
            differ[out] += int((each != product).sum())
    assert 0.15 < differ["float32"] / (20 * 3600) < 0.35
    assert differ["bfloat16"] / (20 * 3600) < 1e-4


def test_an_epilogue_of_ones_own():
    """cuBLASLt with a bias, say: one product of the scales, and the bias before the only
    rounding.
    """
    mine = Epilogue(name="mine", scale="product", bias="before_round")
    assert gemm_of(1.5, 1 + ULP, 1 - ULP / 2, name=mine, bias=0.0) == np.float32(1.5)
    twice = Epilogue(name="twice", scale="each", round_first=True, bias="after_round")
    # 256 * 1.5 + 1 is a tie
    assert gemm_of(257, 1.5, 1, name=twice, out="bfloat16", bias=1.0) == np.float32(384)


def test_by_name_finds_names_and_returns_epilogues_themselves():
    mine = Epilogue(name="mine")
    assert epilogue.by_name("product_then_round") is EPILOGUES["product_then_round"]
    assert epilogue.by_name(mine) is mine


@pytest.mark.parametrize("name", ["once", "", None, 1])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="epilogue is an Epilogue or one of") as error:
        epilogue.by_name(name)
    assert all(known in str(error.value) for known in (*EPILOGUES, repr(name)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale", "both"),
        ("scale", None),
        ("bias", "after"),
        ("bias", True),
        ("round_first", 1),
        ("rounding", "to_odd"),
    ],
)
def test_choices_are_checked(key, value):
    with pytest.raises(ValueError, match=f"{key} is .*; got {value!r}"):
        Epilogue(name="mine", **{key: value})


def test_epilogues_are_frozen_and_take_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EPILOGUES["scale_then_round"].scale = "product"
    with pytest.raises(TypeError):
        Epilogue("mine")


def test_an_epilogue_that_a_backend_lacks_is_refused_with_those_it_has():
    with pytest.raises(
        ValueError,
        match=r"one of scale_then_round, unit_round_scale_round; got 'product_then_round'\. Use "
        r"one of these, or "
        r"fp8ref\.sim",
    ):
        epilogue.check_pair("product_then_round", "torch", "tensorwise", "tensorwise")
