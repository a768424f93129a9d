"""e2m1fn in JAX: casts, codes and MX blocks are the simulator's, bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8ref.conformance.inputs import cast_inputs
from fp8ref.formats import E2M1FN
from fp8ref.jax.quantize import cast, four_bits, scaling
from fp8ref.sim.quantize import cast as sim
from fp8ref.sim.quantize import scaling as sim_scaling

CODES = np.arange(16, dtype=np.uint8)
MX = {"granularity": "mx_1x32", "policy": "mx_rceil"}


def encode(x):
    return np.asarray(jax.jit(lambda x: cast.encode(x, E2M1FN))(x))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_every_16_bit_input_gets_the_simulators_code(dtype):  # C-1 to C-6, C-9
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    np.testing.assert_array_equal(encode(x), sim.encode(x, E2M1FN))


def test_ties_and_random_float32_get_the_simulators_codes(rng):  # C-2
    bits = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    near = rng.uniform(-8, 8, 1 << 16).astype(np.float32)
    x = np.concatenate([cast_inputs.edges(E2M1FN), bits.view(np.float32), near])
    np.testing.assert_array_equal(encode(x), sim.encode(x, E2M1FN))


def test_codes_and_numbers_are_the_reverse_of_each_other():  # F-5
    numbers = four_bits.numbers(jnp.asarray(CODES))
    np.testing.assert_array_equal(np.asarray(four_bits.codes(numbers)), CODES)
    for codes in (numbers, jnp.asarray(CODES)):
        values = np.asarray(cast.decode(codes, E2M1FN))
        np.testing.assert_array_equal(values, sim.decode(CODES, E2M1FN))
        np.testing.assert_array_equal(np.signbit(values), CODES >= 8)


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (32, 32)])
@pytest.mark.parametrize("axis", [-1, 0])
def test_mx_blocks_are_the_simulators(shape, axis, rng):  # S-14
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, shape)).astype(np.float32)
    x.flat[:4] = np.nan, np.inf, -np.inf, -0.0
    x = x.astype(ml_dtypes.bfloat16)
    expected = sim_scaling.quantize(x, E2M1FN, axis=axis, **MX)
    q = jax.jit(lambda x: scaling.quantize(x, E2M1FN, axis=axis, **MX))(x)
    np.testing.assert_array_equal(np.asarray(q.code_bits), expected.codes)
    np.testing.assert_array_equal(np.asarray(q.scale), expected.scale)
    np.testing.assert_array_equal(np.asarray(q.scale_inv), expected.scale_inv)
    np.testing.assert_array_equal(
        np.asarray(scaling.dequantize(q)), sim_scaling.dequantize(expected)
    )


def test_what_is_not_emulated_is_refused():  # R-9, C-9
    x = jnp.ones((32, 32))
    with pytest.raises(ValueError, match="so casts saturate; got saturate=False"):
        cast.encode(x, E2M1FN, saturate=False)
    with pytest.raises(ValueError, match=r"jax scales e2m1fn by mx_floor.*got policy 'torchao'"):
        scaling.quantize(x, E2M1FN)
