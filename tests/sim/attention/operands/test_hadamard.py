"""The rotation of q and k (spec A-13)."""

import numpy as np
import pytest

from fp8ref.formats import BFLOAT16
from fp8ref.sim.attention.operands import hadamard
from fp8ref.sim.quantize import cast

F = np.float32


def matrix(n: int) -> np.ndarray:
    """Sylvester's: the sign of i and j is the parity of the bits that both have."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)])


@pytest.mark.parametrize("n", [1, 2, 64, 256])
# sums of integers need no rounding, so that only the last product has one
def test_integers_are_rotated_exactly(n):
    signs, x = hadamard.signs(n, 3), np.random.default_rng(0).integers(-8, 9, (5, n))
    sums = (x * signs) @ matrix(n)
    np.testing.assert_array_equal(
        hadamard.rotate(x.astype(F), signs), sums.astype(F) * F(1 / np.sqrt(n))
    )


def test_products_stay_and_outliers_spread():
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 7, 128)).astype(F)
    q[:, 5] *= 40
    signs = hadamard.signs(128, 0)
    rq, rk = hadamard.rotate(q, signs), hadamard.rotate(k, signs)
    # Eight roundings of each element, relative to its row's norm: 2 x 8 x 2^-24 of the norms'
    # product, with the products' own sums.
    np.testing.assert_allclose(
        rq @ rk.T,
        q @ k.T,
        atol=32 * 2.0**-24 * np.linalg.norm(q, axis=1).max() * np.linalg.norm(k, axis=1).max(),
    )
    assert abs(rq).max() < abs(q).max() / 3


def test_signs_are_the_seeds():
    assert set(hadamard.signs(256, 1).tolist()) == {1.0, -1.0}
    assert (hadamard.signs(256, 1) != hadamard.signs(256, 2)).sum() > 64
    np.testing.assert_array_equal(hadamard.signs(64, 7), hadamard.signs(256, 7)[:64])


def test_the_result_is_rounded_to_the_format():
    x = np.random.default_rng(2).normal(size=(3, 32)).astype(F)
    signs = hadamard.signs(32, 0)
    np.testing.assert_array_equal(
        hadamard.rotate(x, signs, BFLOAT16), cast.round_to(hadamard.rotate(x, signs), BFLOAT16)
    )


@pytest.mark.parametrize(
    ("size", "seed", "said"), [(96, 0, "power of two"), (64, -1, "seed"), (64, 1 << 64, "seed")]
)
def test_what_is_refused(size, seed, said):
    with pytest.raises(ValueError, match=said):
        hadamard.signs(size, seed)


def test_signs_of_another_size_are_refused():
    with pytest.raises(ValueError, match="features need as many signs"):
        hadamard.rotate(np.ones((2, 64), F), hadamard.signs(32, 0))
