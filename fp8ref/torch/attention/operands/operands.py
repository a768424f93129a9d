"""The operands of attention: quantized, laid out for GEMMs, a tile at a time (spec A-2, A-4, A-6).

The query heads of a head of keys are stacked as rows, [B, Hkv, Tq, G, D], so that one GEMM takes
all of them without repeating k or v, and the rows that see a tile are one piece of memory.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8ref.spec.attention.variant import ROWS, Variant
from fp8ref.torch.attention.exponentials import tanh, times
from fp8ref.torch.attention.operands import heads as head_scaling
from fp8ref.torch.attention.operands.heads import Heads, pad
from fp8ref.torch.attention.operands.problem import STEP, Problem, RankCall, Report, Shape
from fp8ref.torch.quantize import float_values, hadamard, scaling
from fp8ref.torch.quantize.scales import Scales


class Tile(NamedTuple):
    """Keys from begin to below end, in ``width`` with padding; the rows from first to below last
    see them; inside: each of these sees all, and none is padding."""

    begin: int
    end: int
    width: int
    first: int
    last: int
    inside: bool

    @property
    def keys(self) -> slice:
        """The keys, padded."""
        return slice(self.begin, self.begin + self.width)

    @property
    def rows(self) -> slice:
        """The rows."""
        return slice(self.first, self.last)

    @property
    def place(self) -> tuple:
        """The tile in a matrix [B, Hkv, Tq, G, Tk]."""
        return slice(None), slice(None), self.rows, slice(None), self.keys


def tiles(problem: Problem, step: int = 1) -> list[Tile]:
    """The tiles in order (A-6) without unseen ones; rows in multiples of ``step``."""
    call, shape, offset = problem.call, problem.shape, problem.offset
    length, tq, tk = call.variant.tile(shape.features, call.mask), shape.queries, shape.keys
    left, right = problem.window
    seen_tiles = []
    for begin in range(0, tk, length):
        end = min(begin + length, tk)
        first = 0 if right is None else max(0, begin - offset - right)
        last = tq if left is None else min(tq, end - offset + left)
        if first >= last:
            continue
        first, last = first // step * step, -(-last // step) * step
        width = -(-(end - begin) // STEP) * STEP
        inside = width == end - begin and last <= tq
        inside &= (right is None or first + offset + right >= end - 1) and (
            left is None or last - 1 + offset - left <= begin
        )
        seen_tiles.append(Tile(begin, end, width, first, last, inside))
    return seen_tiles[::-1] if call.variant.descending else seen_tiles


def seen(tile: Tile, problem: Problem, device: torch.device) -> Tensor | None:
    """Keys that a tile's rows see (A-3): bool, broadcast to [B, Hkv, rows, G, keys]; None: all."""
    q_documents, k_documents = problem.documents
    visible = None
    if not tile.inside:
        offset = problem.offset
        keys = torch.arange(tile.begin, tile.begin + tile.width, device=device)
        rows = torch.arange(tile.first, tile.last, device=device)[:, None]
        visible = (keys < tile.end) & (rows < problem.shape.queries)
        left, right = problem.window
        if left is not None:
            visible = visible & (keys >= rows + (offset - left))
        if right is not None:
            visible = visible & (keys <= rows + (offset + right))
        visible = visible[None]
    if q_documents is not None and k_documents is not None:
        same = q_documents[:, tile.rows, None] == k_documents[:, None, tile.keys]
        visible = same if visible is None else visible & same
    return None if visible is None else visible[:, None, :, None, :]


def share(amaxes: list[Tensor], call: RankCall) -> list[Tensor]:
    """Amaxes, the largest of all ranks in one collective; unchanged without a group."""
    if call.sharing is None:
        return amaxes
    return list(scaling.merge_amax(torch.stack(amaxes), call.sharing).unbind())


