"""Every operation: what gen asks, answered rightly and wrongly, as verify judges it."""

import ml_dtypes
import numpy as np
import pytest

from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.vectors import cast as casts
from fp8ref.conformance.vectors import gemm as gemms
from fp8ref.conformance.vectors import scale as scales_asked
from fp8ref.conformance.vectors.format import join
from fp8ref.conformance.vectors.operations import OPERATIONS, generate, judge, needed_setting
from fp8ref.conformance.vectors.quantize import Quantize
from fp8ref.formats import BFLOAT16, E2M1FN, E4M3FN, E8M0FNU, FORMATS, FP8_FORMATS
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, scales, scaling

DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}


def answered(lines, answer) -> list[bytes]:
    """A stream in which answer(fields) is written behind every vector."""
    return [
        (line if line.startswith("#") else f"{line} {answer(*line.split())}").encode() + b"\n"
        for line in lines
    ]


def judged(operation: str, settings: dict, answer, **rules):
    return judge(
        operation, answered(generate(operation, settings), answer), settings=settings, rules=rules
    )


def values(text: str, dtype) -> np.ndarray:
    """The numbers of a field."""
    return np.array(
        [int(v, 16) for v in text.split(",")], f"uint{8 * np.dtype(dtype).itemsize}"
    ).view(dtype)


def dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def ml_cast(fmt: str, source: str):
    """The cast of ml_dtypes, saturating, from float64, which every source is exactly; its own clip
    keeps NaNs.
    """

    def answer(text: str) -> str:
        x, dtype = (
            values(text, DTYPES[source]).astype(np.float64),
            getattr(ml_dtypes, f"float8_{fmt}"),
        )
        limit = float(ml_dtypes.finfo(dtype).max)
        return f"{np.clip(x, -limit, limit).astype(dtype).view(np.uint8)[0]:02x}"

    return answer


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # signalling NaNs
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fmt", FP8_FORMATS)
def test_the_cast_of_ml_dtypes_agrees(fmt, source):
    verdict = judged("cast", {"format": fmt, "source": source, "count": 500}, ml_cast(fmt, source))
    assert verdict.ok
    assert {"tie", "next to a tie", "number", "NaN", "infinite", "above max", "zero"} <= set(
        verdict.compared
    )


@pytest.mark.parametrize("fmt", FP8_FORMATS)
@pytest.mark.parametrize("source", dtypes.SOURCES)
def test_a_set_has_every_number_and_every_tie_of_the_format(fmt, source):
    inputs = set(casts.Cast(format=fmt, source=source, count=0).inputs().tolist())
    numbers = np.unique(
        cast.decode(np.arange(FORMATS[fmt].max_code + 1, dtype=np.uint8), FORMATS[fmt])
    ).astype(np.float64)
    ties = (numbers[1:] + numbers[:-1]) / 2
    of = np.concatenate([numbers, ties])
    with np.errstate(over="ignore", under="ignore"):
        found = of.astype(DTYPES[source])
    exact = found[found.astype(np.float64) == of]  # float16 does not reach all
    assert set(exact.view(f"uint{8 * exact.itemsize}").tolist()) <= inputs
    if source != "float16":
        assert len(exact) == len(of)
        bits = exact[exact > 0].view(f"uint{8 * exact.itemsize}")
        assert set((bits - 1).tolist()) | set((bits + 1).tolist()) <= inputs


def test_rounding_twice_is_noticed_and_named():  # C-1
    def by_float32(text: str) -> str:
        return f"{cast.encode(values(text, np.float64).astype(np.float32), E4M3FN)[0]:02X}"

    with np.errstate(all="ignore"):
        verdict = judged("cast", {"format": "e4m3fn", "source": "float64", "count": 0}, by_float32)
    assert set(verdict.differ) == {"next to a tie"}
    assert all("rounding to float32 first" in d["rule"] for d in verdict.first)


