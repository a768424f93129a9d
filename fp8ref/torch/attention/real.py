"""Attention in float64, rounded once at the end, a tile of keys at a time: the variant ``exact``
(spec A-1, A-14).
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8ref.torch.attention import sinks as attention_sinks
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.inputs import Shape, Spec
from fp8ref.torch.attention.output import Documents


class Real(NamedTuple):
    """Before rounding, float64: o [B, Hkv, Tq, G, D], and lse [B, Hkv, Tq, G]; -infinity without
    keys.
    """

    o: Tensor
    lse: Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    shape: Shape,
    documents: Documents,
    sinks: Tensor | None = None,
) -> Real:
    """softmax(q k^T scale) v in float64."""
    q, k, v = (
        operands.grouped(q.double(), shape),
        operands.along_features(k.double()),
        operands.along_tokens(v.double()),
    )
    rows = (shape.batch, shape.key_heads, shape.queries, shape.group)
    m = torch.full(rows, -torch.inf, dtype=torch.float64, device=q.device)
    total, o = torch.zeros_like(m), q.new_zeros(*rows, v.shape[2])
    for tile in operands.tiles(spec, shape):
        s, old = _scores(q, k, tile, spec, shape, documents), m[:, :, tile.rows]
        new = torch.maximum(old, s.amax(-1))
        shift = torch.where(new == -torch.inf, 0.0, new)
        c, p = (old - shift).exp(), (s - shift[..., None]).exp()
        tile_output = operands.products(p.flatten(2, 3), v[:, :, :, tile.keys], spec.variant).view(
            *p.shape[:-1], -1
        )
        total[:, :, tile.rows] = total[:, :, tile.rows] * c + p.sum(-1)
        o[:, :, tile.rows] = o[:, :, tile.rows] * c[..., None] + tile_output
        m[:, :, tile.rows] = new
    if sinks is not None:
        a = attention_sinks.by_rows(sinks, shape).double()
        new = torch.maximum(m, a)
        c = (m - new).exp()
        o, total, m = o * c[..., None], total * c + (a - new).exp(), new
    empty = total == 0
    return Real(
        o / torch.where(empty, 1.0, total)[..., None],
        torch.where(empty, -torch.inf, m + total.log()),
    )


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    shape: Shape,
    documents: Documents,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk and dv, the largest |dS|, and the gradient of sinks or None: float32, each rounded
    once.
    """
    real = forward(q, k, v, spec, shape, documents, sinks)
    do = operands.grouped(do.double(), shape)
    q, k, v = (
        operands.grouped(q.double(), shape),
        operands.along_features(k.double()),
        operands.along_features(v.double()),
    )
    d = (do * real.o).sum(-1)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    largest = torch.zeros((), dtype=torch.float64, device=q.device)
    for tile in operands.tiles(spec, shape):
        lse = real.lse[:, :, tile.rows]
        s = _scores(q, k, tile, spec, shape, documents)
        p = (s - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
        do_tile = do[:, :, tile.rows]
        dp = operands.products(do_tile.flatten(2, 3), v[:, :, tile.keys], spec.variant).view(
            p.shape
        )
        ds = p * (dp - d[:, :, tile.rows, :, None]) * spec.softmax_scale(shape.features)
        if spec.softcap is not None:
            ds = ds * (
                1 - torch.where(s == -torch.inf, 0.0, s / float(np.float32(spec.softcap))) ** 2
            )
        largest = torch.maximum(largest, ds.abs().amax())
        flat = ds.flatten(2, 3)
        dq[:, :, tile.rows] += torch.matmul(flat, k[:, :, tile.keys]).view(do_tile.shape)
        dk[:, :, tile.keys] += torch.matmul(flat.transpose(2, 3), q[:, :, tile.rows].flatten(2, 3))
        dv[:, :, tile.keys] += torch.matmul(p.flatten(2, 3).transpose(2, 3), do_tile.flatten(2, 3))
    keys = (slice(None), slice(None), slice(shape.keys), slice(shape.features))
    dsinks = None
    if sinks is not None:
        dsinks = (
            -((attention_sinks.by_rows(sinks, shape).double() - real.lse).exp() * d)
            .sum((0, 2))
            .flatten()
            .float()
        )
    return (
        operands.by_head(dq, shape).float(),
        dk[keys].float(),
        dv[keys].float(),
        largest.float(),
        dsinks,
    )


def _scores(
    q: Tensor, k: Tensor, tile: operands.Tile, spec: Spec, shape: Shape, documents: Documents
) -> Tensor:
    """Scores [B, Hkv, rows, G, keys]; -infinity of keys that are not seen."""
    a = q[:, :, tile.rows]
    s = operands.products(a.flatten(2, 3), k[:, :, tile.keys], spec.variant).view(
        *a.shape[:-1], tile.width
    )
    s = s * spec.softmax_scale(shape.features)
    if spec.softcap is not None:
        s = (s / float(np.float32(spec.softcap))).tanh() * float(np.float32(spec.softcap))
    visible = operands.seen(tile, spec, shape, documents, q.device)
    return s if visible is None else torch.where(visible, s, -torch.inf)