def rotated(q: Tensor, k: Tensor, v: Tensor, call: RankCall) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v for quantization: q and k rotated if the variant rotates (A-13)."""
    if not call.variant.rotated:
        return q, k, v
    signs = hadamard.signs(q.shape[-1], call.seed, q.device)
    return hadamard.rotate(q, signs), hadamard.rotate(k, signs), v


def quantize(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, report: Report = "all"
) -> dict[str, Heads]:
    """q, k and v as the variant quantizes them, by role (A-2, A-13)."""
    variant, scales = problem.variant, problem.scales
    tensors = dict(zip(("q", "k", "v"), rotated(q, k, v, problem.call), strict=True))
    amaxes = {role: torch.zeros((), device=q.device, dtype=torch.float32) for role in tensors}
    needed = list(tensors)
    if report == "nothing":
        needed = [] if variant.granularity is None else [x for x in tensors if x not in scales]
    group_amaxes = [head_scaling.amax(tensors[role], problem.blocks(role)) for role in needed]
    if variant.granularity in ("tensor", None) and group_amaxes:
        group_amaxes = share(group_amaxes, problem.call)
    amaxes |= dict(zip(needed, group_amaxes, strict=True))
    coded, fmt, policy = {}, variant.fmt, variant.policy
    for role, x in tensors.items():
        blocks, amax, scale = problem.blocks(role), amaxes[role], scales.get(role)
        coded[role] = head_scaling.quantize(x, fmt, blocks, policy, amax=amax, scale=scale)
    return coded


def output(role: str, x: Tensor, amax: Tensor, problem: Problem) -> tuple[Tensor, Heads]:
    """An output or a gradient in the variant's format: its numbers in float32, and what they are
    quantized to, with one scale in FP8 and none in high precision (A-10).
    """
    fmt, (granularity, policy) = problem.variant.out, problem.variant.output_scaling
    blocks = None if granularity is None else (None,) * 4
    scale = problem.scales.get(role)
    out = head_scaling.quantize(x, fmt, blocks, policy, amax=amax, scale=scale)
    if blocks is None:
        return out.codes.float(), out
    return float_values.decode(out.codes).mul_(out.scale_inv), out


def probability_scale(problem: Problem, device: torch.device) -> Scales:
    """What probabilities are multiplied by before their cast, and their codes after it (A-8)."""
    variant = problem.variant
    if "s" in problem.scales:
        return head_scaling.given(problem.scales["s"])
    if variant.p_scale == "state":
        one = torch.ones((), device=device, dtype=torch.float32)
        return head_scaling.scales_of(one, variant.fmt, variant.policy)
    return head_scaling.given(torch.full((), variant.p_scale, device=device, dtype=torch.float32))


def score_factors(tensors: dict[str, Heads], tile: Tile, problem: Problem) -> list[Tensor | float]:
    """The factors of scaled scores, in order; or the one factor of raw scores (A-4, A-5)."""
    variant = problem.variant
    if variant.scores == "raw":
        return [_own_factor(tensors, problem)]
    if variant.granularity == "mx_1x32":
        return [problem.score_scale]
    q_scale_inv = query_scale(tensors["q"].scale_inv, tile, problem)
    k_scale_inv = key_scale(tensors["k"].scale_inv, tile, variant)
    values: dict[str, Tensor | float] = {
        "scale": problem.score_scale,
        "q": q_scale_inv,
        "k": k_scale_inv,
        "qk": times(q_scale_inv, k_scale_inv),
    }
    return [values[name] for name in variant.factors]


def capped(
    s: Tensor, factors: list[Tensor | float], call: RankCall
) -> tuple[Tensor, list[Tensor | float]]:
    """(scores, factor): under a softcap tanh and the cap (A-22), else as given."""
    if call.softcap is None:
        return s, factors
    for factor in factors:
        s = times(s, factor)
    return tanh(s, call.arithmetic), [float(call.cap)]


def raw_factor(tensors: dict[str, Heads], problem: Problem) -> Tensor | float:
    """The factor of raw scores in the exponent, to broadcast against them (A-5, A-22)."""
    if problem.call.softcap is None:
        return _own_factor(tensors, problem)
    return float(problem.call.cap)


def _own_factor(tensors: dict[str, Heads], problem: Problem) -> Tensor | float:
    """The factor of raw scores: in the exponent, or before a softcap."""
    granularity = problem.variant.granularity
    if granularity is None:
        return problem.score_scale
    factor = times(times(tensors["q"].scale_inv, tensors["k"].scale_inv), problem.score_scale)
    return factor[..., None] if granularity == "head" else factor


def query_scale(scale: Tensor, tile: Tile, problem: Problem) -> Tensor:
    """A scale of q or do, not MX, broadcastable to [B, Hkv, rows, G, 1]."""
    granularity, shape = problem.variant.granularity, problem.shape
    if granularity == "rows_128":
        blocks = scale.view(shape.batch, shape.key_heads, shape.group, -1)
        row_scales = blocks.repeat_interleave(ROWS, dim=3)
        return row_scales[..., tile.rows].permute(0, 1, 3, 2)[..., None]
    return scale[..., None] if granularity == "head" else scale


def key_scale(scale: Tensor, tile: Tile, variant: Variant) -> Tensor:
    """A scale of k or v, not MX, broadcastable to [B, Hkv, rows, G, 1]."""
    if variant.granularity == "rows_128":
        block = tile.begin // ROWS
        return scale[:, :, block : block + 1, :, None]
    return scale[..., None] if variant.granularity == "head" else scale


def grouped(x: Tensor, shape: Shape, tokens: int = 1) -> Tensor:
    """[B, H, T, D] as [B, Hkv, T, G, D], padded."""
    parts = pad(pad(x, 3, STEP), 2, tokens)
    parts = parts.view(shape.batch, shape.key_heads, shape.group, *parts.shape[2:])
    return parts.transpose(2, 3).contiguous()


def by_head(x: Tensor, shape: Shape) -> Tensor:
    """[B, Hkv, T, G, D] as [B, H, Tq, D], without padding."""
    x = x[:, :, : shape.queries, :, : shape.features].transpose(2, 3)
    return x.reshape(shape.batch, shape.heads, shape.queries, -1)


def along_features(x: Tensor) -> Tensor:
    """[..., T, D], padded: for GEMMs that sum over features."""
    return pad(pad(x, x.ndim - 1, STEP), x.ndim - 2, STEP)


def along_tokens(x: Tensor) -> Tensor:
    """[..., D, T] of [..., T, D], padded: for GEMMs that sum over tokens."""
    return along_features(x).transpose(-1, -2).contiguous()
