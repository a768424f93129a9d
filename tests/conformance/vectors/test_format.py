"""Streams that are no vectors are errors with a line's number; what shells put around text means
nothing.
"""

import codecs

import pytest

from fp8ref.conformance.vectors.operations import judge

HEADER = "# fp8ref vectors 1: cast format=e4m3fn source=float32 seed=0 count=0"


def judged(*lines, operation="cast", settings=None, **rules):
    stream = [line if isinstance(line, bytes) else f"{line}\n".encode() for line in lines]
    return judge(operation, stream, settings=settings or {}, rules=rules, some=True)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([HEADER, "3F800000"], "line 2: .*; got 1 fields; the answer is missing: '3F800000'"),
        (
            [HEADER, "3F800000 38 00"],
            "line 2: a vector is value, then code, separated by blanks; got 3 fields",
        ),
        (
            [HEADER, "", "3F800000 38", "3F80000 zz"],
            "line 4: a code of e4m3fn is 8 bits in hexadecimal, at most 2 digits; got 'zz'",
        ),
        (
            [HEADER, "13F800000 38"],
            "line 2: a float32 is 32 bits in hexadecimal, at most 8 digits; got '13F800000'. "
            "Write them as %08X",
        ),
        (
            [HEADER, "3F800000 138"],
            "line 2: a code of e4m3fn is 8 bits in hexadecimal, at most 2 digits; got '138'",
        ),
        ([HEADER, "-1 38"], "line 2: a float32 is 32 bits"),
        ([HEADER, b"3F800000 3\xff8\n"], "line 2: a line is ASCII text; got byte 0xFF"),
        (
            [b"\xff\xfe3\0F\0 \x003\x008\0\n", b"\0"],
            "line 1: a line is ASCII text; got UTF-16 .*Convert it with iconv",
        ),
        ([b"\xfe\xff\x003\x000\0 \x000\0\n"], "line 1: a line is ASCII text; got UTF-16"),
        ([HEADER.encode("utf-16-le") + b"\n"], "line 1: a line is ASCII text; got UTF-16"),
        (
            [HEADER, codecs.BOM_UTF8 + b"3F800000 38\n"],
            "line 2: a line is ASCII text; got byte 0xEF",
        ),
        ([HEADER, "3F800000 38", HEADER], "line 3: a header stands before its vectors"),
        ([HEADER, "3F800000 38", f" {HEADER}"], "line 3: a header stands before its vectors"),
        ([HEADER, HEADER, "3F800000 38"], "line 2: a set of vectors has one header"),
        (
            ["# fp8ref vectors 2: cast format=e4m3fn", "3F800000 38"],
            "line 1: these are vectors of version 2",
        ),
        (
            ["# fp8ref vectors 1: scale format=e4m3fn", "3F800000 38"],
            "line 1: these are vectors of 'scale', not of 'cast'",
        ),
        (["# fp8ref vectors 1 cast", "3F800000 38"], "line 1: a header is"),
        (["# fp8ref vectors 1: cast format=e4m3fn color=red", "3F800000 38"], "got 'color'"),
        (
            ["# fp8ref vectors 1: cast format=e4m3fn seed=x", "3F800000 38"],
            "seed of a header is an integer; got 'x'",
        ),
        (["# fp8ref vectors 1: cast source=float32", "3F800000 38"], "a header names a format"),
        (
            ["# fp8ref vectors 1: cast format=e9m9", "3F800000 38"],
            "a cast's format is one of .*; got 'e9m9'",
        ),
        (["3F800000 38"], "vectors without a header need their settings as options, --format"),
        ([HEADER], "got none"),
        ([], "got none"),
    ],
)
def test_a_malformed_stream_of_casts(lines, says):
    with pytest.raises(ValueError, match=says):
        judged(*lines)


