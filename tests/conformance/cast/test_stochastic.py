"""Stochastic casts are identified by how often they round away from zero, and by their other
decisions.
"""

import json

import ml_dtypes
import numpy as np
import pytest
from helpers.quantize import planted_casts as planted

from fp8ref.conformance import identify_cast
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8ref.sim.quantize import cast


def at_random(fmt, *, repeats, saturate=True):
    seeds = iter(range(1000))
    return lambda x: cast.encode(
        x, fmt, rounding="stochastic", saturate=saturate, seed=7 if repeats else next(seeds)
    )


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ], ids=str)
def test_stochastic_rounding(fmt, saturate, repeats):  # C-2 to C-6
    found = identify_cast(at_random(fmt, repeats=repeats, saturate=saturate), fmt)
    special = "nan" if fmt.inf_code is None else "inf"
    beyond = (
        ("max", fmt.max_code)
        if saturate
        else (special, fmt.nan_code if fmt.inf_code is None else fmt.inf_code)
    )
    named = found.found.pop("behavior_but_for_rounding")
    assert ("saturating" if saturate else "non_saturating") in named
    assert set(named) <= set(found.found.pop("behavior_but_for_rounding_and_nan_codes"))
    assert found.found == {
        "format": fmt.name,
        "behavior": [],
        "rounding": "stochastic",
        "repeats_itself": repeats,
        "saturates": saturate,
        "overflow": beyond[0],
        "infinities": beyond[0],
        "inf_code": beyond[1],
        "nan_code": fmt.nan_code,
        "nan_code_of_negative": fmt.nan_code,
        "subnormals": "kept",
        "negative_zero": "kept" if fmt.negative_zero else "lost",
        "policy": None,
        "gives": "uint8",
    }
    assert found.ok
    assert found.identified
    assert not found.unlike
    assert "with the probability of C-2 at the 48 fractions tested" in found.message
    json.dumps(found.to_dict())


def test_the_findings_are_those_of_every_cast():
    found = identify_cast(at_random(E4M3FN, repeats=True), E4M3FN)
    what = [
        "format",
        "rounding",
        "overflow",
        "infinities",
        "nan_code",
        "subnormals",
        "negative_zero",
    ]
    assert [f.what for f in found.findings] == what
    assert not any(f.witness for f in found.findings)
    assert found.findings[1].evidence.endswith("by position, from a fixed seed")


def test_a_name_is_held_to_in_all_it_decides():  # C-2, C-3
    found = identify_cast(
        at_random(E4M3FN, repeats=True, saturate=False), E4M3FN, expect="saturating"
    )
    assert not found.ok
    rounds, *beyond = map(str, found.differences)
    assert rounds.startswith(
        "0.0009765625, 4096 times (float32 0x3A800000): got 0x01 = 0.001953125 0.4"
    )
    assert rounds.endswith("expected 0x00 = 0 every time (C-2)")
    assert beyond == [
        "896 (float32 0x44600000): got 0x7F = nan, expected 0x7E = 448 (C-3)",
        "inf (float32 0x7F800000): got 0x7F = nan, expected 0x7E = 448 (C-3)",
    ]
    alone = identify_cast(at_random(E4M3FN, repeats=True), E4M3FN, expect="saturating")
    assert not alone.ok
    assert [w.clause for w in alone.differences] == ["C-2"]


def test_another_format_than_was_asked():  # F-2
    found = identify_cast(at_random(E5M2, repeats=True), E4M3FN)
    assert not found.ok
    assert (
        "a cast to e5m2 (max 57344), not e4m3fn (max 448), that rounds at random" in found.message
    )


def test_values_are_shown_as_values():
    function = at_random(E4M3FN, repeats=True)
    found = identify_cast(lambda x: cast.decode(function(x), E4M3FN), E4M3FN)
    assert found.ok
    assert (found.found["nan_code"], found.found["gives"]) == (None, "float32")
    held = identify_cast(lambda x: cast.decode(function(x), E4M3FN), E4M3FN, expect="saturating")
    assert "got 0.001953125 0.4" in str(held.differences[0])
    assert "expected 0 every time" in str(held.differences[0])


def test_of_bfloat16_alone():
    function = at_random(E4M3FN, repeats=False)

    def of_bfloat16(x):
        assert x.dtype == ml_dtypes.bfloat16
        return function(x)

    found = identify_cast(of_bfloat16, E4M3FN)
    assert found.ok
    assert "40 bfloat16 numbers" in found.findings[1].evidence


