"""The online softmax of a tile of keys with shifted scores, as SageAttention has it (spec A-26): maxima are of exponents less the offset,
and each key has a factor of its own. The fast form is that of ``attention_fast``."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8ref.attention import Arithmetic
from fp8ref.torch import attention_operands as operands
from fp8ref.torch import head_scaling
from fp8ref.torch.attention_inputs import Shape, Spec
from fp8ref.torch.elementary import divide, exponential, log, multiply_add, times
from fp8ref.torch.head_scaling import Heads
from fp8ref.torch.online_softmax import Rows, finite

BLOCK = 64
"""Queries whose tiles end together."""

INVERSE_LOG2E = 1.44269502162933349609375
"""What a log-sum-exp in base 2 is divided by: the float32 number 1.44269504."""


def scale_of(spec: Spec, shape: Shape) -> float:
    """The softmax scale in base 2: RN32(scale RN32(log2 e))."""
    return float(np.float32(spec.softmax_scale(shape.features)) * np.float32(math.log2(math.e)))


def last_tiles(spec: Spec, shape: Shape) -> list[int]:
    """The first key of the last tile that each block of 64 queries sees; negative if it sees none."""
    right = spec.mask.window[1] if spec.mask.window else None
    if spec.mask.causal:
        right = 0 if right is None else min(right, 0)
    length, found = spec.variant.tile(shape.features, spec.mask), []
    for first in range(0, shape.queries, BLOCK):
        last = min(first + BLOCK, shape.queries) - 1
        high = shape.keys if right is None else min(shape.keys, last + spec.offset(shape) + right + 1)
        found.append((high - 1) // length * length)
    return found


class Parts(NamedTuple):
    """What ``factors`` takes of a pass, the same for all of its tiles.

    of_q    float32 [B, Hkv, Tq, G, 1]: scale_inv of q.
    of_k    float32 [B, Hkv, 1, 1, keys], padded as tiles of k are: scale_inv of k.
    begins  int64 [Tq, 1, 1]: the first key of the last tile that a query's block of 64 sees.
    scale   the softmax scale in base 2.
    """

    of_q: Tensor
    of_k: Tensor
    begins: Tensor
    scale: float


def parts(tensors: dict[str, Heads], spec: Spec, shape: Shape) -> Parts:
    """The parts of a pass, of its quantized q and k."""
    of_q = head_scaling.spread(tensors["q"].scale_inv, (shape.batch, shape.heads, shape.queries, 1), "int8_thread")
    of_q = of_q.view(shape.batch, shape.key_heads, shape.group, -1).transpose(2, 3)[..., None]
    of_k = head_scaling.spread(tensors["k"].scale_inv, (shape.batch, shape.key_heads, shape.keys, 1), "int8_thread")
    begins = torch.tensor(last_tiles(spec, shape), device=of_q.device).repeat_interleave(BLOCK)[: shape.queries, None, None]
    return Parts(of_q, operands.along_features(of_k)[..., 0][:, :, None, None], begins, scale_of(spec, shape))


def factors(s: Tensor, of_pass: Parts, tile: operands.Tile) -> tuple[Tensor, Tensor]:
    """(scores, their factors in the exponent), float32 [B, Hkv, rows, G, keys]: in its last tile a row's scores have both scale_inv
    already."""
    both, last = times(of_pass.of_q[:, :, tile.rows], of_pass.of_k[..., tile.keys]), of_pass.begins[tile.rows] == tile.begin
    return torch.where(last, times(s, both), s), torch.where(last, of_pass.scale, times(both, of_pass.scale))


def step(s: Tensor, factor: Tensor, rows: Rows, seen: Tensor | None, offset: float, how: Arithmetic) -> tuple[Tensor, Tensor, Rows]:
    """(probabilities, factors of what came before, the new state), of scores and factors of ``factors``.

    Shapes:   s and factor float32 [..., keys], keys a multiple of 16; seen broadcasts to it, None: all; the rest [...].
    Order:    m = max(m, RN32(s f - offset)), each rounded once; c = RN32(2^RN32(old m - m)); P = RN32(2^RN32(s f - m)), the
              exponent rounded once; then ``_add``.
    """
    of_keys = multiply_add(s, factor, -float(np.float32(offset)))
    of_keys = of_keys if seen is None else torch.where(seen, of_keys, -torch.inf)
    new = torch.maximum(rows.maximum, of_keys.amax(-1))
    safe = finite(new)
    c = exponential(rows.maximum - safe, "2", how)
    p = exponential(multiply_add(s, factor, -safe[..., None]), "2", how)
    p = p if seen is None else torch.where(seen, p, 0.0)
    return p, c, Rows(new, _add(p, c, rows.sums))


def log_sum(maximum: Tensor, total: Tensor) -> Tensor:
    """The log-sum-exp of rows of smoothed scores: RN32(RN32(RN32(log2 l) + m) / 1.44269504)."""
    empty = total == 0
    found = log(torch.where(empty, 1.0, total), "2") + torch.where(empty, 0.0, maximum)
    return torch.where(empty, -torch.inf, divide(found, torch.full_like(found, INVERSE_LOG2E)))


def _add(p: Tensor, c: Tensor, sums: Tensor) -> Tensor:
    """Each row's probabilities added to its four lanes, which are multiplied by c first: of each 16 columns, lane n has columns 2 n,
    2 n + 1, 2 n + 8 and 2 n + 9, which are added to each other before."""
    lanes, sixteens = times(sums, c[..., None]), p.unflatten(-1, (-1, 2, 4, 2))
    for n in range(sixteens.shape[-4]):
        first, second = sixteens[..., n, 0, :, :], sixteens[..., n, 1, :, :]
        lanes = lanes + (((first[..., 0] + first[..., 1]) + second[..., 0]) + second[..., 1])
    return lanes
