"""Two sets of codes moved as one: every bit of both comes back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.linear import paired_codes
from fp8ref.jax.quantize import cast, scaling

BOTH = jax.jit(
    lambda x, fmt, policy: tuple(
        scaling.quantize(x, fmt, granularity="rowwise", policy=policy, axis=axis)
        for axis in (-1, -2)
    ),
    static_argnums=(1, 2),
)
MERGED, PARTED = jax.jit(paired_codes.merged), jax.jit(paired_codes.parted)


def bits(codes, fmt):
    """uint8, with one code for NaN."""
    raw = np.asarray(jax.lax.bitcast_convert_type(codes, jnp.uint8))
    return np.where(np.isnan(np.asarray(cast.decode(codes, fmt))), fmt.nan_code, raw)


def come_back(x, fmt, policy="torchao_pow2"):
    """Assert that both sets of codes of x do; returns the bits that were moved with the codes, one
    an element.
    """
    rows, columns = BOTH(x, fmt, policy)
    codes, packed = MERGED(rows, columns)
    assert (codes.shape, codes.dtype, packed.shape) == (
        x.shape,
        rows.codes.dtype,
        (*x.shape[:-1], -(-x.shape[-1] // 8)),
    )
    nothing = jnp.zeros_like(codes)
    found = PARTED(codes, packed, *(dataclasses.replace(q, codes=nothing) for q in (rows, columns)))
    for mine, expected in zip(found, (rows, columns), strict=True):
        np.testing.assert_array_equal(bits(mine.codes, fmt), bits(expected.codes, fmt))
        assert mine.axis == expected.axis
    return np.asarray(paired_codes._unpacked(packed, x.shape[-1]))


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_bit_of_both_sets_comes_back(fmt, dtype, rng):  # P-6
    """Rows and columns of magnitudes that differ by up to 2^60, so that codes of one set are
    subnormal or zero where the other's are not.
    """
    spread = np.exp2(rng.integers(-30, 31, (96, 1)) + rng.integers(-30, 31, (1, 43)))
    moved = come_back(jnp.asarray(rng.standard_normal((96, 43)) * spread, dtype), fmt)
    assert 0 < moved.mean() < 0.1  # a few elements become ties


def test_a_number_beside_a_tie_is_rounded_once():  # P-6
    """Rows have scale 1, columns 2^-6, whose smallest codes are an eighth apart: odd multiples of a
    sixteenth are ties. The numbers beside them have their codes by row, but not by column."""
    around = np.array(
        [
            np.nextafter(np.float32(t), np.float32(s)) if s else t
            for t in np.arange(1, 16, 2)
            for s in (0, 100, -100)
        ],
        np.float32,
    )
    column = np.full((1, around.size), 448 * 64, np.float32)
    x = np.concatenate(
        [
            np.concatenate([around * 2.0**-4, [448.0]])[None],
            np.pad(column, ((0, 0), (0, 1)), constant_values=1),
        ]
    )
    moved = come_back(jnp.asarray(x), E4M3FN)
    assert moved.any()


def test_special_numbers_and_scales_come_back():  # P-6, S-3
    """A NaN makes NaN of its row and its column alone, an infinity zeros; zeros keep their
    signs.
    """
    x = np.random.default_rng(2).standard_normal((2, 8, 24)).astype(np.float32)
    x[0, 1, 2], x[0, 3, 4], x[1, 5, 6], x[1, 0], x[:, :, 20], x[0, 7, ::2] = (
        np.nan,
        np.inf,
        -np.inf,
        0,
        -0.0,
        2.0**-140,
    )
    x[1, 2, 4] = np.nan  # in the column of an infinity
    come_back(jnp.asarray(x), E4M3FN)
    come_back(jnp.zeros((4, 8)), E4M3FN)
    come_back(jnp.asarray(x * np.float32(2.0**120)), E4M3FN)
