"""Random numbers of stochastic rounding (C-2): a function of a seed and an element's flat index.

Philox4x32 turns a counter of four 32-bit words and a key of two into four random words by rounds of
multiplication. Seven rounds are the fewest that pass BigCrush: Salmon, Moraes, Dror, Shaw,
"Parallel random numbers: as easy as 1, 2, 3" (2011), table 2. Vendors use ten by default, as a
safety margin. The compiled twin is in ``kernels.cast``.
"""

import numpy as np

ROUNDS = 7
"""Rounds of Philox4x32: the fewest that pass BigCrush."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
"""The multipliers of a round, for the words 0 and 2 of the counter."""

WEYL = (0x9E3779B9, 0xBB67AE85)
"""What each round adds to the two words of the key."""

BLOCK = 4096
"""Elements whose 16 high bits one run of BLOCK / 8 counters gives."""

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def words(counter: np.ndarray, stream: int, seed: int, rounds: int = ROUNDS) -> np.ndarray:
    """Philox4x32: uint32 [n, 4] for counters uint64 [n]; the counter's words are (low, high,
    stream, 0), the key's the halves of seed."""
    counter = np.asarray(counter, np.uint64)
    c0, c1 = counter & _LOW, counter >> _32
    c2, c3 = np.full_like(counter, stream), np.zeros_like(counter)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(rounds):
        p0, p1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (p1 >> _32) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _32) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        # The key of the next round, by Weyl sequences.
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def derived(seed: int, counter: int, stream: int) -> int:
    """The seed that counter and stream make of another one (S-24): word 0 is its low half, word 1
    its high half."""
    low, high = map(int, words(np.array([counter]), stream, seed)[0, :2])
    return high << 32 | low


def uniform48(start: int | np.ndarray, count: int, seed: int) -> np.ndarray:
    """Integers below 2^48, float64 [count], for the elements start, start + 1, ..., or those of an
    array start [count]: 16 high bits, which nearly always decide, and 32 low.

    The 16 bits of element i: of the counters of its block of 4096 elements, in order, the words 0
    and 1 serve the first half of the block, low half-word before high, and the words 2 and 3 the
    second half. The 32 bits: word 0 of counter i, stream 1.
    """
    index = (
        start.astype(np.uint64)
        if isinstance(start, np.ndarray)
        else np.arange(start, start + count, dtype=np.uint64)
    )
    # Words 0 and 1 of all counters first, 2 and 3 second: a kernel fills two 64-bit arrays.
    block, within = index // np.uint64(BLOCK), index % np.uint64(BLOCK)
    half, place = within // np.uint64(BLOCK // 2), within % np.uint64(BLOCK // 2)
    counter = block * np.uint64(BLOCK // 8) + place // np.uint64(4)
    word = half * np.uint64(2) + place % np.uint64(4) // np.uint64(2)
    chosen = words(counter, 0, seed)[np.arange(count), word.astype(np.intp)]
    high = (chosen >> (place % np.uint64(2) * np.uint64(16)).astype(np.uint32)) & np.uint32(0xFFFF)
    return high * 2.0**32 + words(index, 1, seed)[:, 0]
