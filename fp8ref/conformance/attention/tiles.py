"""Tiles of keys: their order and their length (spec A-6).

Block n of keys asks for block m. In question n one key of block n has the largest score. A key of
block m that comes before it is cast with its own maximum and then multiplied by a float32 factor;
one that comes after it, or in the same tile, is cast with the largest maximum. A second key, which
stands next to the largest and has the opposite value, is cast so in any case. The sum of both is 0
if both were cast alike, and else not.
"""

from typing import NamedTuple

import numpy as np

from fp8ref.conformance.attention import scores
from fp8ref.conformance.attention.subjects import Attention
from fp8ref.conformance.kit.finding import Finding

BLOCKS, BLOCK = 32, 32  # the blocks of keys that are compared, and their keys

POWER = 28
"""The largest score, in powers of two: below it, a probability is 0 in FP8 under any scale, and
below 2^-17 in e5m2.
"""

SEEN = 2.0**-13
"""An output that is no zero, relative to one key's part: a rounding to bfloat16 has at least 0.2
2^-8 of it (``scores.between``), and one to float32 at most 2^-24, with some of them at most 2^-20.
"""


class Tiling(NamedTuple):
    """The keys of the first tile, and whether tiles come from the last; None if unknown."""

    length: int | None
    descending: bool | None
    finding: Finding

    def place(self, keys: int) -> list[tuple[int, int]]:
        """(begin, end) of tiles in their order; all keys in one if tiles cannot be told apart."""
        length = self.length or keys
        places = [(n, min(n + length, keys)) for n in range(0, keys, length)]
        return places[::-1] if self.descending else places


def tiling(attention: Attention) -> Tiling:
    """The order and the length of tiles without a mask, of at most 512 keys."""
    before = _before(attention, np.arange(BLOCKS) * BLOCK, np.arange(BLOCKS) * BLOCK + 2)
    if before.any():
        ranks = before.sum(axis=1)  # how many blocks come before each
        steps = np.diff(ranks)
        if np.array_equal(before, ranks[None, :] < ranks[:, None]) and (
            (steps >= 0).all() or (steps <= 0).all()
        ):
            return _refined(attention, ranks)
        shown = {n: _runs(np.flatnonzero(before[n])) for n in (0, BLOCKS // 2, BLOCKS - 1)}
        runs = "; ".join(f"before block {n}: {earlier}" for n, earlier in shown.items())
        evidence = f"blocks of {BLOCK} keys that were cast before a larger score came, {runs}"
        words = "neither ascending nor descending"
    else:
        keys = f"{BLOCKS * BLOCK:,} keys"
        evidence = f"a larger score in any of {keys} changes how all others are cast, or none"
        words = "not seen: one for all keys, or probabilities are not rounded, or the maximum stays"
    return Tiling(None, None, Finding("tiles", None, evidence, words=words))


def _refined(attention: Attention, ranks: np.ndarray) -> Tiling:
    """The length to a key, of the two blocks between which the first tile of keys ends."""
    descending = bool(ranks[0] > ranks[-1])
    after = int(np.flatnonzero(ranks != ranks[0])[0])  # the first block of the second tile
    keys = np.arange((after - 1) * BLOCK + 3, after * BLOCK + 3)
    # the largest score is in the later tile: in the first one if tiles descend, else in the second
    at = 0 if descending else after * BLOCK + 4
    # whether a key is of the second tile
    alike = _before(attention, np.array([at]), keys)[0] == descending
    length = int(keys[alike][0]) if alike.any() else int(keys[-1]) + 1
    order = "descending" if descending else "ascending"
    evidence = f"the first {after} blocks of {BLOCK} keys are cast alike"
    if alike.any() and not alike.all():
        cast = f"from {length} on" if descending else f"before {length}"
        evidence = f"under a larger score at key {at}, keys {cast} and no others were cast with a "
        evidence += "maximum of their own"
    return Tiling(length, descending, Finding("tiles", f"{length} keys, {order}", evidence))


def _before(attention: Attention, largest: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Whether each key, a column, comes in an earlier tile than each largest one, a row."""
    tokens, count = BLOCKS * BLOCK, len(largest)
    pairs = scores.powers(POWER, POWER + 2)  # ascending
    a, b = next(pair for pair in pairs if scores.between(scores.power_of(pair)))
    k, v = np.zeros((count, tokens)), np.zeros((count, tokens, len(keys)))
    k[np.arange(count), largest] = b
    v[:, keys, np.arange(len(keys))] += scores.LARGE
    v[np.arange(count), largest + 1] -= scores.LARGE
    outputs = scores.outputs(attention, a, k, v)[:, : len(keys)]
    # of one key; the largest score's own probability is all of the sum
    part = scores.LARGE * 2.0 ** -scores.power_of((a, b))
    return np.abs(outputs) > SEEN * part


def _runs(blocks: np.ndarray) -> str:
    """Blocks as ranges."""
    if not blocks.size:
        return "none"
    parts = np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1)
    ends = [(part[0], part[-1]) for part in parts]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ends)
