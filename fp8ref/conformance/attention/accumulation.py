"""How both GEMMs of attention add: accumulator width, and chains over tiles (A-4, A-9, G-10).

A large number and its opposite stand next to each other. What an accumulator of n fraction bits
held before, or adds in the same step, is lost if it is smaller than 2^-n of the large number.
Scores are 0, so probabilities are equal: numbers of v are products up to a power of two. Small
products that e4m3's range of v has no number for have a small probability too; whether it was lost
does not depend on its last bits.
"""

import numpy as np

from fp8ref.conformance.attention import scores
from fp8ref.conformance.attention.scores import FEATURES
from fp8ref.conformance.attention.subjects import Attention, Question
from fp8ref.conformance.attention.tiles import Tiling
from fp8ref.conformance.kit.finding import Finding
from fp8ref.sim.gemm import tensor_core

LOW = 8.9
"""A probability of 2^-8.9 is the smallest that e4m3 has under any scale, and with the smallest v
2^-26.7 of the largest product: less than the last of 25 fraction bits."""

LARGEST, SMALLEST = 448.0, 2.0**-9  # of v: the largest number of e4m3, and the smallest
TILES = 33  # the tiles of keys in which chains are looked for
WIDEST = 26  # fraction bits that are tried


def chains(attention: Attention, tiling: Tiling) -> Finding:
    """After how many tiles a chain of P v begins anew.

    The first tile has a small product, each column of v a large number and its negative later.
    """
    if tiling.length is None:
        return Finding("promotion", None, "as tiles", words="cannot tell without tiles")
    keys = TILES * tiling.length
    places = tiling.place(keys)
    a, b = scores.pair(LOW)
    k, v = np.zeros((1, keys)), np.zeros((1, keys, TILES))
    k[0, places[0][0]] = -b
    v[0, places[0][0]] = SMALLEST
    for column, (_, end) in enumerate(places):
        v[0, end - 2 : end, column] = LARGEST, -LARGEST
    kept = scores.outputs(attention, a, k, v)[0, :TILES] != 0
    tiles = f"{TILES} tiles of {tiling.length} keys"
    evidence = f"{tiles}: a small product of the first is kept next to {_which(kept)}"
    if kept.all():
        words = "no sum loses 2^-26 of a product"
        return Finding("promotion", "exact", evidence, words=words)
    if not kept.any():
        words = "none: one chain over all tiles"
        return Finding("promotion", "none", evidence, words=words)
    first = int(np.flatnonzero(kept)[0])
    if first and kept[first:].all():
        words = "each tile" if first == 1 else f"every {first} tiles"
        return Finding("promotion", first, evidence, words=words)
    words = "not after a fixed number of tiles"
    return Finding("promotion", None, evidence, words=words)


def _which(kept: np.ndarray) -> str:
    places = np.flatnonzero(kept)
    if not places.size:
        return "no large ones"
    if places.size == kept.size:
        return "those of all tiles"
    listed = ", ".join(map(str, places[:5]))
    return f"large ones of tiles {listed}{', ...' if places.size > 5 else ''}"


def value_bits(attention: Attention) -> Finding:
    """The fraction bits of the sums of P v: 3 keys of a step, of which two are opposite."""
    a, b = scores.pair(LOW)
    kept = np.ones(WIDEST + 1, bool)
    # whether the third key's probability is 2^-LOW, whose first bit is 2^-9
    for low in (False, True):
        bits = np.arange(WIDEST + 1)
        small = 2.0 ** (8 - bits + (9 if low else 0))
        inside = (small >= SMALLEST) & (small <= 16) if low else small >= SMALLEST
        v = np.zeros((1, 32, FEATURES))
        v[0, 0, bits[inside]], v[0, 1, bits[inside]] = 256, -256
        v[0, 2, bits[inside]] = small[inside]
        k = np.zeros((1, 32))
        k[0, 2] = -b if low else 0
        k[0, 3] = -scores.FAR  # its probability is 0; its value makes the scale of v 1
        v[0, 3, FEATURES - 1] = LARGEST
        kept[bits[inside]] &= scores.outputs(attention, a, k, v)[0, bits[inside]] != 0
    return _bits("sums of P v", kept, "2^8 - 2^8 + a power of two, in one step")


def score_bits(attention: Attention) -> Finding:
    """The same of sums of q k: keys whose score is such a sum, or 0, with opposite values."""
    kept = np.ones(WIDEST + 1, bool)
    for bits in range(8, WIDEST + 1):
        # 2^8 2^8 - 2^8 2^8 + 2^(16 - bits); all times a factor that makes the last a score of 20
        exponent = 16 - bits
        x, y = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)
        factor = 2.0 ** np.round(np.log2(20 / scores.SCALE / (x * y)))
        q, k, v = (np.zeros((1, 1, n, FEATURES), np.float32) for n in (1, 2, 2))
        # the last of each meets a 0, and makes the scale a power of two
        q[0, 0, 0, :4] = (2.0**8, 2.0**8, x, LARGEST)
        k[0, 0, 0, :5] = np.array([2.0**8, -(2.0**8), y, 0, LARGEST]) * factor
        v[0, 0, :, 0] = 1, -1
        kept[bits] = attention.ask(Question(q, k, v)).o[0, 0, 0, 0] != 0
    return _bits("sums of q k", kept, "2^16 - 2^16 + a power of two")


def _bits(what: str, kept: np.ndarray, sums: str) -> Finding:
    if kept.all():
        evidence = f"{sums} down to 2^-{WIDEST} of it"
        return Finding(what, "all", evidence, words="keep all")
    last = int(np.flatnonzero(~kept)[0]) - 1
    cores = tensor_core.UNITS.values()
    units = [unit.name for unit in cores if unit.fraction_bits == last]
    words = f"{last} fraction bits{', as ' if units else ''}{' and '.join(units)}"
    return Finding(what, last, f"{sums}: kept down to 2^-{last} of it", words=words)