@pytest.mark.parametrize(
    ("name", "departs", "shown"),
    [
        ("coin", 40, "0.00048828125, 4096 times (float32 0x3A000000): got 0x01 = 0.001953125 0."),
        (
            "noise_in_bits",
            24,
            "0.0009765625, 4096 times (float32 0x3A800000): got 0x01 = 0.001953125 0.000 of the "
            "time, expected 0.5",
        ),
        ("noise_of_one_binade", 34, "0.0009765625, 4096 times"),
        (
            "positives_alone",
            24,
            "-0.0009765625, 4096 times (float32 0xBA800000): got 0x81 = -0.001953125 0.000 of "
            "the time, expected 0.5",
        ),
        ("underflow_to_nearest", 14, "0.0009765625, 4096 times"),
        (
            "upwards",
            20,
            "-0.00048828125, 4096 times (float32 0xBA000000): got 0x81 = -0.001953125 0.7",
        ),
        ("flushes_subnormals", 24, "0.0009765625, 4096 times"),
        ("specials_are_zero", 24, "-0.0009765625, 4096 times"),
    ],
)
def test_a_probability_that_is_wrong_somewhere(name, departs, shown):  # C-2
    found = identify_cast(getattr(planted.AtRandom(), name), E4M3FN)
    assert not found.ok
    assert not found.identified
    assert found.found["rounding"] is None
    assert f"but not by the distance (C-2) at {departs} of the 48 fractions tested" in found.message
    assert str(found.unlike[0]).startswith(shown)
    fine = 8 if name == "coin" else 4  # of 1/512 and 511/512, which the first four leave out
    assert f"and {departs - fine - 4} more" in found.findings[1].evidence


@pytest.mark.parametrize(
    ("name", "differs", "shown"),
    [
        (
            "nan_is_zero",
            {"nan_code": 0},
            "nan (float32 0x7FC00000): got 0x00 = 0, expected 0x7F = nan (by saturating)",
        ),
        (
            "infinity_is_zero",
            {"infinities": None},
            "inf (float32 0x7F800000): got 0x00 = 0, expected 0x7E = 448 (by the behavior found)",
        ),
        (
            "far_above_is_zero",
            {},
            "(float32 0x7149F2CA): got 0x00 = 0, expected 0x7E = 448 (by the behavior found)",
        ),
        (
            "nan_at_random",
            {"nan_code": 0x7E},
            "nan (float32 0x7FC00000): got 0x7F = nan, expected 0x7E = 448 (by the behavior found)",
        ),
        (
            "loses_negative_zero",
            {"negative_zero": "lost_at_zero"},
            "-0 (float32 0x80000000): got 0x00 = 0, expected 0x80 = -0 (by saturating)",
        ),
    ],
)
def test_what_it_decides_without_chance(name, differs, shown):  # C-3 to C-6
    found = identify_cast(getattr(planted.AtRandom(), name), E4M3FN)
    right = {
        "rounding": "stochastic",
        "overflow": "max",
        "infinities": "max",
        "nan_code": 0x7F,
        "subnormals": "kept",
        "negative_zero": "kept",
    }
    assert {key: found.found[key] for key in right} == right | differs
    assert not found.ok
    assert not found.identified
    assert found.found["behavior_but_for_rounding"] == []
    assert "is otherwise no known cast" in found.message
    assert str(found.unlike[0]).endswith(shown)


def test_all_that_is_wrong_at_once():  # C-2, C-3, C-5
    found = identify_cast(planted.AtRandom().specials_are_zero, E4M3FN)
    assert (found.found["infinities"], found.found["inf_code"], found.found["nan_code"]) == (
        None,
        0,
        0,
    )
    assert [w.clause for w in found.unlike] == ["C-2", "by the behavior found"]


def wrong_at_the_end_of_many(x):
    codes = planted.saturating(x)
    if 100_000 < codes.size < 1_000_000:
        codes[-1] ^= 1
    return codes


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (planted.Stale(), r"float32 nan \(0xFFFFFFFF\) gave different codes on the second call"),
        (
            planted.AtRandom().moves_numbers,
            r"float32 3.5 \(0x40600000\) gave 0x47 = 3.75, which is not a neighbor",
        ),
    ],
)
def test_what_does_not_repeat_itself_and_does_not_round_at_random(function, said):  # C-2
    with pytest.raises(
        ConformanceError,
        match=f"mine does not repeat itself, and does not round stochastically: {said}.*depend "
        "on its input alone",
    ):
        identify_cast(function, E4M3FN, name="mine")


def test_what_depends_on_the_place_is_said_to():  # C-2
    said = (
        r"mine depends on the place or the number of elements, .* at index 163839 than at "
        r"159744, in every call"
    )
    with pytest.raises(ConformanceError, match=said):
        identify_cast(wrong_at_the_end_of_many, E4M3FN, name="mine")


def test_all_inputs_are_not_held_to_one_code():
    with pytest.raises(
        ConformanceError, match=r"different codes for equal inputs.*Leave --exhaustive out"
    ):
        identify_cast(at_random(E4M3FN, repeats=True), E4M3FN, exhaustive=True)


