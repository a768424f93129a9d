"""Stochastic rounding in PyTorch (spec C-2), by integer operations: the simulator's random numbers,
a function of a seed and an element's flat index.

Words are integers below 2^32, in Python or in int64 tensors: a product of two of them wraps around
2^64, and the 32 bits above and below are read by a shift and a mask.
"""

from typing import Any

import torch
from torch import Tensor

from fp8ref.formats import Format

ROUNDS, MULTIPLIERS, WEYL = 7, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
"""Philox4x32-7: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011."""

BLOCK = 4096
"""Elements whose 16 high bits one run of BLOCK / 8 counters gives."""

_LOW = 0xFFFFFFFF
Key = tuple[int, int] | tuple[Tensor, Tensor]
"""The low and the high half of a seed."""


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


def high_bits(start: int, count: int, key: Key, device: torch.device) -> Tensor:
    """h of C-2 of the elements start, start + 1, ...: int32 [count]."""
    first, last = start // BLOCK, -(-(start + count) // BLOCK)
    counter = torch.arange(first * (BLOCK // 8), last * (BLOCK // 8), device=device)
    c0, c1, c2, c3 = (word.view(last - first, BLOCK // 8) for word in words(counter, 0, key))
    # [blocks, halves of a block, counters, 2 words, 2 half-words]
    halves = torch.stack([torch.stack([c0, c1], -1), torch.stack([c2, c3], -1)], 1)
    h = torch.stack([halves & 0xFFFF, halves >> 16], -1).view(-1)
    return h[start - first * BLOCK :][:count].to(torch.int32)


def codes(x: Tensor, fmt: Format, key: Key, start: int) -> Tensor:
    """The codes of x, rounded stochastically and saturated: int32 of x's shape, flat.

    start     the flat index of the first element.
    Shapes:   x float32 [n].
    Specials: NaN is fmt.nan_code; zeros keep their sign.
    Source:   spec C-2, C-3, C-5, C-6.
    """
    bits = x.clamp(-fmt.max, fmt.max).view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    field = magnitude >> 23
    exponent = field.clamp(min=1) - 127
    mantissa = (magnitude & 0x7FFFFF) + (field.clamp(max=1) << 23)
    # |x| in spacings is mantissa / 2^shift; no mantissa has more than 24 bits, so that larger
    # shifts leave nothing.
    shift = (23 - fmt.mantissa_bits + (fmt.emin - exponent).clamp(min=0)).clamp(max=72)
    whole = mantissa >> shift.clamp(max=31)
    rest = mantissa - (whole << shift.clamp(max=31))
    # The upper 16 of the 48 bits of C-2 decide, unless with h they are all ones; 13 is the smallest
    # shift, of float16.
    high = ((rest << 3) >> (shift - 13).clamp(max=31)) + high_bits(start, x.numel(), key, x.device)
    if torch.compiler.is_compiling():
        up = (high > 0xFFFF) | (
            (high == 0xFFFF)
            & _low_carries(
                rest, shift, torch.arange(start, start + x.numel(), device=x.device), key
            )
        )
    else:
        up = high > 0xFFFF
        open_ = (high == 0xFFFF).nonzero().squeeze(1)
        up[open_] = _low_carries(rest[open_], shift[open_], open_ + start, key)
    rounded_codes = whole + up + ((exponent.clamp(min=fmt.emin) - fmt.emin) << fmt.mantissa_bits)
    rounded_codes = torch.where(
        x.isnan(),
        fmt.nan_code,
        rounded_codes.clamp(max=fmt.max_code) | ((bits >> 31) & fmt.sign_bit),
    )
    return rounded_codes.to(torch.int32)


def _low_carries(rest: Tensor, shift: Tensor, index: Tensor, key: Key) -> Tensor:
    """Whether the lower 32 bits of C-2 carry."""
    low = ((rest.long() << (48 - shift).clamp(min=0)) >> (shift - 48).clamp(min=0)) & _LOW
    return low + words(index, 1, key)[0] > _LOW