def test_an_e8m0_cast():  # C-7
    def answer(text: str, *, up: bool = True) -> str:
        with np.errstate(invalid="ignore"):
            fraction, k = np.frexp(values(text, np.float32).astype(np.float64)[0])
        if not fraction > 0:
            return "FF"
        if np.isinf(fraction):
            return "FE"
        return (
            f"{min(max(int(k) + 126 + (fraction >= 0.75 if up else fraction > 0.75), 0), 254):02X}"
        )

    settings = {"format": "e8m0fnu", "count": 300}
    assert judged("cast", settings, answer).ok
    verdict = judged("cast", settings, lambda text: answer(text, up=False))
    assert set(verdict.differ) == {"tie"}
    assert "C-7" in verdict.first[0]["rule"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rounding": "toward_zero"}, "rounding toward_zero"),
        ({"rounding": "nearest_away"}, "rounding nearest_away"),
        ({"saturate": False}, "not saturating"),
    ],
)
def test_a_wrong_cast_is_named(wrong, says):
    def answer(text: str) -> str:
        return f"{cast.encode(values(text, np.float32), FORMATS['e5m2'], **wrong)[0]:02X}"

    verdict = judged("cast", {"format": "e5m2", "count": 50}, answer)
    assert verdict.notes == [f"All codes are what {says} gives."]
    assert all(
        f"The answer is what {says}" in d["rule"] or says in d["rule"] for d in verdict.first
    )
    assert judged("cast", {"format": "e5m2", "count": 50}, answer, **wrong).ok


def test_a_cast_to_e2m1fn():  # C-9
    """ml_dtypes' cast, saturating; a NaN becomes the largest number."""

    def answer(text: str) -> str:
        x = values(text, np.float32)
        code = (
            np.nan_to_num(x, nan=6.0, posinf=6, neginf=-6)
            .clip(-6, 6)
            .astype(ml_dtypes.float4_e2m1fn)
            .view(np.uint8)[0]
            & 15
        )
        return f"{code:X}"

    settings = {"format": "e2m1fn", "count": 200}
    verdict = judged("cast", settings, answer)
    assert verdict.ok
    assert {
        "tie",
        "next to a tie",
        "number",
        "NaN",
        "infinite",
        "above max",
        "zero",
        "subnormal",
    } <= set(verdict.compared)
    away = judged(
        "cast",
        settings,
        lambda text: (
            f"{cast.encode(values(text, np.float32), E2M1FN, rounding='nearest_away')[0]:X}"
        ),
    )
    assert set(away.differ) == {"tie"}
    assert away.notes == ["All codes are what rounding nearest_away gives."]

    def other_nan(text: str) -> str:  # any code of a NaN: there is no right one
        return "8" if np.isnan(values(text, np.float32)[0]) else answer(text)

    assert judged("cast", settings, other_nan).ok
    with pytest.raises(ValueError, match="is 4 bits in hexadecimal, at most 1 digit; got '10'"):
        judged("cast", settings, lambda text: "10")


def test_scales_of_e2m1fn():  # S-14, S-22
    def answer(text: str) -> str:  # the power of two of floor(log2(amax)) - 2
        amax = values(text, np.float32)[0]
        if np.isnan(amax):
            return "FF"
        return f"{max(int(amax.view(np.uint32) >> np.uint32(23)) - 2, 0):02X}"

    assert judged(
        "scale", {"format": "e2m1fn", "policy": "mx_floor", "count": 50}, answer, made="e8m0"
    ).ok
    with pytest.raises(
        ValueError, match=r"makes scales from a block's amax and the tensor's .* Ask for quantize"
    ):
        judged("scale", {"format": "e2m1fn", "policy": "te_nvfp4"}, answer)


def test_the_scales_of_torchao_agree():  # S-3
    import torch
    from torchao.float8.float8_utils import amax_to_scale

    def answer(text: str, power: bool = False) -> str:
        amax = torch.from_numpy(values(text, np.float32).copy())
        return join(
            amax_to_scale(amax, torch.float8_e4m3fn, round_scales_to_power_of_2=power)
            .numpy()
            .view(np.uint32),
            32,
        )

    settings = {"format": "e4m3fn", "count": 200}
    verdict = judged("scale", settings, answer)
    assert verdict.ok
    assert judged("scale", settings | {"policy": "torchao_pow2"}, lambda t: answer(t, True)).ok
    verdict = judged("scale", settings | {"policy": "torchao_mask"}, lambda t: answer(t, True))
    # S-4: exp2_log2 and mask differ there alone
    assert "next to max times a power of two" in verdict.differ
    assert set(verdict.differ) <= {"next to max times a power of two", "infinite", "below eps"}


