"""Deviations have names, their numbers are solved, each is shown once, and the questions go on
after them.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers.quantize import planted_quantizers as planted

from fp8ref.conformance import identify_quantizer
from fp8ref.conformance.inputs import quantizer_inputs
from fp8ref.conformance.kit import subject
from fp8ref.conformance.quantizer import deviation_search, outputs, policy_match
from fp8ref.conformance.quantizer.outputs import Quantizer
from fp8ref.formats import E4M3FN, FLOAT32
from fp8ref.policy import POLICIES

NAMED = [
    (
        planted.eps_is_added,
        "its eps, 1e-12, is added to the amax, not the least amax",
        "= 1.52587890625e-05, then",
    ),
    (
        planted.a_large_eps_is_added,
        "its eps, 1e-05, is added to the amax, not the least amax",
        "= 1, then",
    ),
    (planted.block_amax_in_bfloat16, "its amax is rounded to bfloat16", "= 1.6"),
    (planted.block_scale_in_bfloat16, "its scale is rounded to bfloat16", "= 1.5, then"),
    (
        planted.stores_in_bfloat16,
        "the scale_inv that it returns is rounded to bfloat16, and its codes are of the float32 "
        "one, and its eps, 1e-10, is added to the amax, not the least amax",
        "= 1, then",
    ),
    (
        planted.stores_the_ratio,
        "its scale_inv is amax / max, not the reciprocal of the scale",
        "= 1.",
    ),
    (planted.rounds_blocks_up, "its scale is rounded up to a power of two, not down", "= 1, then"),
]


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("function", "deviation", "shown"), NAMED, ids=[function.__name__ for function, *_ in NAMED]
)
def test_named_and_shown_once(function, deviation, shown):  # S-16
    found = identify_quantizer(function, E4M3FN, name="mine", expect="torchao")
    # COAT's codes are x * (1 / s): those of torchao and of its own scale_inv differ (S-17).
    nearest = "deepgemm_cpu" if function is planted.stores_in_bfloat16 else "torchao"
    assert (found.found["nearest_policy"], found.found["deviation"]) == (nearest, deviation)
    assert f"policy {nearest}, but {deviation}" in found.message
    assert len(found.differences) == 1, found.message
    assert shown in found.differences[0].input


def test_a_factor_is_shown_once():
    found = identify_quantizer(
        lambda x: planted.blocks(x, lambda amax: 1.5 * planted.torchao_scale(amax)),
        E4M3FN,
        expect="torchao",
    )
    assert found.found["deviation"] == "its scale is 1.5 times that policy's"
    assert [w.input for w in found.differences] == ["x [1, 128] = 1, then zeros"]
    assert "the cast alone: with that deviation no amax has scale 1" in found.unasked


def test_without_a_name_other_finite_amaxes_are_not_shown_again():
    found = identify_quantizer(
        lambda x: planted.blocks(x, lambda amax: 448 / (amax + amax**2)), E4M3FN, expect="torchao"
    )
    assert found.found["deviation"] is None
    finite = [
        w
        for w in found.differences
        if np.isfinite(float(w.input.split(" = ")[1].split(",")[0])) and " = 0," not in w.input
    ]
    assert len(finite) == 1
    assert any("other shapes" in one for one in found.unasked)


def floored(eps, max_=448.0):
    return lambda amax: np.float32(max_) / np.maximum(amax, np.float32(eps))


def wrong_in_bfloat16(x):
    """The amax of a bfloat16 input is that of its first half."""
    codes, scale = planted.blocks(x, floored(3e-7))
    if x.dtype == ml_dtypes.bfloat16:
        _, scale = planted.blocks(np.where(np.arange(x.shape[1]) % 128 < 64, x, 0), floored(3e-7))
        codes = planted.codes(
            np.asarray(x, np.float32), np.repeat(scale, 128, axis=1)[:, : x.shape[1]]
        )
    return codes, scale


def no_tail(x):
    codes, scale = planted.blocks(x, floored(3e-7))
    codes[:, x.shape[1] // 128 * 128 :] = 0
    return codes, scale


def loses_nan(x):
    """A NaN behind the first 16 elements of a block has no part in the amax."""
    x = np.asarray(x, np.float32)
    _, scale = planted.blocks(
        np.where(np.isnan(x) & (np.arange(x.shape[1]) % 128 >= 16), 0, x), floored(3e-7)
    )
    return planted.codes(x, np.repeat(scale, 128, axis=1)[:, : x.shape[1]]), scale


@pytest.mark.parametrize(
    ("function", "what", "second"),
    [
        (wrong_in_bfloat16, "shapes of bfloat16", "(bfloat16 0x"),
        (no_tail, "ragged blocks", "of x [1, 3]"),
        (loses_nan, "shapes", "NaN last in each group"),
    ],
)
def test_a_second_fault_beside_another_eps(function, what, second):  # S-16
    """As vLLM, SGLang, slime, miles and verl floor the amax, each at a number of its own."""
    found = identify_quantizer(function, E4M3FN, name="mine", framework="numpy", expect="torchao")
    deviation = "its eps is 3e-07, not 1e-12"
    assert not found.ok
    assert (found.found["policy"], found.found["deviation"]) == (None, deviation)
    assert f"that returns scale: policy torchao, but {deviation}" in found.message
    first, other = found.differences
    assert "x [1, 128] = 5.96" in first.input
    assert first.expected.endswith("by torchao")
    assert second in str(other)
    assert other.expected.endswith(f"by torchao, but {deviation}")
    assert next(f for f in found.findings if f.what == what).value is False
    assert not any("not explained" in one for one in found.unasked)


def test_another_rounding_does_not_stop_the_questions():
    def truncates(x):
        _, scale = planted.blocks(x, planted.torchao_scale)
        codes = planted.codes(
            x, np.repeat(scale, 128, axis=1)[:, : x.shape[1]], rounding="toward_zero"
        )
        codes[:, x.shape[1] // 128 * 128 :] = 0
        return codes, scale

    found = identify_quantizer(truncates, E4M3FN, framework="numpy", expect="torchao")
    assert found.found["rounding"] == "toward_zero"
    assert next(f for f in found.findings if f.what == "ragged blocks").text == "not all alike"


def deviation(function, expect="torchao"):
    """The nearest policy and the deviation from it, of a quantizer in blocks along K."""
    made = subject.wrap("mine", function, framework="numpy", device="cpu", shape=subject.SHAPE)
    quantizer = Quantizer(subject=made, dtype="float32")
    asked = quantizer_inputs.identifying(E4M3FN, "float32")
    granularity = "mx_1x32" if expect.startswith("mx") else "blockwise_1x128"
    responses = outputs.ask(quantizer, asked, subject.SHAPE, granularity, -1)
    scale_layout = outputs.identify_returned(responses, granularity, -1)
    answers = policy_match.Answers(
        quantizer=quantizer,
        responses=responses,
        scale_layout=scale_layout,
        fmt=E4M3FN,
        shape=subject.SHAPE,
    )
    found = policy_match.match_policies(answers, POLICIES[expect])
    assert found.deviating is not None
    assert not found.mismatches(found.deviating).any()
    return found.nearest.candidate.policy.name, found.deviation


def of_amax(scale):
    return lambda x: planted.blocks(x, scale)


SOLVED = {
    "its eps is 1e-08, not 1e-12": of_amax(floored(1e-8)),
    "its eps is 1.5e-05, not 1e-12": of_amax(floored(1.5e-5)),
    "its eps is 0.5, not 1e-12": of_amax(floored(0.5)),
    "its eps is 0, not 1e-12": of_amax(floored(0)),
    # without scales: it is asked for
    "its eps is 0.003, not 1e-12": lambda x: planted.blocks(x, floored(3e-3))[0],
    "its eps, 3e-07, is added to the amax, not the least amax": of_amax(
        lambda amax: np.float32(448) / (amax + np.float32(3e-7))
    ),
    "its eps is 0.21896383 (its scale is at most 2046), not 1e-12": of_amax(
        lambda amax: np.minimum(planted.torchao_scale(amax), 2046)
    ),
    "its scale is at least 4.79999983e-07": of_amax(
        lambda amax: np.maximum(planted.torchao_scale(amax), np.float32(4.8e-7))
    ),
    "its max is 440, not 448, and its eps is 1e-08, not 1e-12": of_amax(floored(1e-8, 440)),
    "its scale is 0.5 times that policy's, as of a max of 224, not 448": of_amax(
        floored(1e-12, 224)
    ),
    "its scale is 0.9 times that policy's": of_amax(
        lambda amax: np.float32(0.9) * planted.torchao_scale(amax)
    ),
    "its eps is 1e-08, not 1e-12, and an infinite amax has scale 1": of_amax(
        lambda amax: np.where(np.isinf(amax), 1, floored(1e-8)(amax))
    ),
    "an amax of NaN has scale 7": of_amax(
        lambda amax: np.where(np.isnan(amax), 7, planted.torchao_scale(amax))
    ),
}


@pytest.mark.parametrize("words", SOLVED)
def test_numbers_are_solved(words):  # S-16
    assert deviation(SOLVED[words]) == ("torchao", words)


def test_another_max_of_powers_of_two():
    words = "its max is 256, not 448"
    quantizer = of_amax(lambda amax: np.exp2(np.floor(np.log2(floored(1e-12, 256)(amax)))))
    assert deviation(quantizer, "torchao_pow2") == ("torchao_pow2", words)


def mx(
    *, code_0=2.0**126, ends=(-127, 127), of_nan=0.0, of_inf=2.0**-120, byte=lambda byte, amax: byte
):
    """mx_floor in NumPy; code_0: the scale beside code 0; ends: of its exponents; byte: another
    byte than the right one.
    """

    def quantize(x):
        x = np.pad(np.asarray(x, np.float32), ((0, 0), (0, -x.shape[1] % 32)))
        amax = np.abs(x).reshape(len(x), -1, 32).max(-1)
        k = np.clip((amax.view(np.uint32) >> 23).astype(int) - 127 - 8, *ends)
        code = np.where(np.isnan(amax), 255, k + 127)
        special = [np.isnan(amax), np.isinf(amax), code == 0]
        scale = np.select(special, [of_nan, of_inf, code_0], np.ldexp(1.0, -k)).astype(np.float32)
        return planted.codes(x, np.repeat(scale, 32, axis=1)), byte(code, amax).astype(np.uint8)

    return quantize


# vllm#46676: byte 0 read as 0.0. flashinfer#2595: NaN of scales at their ends.
AT_ENDS = {
    "beside a scale_inv of 2^-127 its scale is inf, as if code 0 were 0, not 2^126": mx(
        code_0=np.inf
    ),
    "beside a scale_inv of 2^-127 its scale is 2^127, not 2^126": mx(code_0=2.0**127),
    "beside a scale_inv of 2^-127 its scale is 1 or less, so that its codes are zeros, not 2^126": mx(
        code_0=0.0
    ),
    "its scale_inv is at least 2^-126": mx(ends=(-126, 127)),
    "its scale_inv is at most 2^110": mx(ends=(-127, 110)),
    "an amax of NaN has scale_inv nan": mx(of_nan=np.nan),
    "an amax of NaN has scale_inv 2^127": mx(byte=lambda byte, amax: np.minimum(byte, 254)),
    "an infinite amax has scale_inv nan": mx(
        byte=lambda byte, amax: np.where(np.isinf(amax), 255, byte)
    ),
    "an amax of 0 has scale_inv 1": mx(byte=lambda byte, amax: np.where(amax == 0, 127, byte)),
}


@pytest.mark.parametrize("words", AT_ENDS)
def test_scales_at_their_ends(words):  # S-14, S-16
    assert deviation(AT_ENDS[words], "mx_floor") == ("mx_floor", words)


def test_codes_show_the_scale_beside_a_returned_constant():
    """Inf is taken as NaN, of which mx_floor has scale 0: not the reciprocal of what is returned,
    nor the policy's own.
    """
    quantizer = mx(of_inf=0.0, byte=lambda byte, amax: np.where(np.isinf(amax), 255, byte))
    assert deviation(quantizer, "mx_floor") == ("mx_floor", "an infinite amax has scale_inv nan")


def te_current(x, over=FLOAT32.max, least=0.0):
    """te_current in blocks; over: in place of an infinite scale; least: smaller scale_inv become
    0.
    """

    def scale(amax):
        ratio = np.float32(448) / amax
        return np.where((amax == 0) | ~np.isfinite(amax), 1, np.where(np.isinf(ratio), over, ratio))

    codes, scale = planted.blocks(x, scale)
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / scale
    return {
        "codes": codes,
        "scale": scale,
        "scale_inv": np.where(inverse < least, np.float32(0), inverse),
    }


def rows(x, scale_inv, codes_by=None):
    """Rows divided by scale_inv of their amax, or by ``codes_by``; the former are returned."""
    x = np.asarray(x, np.float32)
    amax = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        y = x / (codes_by or scale_inv)(amax)
        y = np.where(np.isnan(y), y, np.clip(y, -448, 448))
        return y.astype(ml_dtypes.float8_e4m3fn), scale_inv(amax)


def deepseek(amax):
    return np.maximum(amax, np.float32(1e-4)) / np.float32(448)


def power(amax):
    return np.exp2(np.ceil(np.log2(deepseek(amax))))


def without_floor(amax):
    return amax / np.float32(448)


def in_float16(x):
    """A float16 input has its scale_inv in float16, 0 for a small amax."""
    half = np.asarray(x).dtype == np.float16
    return rows(
        x, lambda amax: deepseek(amax).astype(np.float16 if half else np.float32).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("function", "expect", "words"),
    [
        (
            lambda x: rows(x, power, deepseek),
            "deepseek_v3_ue8m0",
            "but its codes are made by other scales than it returns, as if its scales are no "
            "powers of two",
        ),
        (
            lambda x: rows(x, without_floor),
            "deepseek_v3",
            "policy deepseek_v3_2024 (deepseek_v3, but its eps is 0, not 0.0001); a block of "
            "zeros is NaN",
        ),
        (
            lambda x: rows(np.asarray(x).astype(ml_dtypes.bfloat16), deepseek),
            "deepseek_v3",
            "policy deepseek_v3, but x is rounded to bfloat16 before its amax",
        ),
    ],
)
def test_deviations_from_the_expected_policy(function, expect, words):  # S-16
    found = identify_quantizer(function, E4M3FN, name="mine", expect=expect)
    assert not found.ok
    assert words in found.message
    assert "stopped at the first difference" not in found.message


def test_scales_of_float16_are_float32():  # S-13, S-16
    found = identify_quantizer(in_float16, E4M3FN, name="mine", expect="deepseek_v3")
    assert not found.ok
    (of_float16,) = (f for f in found.findings if f.what == "from float16")
    assert of_float16.text.startswith("deepseek_v3, but its scale_inv is rounded to float16")


def test_a_memory_that_another_shape_shows():  # S-16
    scratch = np.zeros((1024, 384), np.float32)

    def padded(x):
        scratch.reshape(-1)[: x.size] = np.asarray(x, np.float32).reshape(-1)
        of_tile = scratch.reshape(-1)[: -(-len(x) // 16) * 16 * x.shape[1]]
        scale_inv = np.abs(of_tile).max() / np.float32(448)
        return (np.asarray(x, np.float32) / scale_inv).astype(ml_dtypes.float8_e4m3fn), scale_inv

    with pytest.raises(subject.ConformanceError, match="keeps numbers of an earlier call with ano"):
        identify_quantizer(padded, E4M3FN)


def test_scales_are_flushed_beside_e8m0_codes():  # S-14, S-16
    """A device flushes small scale_inv, whose reciprocal is then infinite."""

    def flushed(x):
        x = np.asarray(x, np.float32)
        blocks = x.reshape(len(x), -1, 32)
        amax = np.abs(blocks).max(-1)
        k = np.clip((amax.view(np.uint32) >> 23).astype(int) - 127 - 8, -127, 127)
        code = np.where(np.isnan(amax), 255, k + 127)
        scale = np.ldexp(np.float32(1), -k)
        scale = np.where((code < 7) & (amax > 0), np.inf, np.where(code == 0, 2.0**126, scale))
        scale = np.where(np.isnan(amax), 0, scale).astype(np.float32)
        return planted.codes(x, np.repeat(scale, 32, axis=1)), code.astype(np.uint8)

    found = deviation(flushed, "mx_floor")
    assert found == (
        "mx_floor",
        "beside scale_inv of at most 2^-121 its scale is inf, as if flushed to 0 (a block of "
        "zeros aside)",
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: te_current(x, over=np.inf), "a scale above float32's range is inf"),
        (lambda x: te_current(x, least=2.0**-126), "its subnormal scales and scale_inv are 0"),
    ],
)
def test_scales_beyond_float32(function, words):  # S-9, S-12, S-16
    assert deviation(function, "te_current") == ("te_current", words)


def test_the_least_number_from_which_on():
    assert deviation_search.smallest(lambda eps: eps >= 0.1) == 0.1
    assert deviation_search.smallest(lambda eps: True) == 0
    assert deviation_search.smallest(lambda eps: False) is None


@pytest.mark.parametrize(
    ("low", "high", "number"),
    [
        (1e-8, 1e-8, (1e-8, "1e-08")),
        (float(np.float32(1e-8)), float(np.float32(1e-8)), (float(np.float32(1e-8)), "1e-08")),
        (0.011, 0.019, (0.015, "0.015")),
        (0.0, 1e-3, (0.0, "0")),
    ],
)
def test_the_shortest_decimal(low, high, number):
    assert deviation_search.shortest(low, high) == number
