"""Decoders and dequantizers, right and wrong, by name (spec F-1 to F-5, S-8, S-22, S-25)."""

import numpy as np
import pytest

from fp8ref.conformance import identify_decoder
from fp8ref.conformance.decoder.identify import require_decoder
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.formats import FORMATS, Format
from fp8ref.sim.quantize import cast, scale_layouts
from fp8ref.sim.quantize.packing import unpack

E4M3, E5M2, E2M1, E8M0 = (FORMATS[name] for name in ("e4m3fn", "e5m2", "e2m1fn", "e8m0fnu"))
CODED = [fmt for fmt in FORMATS.values() if fmt.bits <= 8]


def numbers(codes, fmt: Format = E4M3) -> np.ndarray:
    return cast.decode(np.asarray(codes), fmt)


def spread(scales, block: int) -> np.ndarray:
    return np.repeat(np.asarray(scales), block, axis=1)


@pytest.mark.parametrize("fmt", CODED, ids=str)
def test_right_decoders(fmt):  # F-1
    outcome = identify_decoder(lambda codes: cast.decode(codes, fmt), fmt)
    assert outcome.ok
    assert outcome.summary == f"a right decoder of {fmt}"


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_torchs_own_decoder(fmt):
    torch = pytest.importorskip("torch")
    outcome = identify_decoder(lambda codes: codes.float(), fmt, framework="torch")
    assert outcome.ok
    assert outcome.found["codes_as"] == "native"
    assert identify_decoder(lambda codes: codes.to(torch.bfloat16), fmt, framework="torch").ok


def changed(fmt: Format, change):
    """A decoder whose table of numbers is changed: ``change(table, codes)``."""
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    table = change(cast.decode(codes, fmt), codes.astype(int)).astype(np.float32)
    return lambda asked: table[np.asarray(asked)]


def subnormal(table: np.ndarray, fmt: Format) -> np.ndarray:
    return (np.abs(table) < fmt.smallest_normal) & (table != 0)


def as_normal(table, codes):
    """Subnormal codes with an implicit one, tilelang#2702."""
    one = np.copysign((1 + (codes & 7) / 8) * 2.0**-7, table)
    return np.where(subnormal(table, E4M3), one, table)


