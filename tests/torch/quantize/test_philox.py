"""Random numbers and stochastic rounding in PyTorch against the simulator's (spec C-2)."""

import numpy as np
import pytest
import torch

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim import philox as sim
from fp8ref.sim.quantize import cast
from fp8ref.torch.quantize import philox

SEEDS = [0, 7, 2**63 + 5, 0xFEDCBA9876543210]


def halves(seed: int) -> tuple[int, int]:
    return seed & 0xFFFFFFFF, seed >> 32


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stream", [0, 1, 2**31 + 3])
def test_words_of_integers_and_of_tensors(seed, stream):
    counters = [0, 1, 4095, 2**32 - 1, 2**32, 2**40 + 11]
    expected = sim.words(np.array(counters, np.uint64), stream, seed)
    assert [
        list(philox.words(counter, stream, halves(seed))) for counter in counters
    ] == expected.tolist()
    of_tensor = torch.stack(philox.words(torch.tensor(counters), stream, halves(seed)), dim=-1)
    assert of_tensor.tolist() == expected.tolist()


@pytest.mark.parametrize("start", [0, 1, 2047, 2048, 4095, 4096, 123_457])
def test_the_high_bits_follow_the_flat_index(start):
    expected = sim.uniform48(start, 5000, 7).astype(np.uint64) >> np.uint64(32)
    assert (
        philox.high_bits(start, 5000, halves(7), torch.device("cpu")).tolist() == expected.tolist()
    )


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_codes_are_the_simulators(fmt, seed):
    rng = np.random.default_rng(1)
    # subnormals, zeros and saturation of either format
    wide = np.exp2(rng.uniform(-40, 20, 20_000)) * rng.choice([-1, 1], 20_000)
    x = np.concatenate(
        [np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-126, 2.0**-149, fmt.max]), wide]
    ).astype(np.float32)
    for start in (0, 4097):
        expected = cast.encode_plain(x, fmt, rounding="stochastic", seed=seed, start=start)
        np.testing.assert_array_equal(
            philox.codes(torch.tensor(x), fmt, halves(seed), start).numpy(), expected
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
        philox.codes(torch.tensor(x), E4M3FN, halves(21), 0).numpy(), expected
    )
