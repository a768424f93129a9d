"""The operands of attention: quantized, laid out for GEMMs, a tile at a time (spec A-2, A-4, A-6).

The query heads of a head of keys are stacked as rows, [B, Hkv, Tq, G, D], so that one GEMM takes
all of them and neither k nor v is repeated, and so that the rows that see a tile are one piece of
memory.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.spec.attention.variants import Variant
from fp8ref.torch.attention.exponentials import tanh, times
from fp8ref.torch.attention.operands import hadamard
from fp8ref.torch.attention.operands import heads as head_scaling
from fp8ref.torch.attention.operands.heads import ROWS, Heads, pad
from fp8ref.torch.attention.operands.inputs import Report, Shape, Spec
from fp8ref.torch.gemm import gemm
from fp8ref.torch.quantize import scaling
from fp8ref.torch.quantize.scaling import Quantized

STEP = 16
"""What features, and the keys of a tile, are padded to a multiple of, which kernels need."""

_FORMATS = {torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}


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


def tiles(spec: Spec, shape: Shape, step: int = 1) -> list[Tile]:
    """The tiles in their order (A-6), those that no row sees left out; rows from and to multiples
    of ``step``.
    """
    length, tq, tk = spec.variant.tile(shape.features, spec.mask), shape.queries, shape.keys
    offset = spec.offset(shape)
    left, right = spec.mask.window or (None, None)
    if spec.mask.causal:
        right = 0 if right is None else min(right, 0)
    seen_tiles = []
    for begin in range(0, tk, length):
        end = min(begin + length, tk)
        # Row i sees keys from i + offset - left to i + offset + right.
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
    return seen_tiles[::-1] if spec.variant.descending else seen_tiles


def seen(
    tile: Tile,
    spec: Spec,
    shape: Shape,
    documents: tuple[Tensor | None, Tensor | None],
    device: torch.device,
) -> Tensor | None:
    """Which keys of a tile its rows see (A-3): bool, to broadcast against scores [B, Hkv, rows, G,
    keys]; None: all.
    """
    q_documents, k_documents = documents
    visible = None
    if not tile.inside:
        offset = spec.offset(shape)
        keys = torch.arange(tile.begin, tile.begin + tile.width, device=device)
        rows = torch.arange(tile.first, tile.last, device=device)[:, None]
        visible = (keys < tile.end) & (rows < shape.queries)
        left, right = spec.mask.window or (None, None)
        if spec.mask.causal:
            visible = visible & (keys <= rows + offset)
        if left is not None:
            visible = visible & (keys >= rows + (offset - left))
        if right is not None:
            visible = visible & (keys <= rows + (offset + right))
        visible = visible[None]
    if q_documents is not None and k_documents is not None:
        same = q_documents[:, tile.rows, None] == k_documents[:, None, tile.keys]
        visible = same if visible is None else visible & same
    return None if visible is None else visible[:, None, :, None, :]


def share(amaxes: list[Tensor], spec: Spec) -> list[Tensor]:
    """Amaxes of whole tensors, the largest of all ranks, in one collective; as they are without a
    group.
    """
    if spec.amax_group is None:
        return amaxes
    return list(scaling.merge_amax(torch.stack(amaxes), spec.amax_group).unbind())


def rotated(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as they are quantized: q and k after the variant's rotation, if it has one
    (A-13).
    """
    if not spec.variant.rotated:
        return q, k, v
    signs = hadamard.signs(q.shape[-1], spec.seed, q.device)
    return hadamard.rotate(q, signs), hadamard.rotate(k, signs), v


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    role_scales: dict[str, Tensor],
    *,
    report: Report = "all",
) -> dict[str, Heads]:
    """q, k and v as the variant quantizes them, by role (A-2, A-13)."""
    variant, heads = spec.variant, k.shape[1]
    q, k, v = rotated(q, k, v, spec)
    tensors = {"q": q, "k": k, "v": v}
    amaxes = {role: torch.zeros((), device=q.device, dtype=torch.float32) for role in tensors}
    needed = [
        role
        for role in tensors
        if report != "nothing" or (variant.granularity is not None and role not in role_scales)
    ]
    group_amaxes = [
        head_scaling.amax(tensors[role], variant.granularity, heads=heads, along_tokens=role == "v")
        for role in needed
    ]
    if variant.granularity in ("tensor", None) and group_amaxes:
        group_amaxes = share(group_amaxes, spec)
    amaxes |= dict(zip(needed, group_amaxes, strict=True))
    return {
        role: head_scaling.quantize(
            x,
            variant.fmt,
            variant.granularity,
            variant.policy,
            amax_of_groups=amaxes[role],
            along_tokens=role == "v",
            scale=role_scales.get(role),
        )
        for role, x in tensors.items()
    }


