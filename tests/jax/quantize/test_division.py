"""Quotients and roots against NumPy's, which IEEE 754 defines: what runs on a GPU, here on a CPU
(spec S-3, O-6, O-7).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.jax.quantize import division

LEAST = np.finfo(np.float32).tiny
SPECIAL = np.float32([0, -0.0, 1, -3, LEAST, np.finfo(np.float32).max, np.inf, -np.inf, np.nan])


def numbers(seed: int) -> np.ndarray:
    """A million of any normal magnitude."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    x = bits.view(np.float32)
    return x[np.isfinite(x) & (np.abs(x) >= LEAST)]


def near_midpoints() -> tuple[np.ndarray, np.ndarray]:
    """Pairs whose quotients are as near to a midpoint of float32 numbers as quotients come: a =
    RN(t b) for midpoints t.
    """
    rng = np.random.default_rng(2)
    t = rng.integers(1 << 24, 1 << 25, 1 << 20).astype(np.float64) // 2 * 2 + 1
    b = rng.integers(1 << 23, 1 << 24, 1 << 20).astype(np.float64)
    return (t * b).astype(np.float32), b.astype(np.float32)


def equal(found, wanted) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    both = np.isnan(found) & np.isnan(wanted)
    np.testing.assert_array_equal(found.view(np.uint32)[~both], wanted.view(np.uint32)[~both])


@pytest.mark.parametrize(
    "pair", [(numbers(0), numbers(1)), near_midpoints()], ids=["any", "near midpoints"]
)
def test_quotients(pair):
    size = min(map(len, pair))
    a, b = (x[:size] for x in pair)
    with np.errstate(over="ignore", under="ignore"):
        wanted = a / b
    normal = np.abs(wanted) >= LEAST  # XLA flushes others on a CPU
    assert normal.sum() > size / 2
    equal(jax.jit(division.divide_in_float64)(a, b)[normal], wanted[normal])


def test_quotients_of_special_numbers():
    a, b = (x.reshape(-1) for x in np.meshgrid(SPECIAL, SPECIAL))
    with np.errstate(all="ignore"):
        wanted = a / b
    normal = ~(np.abs(wanted) < LEAST) | (wanted == 0)
    equal(jax.jit(division.divide_in_float64)(a, b)[normal], wanted[normal])


def test_roots():
    x = np.concatenate([np.abs(numbers(3)), SPECIAL])
    with np.errstate(invalid="ignore"):
        equal(jax.jit(division.sqrt_in_float64)(x), np.sqrt(x))


def test_results_are_rounded_before_they_are_used_again():
    x = np.abs(numbers(4))
    f = jax.jit(lambda x: division.sqrt_in_float64(division.sqrt_in_float64(x)))
    equal(f(x), np.sqrt(np.sqrt(x)))


def test_by_platform():
    """Float64 on an NVIDIA GPU alone."""
    f = jax.jit(lambda a, b: division.sqrt(division.divide(a, 3.0)) + division.divide(1, b))
    x = jnp.ones((8,), jnp.float32)
    texts = {
        platform: f.trace(x, x).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda")
    }
    assert "f64" not in texts["cpu"]
    assert texts["cuda"].count("stablehlo.divide") == 2
    assert all(
        "f64" in line
        for line in texts["cuda"].splitlines()
        if "stablehlo.divide" in line or "stablehlo.sqrt" in line
    )