def test_an_inverse_and_an_e8m0_code_are_answers_too():  # S-14
    def of(policy, made):
        def answer(text: str) -> str:
            pair = scales.scales_from_amax(values(text, np.float32), E4M3FN, policy)
            if made == "e8m0":
                nan = np.isnan(pair.scale_inv[0])
                return "FF" if nan else f"{int(np.log2(pair.scale_inv[0])) + 127:02X}"
            return join(getattr(pair, made).view(np.uint32), 32)

        return answer

    settings = {"format": "e4m3fn", "policy": "mx_rceil", "count": 50}
    assert judged("scale", settings, of("mx_rceil", "e8m0"), made="e8m0").ok
    verdict = judged("scale", settings, of("mx_floor", "e8m0"), made="e8m0")
    assert not verdict.ok
    assert "S-14" in verdict.first[0]["rule"]
    # e4m3fn's
    assert judged(
        "scale",
        {"format": "e5m2", "policy": "flax", "count": 50},
        of("flax", "scale_inv"),
        made="scale_inv",
    ).differ
    with pytest.raises(ValueError, match="e8m0 needs a policy with e8m0 scales"):
        judged("scale", {"format": "e5m2", "policy": "flax"}, of("flax", "scale"), made="e8m0")


def quantized(question: Quantize, *, codes=lambda c: c, scale=lambda s: s, **other):
    source = dtypes.by_name(question.source)

    def answer(shape: str, numbers: str) -> str:
        x = dtypes.values(values(numbers, f"uint{source.bits}"), source).reshape(dims(shape))
        how = {
            "granularity": question.granularity,
            "policy": question.policy,
            "axis": question.axis,
        } | other
        q = scaling.quantize(x, question.way.fmt, **how)
        return (
            f"{join(codes(q.codes), 8)} {join(np.atleast_1d(scale(q.scale)).view(np.uint32), 32)}"
        )

    return answer


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "e4m3fn"},
        {
            "format": "e5m2",
            "source": "bfloat16",
            "granularity": "rowwise",
            "axis": 0,
            "shape": "5,3,7",
        },
        {
            "format": "e4m3fn",
            "source": "float16",
            "granularity": "blockwise_128x128",
            "shape": "130,128",
            "count": 3,
        },
        {"format": "e4m3fn", "granularity": "mx_1x32", "policy": "mx_rceil", "shape": "3,64"},
        {"format": "e4m3fnuz", "policy": "flax", "shape": "33"},
    ],
    ids=lambda s: "-".join(str(v) for v in s.values()),
)
def test_quantizers(settings):  # S-5, S-6
    question = Quantize(**settings)
    verdict = judged("quantize", settings, quantized(question))
    assert verdict.ok
    if settings.get("count", 30) == 30:
        assert set(verdict.compared) == {
            "ordinary",
            "outliers",
            "wide",
            "subnormal",
            "zeros",
            "zero lines",
            "power of two",
            "huge",
            "infinity",
            "NaN",
        }
    verdict = judged("quantize", settings, quantized(question, scale=lambda s: s * np.float32(2)))
    assert "of amax" in verdict.first[0]["vector"]


def nvfp4(
    shape: str, numbers: str, *, tensor=lambda t: t, block=lambda s: s, code=lambda c: c
) -> str:
    """Transformer Engine's NVFP4 of a row of blocks of 16, each operation written out (S-22)."""
    x = values(numbers, np.float32).reshape(-1, 16)
    one, largest = np.float32(1), np.finfo(np.float32).max
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(axis=1, keepdims=True)
        encode = np.minimum(np.float32(2688) / amax.max(), largest)
        encode = one if encode == 0 or amax.max() == 0 else encode
        scales = (
            np.minimum(amax * (encode * (one / np.float32(6))), np.float32(448))
            .astype(ml_dtypes.float8_e4m3fn)
            .astype(np.float32)
        )
        factor = np.minimum(one / (scales * (one / encode)), largest)
        scaled = np.nan_to_num(np.clip(x * factor, -6, 6), nan=6.0)
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    made = np.append(block(scales.ravel()), tensor(np.float32(one / encode))).astype(np.float32)
    return f"{','.join(f'{c:X}' for c in code(codes.ravel()))} {join(made.view(np.uint32), 32)}"


