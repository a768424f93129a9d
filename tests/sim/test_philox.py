import numpy as np
import pytest

from fp8ref.sim import philox


def philox4x32(counter: list[int], key: list[int], rounds: int) -> list[int]:
    """Philox4x32 in Python integers, after Salmon et al., section 3.3."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(rounds):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ k0, q & 0xFFFFFFFF, p >> 32 ^ d ^ k1, p & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [a, b, c, d]


# Known answers of Random123, the authors' library (kat_vectors).
@pytest.mark.parametrize(
    ("rounds", "counter", "key", "answer"),
    [
        (10, [0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (10, [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            10,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
        (7, [0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    ],
)
def test_the_integers_give_the_known_answers(rounds, counter, key, answer):
    assert philox4x32(counter, key, rounds) == answer


@pytest.mark.parametrize("rounds", [7, 10])
@pytest.mark.parametrize("seed", [0, 1, 0x299F31D0A4093822, 2**64 - 1])
def test_words_are_philox_of_counter_and_stream(seed, rounds):  # C-2
    counters = [0, 1, 2**32 - 1, 2**32, 2**40 + 12345]
    for stream in (0, 1):
        expected = [
            philox4x32(
                [c & 0xFFFFFFFF, c >> 32, stream, 0], [seed & 0xFFFFFFFF, seed >> 32], rounds
            )
            for c in counters
        ]
        np.testing.assert_array_equal(
            philox.words(np.array(counters, np.uint64), stream, seed, rounds),
            np.array(expected, np.uint32),
        )


@pytest.mark.parametrize("i", [0, 1, 2, 3, 4, 2047, 2048, 2050, 4095, 4096, 10_000, 2**33 + 4097])
def test_which_bits_belong_to_an_element(i):  # C-2, in its own words
    block, within = divmod(i, 4096)
    p, j = divmod(within, 2048)
    words = philox4x32(
        [(512 * block + j // 4) & 0xFFFFFFFF, (512 * block + j // 4) >> 32, 0, 0], [7, 0], 7
    )
    h = (words[2 * p + j % 4 // 2] >> (16 * (j % 2))) & 0xFFFF
    w = philox4x32([i & 0xFFFFFFFF, i >> 32, 1, 0], [7, 0], 7)[0]
    assert philox.uniform48(i, 1, 7)[0] == 2**32 * h + w


def test_every_half_word_serves_one_element():
    halves = (philox.uniform48(0, 4096, 3) // 2.0**32).astype(np.uint16)
    words = philox.words(np.arange(512, dtype=np.uint64), 0, 3)
    np.testing.assert_array_equal(np.sort(halves), np.sort(words.view(np.uint16).reshape(-1)))