def test_the_witness_is_the_simplest_number_that_departs():
    """From 1 on it goes away from zero as often as it should go toward it."""
    function = at_random(E4M3FN, repeats=False)

    def turned(x):
        return np.where(
            np.abs(x) < 1, function(x), function(x) ^ planted.truncation(x) ^ planted._away(x)
        ).astype(np.uint8)

    found = identify_cast(turned, E4M3FN)
    assert "but not by the distance (C-2) at 20 of the 48 fractions tested" in found.message
    assert str(found.unlike[0]).startswith(
        "1.03125, 4096 times (float32 0x3F840000): got 0x39 = 1.125 0.7"
    )


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_few_random_bits_are_not_the_probability(bits):  # C-2
    """Fractions are cut to a few bits, as hardware does that adds so many random bits below the
    last place.
    """
    rng = np.random.default_rng(1)

    def function(x):
        low, high = (
            cast.encode(x, E4M3FN, rounding="toward_zero"),
            cast.encode(x, E4M3FN, rounding="toward_zero") + np.uint8(1),
        )
        at, above = (cast.decode(codes, E4M3FN).astype(np.float64) for codes in (low, high))
        with np.errstate(all="ignore"):
            cut = np.floor((x - at) / (above - at) * 2**bits)
        return np.where(cut > rng.integers(0, 2**bits, x.shape), high, low).astype(np.uint8)

    found = identify_cast(function, E4M3FN)
    assert not found.ok
    assert found.found["rounding"] is None
    assert "but not by the distance (C-2)" in found.message
    assert str(found.unlike[0]).endswith("of the time (C-2)")


def with_noise(up):
    """A cast of e4m3fn that goes up where up(f, u), of the way f and u in [0, 1), is at least 1."""
    rng = np.random.default_rng(0)

    def cast_(x):
        spacing = np.exp2(np.maximum(np.frexp(x.astype(np.float64))[1] - 1, -6) - 3.0)
        below = np.floor(np.abs(x) / spacing)
        f = np.abs(x) / spacing - below
        with np.errstate(invalid="ignore"):
            rounded = below + np.where(f > 0, np.floor(up(f, rng.random(x.shape))), 0)
        return cast.encode(np.copysign(rounded * spacing, x), E4M3FN)

    return cast_


@pytest.mark.parametrize(
    ("up", "words"),
    [
        (lambda f, u: f + u / 32, "at random: at f of the way it rounds up at the rate 3"),
        (lambda f, u: f + 0.5 + u / 2, "at random: at f of the way it rounds up at the rate "),
        (lambda f, u: f + 0.375 + u / 4, "at random: at f of the way it rounds up at the rate "),
        (lambda f, u: u < 1 - f, "it rounds up at the rate -"),
        (lambda f, u: u < 0.3, "it rounds up at the rate "),
        (lambda f, u: f + np.floor(8 * u) / 8, "its noise has 3 random bits, but"),
        (lambda f, u: f + np.floor(256 * u) / 256, "its noise has 8 random bits, but"),
        (lambda f, u: f + (np.floor(16 * u) + 0.5) / 16, "its noise has 4 random bits, centered,"),
        (lambda f, u: u < f * f, "that rounds at random, but not by the distance"),
    ],
)
def test_a_wrong_noise_is_named(up, words):  # C-2
    outcome = identify_cast(with_noise(up), E4M3FN)
    assert not outcome.ok
    assert words in outcome.summary, outcome.summary


def test_a_right_noise_has_no_name():  # C-2
    outcome = identify_cast(with_noise(lambda f, u: f + u), E4M3FN)
    assert outcome.ok, outcome.message
    assert ":" not in outcome.findings[1].text


def carries_lost(codes, x):
    below = cast.encode(x, E4M3FN, rounding="toward_zero")
    return np.where((codes >> 3 > below >> 3) & (below & 0x7F > 7), below & 0xF8, codes)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (carries_lost, "not a neighbor: the carry of a mantissa that rounds up to 2 is lost."),
        (lambda codes, x: codes & 0x7F, "not a neighbor: the sign is lost."),
        (lambda codes, x: codes ^ (4 * (np.abs(x) > 11)).astype(np.uint8), "not a neighbor. "),
    ],
)
def test_another_number_than_a_neighbor_is_named(changed, words):  # C-2
    function = at_random(E4M3FN, repeats=False)
    with pytest.raises(ConformanceError, match=words):
        identify_cast(lambda x: changed(function(x), x), E4M3FN)


def test_a_noise_wider_than_a_spacing_is_named():  # C-2
    with pytest.raises(ConformanceError, match="its noise is wider than a spacing"):
        identify_cast(with_noise(lambda f, u: f + 2 * u), E4M3FN)