def probability_scale(
    variant: Variant, role_scales: dict[str, Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """(scale, scale_inv) of the probabilities (A-8)."""
    if "s" in role_scales:
        return role_scales["s"], head_scaling.inverse(role_scales["s"])
    if variant.p_scale == "state":
        return head_scaling.scales_of(
            torch.ones((), device=device, dtype=torch.float32), variant.fmt, variant.policy
        )
    scale = torch.full((), variant.p_scale, device=device, dtype=torch.float32)
    return scale, head_scaling.inverse(scale)


def score_scale(spec: Spec, shape: Shape) -> float:
    """The softmax scale under the variant's base, a float32 number (A-4); under a softcap, the
    scale over it (A-22).
    """
    scale = spec.softmax_scale(shape.features)
    if spec.softcap is not None:
        return float(np.float32(scale) / np.float32(spec.softcap))
    return spec.under_base(scale)


def score_factors(
    tensors: dict[str, Heads], tile: Tile, spec: Spec, shape: Shape
) -> list[Tensor | float]:
    """The factors of scaled scores, in order; or the one factor of raw scores (A-4, A-5)."""
    variant, scale = spec.variant, score_scale(spec, shape)
    if variant.scores == "raw":
        return [own_factor(tensors, spec, shape)]
    if variant.granularity == "mx_1x32":
        return [scale]
    q_scale_inv, k_scale_inv = (
        query_scale(tensors["q"].scale_inv, tile, variant, shape),
        key_scale(tensors["k"].scale_inv, tile, variant),
    )
    values: dict[str, Tensor | float] = {
        "scale": scale,
        "q": q_scale_inv,
        "k": k_scale_inv,
        "qk": times(q_scale_inv, k_scale_inv),
    }
    return [values[name] for name in variant.factors]


def capped(
    s: Tensor, factors: list[Tensor | float], spec: Spec
) -> tuple[Tensor, list[Tensor | float]]:
    """(scores, what is still multiplied into them): under a softcap hyperbolic tangents and the cap
    (A-22), else as given.
    """
    if spec.softcap is None:
        return s, factors
    for factor in factors:
        s = times(s, factor)
    return tanh(s, spec.arithmetic), [spec.cap]


def slope(t: Tensor, spec: Spec) -> Tensor | None:
    """What a softcap multiplies dS by, of the scores of ``capped``; None without one."""
    return None if spec.softcap is None else 1.0 - times(t, t)


def raw_factor(tensors: dict[str, Heads], spec: Spec, shape: Shape) -> Tensor | float:
    """The factor of raw scores in the exponent, to broadcast against them (A-5, A-22)."""
    return own_factor(tensors, spec, shape) if spec.softcap is None else spec.cap


def own_factor(tensors: dict[str, Heads], spec: Spec, shape: Shape) -> Tensor | float:
    """The factor of raw scores: in the exponent, or under a softcap before it."""
    scale = score_scale(spec, shape)
    if spec.variant.granularity is None:
        return scale
    factor = times(times(tensors["q"].scale_inv, tensors["k"].scale_inv), scale)
    return factor[..., None] if spec.variant.granularity == "head" else factor


def query_scale(scale: Tensor, tile: Tile, variant: Variant, shape: Shape) -> Tensor:
    """A scale of q or do, but of MX blocks, to broadcast against a tile's rows [B, Hkv, rows, G,
    1].
    """
    if variant.granularity == "head":
        return scale[..., None]
    if variant.granularity == "rows_128":
        row_scales = scale.view(shape.batch, shape.key_heads, shape.group, -1).repeat_interleave(
            ROWS, dim=3
        )
        return row_scales[..., tile.rows].permute(0, 1, 3, 2)[..., None]
    return scale


def key_scale(scale: Tensor, tile: Tile, variant: Variant) -> Tensor:
    """A scale of k or v, but of MX blocks, to broadcast against a tile's rows [B, Hkv, rows, G,
    1].
    """
    if variant.granularity == "rows_128":
        block = tile.begin // ROWS
        return scale[:, :, block : block + 1, :, None]
    return scale[..., None] if variant.granularity == "head" else scale


def grouped(x: Tensor, shape: Shape, tokens: int = 1) -> Tensor:
    """[B, H, T, D] as [B, Hkv, T, G, D], padded."""
    parts = pad(pad(x, 3, STEP), 2, tokens)
    return (
        parts.view(shape.batch, shape.key_heads, shape.group, *parts.shape[2:])
        .transpose(2, 3)
        .contiguous()
    )


def by_head(x: Tensor, shape: Shape) -> Tensor:
    """[B, Hkv, T, G, D] as [B, H, Tq, D], without padding."""
    return (
        x[:, :, : shape.queries, :, : shape.features]
        .transpose(2, 3)
        .reshape(shape.batch, shape.heads, shape.queries, -1)
    )


def along_features(x: Tensor) -> Tensor:
    """[..., T, D], padded: for GEMMs that sum over features."""
    return pad(pad(x, x.ndim - 1, STEP), x.ndim - 2, STEP)


def along_tokens(x: Tensor) -> Tensor:
    """[..., D, T] of [..., T, D], padded: for GEMMs that sum over tokens."""
    return along_features(x).transpose(-1, -2).contiguous()


def products(a: Tensor, b: Tensor, variant: Variant) -> Tensor:
    """Sums of products over the last axis: a [..., M, K] and b [..., N, K], of leading dims [...];
    float32 [..., M, N].

    Order:    that of the library. FP8 codes: a GEMM for each of [...], as torch._scaled_mm takes
              matrices. Numbers of higher precision: one batched GEMM, in float32, or float64.
    """
    if a.dtype in _FORMATS:
        unit = torch.ones((), device=a.device, dtype=torch.float32)
        accumulate = "fast" if variant.plan == "hopper_fast" else "slow"
        pairs = zip(a.flatten(0, -3).unbind(), b.flatten(0, -3).unbind(), strict=True)
        out = [
            gemm.matmul(_quantized(x, unit), _quantized(y, unit), accumulate=accumulate)
            for x, y in pairs
        ]
        return (
            torch.stack(out).view(*a.shape[:-1], b.shape[-2])
            if len(out) > 1
            else out[0].view(*a.shape[:-1], b.shape[-2])
        )
    if a.dtype == torch.bfloat16 and a.is_cuda:
        sums = torch.bmm(
            a.flatten(0, -3), b.flatten(0, -3).transpose(1, 2), out_dtype=torch.float32
        )
        return sums.view(*a.shape[:-1], b.shape[-2])
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return torch.matmul(a.to(wide), b.to(wide).transpose(-1, -2))


def _quantized(codes: Tensor, unit: Tensor) -> Quantized:
    return Quantized(codes, unit, unit, _FORMATS[codes.dtype], "tensorwise", 1)
