"""The online softmax of a tile of keys with shifted scores, as SageAttention has it (spec A-26): maxima are of exponents less the offset,
and each key has a factor of its own."""

import math

import numpy as np

from fp8ref.sim import elementary
from fp8ref.sim.accumulate import multiply_add
from fp8ref.sim.online_softmax import Rows, Seen

BLOCK = 64
"""Queries whose tiles end together."""

INVERSE_LOG2E = np.float32(1.44269504)
"""What a log-sum-exp in base 2 is divided by."""

_NONE = np.float32(-np.inf)


def scale_of(scale: np.float32) -> np.float32:
    """The softmax scale in base 2: RN32(scale RN32(log2 e))."""
    return np.float32(scale * np.float32(math.log2(math.e)))


def last_tiles(high: np.ndarray, keys: int, length: int) -> np.ndarray:
    """int64 [Tq]: the first key of the last tile that a query's block of 64 sees; negative if it sees none.

    high      the keys that a query sees lie below it (A-3).
    """
    of_blocks = [np.full(len(part), min(part.max(), keys)) for part in np.split(high, range(BLOCK, len(high), BLOCK))]
    return (np.concatenate(of_blocks) - 1) // length * length


def factors(s: np.ndarray, scale: np.float32, of_q: np.ndarray, of_k: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scores, their factors in the exponent): in its last tile a row's scores have both scale_inv already.

    Shapes:   s float32 [rows, keys], integers; scale_inv of q [rows] and of k [keys]; last bool [rows].
    """
    both, of_rows = of_q[:, None] * of_k, last[:, None]
    return np.where(of_rows, s * both, s), np.where(of_rows, scale, scale * both)


def step(s: np.ndarray, factor: np.ndarray, rows: Rows, seen: Seen, offset: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """(probabilities, factors of what came before); rows is updated.

    Shapes:   s and factor float32 [rows, keys], of ``factors``; probabilities of that shape; float32 [rows].
    Order:    m = max(m, RN32(s f - offset)), each rounded once; c = RN32(2^RN32(old m - m)); P = RN32(2^RN32(s f - m)), the
              exponent rounded once; then ``_add``.
    """
    keys = np.arange(s.shape[1])
    visible = (keys >= seen.low[:, None]) & (keys < seen.high[:, None]) & (seen.q_documents[:, None] == seen.k_documents)
    old = rows.maximum.copy()
    of_tile = np.where(visible, multiply_add(s, factor, np.full_like(s, -offset)), _NONE).max(axis=1)
    new = np.maximum(old, of_tile)
    safe = np.where(new == _NONE, np.float32(0), new)
    c = elementary.exp2(old - safe)
    p = elementary.exp2(np.where(visible, multiply_add(s, factor, np.broadcast_to(-safe[:, None], s.shape)), _NONE))
    rows.maximum[:] = new
    _add(p, c, rows.sums)
    return p, c


def _add(p: np.ndarray, c: np.ndarray, sums: np.ndarray) -> None:
    """Each row's probabilities added to its four lanes, which are multiplied by c first: of each 16 columns, lane n has columns 2 n,
    2 n + 1, 2 n + 8 and 2 n + 9, which are added to each other before."""
    sums *= c[:, None]
    sixteens = np.pad(p, ((0, 0), (0, -p.shape[1] % 16))).reshape(len(p), -1, 2, 4, 2)
    for n in range(sixteens.shape[1]):
        first, second = sixteens[:, n, 0], sixteens[:, n, 1]  # [rows, 4, 2]
        sums += ((first[..., 0] + first[..., 1]) + second[..., 0]) + second[..., 1]


def log_sum(maximum: np.ndarray, total: np.ndarray, of_mean: np.ndarray, scale: np.float32) -> np.ndarray:
    """The log-sum-exp of rows: RN32(RN32(RN32(log2 l) + m) / 1.44269504) + RN32(of_mean scale), rounded; of_mean is of ``int8_heads.taken``."""
    empty = total == 0
    found = (elementary.log2(np.where(empty, np.float32(1), total)) + np.where(empty, np.float32(0), maximum)) / INVERSE_LOG2E
    return np.where(empty, _NONE, found + of_mean * scale)
