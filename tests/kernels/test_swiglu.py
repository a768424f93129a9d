"""SwiGLU's kernels, interpreted: the codes of the plain form, which stores its result and casts it.

The interpreter's exp is NumPy's, so that every result is that of the same steps in NumPy (M-11).
"""

import numpy as np
import pytest

pytest.importorskip("triton")

from helpers.kernels.planted_tensors import (
    RAGGED,
    SHAPES,
    amax_of,
    both_orders,
    cases,
    planted,
    run,
    scales,
)

from fp8ref.kernels import casts, swiglu
from fp8ref.sim.quantize import scaling

ONE = np.float32(1)


def plain(gate, up, d=None, *, twice=False):
    """The product, or the gradients of gate and of up, of gate's dtype: the steps of M-11.

    twice   silu(gate) is rounded to that dtype before it is multiplied, as in transformers.
    """
    g, u = gate.astype(np.float32), up.astype(np.float32)

    def inner(x):
        return x.astype(gate.dtype).astype(np.float32) if twice else x

    with np.errstate(all="ignore"):
        if d is None:
            return (inner(g / (ONE + np.exp(-g))) * u).astype(gate.dtype)
        e, s = d.astype(np.float32), ONE / (ONE + np.exp(-g))
        of_gate = inner(e * u) * (s * (ONE + g * (ONE - s)))
        return of_gate.astype(gate.dtype), (e * inner(g * s)).astype(gate.dtype)


def check(result, scale, fmt, codes, transposed, amaxes):
    """No code and no amax differs from the simulator's cast of the stored result."""
    expected = scaling.quantize_with(result, scales(scale), fmt).codes
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(transposed, expected.T)
    np.testing.assert_array_equal(amax_of(amaxes), scaling.amax(result))


@pytest.mark.parametrize(("wide", "twice"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("shape", "dtype", "fmt"), cases(RAGGED, *SHAPES))
def test_the_product_is_rounded_and_then_cast(shape, dtype, fmt, wide, twice):  # M-11
    gate, up = (planted(*shape, dtype, seed=seed, wide=wide) for seed in range(2))
    scale = np.float32(0.73)
    launch = swiglu.cast(shape, e5m2=fmt == "e5m2", twice=twice)
    parts = ((launch.programs,), "int32")
    codes, transposed, amaxes = run(launch, [gate, up, scale], [*both_orders(shape), parts])
    check(plain(gate, up, twice=twice), scale, fmt, codes, transposed, amaxes)
    np.testing.assert_array_equal(
        run(swiglu.amax(shape, twice=twice), [gate, up], [parts])[0], amaxes
    )


@pytest.mark.parametrize(("wide", "twice"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("shape", "dtype", "fmt"), cases(RAGGED, *SHAPES))
def test_both_gradients_are_rounded_and_then_cast(shape, dtype, fmt, wide, twice):  # M-11
    gate, up, d = (planted(*shape, dtype, seed=seed, wide=wide) for seed in range(3))
    of_scales = np.float32(0.73), np.float32(91)
    launch = swiglu.cast_gradients(shape, e5m2=fmt == "e5m2", twice=twice)
    orders, parts = both_orders(shape), [((launch.programs,), "int32")] * 2
    *codes, gate_amaxes, up_amaxes = run(
        launch, [d, gate, up, *of_scales], [*orders, *orders, *parts]
    )
    of_gate, of_up = plain(gate, up, d, twice=twice)
    check(of_gate, of_scales[0], fmt, *codes[:2], gate_amaxes)
    check(of_up, of_scales[1], fmt, *codes[2:], up_amaxes)
    alone = swiglu.gradient_amaxes(shape, twice=twice)
    for again, amaxes in zip(
        run(alone, [d, gate, up], parts), (gate_amaxes, up_amaxes), strict=True
    ):
        np.testing.assert_array_equal(again, amaxes)


@pytest.mark.parametrize("shape", [(128, 128), (131, 130)])
def test_results_are_cast_by_blocks_along_both_axes(shape):  # M-11, S-6
    gate, up, d = (planted(*shape, "bfloat16", seed=seed) for seed in range(3))
    (m, n), (rows, columns) = shape, casts.tiles(*shape, (casts.BLOCK, casts.BLOCK))
    of_scales = [((m, columns), "float32")] * 2 + [((rows, n), "float32")] * 2
    outputs = [*both_orders(shape), *of_scales]
    one = run(swiglu.lines(shape, e5m2=False), [gate, up], outputs)
    both = run(swiglu.gradient_lines(shape, e5m2=False), [d, gate, up], outputs * 2)
    results = (plain(gate, up), *plain(gate, up, d))
    for result, found in zip(results, (one, both[:6], both[6:]), strict=True):
        codes, transposed, *scales_found = found
        along, down = (
            scaling.quantize(result, "e4m3fn", granularity="blockwise_1x128", axis=a, ragged=True)
            for a in (1, 0)
        )
        np.testing.assert_array_equal(codes, along.codes)
        np.testing.assert_array_equal(transposed, down.codes.T)
        expected = (along.scale, along.scale_inv, down.scale, down.scale_inv)
        for scale, each in zip(scales_found, expected, strict=True):
            np.testing.assert_array_equal(scale, each)


def test_operations_are_in_the_stated_order():  # M-11
    """In float32 partial amaxes show a result to its last bit: each tile here has one number."""
    shape = (256, 512)
    gate, up = (planted(*shape, "float32", seed=seed) for seed in range(2))
    d = np.zeros(shape, np.float32)
    d[5::64, 7::64] = 1 + np.random.default_rng(3).random((4, 8), np.float32)
    launch = swiglu.gradient_amaxes(shape)
    amaxes = run(launch, [d, gate, up], [((4, 8), "int32")] * 2)
    for found, result in zip(amaxes, plain(gate, up, d), strict=True):
        np.testing.assert_array_equal(found.view(np.float32), np.abs(result[5::64, 7::64]))


def test_a_result_near_a_tie_shows_that_it_is_rounded_first():  # M-11, step 2
    """Of results in float32 and in bfloat16 some codes differ."""
    gate, up = (planted(64, 64, seed=seed) for seed in range(2))
    g, u = gate.astype(np.float32), up.astype(np.float32)
    with np.errstate(all="ignore"):
        unrounded = g / (ONE + np.exp(-g)) * u
    codes = [
        scaling.quantize_with(y, scales(256), "e4m3fn").codes for y in (unrounded, plain(gate, up))
    ]
    assert (codes[0] != codes[1]).sum() > 0