def nvfp4_rows(shape: str, numbers: str, *, swapped: bool = False) -> str:
    """The same of each row under a scale of its own; the rows' scales last, in order or swapped."""
    codes, scales = [], []
    words = numbers.split(",")
    for row in range(3):
        line, made = nvfp4(shape, ",".join(words[64 * row : 64 * row + 64])).split(" ")
        codes.append(line)
        scales.append(made.split(","))
    blocks = [word for made in scales for word in made[:-1]]
    tensors = [made[-1] for made in scales]
    tensors = [tensors[i] for i in ((0, 2, 1) if swapped else (0, 1, 2))]
    return f"{','.join(codes)} {','.join(blocks + tensors)}"


def test_a_quantizer_to_nvfp4():  # S-22
    settings = {
        "format": "e2m1fn",
        "policy": "te_nvfp4",
        "granularity": "nvfp4_1x16",
        "shape": "1,64",
    }
    assert judged("quantize", settings, nvfp4, made="scale_inv").ok
    for planted, vector in (
        ({"tensor": lambda t: 2 * t}, "scale_inv of the tensor, of amax"),
        ({"block": lambda s: np.append(s[:-1], 2 * s[-1])}, "scale_inv [0, 3], of amax"),
        ({"code": lambda c: c ^ 8}, "element [0, "),
    ):
        verdict = judged(
            "quantize",
            settings,
            lambda *fields, planted=planted: nvfp4(*fields, **planted),
            made="scale_inv",
        )
        assert not verdict.ok
        assert vector in verdict.first[0]["vector"]
        assert "S-22" in verdict.first[0]["rule"] or "S-5" in verdict.first[0]["rule"]
    with pytest.raises(ValueError, match="are compared as scale_inv"):
        judged("quantize", settings, nvfp4)
    settings |= {"policy": "te_nvfp4_row", "shape": "3,64"}
    assert judged("quantize", settings, nvfp4_rows, made="scale_inv").ok
    planted = judged(
        "quantize", settings, lambda *f: nvfp4_rows(*f, swapped=True), made="scale_inv"
    )
    assert "scale_inv of row [" in planted.first[0]["vector"]
    with pytest.raises(ValueError, match=r"got granularity 'nvfp4_16x16'\. Use nvfp4_1x16\.$"):
        Quantize(**settings | {"granularity": "nvfp4_16x16"})
    settings["policy"] = "te_nvfp4"
    with pytest.raises(ValueError, match="policy 'te_nvfp4' is of e2m1fn; got 'e4m3fn'"):
        Quantize(**settings | {"format": "e4m3fn"})
    for granularity in ("rowwise", "tensorwise", "mx_1x32"):
        with pytest.raises(ValueError, match=f"blocks of 16 .* got granularity '{granularity}'"):
            Quantize(**settings | {"granularity": granularity})


def test_a_quantizer_to_mxfp4():  # S-14
    settings = {
        "format": "e2m1fn",
        "policy": "mx_rceil",
        "granularity": "mx_1x32",
        "shape": "3,64",
        "count": 10,
    }

    def answer(shape: str, numbers: str) -> str:
        q = scaling.quantize(
            values(numbers, np.float32).reshape(dims(shape)),
            E2M1FN,
            granularity="mx_1x32",
            policy="mx_rceil",
        )
        return f"{join(q.codes, 4)} {join(cast.encode(q.scale_inv, E8M0FNU), 8)}"

    assert judged("quantize", settings, answer, made="e8m0").ok


def test_a_set_that_repeats_itself_is_asked_as_often():
    """Of tensors of one element some are alike."""
    settings = {"format": "e4m3fn", "shape": "1"}
    stream = answered(generate("quantize", settings), quantized(Quantize(**settings)))
    assert len(set(stream)) < len(stream)
    assert judge("quantize", stream, settings=settings, rules={}).ok
    again = judge("quantize", [*stream, stream[2]], settings=settings, rules={})
    assert again.repeated == [33]
    assert not again.ok


def test_a_wrong_code_under_a_right_scale_is_named_by_its_element():
    def last_off(codes):
        codes = codes.copy()
        codes[-1, -1] ^= 1
        return codes

    verdict = judged(
        "quantize",
        {"format": "e4m3fn", "count": 1},
        quantized(Quantize(format="e4m3fn"), codes=last_off),
    )
    assert verdict.differ == {"ordinary": 1}
    assert "element [3, 127]" in verdict.first[0]["vector"]
    assert "1 of 512 codes differ" in verdict.first[0]["rule"]


