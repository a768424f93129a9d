"""Stochastic rounding in PyTorch (spec C-2), by integer operations: the simulator's random numbers,
a function of a seed and an element's flat index.

Words are integers below 2^32, in Python or in int64 tensors: a product of two of them wraps around
2^64, and the 32 bits above and below are read by a shift and a mask.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8ref.formats import Format
from fp8ref.torch.quantize.float_values import SMALL, slices

ROUNDS, MULTIPLIERS, WEYL = 7, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
"""Philox4x32-7: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011."""

BLOCK = 4096
"""Elements whose 16 high bits one run of BLOCK / 8 counters gives."""

_LOW = 0xFFFFFFFF
_FEW = 8  # numbers that Python's integers make sooner
Key = tuple[int, int] | tuple[Tensor, Tensor]
"""The low and the high half of a seed."""


class Draw(NamedTuple):
    """What rounds an operand stochastically.

    key     the seed of its GEMM.
    bits    48 or 8 random bits for each element (C-2).
    start   the flat index of the first element in the whole operand with its reduced axis last; or
            of all elements, int64, where they do not follow each other there.
    """

    key: Key
    bits: int
    start: int | Tensor = 0


def words(counter: Any, stream: int, key: Key) -> tuple[Any, Any, Any, Any]:
    """Philox4x32 of counters, an integer or an int64 tensor: four words of each."""
    c0, c1, c2, c3 = counter & _LOW, counter >> 32, counter * 0 + stream, counter * 0
    k0: Any
    k1: Any
    k0, k1 = key
    for _ in range(ROUNDS):
        p, q = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((q >> 32) & _LOW) ^ c1 ^ k0,
            q & _LOW,
            ((p >> 32) & _LOW) ^ c3 ^ k1,
            p & _LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def high_bits(start: int | Tensor, count: int, key: Key, device: torch.device) -> Tensor:
    """h of C-2 of the elements start, start + 1, ..., or of those of a tensor: int32 [count]."""
    if isinstance(start, Tensor):
        place = start % (BLOCK // 2)
        counter = start // BLOCK * (BLOCK // 8) + place // 4
        word = start % BLOCK // (BLOCK // 2) * 2 + place % 4 // 2
        chosen = torch.stack(words(counter, 0, key), -1).gather(-1, word[:, None]).squeeze(-1)
        return (chosen >> place % 2 * 16).bitwise_and_(0xFFFF).to(torch.int32)
    first, last = start // BLOCK, -(-(start + count) // BLOCK)
    counter = torch.arange(first * (BLOCK // 8), last * (BLOCK // 8), device=device)
    c0, c1, c2, c3 = (word.view(last - first, BLOCK // 8) for word in words(counter, 0, key))
    # [blocks, halves of a block, counters, 2 words, 2 half-words]
    halves = torch.stack([torch.stack([c0, c1], -1), torch.stack([c2, c3], -1)], 1)
    h = torch.stack([halves & 0xFFFF, halves >> 16], -1).view(-1)
    return h[start - first * BLOCK :][:count].to(torch.int32)


def codes(x: Tensor, fmt: Format, key: Key, start: int | Tensor, bits: int = 48) -> Tensor:
    """The codes of x, rounded stochastically and saturated: int32 of x's shape, flat.

    start, bits  as of ``Draw``.
    Shapes:   x float32 [n].
    Specials: NaN is fmt.nan_code; zeros keep their sign, where the format has two.
    Source:   spec C-2, C-3, C-5, C-6.
    """
    random = high_bits(start, x.numel(), key, x.device)
    parts = []
    for i in slices(x, SMALL):
        first = start[i] if isinstance(start, Tensor) else start + (i.start or 0)
        parts.append(_codes(x[i], fmt, random[i], key, first, bits))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _codes(
    x: Tensor, fmt: Format, random: Tensor, key: Key, start: int | Tensor, bits: int
) -> Tensor:
    below, m = 127 + fmt.emin, fmt.mantissa_bits
    magnitude, pattern = x.abs().clamp_(max=fmt.max), x.view(torch.int32)
    field = (magnitude.view(torch.int32) >> 23).clamp_(min=below)
    # |x| in spacings, n of C, times 2^16: exactly, as the factor is a power of two. It is in two
    # parts, as bfloat16's would exceed float32's range.
    power = ((127 + m + 16 - 22 + 127 - field) << 23).view(torch.float32)
    scaled = magnitude * power * 2.0**22
    n = scaled.to(torch.int32)
    if bits == 8:
        up = ((n & 0xFFFF) + (random & 0xFF00)) >> 16  # of n the lower 8 bits carry nothing
    else:
        up = _carries(scaled, n, random, key, start)
    # C's code: n and steps of the exponent above the smallest
    rounded_codes = (n >> 16) + up + ((field - below) << m)
    if fmt.nan == "negative_zero":
        pattern = torch.where(rounded_codes == 0, 0, pattern)
    rounded_codes = rounded_codes | ((pattern >> 31) & fmt.sign_bit)
    return torch.where(x.isnan(), fmt.nan_code, rounded_codes).to(torch.int32)


def _carries(scaled: Tensor, n: Tensor, random: Tensor, key: Key, start: int | Tensor) -> Tensor:
    """Whether 48 bits carry, int32. The upper 16 decide, unless with h they are all ones.

    scaled, n, random  a number in spacings, times 2^16, and cut to an integer; h.
    """
    high = (n & 0xFFFF) + random
    if torch.compiler.is_compiling():
        if not isinstance(start, Tensor):
            start = torch.arange(start, start + n.numel(), device=n.device)
        low = words(start, 1, key)[0]
        return (high >> 16) | ((high == 0xFFFF) & _low_carries(scaled - n, low))
    open_ = (high == 0xFFFF).nonzero().squeeze(1)
    if len(open_):
        index = start[open_] if isinstance(start, Tensor) else open_ + start
        if len(open_) < _FEW:
            integers = int(key[0]), int(key[1])
            low = torch.tensor([words(i, 1, integers)[0] for i in index.tolist()], device=n.device)
        else:
            low = words(index, 1, key)[0]
        high[open_] += _low_carries(scaled[open_] - n[open_], low).int()
    return high >> 16


def _low_carries(rest: Tensor, low: Tensor) -> Tensor:
    """Whether the lower 32 bits of C-2 carry; rest: what n was cut by, below 1."""
    return (rest.double() * 2.0**32).long() + low > _LOW
