"""Mistakes of casts by name: each is found in more than one format, and right casts have none."""

import numpy as np
import pytest

from fp8ref.conformance import identify_cast
from fp8ref.conformance.cast import mistakes
from fp8ref.conformance.cast.outputs import Output, Responses
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.formats import FORMATS, FP8_FORMATS, Format
from fp8ref.sim.quantize import cast

FORMATS_ASKED = [FORMATS[name] for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn")]


def bits_read(count: int):
    """A cast that reads so many fraction bits of float32."""
    mask = np.uint32(0xFFFFFFFF << (23 - count) & 0xFFFFFFFF)
    return lambda x, fmt: cast.encode((x.view(np.uint32) & mask).view(np.float32), fmt)


def clipped(bound: float):
    return lambda x, fmt: cast.encode(np.clip(x, -bound * fmt.max, bound * fmt.max), fmt)


def cleared(bit: int):
    def function(x, fmt: Format):
        codes = cast.encode(x, fmt)
        return np.where(np.abs(x) > fmt.max, codes, codes & ~np.uint8(1 << bit))

    return function


def upward(x, fmt: Format):
    toward = cast.encode(x, fmt, rounding="toward_zero")
    exact = cast.decode(toward, fmt) == x
    up = np.minimum(toward.astype(int) + 1, fmt.max_code)
    return np.where(exact | (x < 0) | np.signbit(x), toward, up).astype(np.uint8)


def early(x, fmt: Format):
    """Overflow of all that is larger than max, before rounding."""
    code = fmt.inf_code or fmt.nan_code
    signs = np.where(np.signbit(x), fmt.sign_bit, 0)
    return np.where(np.abs(x) > fmt.max, code | signs, cast.encode(x, fmt)).astype(np.uint8)


def halved(x, fmt: Format):
    small = np.abs(x) < fmt.smallest_normal
    return cast.encode(np.where(small, x * np.float32(0.5), x), fmt)


def small_toward_zero(x, fmt: Format):
    """The fraction of subnormal results is cut."""
    cut = cast.encode(x, fmt, rounding="toward_zero")
    return np.where(np.abs(x) < fmt.smallest_normal, cut, cast.encode(x, fmt)).astype(np.uint8)


MISTAKES = {
    "subnormal results are rounded toward_zero": small_toward_zero,
    "only 9 fraction bits of a number are read": bits_read(9),
    "only 15 fraction bits of a number are read": bits_read(15),
    "numbers are clipped to": clipped(0.5),
    "the last bit of codes is cleared": cleared(0),
    "it rounds up, toward infinity": upward,
    "overflow is decided before rounding": early,
    "subnormal results are half what they are": halved,
}


def asked(function, fmt: Format) -> Responses:
    x = cast_inputs.identifying(fmt, "float32")
    with np.errstate(all="ignore"):
        codes = np.asarray(function(x, fmt), np.uint8)
    return Responses(x=x, source="float32", output=Output(array=codes, dtype="uint8"), fmt=fmt)


@pytest.mark.parametrize("fmt", FORMATS_ASKED, ids=str)
@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_has_its_name(words, fmt):
    if words.startswith("overflow") and not fmt.has_nan:
        pytest.skip("a format without NaN has no code for it")
    assert mistakes.name(asked(MISTAKES[words], fmt)).startswith(words)


@pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=str)
def test_another_mistake_has_none(fmt):
    def one_code(x, fmt):
        codes = cast.encode(x, fmt)
        return np.where(codes == 0x21, 0x22, codes)

    assert mistakes.name(asked(one_code, fmt)) == ""


def test_infinities_alone_have_none():
    def lost(x, fmt):
        return np.where(np.isinf(x), 0, cast.encode(x, fmt))

    assert mistakes.name(asked(lost, FORMATS["e5m2"])) == ""


def test_the_report_says_it():
    def function(x):
        return bits_read(9)(np.asarray(x, np.float32), FORMATS["e4m3fn"])

    outcome = identify_cast(function, "e4m3fn", framework="numpy")
    assert not outcome.ok
    assert "only 9 fraction bits of a number are read" in outcome.summary
    doubles = [f for f in outcome.findings if f.what.startswith("double_rounding")]
    assert all(f.value is None for f in doubles)