def multiplied(question: gemms.Gemm, **how):
    def answer(shape: str, a: str, scale_a: str, b: str, scale_b: str) -> str:
        m, n, k = dims(shape)
        sides = []
        for codes, scale, rows, fmt in (
            (a, scale_a, m, question.format),
            (b, scale_b, n, question.format_b),
        ):
            inv = values(scale, np.float32).reshape(
                () if question.granularity == "tensorwise" else (rows, -1)
            )
            sides.append(
                scaling.Quantized(
                    values(codes, np.uint8).reshape(rows, k),
                    inv,
                    inv,
                    FORMATS[fmt],
                    question.granularity,
                    -1,
                )
            )
        out = gemm.matmul(*sides, out_dtype=FORMATS[question.out_dtype], **how)
        bits = out.view(np.uint32)
        return (
            join(bits, 32) if question.out_dtype == "float32" else join(bits >> np.uint32(16), 16)
        )

    return answer


@pytest.mark.parametrize(
    "how",
    [
        {"accumulate": "exact"},
        {"accumulate": "hopper_fast", "epilogue": "product_then_round"},
        {"accumulate": "f32"},
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"format": "e4m3fn"},
        {"format": "e5m2", "format_b": "e4m3fn", "granularity": "rowwise", "out_dtype": "bfloat16"},
    ],
)
def test_gemms(settings, how):  # G-2, G-3, G-12
    verdict = judged("gemm", settings, multiplied(gemms.Gemm(**settings), **how), **how)
    assert verdict.ok
    assert set(verdict.compared) == set(gemms.PATTERNS)


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_a_bound_in_the_place_of_bits(out_dtype):  # B-1
    settings = {"format": "e4m3fn", "granularity": "rowwise", "out_dtype": out_dtype}
    question = gemms.Gemm(**settings)
    in_order = multiplied(question, accumulate="f32")
    assert judged("gemm", settings, in_order).ok == (out_dtype != "float32")
    verdict = judged("gemm", settings, in_order, bound=True)
    assert verdict.ok
    assert "of B-1's bound" in verdict.notes[0]
    narrow = judged("gemm", settings, multiplied(question, accumulate="hopper_fast"), bound=True)
    assert not narrow.ok
    assert "of the bound (B-1)" in narrow.first[0]["rule"]
    nan = join(
        np.full(16, 0x7FC00000 if out_dtype == "float32" else 0x7FC0, np.uint32),
        32 if out_dtype == "float32" else 16,
    )
    assert not judged("gemm", settings, lambda *_: nan, bound=True).ok


def test_a_bound_is_of_the_exact_sum():
    with pytest.raises(
        ValueError, match="B-1 bounds the distance from the exact sum; got accumulate 'f32'"
    ):
        gemms.Rules(accumulate="f32", bound=True)


def test_other_sums_are_told_apart_and_named():
    settings, how = {"format": "e4m3fn"}, {"accumulate": "hopper_slow"}
    verdict = judged("gemm", settings, multiplied(gemms.Gemm(**settings), **how))
    assert {"ordinary", "one large", "canceling"} <= set(verdict.differ)
    assert not {"zero"} & set(verdict.differ)
    assert any(
        "The answer is what --accumulate hopper_slow --epilogue scale_then_round gives."
        in d["rule"]
        for d in verdict.first
    )


def test_a_zero_of_the_other_sign_is_not_said_to_be_what_was_asked():
    line = b"1,1,1 38 80000000 38 3F800000 00000000\n"
    verdict = judge("gemm", [line], settings={"format": "e4m3fn"}, rules={}, some=True)
    assert (verdict.first[0]["expected"], verdict.first[0]["got"]) == (
        "80000000 (-0)",
        "00000000 (0)",
    )
    assert "The answer is" not in verdict.first[0]["rule"]


def test_every_pair_of_plans_is_told_apart_by_a_set():
    """But for those that are one up to a K of 128: fast and slow."""
    settings = {"format": "e4m3fn", "shape": "2,2,512", "count": 14}
    question = gemms.Gemm(**settings)
    operands = [(a, b) for _, a, b in question.operands()]
    results = {
        how: np.stack([gemm.matmul(a, b, accumulate=how) for a, b in operands]).view(np.uint32)
        for how in gemms.ACCUMULATE
    }
    names = list(results)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            assert (results[first] != results[second]).any(), (first, second)


