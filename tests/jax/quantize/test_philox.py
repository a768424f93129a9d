"""Random numbers and stochastic rounding in JAX against the simulator's (spec C-2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.quantize import philox
from fp8ref.sim import philox as sim
from fp8ref.sim.quantize import cast

SEEDS = [0, 7, 2**63 + 5, 0xFEDCBA9876543210]


def halves(seed: int):
    return jnp.uint32(seed & 0xFFFFFFFF), jnp.uint32(seed >> 32)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stream", [0, 1, 2**31 + 3])
def test_words(seed, stream):
    counters = np.array([0, 1, 4095, 2**31, 2**32 - 1], np.uint32)
    found = jnp.stack(philox.words(jnp.asarray(counters), stream, halves(seed)), axis=-1)
    np.testing.assert_array_equal(found, sim.words(counters.astype(np.uint64), stream, seed))


def test_a_key_is_of_a_seed_a_step_and_a_stream():  # O-8, O-15
    words = sim.words(np.array([12], np.uint64), 5, SEEDS[3])[0].tolist()
    assert [int(word) for word in philox.key_of(SEEDS[3], 12, 5)] == words[:2]
    assert [int(word) for word in philox.key_of(SEEDS[3], 12, 5, master=True)] == words[2:]


@pytest.mark.grid(2)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_codes_are_the_simulators(fmt, seed):
    rng = np.random.default_rng(1)
    # subnormals, zeros and saturation of either format
    wide = np.exp2(rng.uniform(-40, 20, 20_000)) * rng.choice([-1, 1], 20_000)
    x = np.concatenate(
        [np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-126, fmt.max, -fmt.max]), wide]
    ).astype(np.float32)
    x = x.reshape(8, -1)  # numbers follow the flat index of any shape
    codes = jax.jit(lambda x: philox.codes(x, fmt, philox.Random(halves(seed))))(x)
    np.testing.assert_array_equal(
        np.asarray(codes), cast.encode_plain(x, fmt, rounding="stochastic", seed=seed)
    )


def test_the_lower_32_bits_decide_where_the_upper_16_do_not():
    # About one element in 2^16 is open after 16 bits: in 2^21 elements about 32 are.
    x = np.random.default_rng(3).uniform(E4M3FN.max / 4, E4M3FN.max / 2, 1 << 21).astype(np.float32)
    spacing = np.exp2(np.floor(np.log2(x)) - E4M3FN.mantissa_bits)
    is_open = (
        np.floor(x / spacing % 1 * 2**16) + sim.uniform48(0, x.size, 21) // 2.0**32 == 2**16 - 1
    )
    expected = cast.encode(x, E4M3FN, rounding="stochastic", seed=21)
    # it goes both ways
    assert (
        0 < (spacing * np.floor(x / spacing) != cast.decode(expected, E4M3FN))[is_open].mean() < 1
    )
    np.testing.assert_array_equal(
        jax.jit(lambda x: philox.codes(x, E4M3FN, philox.Random(halves(21))))(x), expected
    )
