"""behavior.encode agrees with the simulator, with exact comparison in every rounding, and with each
library it names.
"""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from fp8ref.conformance.cast import behavior
from fp8ref.conformance.cast.behavior import KNOWN_CASTS, ROUNDINGS, DoubleRounding
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.conformance.inputs.cast_inputs import CAST_FORMATS
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FP8_FORMATS
from fp8ref.sim.quantize import cast

ours = pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=str)


@ours
@pytest.mark.parametrize("rounding", sorted(set(ROUNDINGS) & set(cast.ROUNDINGS)))
@pytest.mark.parametrize("source", ["float32", "float64"])
def test_roundings_are_the_simulators(fmt, rounding, source):  # C-2, C-3, C-5, C-6
    x = cast_inputs.identifying(fmt, source)
    model = dataclasses.replace(KNOWN_CASTS["saturating"].behavior(fmt), rounding=rounding)
    np.testing.assert_array_equal(
        behavior.encode(x, fmt, model, source=source), cast.encode(x, fmt, rounding=rounding)
    )


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", CAST_FORMATS.values(), ids=str)
def test_roundings_by_the_table_of_numbers(fmt, rounding):  # C-2, C-8
    """Every number and tie of a format, and the float64 numbers next to each: the neighbor is
    chosen by comparison alone.
    """
    numbers = cast_inputs.with_next(fmt)
    ties = (numbers[1:] + numbers[:-1]) / 2  # exact: numbers have few bits
    points = np.concatenate([numbers, ties])
    points = np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, 0)])
    points = points[points <= fmt.max]
    x = np.concatenate([points, -points])
    magnitude, negative = np.abs(x), np.signbit(x)
    # codes count the numbers from zero
    below = np.searchsorted(numbers, magnitude, side="right") - 1
    inexact, tie, above_tie = (
        magnitude != numbers[below],
        magnitude == ties[below],
        magnitude > ties[below],
    )
    away = {
        "nearest_even": above_tie | (tie & (below % 2 == 1)),
        "nearest_away": above_tie | tie,
        "nearest_zero": above_tie,
        "toward_zero": np.zeros_like(tie),
        "away_from_zero": inexact,
        "to_odd": inexact & (below % 2 == 0),
        "up": inexact & ~negative,
        "down": inexact & negative,
    }[rounding]
    codes = below + away
    signed = negative & ((codes != 0) | fmt.negative_zero)
    model = dataclasses.replace(KNOWN_CASTS["saturating"].behavior(fmt), rounding=rounding)
    np.testing.assert_array_equal(
        behavior.encode(x, fmt, model, source="float64"), codes | np.where(signed, fmt.sign_bit, 0)
    )


@ours
def test_the_unsaturating_is_the_simulators(fmt):  # C-4
    x = cast_inputs.identifying(fmt, "float32")
    np.testing.assert_array_equal(
        behavior.encode(x, fmt, KNOWN_CASTS["non_saturating"].behavior(fmt)),
        cast.encode(x, fmt, saturate=False),
    )


@pytest.mark.parametrize("fmt", CAST_FORMATS.values(), ids=str)
def test_directed_roundings_lie_around_the_exact_value(fmt):  # C-8
    x = cast_inputs.identifying(fmt, "float32", limit=fmt.max)
    model = KNOWN_CASTS["saturating"].behavior(fmt)
    values = {
        r: cast.decode(behavior.encode(x, fmt, dataclasses.replace(model, rounding=r)), fmt)
        for r in ROUNDINGS
    }
    assert (values["down"] <= x).all()
    assert (values["up"] >= x).all()
    assert (np.abs(values["away_from_zero"]) >= np.abs(x)).all()
    nearest, other = (
        np.abs(values[r].astype(np.float64) - x) for r in ("nearest_even", "nearest_zero")
    )
    np.testing.assert_array_equal(nearest, other)
    assert (np.abs(values["nearest_zero"]) <= np.abs(values["nearest_away"])).all()
    assert len({value.tobytes() for value in values.values()}) == len(ROUNDINGS)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("name", ["torch", "ml_dtypes", "jax"])
def test_names_are_what_the_libraries_do(name, fmt):  # C-5, C-8
    x = cast_inputs.identifying(fmt, "float32")
    with np.errstate(all="ignore"):
        found = {
            "torch": lambda: (
                torch.from_numpy(x)
                .to(getattr(torch, f"float8_{fmt.name}"))
                .view(torch.uint8)
                .numpy()
            ),
            "ml_dtypes": lambda: x.astype(getattr(ml_dtypes, f"float8_{fmt.name}")).view(np.uint8),
            "jax": lambda: np.asarray(jnp.asarray(x).astype(f"float8_{fmt.name}")).view(np.uint8),
        }[name]()
    np.testing.assert_array_equal(behavior.encode(x, fmt, KNOWN_CASTS[name].behavior(fmt)), found)


@pytest.mark.parametrize("name", ["e4m3", "e3m4", "e4m3b11fnuz"])
def test_the_other_layouts_are_those_of_ml_dtypes(name):
    dtype = getattr(ml_dtypes, f"float8_{name}")
    ours = cast.decode(np.arange(256, dtype=np.uint8), CAST_FORMATS[name])
    np.testing.assert_array_equal(
        ours, np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    )


def test_a_double_rounding_is_of_its_source_alone():
    model = dataclasses.replace(
        KNOWN_CASTS["saturating"].behavior(E4M3FN),
        double_rounding={"float32": DoubleRounding(dtype="bfloat16")},
    )
    x = cast_inputs.identifying(E4M3FN, "float32")
    np.testing.assert_array_equal(
        behavior.encode(x, E4M3FN, model), cast.encode(cast.round_to(x, BFLOAT16), E4M3FN)
    )
    np.testing.assert_array_equal(
        behavior.encode(x, E4M3FN, model, source="float64"), cast.encode(x, E4M3FN)
    )


def test_inputs_are_numbers_of_their_dtype():
    for source in ("float32", "bfloat16", "float16"):
        x = cast_inputs.identifying(E4M3FN, source)
        finite = x[np.isfinite(x)]
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(
                finite.astype({"bfloat16": ml_dtypes.bfloat16}.get(source, source)).astype(
                    np.float32
                ),
                finite,
            )


def test_an_unknown_name():
    with pytest.raises(
        ValueError, match=r"a cast's behavior is one of saturating, non_saturating, .*; got 'tf32'"
    ):
        behavior.by_name("tf32", E4M3FN)
