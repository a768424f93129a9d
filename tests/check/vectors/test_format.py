"""Streams that are no vectors are errors with a line's number; what is missing is noticed."""

import re

import numpy as np
import pytest

from fp8ref.check.vectors.operations import generate, judge
from fp8ref.formats import E4M3FN
from fp8ref.sim import cast

HEADER = "# fp8ref vectors 1: cast format=e4m3fn source=float32 seed=0 count=0"


def judged(*lines, operation="cast", settings=None, **rules):
    stream = [line if isinstance(line, bytes) else f"{line}\n".encode() for line in lines]
    return judge(operation, stream, settings=settings or {}, rules=rules)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([HEADER, "3F800000"], "line 2: .*; got 1 fields; the answer is missing: '3F800000'"),
        ([HEADER, "3F800000 38 00"], "line 2: a vector is value, then code, separated by blanks; got 3 fields"),
        ([HEADER, "", "3F800000 38", "3F80000 zz"], "line 4: a code of e4m3fn is 8 bits in hexadecimal; got 'zz'"),
        ([HEADER, "13F800000 38"], "line 2: a float32 is 32 bits in hexadecimal, 8 digits; got '13F800000'"),
        ([HEADER, "3F800000 138"], "line 2: a code of e4m3fn is 8 bits in hexadecimal, 2 digits; got '138'"),
        ([HEADER, "-1 38"], "line 2: a float32 is 32 bits"),
        ([HEADER, b"3F800000 3\xff8\n"], "line 2: a line is ASCII text; got byte 0xFF"),
        ([HEADER, "3F800000 38", HEADER], "line 3: a header behind vectors"),
        ([HEADER, HEADER, "3F800000 38"], "line 2: a second header"),
        (["# fp8ref vectors 2: cast format=e4m3fn", "3F800000 38"], "line 1: these are vectors of version 2"),
        (["# fp8ref vectors 1: scale format=e4m3fn", "3F800000 38"], "line 1: these are vectors of 'scale', not of 'cast'"),
        (["# fp8ref vectors 1 cast", "3F800000 38"], "line 1: a header is"),
        (["# fp8ref vectors 1: cast format=e4m3fn colour=red", "3F800000 38"], "got 'colour'"),
        (["# fp8ref vectors 1: cast format=e4m3fn seed=x", "3F800000 38"], "seed of a header is an integer; got 'x'"),
        (["# fp8ref vectors 1: cast source=float32", "3F800000 38"], "a header names a format"),
        (["# fp8ref vectors 1: cast format=e9m9", "3F800000 38"], "a cast's format is one of .*; got 'e9m9'"),
        (["3F800000 38"], "these vectors have no header; say what they ask, with --format"),
        ([HEADER], "none came"),
        ([], "none came"),
    ],
)
def test_a_malformed_stream_of_casts(lines, says):
    with pytest.raises(ValueError, match=says):
        judged(*lines)


@pytest.mark.parametrize(
    ("operation", "settings", "line", "says"),
    [
        ("scale", {"format": "e4m3fn"}, "BF800000 43E00000", "line 1: an amax is not negative; got BF800000"),
        (
            "quantize",
            {"format": "e4m3fn"},
            "2 3F800000,3F800000 7E,7E 43E00000,00",
            "line 1: scale of tensorwise groups, shape .*: 1 numbers.*; got 2",
        ),
        ("quantize", {"format": "e4m3fn"}, "3 3F800000,3F800000 7E,7E 43E00000", "line 1: values, float32, of shape 3: 3 numbers.*; got 2"),
        ("quantize", {"format": "e4m3fn"}, "2, 3F800000,3F800000 7E,7E 43E00000", "line 1: a shape is numbers in decimal.*; got '2,'"),
        ("quantize", {"format": "e4m3fn"}, "0 3F800000 7E 43E00000", "line 1: a scale needs at least one element"),
        ("quantize", {"format": "e4m3fn", "granularity": "mx_1x32", "shape": "32"}, "8 0 0 0", "line 1: mx_1x32 needs K"),
        ("gemm", {"format": "e4m3fn"}, "1,1 38 3F800000 38 3F800000 3F800000", "line 1: a shape is 3 in decimal"),
        ("gemm", {"format": "e4m3fn"}, "1,1,1 38 BF800000 38 3F800000 3F800000", "line 1: scales are not negative"),
    ],
)
def test_a_malformed_line_of_the_others(operation, settings, line, says):
    with pytest.raises(ValueError, match=says):
        judged(line, operation=operation, settings=settings)


def test_vectors_of_another_question_are_refused():
    with pytest.raises(
        ValueError, match=r"ask cast with format=e4m3fn; got --format e5m2. Make them with fp8ref vectors gen cast --format e5m2"
    ):
        judged(HEADER, "3F800000 38", settings={"format": "e5m2"})


def test_digits_may_be_few_or_small_and_have_a_prefix():
    assert judged("0x3f800000 0x38", "# of somebody's", "0 0", settings={"format": "e4m3fn"}).ok


def test_without_a_header_vectors_are_judged_and_what_is_missing_is_unknown():
    verdict = judged("3F800000 38", "3F880000 38", "3F880000 39", settings={"format": "e4m3fn"})
    assert verdict.missing is None
    assert verdict.differ == {"tie": 1}
    assert "no header" in verdict.text()
    assert "2 of 3 answers agree" in verdict.text()


def test_missing_vectors_are_counted_by_kind_and_repeated_ones_once():
    lines = list(generate("cast", {"format": "e4m3fn", "count": 0}))
    vectors = [line for line in lines if not line.startswith("#")]
    values = np.array([int(v, 16) for v in vectors], np.uint32).view(np.float32)
    answered = [f"{v} {code:02X}" for v, code in zip(vectors, cast.encode(values, E4M3FN), strict=True)]
    whole = judged(HEADER, *answered[::-1], *answered[:9])
    assert whole.ok
    assert whole.missing == {}
    assert sum(whole.compared.values()) == len(answered) + 9
    kept = [line for line, x in zip(answered, values, strict=True) if not (np.isnan(x) or x == 0)]
    part = judged(HEADER, *kept, "40490FDB 45")
    assert part.ok
    assert part.missing == {"NaN": int(np.isnan(values).sum()), "zero": 2}
    text = part.text()
    assert f"missing: {sum(part.missing.values())} of {len(answered):,} vectors were not answered" in text
    assert "1 vectors are not of the set" in text
    assert re.search(r"^NaN +\d+ +0 +0 +0$", text, re.MULTILINE)


def test_nan_codes_are_all_one():  # C-5
    assert judged("7FC00000 7F", "7FC00000 FF", "7F800001 ff", settings={"format": "e4m3fn"}).ok
    assert not judged("7FC00000 7E", settings={"format": "e4m3fn"}).ok
