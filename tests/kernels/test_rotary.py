"""The gradient of a rotary embedding, interpreted: the codes of the plain form, which stores it."""

import numpy as np
import pytest

pytest.importorskip("triton")

from helpers.kernels.planted_tensors import amax_of, both_orders, cases, planted, run, scales

from fp8ref.kernels import rotary
from fp8ref.sim.quantize import scaling

SHAPES = [(2, 35, 3, 8), (1, 64, 2, 16), (1, 1, 1, 2), (3, 1, 2, 4)]
ORDERS = {"of tokens": (0, 1, 2, 3), "of heads": (0, 2, 1, 3), "of batches": (1, 0, 2, 3)}
"""{name: the order in memory of [B, T, H, D]}; attention's own gradient has it by heads."""


def gradient(shape, order, dtype, *, wide):
    """[B, T, H, D] whose memory has another order of B, T and H."""
    count = int(np.prod(shape))
    memory = planted(1, count, dtype, wide=wide).reshape([shape[axis] for axis in order])
    return memory.transpose(np.argsort(order))


def rotated(g, cos, sin):
    """d cos + rotate_half^T(d) sin, rounded to g's dtype (M-11)."""
    (g1, g2), half = np.split(g.astype(np.float32), 2, -1), g.shape[-1] // 2
    c, s = cos[:, None], sin[:, None]
    with np.errstate(all="ignore"):
        first = g1 * c[..., :half] + g2 * s[..., half:]
        second = g2 * c[..., half:] - g1 * s[..., :half]
        return np.concatenate([first, second], -1).astype(g.dtype)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("shape", "dtype", "fmt"), cases(*SHAPES))
def test_the_gradient_is_rounded_and_then_cast(shape, order, dtype, fmt):  # M-11
    for wide in (False, True):
        g = gradient(shape, ORDERS[order], dtype, wide=wide)
        (batch, tokens, heads, width), scale = shape, np.float32(3.3)
        cos, sin = (planted(tokens, width, "float32", seed=seed) for seed in (5, 6))
        strides = tuple(n // g.itemsize for n in g.strides[:3])
        matrix, tables = (batch * tokens, heads * width), [cos, sin]
        launch = rotary.cast(shape, strides, e5m2=fmt == "e5m2")
        parts = ((launch.programs,), "int32")
        codes, transposed, amaxes = run(launch, [g, *tables, scale], [*both_orders(matrix), parts])
        plain = rotated(g, cos, sin).reshape(matrix)
        expected = scaling.quantize_with(plain, scales(scale), fmt).codes
        np.testing.assert_array_equal(codes, expected)
        np.testing.assert_array_equal(transposed, expected.T)
        np.testing.assert_array_equal(amax_of(amaxes), scaling.amax(plain))
        alone = rotary.amax(shape, strides)
        np.testing.assert_array_equal(run(alone, [g, *tables], [parts])[0], amaxes)


@pytest.mark.parametrize(("shape", "dtype", "fmt"), cases(*SHAPES))
def test_an_embedding_is_rotated_and_rounded(shape, dtype, fmt):  # M-3
    x = gradient(shape, (0, 1, 2, 3), dtype, wide=True)
    cos, sin = (planted(shape[1], shape[3], "float32", seed=seed) for seed in (5, 6))
    (out,) = run(rotary.rotate(shape), [x, cos, sin], [(shape, dtype)])
    # the gradient of the inverse rotation, of which the halves of sin change places
    inverse = -np.roll(sin, shape[3] // 2, -1)
    expected = rotated(x, cos, inverse)
    np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))


def test_operations_are_in_the_stated_order():  # M-11
    """In float32 partial amaxes show a result to its last bit: each tile here has one number."""
    shape = (1, 64 * 16, 1, 2)
    g, (cos, sin) = (
        np.random.default_rng(1).standard_normal((1, 64 * 16, 1, 2)).astype(np.float32),
        (planted(shape[1], 2, "float32", seed=seed) for seed in (5, 6)),
    )
    g[:, np.arange(shape[1]) % 64 != 9] = 0
    launch = rotary.amax(shape, (0, 2, 2))
    (amaxes,) = run(launch, [g, cos, sin], [((16,), "int32")])
    largest = np.abs(rotated(g, cos, sin))[0, 9::64, 0].max(-1)
    np.testing.assert_array_equal(amaxes.view(np.float32), largest)