@pytest.mark.parametrize(
    ("operation", "settings", "line", "says"),
    [
        ("scale", {}, "BF800000 43E00000", "an amax is not negative; got BF800000"),
        (
            "quantize",
            {},
            "2 3F800000,3F800000 7E,7E 43E00000,00",
            r"the scales of tensorwise groups, shape \[\], need 1 numbers, separated by commas; "
            r"got 2. Write all",
        ),
        (
            "quantize",
            {},
            "3 3F800000,3F800000 7E,7E 43E00000",
            r"the values, float32, of shape \[3\] need 3 numbers.*; got 2",
        ),
        (
            "quantize",
            {},
            "2 3F800000,3F800000 7E 43E00000",
            r"the codes of shape \[2\] need 2 numbers.*; got 1",
        ),
        (
            "quantize",
            {},
            "2 3F800000,3F800000 7E,7E",
            "separated by blanks; got 3 fields: '2 3F80.*Write gen's line again",
        ),
        (
            "quantize",
            {},
            "2 3F800000,3F800000 7E,7E 43E00000 0",
            "separated by blanks; got 5 fields",
        ),
        ("quantize", {}, "2 3F800000,3F800000", "got 2 fields; the answer is missing"),
        (
            "quantize",
            {},
            "2 3F800000,x 7E,7E 43E00000",
            "each of the values, float32, .* is 32 bits in hexadecimal.*; got 'x'. Write",
        ),
        (
            "quantize",
            {},
            "2 3F800000,3F800000 7E,17E 43E00000",
            "is 8 bits in hexadecimal, at most 2 digits; got '17E'. Write them as %02X",
        ),
        (
            "quantize",
            {"source": "bfloat16"},
            "1 3F800000 7E 43E00000",
            "is 16 bits in hexadecimal, at most 4 digits; got '3F800000'",
        ),
        (
            "quantize",
            {},
            "2, 3F800000,3F800000 7E,7E 43E00000",
            "a shape is 1 to 32 axes, .*; got '2,'. Write it like 4,128",
        ),
        ("quantize", {}, "0 3F800000 7E 43E00000", "a shape is .*each at least 1.*; got '0'"),
        ("quantize", {}, "-1 3F800000 7E 43E00000", "a shape is .*; got '-1'"),
        ("quantize", {}, ",".join("1" * 33) + " 3F800000 7E 43E00000", "a shape is 1 to 32 axes"),
        (
            "quantize",
            {},
            "999999999,999999999 0 0 0",
            "need 999,999,998,000,000,001 numbers.*; got 1",
        ),
        ("quantize", {"granularity": "mx_1x32", "shape": "32"}, "8 0 0 0", "mx_1x32 needs K"),
        (
            "gemm",
            {},
            "1,1 38 3F800000 38 3F800000 3F800000",
            "a shape is M,N,K, .*; got '1,1'. Write it like 4,4,256",
        ),
        (
            "gemm",
            {},
            "1,1,0 38 3F800000 38 3F800000 3F800000",
            "a shape is M,N,K, each at least 1.*; got '1,1,0'",
        ),
        (
            "gemm",
            {},
            "1,1,999999999 38 3F800000 38 3F800000 3F800000",
            r"the codes of a \[1, 999999999\] need 999,999,999 numbers.*; got 1",
        ),
        ("gemm", {}, "1,1,1 38 3F800000 38 3F800000", "got 5 fields; the answer is missing"),
        (
            "gemm",
            {},
            "1,1,1 g8 3F800000 38 3F800000 3F800000",
            r"each of the codes of a \[1, 1\] is 8 bits in hexadecimal.*; got 'g8'",
        ),
        (
            "gemm",
            {},
            "1,1,1 38 3F8000000 38 3F800000 3F800000",
            "scale_inv of a, .* 32 bits in hexadecimal, at most 8 digits; got '3F8000000'",
        ),
        (
            "gemm",
            {},
            "1,1,2 38,38 3F800000 38 3F800000 3F800000",
            r"the codes of b \[1, 2\] need 2 numbers.*; got 1",
        ),
        (
            "gemm",
            {},
            "2,1,1 38,38 3F800000 38 3F800000 3F800000",
            "the values, float32, of M x N = 2 x 1 need 2 numbers.*; got 1",
        ),
        ("gemm", {}, "1,1,1 38 BF800000 38 3F800000 3F800000", "scales are not negative"),
        (
            "gemm",
            {},
            "1,1,1 38 7FC00000 38 3F800000 7FC00000",
            "a NaN scale needs codes that are NaN or zero",
        ),
        (
            "gemm",
            {"granularity": "mx_1x32"},
            "1,1,33 38 3F800000 38 3F800000 3F800000",
            "mx_1x32 needs K",
        ),
    ],
)
def test_a_malformed_line_of_the_others(operation, settings, line, says):
    with pytest.raises(ValueError, match=f"^line 1: .*{says}"):
        judged(line, operation=operation, settings={"format": "e4m3fn"} | settings)


@pytest.mark.parametrize(
    ("operation", "line"),
    [
        ("quantize", "2 7FC00000,3F800000 7F,FF FFC00001"),  # NaN codes and scales are each one
        ("quantize", "2 80000000,00000000 80,00 57CBBA10"),
        ("gemm", "1,1,1 7F 3F800000 38 3F800000 FFC00001"),
        ("gemm", "1,1,1 38 7F800000 38 3F800000 7F800000"),
        ("gemm", "1,1,1 80 3F800000 38 3F800000 00000000"),  # a sum of zeros is +0
        ("gemm", "1,1,1 38 80000000 38 3F800000 80000000"),  # 1 times a scale of -0
    ],
)
def test_zeros_infinities_and_nans_of_somebody_s_lines(operation, line):
    assert judged(line, operation=operation, settings={"format": "e4m3fn"}).ok


def test_vectors_of_another_question_are_refused():
    with pytest.raises(
        ValueError,
        match=r"are of cast with format=e4m3fn; got --format e5m2. Make them with fp8ref vectors "
        r"gen cast --format e5m2",
    ):
        judged(HEADER, "3F800000 38", settings={"format": "e5m2"})


def test_digits_may_be_few_or_small_and_have_a_prefix():
    assert judged("0x3f800000 0x38", "# of somebody's", "0 0", settings={"format": "e4m3fn"}).ok


@pytest.mark.parametrize(
    "stream",
    [
        [HEADER, "3F800000 38"],
        [codecs.BOM_UTF8 + HEADER.encode() + b"\r\n", b"3F800000 38\r\n"],
        [codecs.BOM_UTF8 + b"\n", HEADER, "3F800000 38"],
        [f"  {HEADER}  ", "\t3F800000   38 "],
        [HEADER.replace("# ", "#"), b"3F800000 38"],
        ["# of somebody's", "", HEADER.replace(" ", "  "), "# and again", "3F800000 38"],
    ],
    ids=["plain", "Windows", "mark alone", "blanks about", "no blank", "comments"],
)
def test_a_header_is_read_whatever_stands_around_it(stream):
    verdict = judged(*stream)
    assert verdict.ok
    assert verdict.unsure == ""
    assert verdict.compared == {"number": 1}


def test_nan_codes_are_all_one():  # C-5
    assert judged("7FC00000 7F", "7FC00000 FF", "7F800001 ff", settings={"format": "e4m3fn"}).ok
    assert not judged("7FC00000 7E", settings={"format": "e4m3fn"}).ok