WRONG = {
    "subnormal codes of e4m3fn are taken for 0": (
        E4M3,
        lambda t, c: np.where(subnormal(t, E4M3), np.copysign(0, t), t),
    ),
    "subnormal codes of e4m3fn are read as normal numbers": (E4M3, as_normal),
    "subnormal codes of e4m3fn are half what they are": (
        E4M3,
        lambda t, c: np.where(subnormal(t, E4M3), t / 2, t),
    ),
    "NaN of e4m3fn is taken for numbers": (
        E4M3,
        lambda t, c: np.where(np.isnan(t), np.where(c > 127, -480, 480), t),
    ),
    "NaN of e4m3fn is taken for 0": (E4M3, lambda t, c: np.nan_to_num(t)),
    "the sign of e4m3fn is ignored": (E4M3, lambda t, c: np.abs(t)),
    "-0 of e4m3fn is taken for +0": (E4M3, lambda t, c: t + np.float32(0)),
    "codes of e4m3fn are read as e4m3fnuz": (
        E4M3,
        lambda t, c: cast.decode(c.astype(np.uint8), "e4m3fnuz"),
    ),
    "numbers of e4m3fn are 2 times what they are": (E4M3, lambda t, c: t * 2),
    "the largest exponent of e4m3fn is read as infinities and NaN": (
        E4M3,
        lambda t, c: np.where(c & 120 == 120, np.where(c & 7, np.nan, np.copysign(np.inf, t)), t),
    ),
    "infinities of e5m2 are taken for NaN": (E5M2, lambda t, c: np.where(np.isinf(t), np.nan, t)),
    "NaN and infinities of e5m2 are taken for numbers": (
        E5M2,
        lambda t, c: np.where(
            c & 124 == 124, np.where(c > 127, -1, 1) * (1 + (c & 3) / 4) * 65536, t
        ),
    ),
    "e8m0fnu is read as a power of two without its bias": (
        E8M0,
        lambda t, c: np.int32(1) << (c & 31).astype(np.int32),
    ),
    "code 0 of e8m0fnu is taken for 0": (E8M0, lambda t, c: np.where(c == 0, 0, t)),
    "NaN of e8m0fnu is taken for infinity": (E8M0, lambda t, c: np.where(np.isnan(t), np.inf, t)),
    "subnormal codes of e2m1fn are taken for 0": (
        E2M1,
        lambda t, c: np.where(np.abs(t) == 0.5, np.copysign(0, t), t),
    ),
    "codes of e2m1fn are read as integers": (E2M1, lambda t, c: c),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_codes_have_names(name):  # F-1
    fmt, change = WRONG[name]
    outcome = identify_decoder(changed(fmt, change), fmt)
    assert not outcome.ok
    assert outcome.found["faults"] == [name]
    assert outcome.unlike[0].clause == "F-1"
    assert "code 0x" in outcome.unlike[0].input


def test_two_mistakes_have_both_names():
    both = changed(E4M3, lambda t, c: np.where(subnormal(t, E4M3), 0 * t, np.nan_to_num(t)))
    assert identify_decoder(both, E4M3).found["faults"] == [
        "subnormal codes of e4m3fn are taken for 0 and NaN of e4m3fn is taken for 0"
    ]


def test_a_mistake_without_a_name_shows_its_code():
    outcome = identify_decoder(changed(E4M3, lambda t, c: np.where(c == 0x35, 7, t)), E4M3)
    assert outcome.found["faults"] == ["codes are read otherwise: 0x35 as 7"]
    assert "got 7, expected 0.8125 (F-1)" in str(outcome.unlike[0])


def test_a_place_is_named():
    def tail(codes):
        x = numbers(codes).copy()
        x[..., x.shape[-1] // 16 * 16 - 16 :] = 0  # the last vector is lost
        return x

    faults = identify_decoder(tail, E4M3).found["faults"]
    assert faults == ["a code's number depends on its place: columns from 496 on"]


@pytest.mark.parametrize("swap", [False, True])
def test_pairs(swap):  # F-5
    def decode(packed):
        packed = np.asarray(packed)
        return numbers(unpack(packed << 4 | packed >> 4 if swap else packed), E2M1)

    outcome = identify_decoder(decode, E2M1)
    assert outcome.ok is not swap
    assert outcome.found["faults"] == ["of a pair the high half comes first"] * swap
    assert outcome.found["packing"] == ("pairs, high first" if swap else "pairs")


def split(packed, block: int, *, high: bool):
    """Numbers of ``block / 2`` bytes, first those of one half of each byte, as GGML keeps them."""
    halves = unpack(np.asarray(packed)).reshape(*packed.shape[:-1], -1, block // 2, 2)
    halves = np.moveaxis(halves[..., ::-1] if high else halves, -1, -2)
    return numbers(halves.reshape(*packed.shape[:-1], -1), E2M1)


PACKED = {
    "of 16 bytes all low halves come first": lambda p: split(p, 32, high=False),
    "of 8 bytes all high halves come first": lambda p: split(p, 16, high=True),
    "the second number of a pair is 0": lambda p: numbers(
        unpack(p) * np.uint8([1, 0] * p.shape[-1]), E2M1
    ),
    "a pair has its first number twice": lambda p: numbers(np.repeat(p & 15, 2, axis=-1), E2M1),
}


@pytest.mark.parametrize("name", PACKED)
def test_wrong_pairs_have_names(name):  # F-5
    outcome = identify_decoder(lambda packed: PACKED[name](np.asarray(packed)), E2M1)
    assert outcome.found["faults"] == [name]


def dequantize(block: int, scale=lambda s: s, product=lambda x, s: x * s, fmt: Format = E4M3):
    def function(codes, scale_inv):
        return product(numbers(codes, fmt), spread(scale(np.asarray(scale_inv)), block))

    return function


def bfloat16(x):
    return cast.round_to(x, "bfloat16")


def shifted(s):
    return np.roll(s.reshape(-1), -1).reshape(s.shape)


SCALES = {
    "scales are read as their transpose": lambda s: s.reshape(s.shape[::-1]).T,
    "every block reads the first scale": lambda s: np.full_like(s, s[0, 0]),
    "every row reads the scales of the first": lambda s: np.broadcast_to(s[:1], s.shape),
    "every block of a row reads its first scale": lambda s: np.broadcast_to(s[:, :1], s.shape),
    "blocks of a row read its scales backwards": lambda s: s[:, ::-1],
    "scale_inv is rounded to bfloat16": bfloat16,
    "scale_inv is rounded down to a power of two": lambda s: np.exp2(np.floor(np.log2(s))),
    "a scale_inv of nan is read as a number": lambda s: np.nan_to_num(s, nan=1, posinf=np.inf),
    "a scale_inv of 2^-100 is read as another number": lambda s: np.maximum(s, np.float32(1e-27)),
}


@pytest.mark.parametrize("name", SCALES)
def test_wrong_scales_have_names(name):  # S-6, S-8
    function = dequantize(128, scale=SCALES[name])
    outcome = identify_decoder(function, E4M3, granularity="blockwise_1x128")
    assert not outcome.ok
    assert name in outcome.found["faults"]


PRODUCTS = {
    "it divides by scale_inv": lambda x, s: x / s,
    "its scale is ignored": lambda x, s: x,
    "the product is rounded to bfloat16": lambda x, s: bfloat16(x * s),
    "it divides by 1 / scale_inv in the place of multiplying": lambda x, s: x / (1 / s),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_wrong_products_have_names(name):  # S-8
    function = dequantize(128, product=PRODUCTS[name])
    outcome = identify_decoder(function, E4M3, granularity="blockwise_1x128")
    assert outcome.found["faults"] == [name]


def test_a_scale_may_divide():
    """Of a function whose argument is called scale, as torchao's."""

    def to_original(codes, scale):
        with np.errstate(divide="ignore", invalid="ignore"):
            return numbers(codes) / scale

    outcome = identify_decoder(to_original, E4M3)
    assert outcome.ok
    assert outcome.found["granularity"] == "tensorwise"


MX = {
    "a scale_inv of 2^-127 is read as 0": lambda e: (e.astype(np.uint32) << 23).view(np.float32),
    "a scale_inv of nan gives infinity": lambda e: (
        np.exp2(e.astype(np.float64) - 127).astype(np.float32)
        + np.where(e == 255, np.float32(np.inf), np.float32(0))
    ),
}


def test_scales_read_as_integers_have_a_name():  # S-8
    def function(codes, scale_inv):
        assert scale_inv.dtype == np.uint8
        return bfloat16(numbers(codes) * spread(scale_inv.astype(np.float32), 32))

    outcome = identify_decoder(function, E4M3, granularity="mx_1x32", framework="numpy")
    assert outcome.found["faults"] == ["codes of scales are read as integers"]


@pytest.mark.parametrize("name", MX)
def test_ends_of_e8m0_have_names(name):  # S-8, F-4
    """Byte 0 by a shift, vllm#46676; byte 255 as a power."""
    function = dequantize(32, scale=MX[name])
    outcome = identify_decoder(function, E4M3, granularity="mx_1x32")
    assert outcome.found["scales_as"] == "uint8"
    assert name in outcome.found["faults"]


def test_flushed_products_have_a_name():  # S-8
    def function(codes, scale_inv):
        product = dequantize(32, scale=lambda e: numbers(e, E8M0))(codes, scale_inv)
        return np.where(np.abs(product) < 2.0**-126, 0 * product, product)

    outcome = identify_decoder(function, E4M3, granularity="mx_1x32", framework="numpy")
    assert "products below 2^-126 are flushed to 0" in outcome.found["faults"]


def nvfp4(codes, scale_inv, tensor_scale_inv):
    scales = tensor_scale_inv * numbers(scale_inv)
    return numbers(unpack(np.asarray(codes)), E2M1) * spread(scales, 16)


def test_two_levels():  # S-22
    assert identify_decoder(nvfp4, E2M1, granularity="nvfp4_1x16").ok

    def otherwise(codes, scale_inv, tensor_scale_inv):
        x = numbers(unpack(np.asarray(codes)), E2M1) * spread(numbers(scale_inv), 16)
        return x * tensor_scale_inv

    outcome = identify_decoder(otherwise, E2M1, granularity="nvfp4_1x16")
    name = "the product with scale_inv is rounded before the tensor's scale"
    assert outcome.found["faults"] == [name]


@pytest.mark.parametrize("layout", ["swizzled_128x4", "mn_major", "column_major"])
def test_layouts(layout):  # S-25
    def function(codes, scale_inv):
        grid = codes.shape[0], -(-codes.shape[1] // 32)
        scales = scale_layouts.load(np.resize(scale_inv, size(grid)), layout, grid)
        return numbers(codes) * spread(numbers(scales, E8M0), 32)[:, : codes.shape[1]]

    def size(grid):
        return scale_layouts.SCALE_LAYOUTS[layout].size(grid, 1)

    outcome = identify_decoder(function, E4M3, granularity="mx_1x32", layout=layout)
    assert outcome.ok, outcome.message
    # the same memory in C order is read wrongly, and the kit knows as what
    outcome = identify_decoder(function, E4M3, granularity="mx_1x32")
    name = "their transpose" if layout == "column_major" else layout
    assert outcome.found["faults"] == [f"scales are read as {name}"]


def test_a_square_of_scales_is_no_transpose():  # S-6
    def guessing(codes, scale_inv):
        rows, columns = codes.shape
        turned = scale_inv.shape == (-(-columns // 128), -(-rows // 128))
        right = np.asarray(scale_inv.T if turned else scale_inv)
        return numbers(codes) * spread(np.repeat(right, 128, axis=0)[:rows], 128)[:, :columns]

    outcome = identify_decoder(guessing, E4M3, granularity="blockwise_128x128", framework="numpy")
    assert outcome.found["faults"] == ["scales are read as their transpose"]


def test_shapes_and_strides_are_asked():
    def short(codes):
        return numbers(codes) * np.float32(1 if codes.size != 33 * 65 else 2)

    assert identify_decoder(short, E4M3).found["faults"] == ["numbers depend on the shape"]
    torch = pytest.importorskip("torch")

    def contiguous(codes):  # the memory, whatever the strides
        flat = torch.as_strided(codes, codes.shape, torch.empty(codes.shape).stride())
        return torch.from_numpy(numbers(flat.numpy()))

    outcome = identify_decoder(contiguous, E4M3, framework="torch")
    assert outcome.found["faults"] == ["numbers depend on the stride"]


def test_require_decoder():
    assert require_decoder(numbers).ok
    with pytest.raises(AssertionError, match="the sign of e4m3fn is ignored"):
        require_decoder(lambda codes: abs(numbers(codes)))


def test_bad_input():
    with pytest.raises(ValueError, match="a decoder's format is one of e4m3fn"):
        identify_decoder(numbers, "bfloat16")
    with pytest.raises(ValueError, match="a function of codes; got int"):
        identify_decoder(3, E4M3)
    with pytest.raises(ValueError, match=r"needs 4 arguments\. Give the others defaults"):
        identify_decoder(lambda codes, a, b, c: codes, E4M3)
    with pytest.raises(ConformanceError, match="raised IndexError for codes"):
        identify_decoder(lambda codes: codes[999, 999, 999], E4M3)
    with pytest.raises(ConformanceError, match="gives uint8"):
        identify_decoder(lambda codes: codes, E4M3, framework="numpy")

    def writing(codes):
        codes[:] = 0
        return codes.astype(np.float32)

    with pytest.raises(ConformanceError, match="changed its codes"):
        identify_decoder(writing, E4M3, framework="numpy")
