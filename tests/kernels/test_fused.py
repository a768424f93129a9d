"""Kernels of norms, SwiGLU and rotary embeddings, interpreted, against NumPy in float32.

Exponentials differ by ulps of float32, which show in a result that is rounded to bfloat16 where it
lies near the middle between two: of the normal numbers here in less than one in 100, by one code.
"""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

from fp8ref.kernels import norms, rotary, swiglu
from fp8ref.kernels.jit import interpret

BF16 = ml_dtypes.bfloat16
RAGGED = (70, 37)


def run(launch, inputs, shapes):
    """Outputs of a launch, of {shape: dtype}."""
    outputs = [np.zeros(shape, dtype) for shape, dtype in shapes]
    arrays = [*inputs, *outputs]
    interpret(launch, arrays, [str(array.dtype) for array in arrays])
    return outputs


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(BF16)


def wide(*arrays):
    return [x.astype(np.float32) for x in arrays]


def e4m3(x, scale):
    """Codes of a float32 result that is rounded to bfloat16 first."""
    rounded = x.astype(BF16).astype(np.float32) * np.float32(scale)
    return np.clip(rounded, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def both(shape):
    return [(shape, np.uint8), (shape[::-1], np.uint8)]


def check(codes, transposed, expected, share=0.01):
    assert (transposed == codes.T).all()
    assert np.abs(codes.astype(int) - expected.astype(int)).max() <= 1
    assert (codes != expected).mean() <= share


def largest(amaxes):
    return amaxes.max().view(np.float32)


@pytest.mark.parametrize("shape", [(128, 64), RAGGED])
def test_swiglu(shape):
    gate, up, d = (normal(*shape, seed=seed) for seed in range(3))
    scale = np.float32([100])
    g, u, e = wide(gate, up, d)
    launch = swiglu.cast(shape, e5m2=False)
    codes, transposed, amaxes = run(
        launch, [gate, up, scale], [*both(shape), (launch.programs, np.int32)]
    )
    product = g / (1 + np.exp(-g)) * u
    check(codes, transposed, e4m3(product, 100))
    assert largest(amaxes) == np.abs(product.astype(BF16)).max().astype(np.float32)
    launch = swiglu.amax(shape)
    (again,) = run(launch, [gate, up], [(launch.programs, np.int32)])
    assert (again == amaxes).all()
    launch = swiglu.cast_gradients(shape, e5m2=False)
    parts = (launch.programs, np.int32)
    gate_q, gate_t, up_q, up_t, gate_amaxes, up_amaxes = run(
        launch, [d, gate, up, scale, scale * 2], [*both(shape), *both(shape), parts, parts]
    )
    s = 1 / (1 + np.exp(-g))
    check(gate_q, gate_t, e4m3(e * u * s * (1 + g * (1 - s)), 100))
    check(up_q, up_t, e4m3(e * (g * s), 200))
    launch = swiglu.gradient_amaxes(shape)
    again = run(launch, [d, gate, up], [parts, parts])
    assert (again[0] == gate_amaxes).all()
    assert (again[1] == up_amaxes).all()


@pytest.mark.parametrize("residual", [False, True])
def test_norm(residual):
    h, more = normal(*RAGGED), normal(*RAGGED, seed=1)
    weight = normal(RAGGED[1], seed=2)
    inputs = [h, more, weight] if residual else [h, weight]
    shapes = [(RAGGED, BF16)] * residual + [(RAGGED[0], np.float32), (RAGGED[0], np.int32)]
    launch = norms.statistics(RAGGED, eps=1e-5, residual=residual)
    *sums, factors, amaxes = run(launch, inputs, shapes)
    if residual:
        h = (h.astype(np.float32) + more.astype(np.float32)).astype(BF16)
        assert (sums[0] == h).all()
    x, w = wide(h, weight)
    # a mean of 37 squares in another order, and two roundings: 40 units in the last place suffice
    np.testing.assert_allclose(factors, 1 / np.sqrt((x * x).mean(1) + 1e-5), rtol=40 * 2**-24)
    norm = x * factors[:, None] * w
    assert (amaxes.view(np.float32) == np.abs(norm.astype(BF16)).max(1).astype(np.float32)).all()
    launch = norms.cast(RAGGED, e5m2=False)
    codes, transposed, parts = run(
        launch, [h, factors, weight, np.float32([50])], [*both(RAGGED), (launch.programs, np.int32)]
    )
    check(codes, transposed, e4m3(norm, 50), share=0)
    assert parts.max() == amaxes.max()


def test_gradients_of_rotated_heads_of_any_strides():
    batch, tokens, heads, width = shape = (2, 35, 3, 8)
    memory = normal(tokens, batch, heads, width)
    gradient = memory.transpose(1, 0, 2, 3)
    cos, sin = wide(normal(tokens, width, seed=1), normal(tokens, width, seed=2))
    strides = (heads * width, batch * heads * width, width)
    launch = rotary.cast(shape, strides, e5m2=False)
    matrix, scale = (batch * tokens, heads * width), np.float32([30])
    codes, transposed, amaxes = run(
        launch, [memory, cos, sin, scale], [*both(matrix), (launch.programs, np.int32)]
    )
    (g1, g2), half = np.split(gradient.astype(np.float32), 2, -1), width // 2
    c, s = cos[:, None], sin[:, None]
    first = g1 * c[..., :half] + g2 * s[..., half:]
    second = g2 * c[..., half:] - g1 * s[..., :half]
    expected = np.concatenate([first, second], -1).reshape(matrix)
    check(codes, transposed, e4m3(expected, 30), share=0)
    assert largest(amaxes) == np.abs(expected.astype(BF16)).max().astype(np.float32)
    launch = rotary.amax(shape, strides)
    (again,) = run(launch, [memory, cos, sin], [(launch.programs, np.int32)])
    assert (again == amaxes).all()
