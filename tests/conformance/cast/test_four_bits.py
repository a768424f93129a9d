"""Casts to e2m1fn of libraries, and with planted faults, through ``identify_cast``."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8ref.conformance import identify_cast
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.formats import E2M1FN
from fp8ref.sim.quantize import cast, packing


def by_ml_dtypes(x):
    with np.errstate(invalid="ignore"):
        return x.astype(ml_dtypes.float4_e2m1fn)


def by_torchao(x):
    from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked

    return f32_to_f4_unpacked(x)


def away(x):
    return cast.encode(x, E2M1FN, rounding="nearest_away")


def of(**options):
    return lambda x: cast.encode(x, E2M1FN, **options)


@pytest.mark.parametrize(
    ("function", "framework", "known", "packing"),
    [
        (by_ml_dtypes, "numpy", "ml_dtypes", "one a byte"),
        (by_torchao, "torch", "torchao_f4", "one a byte"),
        (lambda x: cast.encode(x, E2M1FN), "numpy", "saturating", "one a byte"),
        (lambda x: packing.pack(cast.encode(x, E2M1FN)), "numpy", "saturating", "low first"),
        (lambda x: cast.decode(cast.encode(x, E2M1FN), E2M1FN), "numpy", "saturating", "values"),
    ],
    ids=["ml_dtypes", "torchao", "sim", "packed", "values"],
)
def test_casts_are_identified(function, framework, known, packing):  # C-9, F-5
    outcome = identify_cast(function, E2M1FN, framework=framework, expect=known)
    assert (outcome.ok, outcome.named) == (True, True), outcome.message
    assert outcome.found["is"] == [known]
    assert outcome.found["packing"] == packing
    assert outcome.found["rounding"] == "nearest_even"


def high_first(x):
    pairs = packing.pack(cast.encode(x, E2M1FN))
    return pairs << np.uint8(4) | pairs >> np.uint8(4)


def wrong_tie(x):  # 5 lies between 4 and 6: to the even code, 4
    return np.where(
        np.abs(x) == 5, np.uint8(7) | (np.signbit(x) * np.uint8(8)), cast.encode(x, E2M1FN)
    ).astype(np.uint8)


def without_minus_zero(x):
    codes = cast.encode(x, E2M1FN)
    return np.where(codes == 8, np.uint8(0), codes)


@pytest.mark.parametrize("mode", ["nearest_away", "toward_zero", "to_odd"])
def test_another_rounding_is_named_and_has_no_name_of_a_library(mode):  # C-2
    outcome = identify_cast(of(rounding=mode), E2M1FN, framework="numpy")
    assert outcome.identified
    assert not outcome.named
    assert outcome.found["rounding"] == mode
    assert f"rounding {mode}" in str(
        identify_cast(
            of(rounding=mode), E2M1FN, framework="numpy", expect="saturating"
        ).differences[0]
    )


@pytest.mark.parametrize(
    ("function", "input_", "got"),
    [(wrong_tie, "5 ", "got 6, expected 4"), (without_minus_zero, "", "got 0, expected -0")],
)
def test_a_fault_is_shown_at_its_first_number(function, input_, got):  # C-2, C-6
    outcome = identify_cast(function, E2M1FN, framework="numpy")
    assert not outcome.ok
    assert not outcome.identified
    assert got in str(outcome.unlike[0])
    assert input_ in str(outcome.unlike[0])


def test_pairs_with_the_first_code_high_are_told_apart():  # F-5
    assert identify_cast(high_first, E2M1FN, framework="numpy").found["packing"] == "high first"


def test_stochastic_rounding_is_told_from_a_biased_one():  # C-2
    seeds = iter(range(100_000))
    fair = identify_cast(
        lambda x: cast.encode(x, E2M1FN, rounding="stochastic", seed=next(seeds)),
        E2M1FN,
        framework="numpy",
    )
    assert (fair.ok, fair.found["rounding"]) == (True, "stochastic"), fair.message
    up = np.float32(1 + 2.0**-5)  # rounds up more often than the fraction
    outcome = identify_cast(
        lambda x: cast.encode(x * up, E2M1FN, rounding="stochastic", seed=next(seeds)),
        E2M1FN,
        framework="numpy",
    )
    assert not outcome.identified
    # of the number before 1
    assert (outcome.unlike[0].got, outcome.unlike[0].clause) == ("1.5", "C-2")


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64])
def test_codes_of_any_integer_dtype(dtype):
    outcome = identify_cast(
        lambda x: by_ml_dtypes(x).view(np.uint8).astype(dtype), E2M1FN, framework="numpy"
    )
    assert outcome.ok
    assert outcome.found["rounding"] == "nearest_even"


def test_errors():
    with pytest.raises(ValueError, match="one of saturating, ml_dtypes, torchao_f4; got 'jax'"):
        identify_cast(away, E2M1FN, expect="jax")
    with pytest.raises(ValueError, match="exhaustive is of casts to FP8"):
        identify_cast(away, E2M1FN, exhaustive=True)
    with pytest.raises(ConformanceError, match=r"gives uint8 \[3\]; a cast to e2m1fn"):
        identify_cast(lambda x: np.zeros(3, np.uint8), E2M1FN, framework="numpy")
    with pytest.raises(ConformanceError, match="gives a code 16"):
        identify_cast(lambda x: np.full(x.shape, 16, np.uint8), E2M1FN, framework="numpy")
    with pytest.raises(ConformanceError, match="gives a code -1"):
        identify_cast(lambda x: np.full(x.shape, -1, np.int64), E2M1FN, framework="numpy")
    with pytest.raises(ConformanceError, match="values that are none of e2m1fn"):
        identify_cast(lambda x: x * 2, E2M1FN, framework="numpy")
    other = identify_cast(by_ml_dtypes, E2M1FN, framework="numpy", expect="saturating")
    assert not other.ok
    assert "codes (8, 0)" in str(other.differences[0])
    assert torch.tensor(0).dtype == torch.int64


def test_a_number_just_above_the_first_tie_is_asked():  # C-1, tt-metal#51971
    def function(x):
        return np.where(
            np.abs(x) == np.nextafter(np.float32(0.25), np.float32(1)),
            np.uint8(0),
            cast.encode(x, E2M1FN),
        )

    found = identify_cast(function, E2M1FN, expect="saturating")
    assert not found.ok
    assert "0.2500000" in found.message


@pytest.mark.parametrize("bits", [4, 8])
def test_few_random_bits_are_no_stochastic_rounding(bits):  # C-2
    rng = np.random.default_rng(1)

    def function(x):
        steps = np.clip(np.nan_to_num(np.abs(x) / 0.5), 0, 1)
        up = np.floor(steps * 2**bits) / 2**bits > rng.integers(0, 2**bits, x.shape) / 2**bits
        low = np.where(up, np.uint8(1), np.uint8(0)) | np.where(
            np.signbit(x), np.uint8(8), np.uint8(0)
        )
        return np.where(
            np.abs(x) < 0.5,
            low,
            cast.encode(x, E2M1FN, rounding="stochastic", seed=int(rng.integers(1 << 60))),
        ).astype(np.uint8)

    found = identify_cast(function, E2M1FN)
    assert not found.identified
    (unlike,) = found.unlike
    assert unlike.got.startswith("0.5 in 0")
    assert unlike.expected.startswith("0.5 in 0")


def stochastic(x, codes=lambda low, other, x: other):
    """Codes rounded toward zero, and at random, from which another cast takes its own."""
    low, rng = cast.encode(x, E2M1FN, rounding="toward_zero"), np.random.default_rng()
    return codes(
        low, cast.encode(x, E2M1FN, rounding="stochastic", seed=int(rng.integers(1 << 60))), x
    ).astype(np.uint8)


PLANTED_STOCHASTIC = {
    "drops signs": lambda low, other, x: other & 7,
    "drops the sign of zero": lambda low, other, x: np.where(other == 8, 0, other),
    "all above 0.5 is zero": lambda low, other, x: np.where(np.abs(x) > 0.5, low & 8, other),
    "toward zero above 0.5": lambda low, other, x: np.where(np.abs(x) > 0.5, low, other),
    "negative numbers toward zero": lambda low, other, x: np.where(x < 0, low, other),
    "one too far": lambda low, other, x: np.where(
        (low % 8 == 5) & (other % 8 == 6), other + 1, other
    ),
}


@pytest.mark.parametrize("name", PLANTED_STOCHASTIC)
def test_a_stochastic_cast_is_asked_for_all_numbers(name):  # C-2
    found = identify_cast(
        lambda x: stochastic(x, PLANTED_STOCHASTIC[name]), E2M1FN, expect="saturating"
    )
    assert (found.identified, found.ok) == (False, False)
    assert found.differences[0].clause == "C-2"