NEEDED = dict.fromkeys(OPERATIONS, "e4m3fn") | {"attention": "fa3"}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_set_is_the_same_wherever_it_is_made(operation):
    """PCG64's stream is NumPy's promise; all else is integers."""
    import hashlib

    text = "\n".join(
        generate(operation, {needed_setting(operation): NEEDED[operation], "count": 8})
    ).encode()
    assert hashlib.sha256(text).hexdigest()[:16] == KNOWN[operation]


KNOWN = {
    "cast": "08a807a6e50cd2d8",
    "decode": "2f22ac416e80221c",
    "scale": "4ec9ae6a87bda448",
    "quantize": "1ff1bff36fda37a3",
    "gemm": "d008d584eebb5c9c",
    "attention": "48415ee930dcc151",
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_another_seed_asks_otherwise(operation):
    first, second = (
        list(
            generate(
                operation, {needed_setting(operation): NEEDED[operation], "seed": seed, "count": 8}
            )
        )
        for seed in (0, 1)
    )
    assert first[2:] != second[2:]


def test_scales_are_asked_once_each():
    inputs = scales_asked.Scale(format="e4m3fn").inputs()
    assert len(np.unique(inputs)) == len(inputs)


def test_bfloat16_needs_no_ml_dtypes():
    x = np.float64([1.0, -2.5, 3.0e38, np.inf])
    bits = dtypes.bits(x, dtypes.by_name("bfloat16"))
    np.testing.assert_array_equal(
        dtypes.values(bits, dtypes.by_name("bfloat16")), cast.round_to(x, BFLOAT16)
    )


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NaN scales
@pytest.mark.parametrize("scales_of", ["float32", "e8m0fnu", "e4m3fn"])
@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e2m1fn"])
def test_decoders_of_ml_dtypes_agree(fmt, scales_of):  # S-8
    """Products in float64, rounded once more: numbers of 8 bits times 24 are exact there."""
    bits = 4 if fmt == "e2m1fn" else 8
    number = getattr(ml_dtypes, f"float{bits}_{fmt}")

    def answer(code: str, scale: str, *, flush: bool = False) -> str:
        dtype = np.float32 if scales_of == "float32" else getattr(ml_dtypes, f"float8_{scales_of}")
        x, s = values(code, number).astype(np.float64), values(scale, dtype).astype(np.float64)
        s = np.where((s < 2.0**-126) & flush, 0, s)
        with np.errstate(over="ignore"):
            return f"{(x * s).astype(np.float32).view(np.uint32)[0]:08X}"

    settings = {"format": fmt, "scales": scales_of, "count": 400}
    verdict = judged("decode", settings, answer)
    assert verdict.ok, verdict.text()
    assert {"zero", "subnormal", "number", "scale at an end"} <= set(verdict.compared)
    if scales_of == "e8m0fnu":  # byte 0 read as 0, vllm#46676
        wrong = judged("decode", settings, lambda *of: answer(*of, flush=True))
        assert set(wrong.differ) == {"scale at an end"}
        assert "(S-8)" in wrong.first[0]["rule"]


def test_decoders_round_to_the_dtype_asked_for():
    @np.errstate(all="ignore")
    def answer(code: str, scale: str) -> str:
        x = cast.decode(np.uint8([int(code, 16)]), E4M3FN) * values(scale, np.float32)
        return f"{x.astype(ml_dtypes.bfloat16).view(np.uint16)[0]:04X}"

    settings = {"format": "e4m3fn", "out_dtype": "bfloat16", "count": 200}
    assert judged("decode", settings, answer).ok

    @np.errstate(all="ignore")
    def once(code: str, scale: str) -> str:
        x = cast.decode(np.uint8([int(code, 16)]), E4M3FN).astype(np.float64)
        product = x * values(scale, np.float32)
        return f"{cast.round_to(product, BFLOAT16).view(np.uint32)[0] >> 16:04X}"

    assert judged("decode", settings | {"count": 20_000}, once).ok
    with pytest.raises(ValueError, match="a decoder's scales is one of float32, e8m0fnu, e4m3fn"):
        judged("decode", {"format": "e4m3fn", "scales": "e5m2"}, answer)
