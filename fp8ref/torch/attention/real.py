"""Attention in float64, rounded once, a tile of keys at a time: variant ``exact`` (A-1, A-14)."""

import numpy as np
import torch
from torch import Tensor

from fp8ref.torch.attention import sinks as attention_sinks
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.problem import Problem, Report
from fp8ref.torch.attention.output import Result


def result(q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, report: Report) -> Result:
    """What a forward pass of the variant ``exact`` gives."""
    (o, lse), shape = forward(q, k, v, problem), problem.shape
    o = operands.by_head(o, shape).float()
    lse = operands.by_head(lse[..., None], shape)[..., 0].float()
    unit = torch.ones((), device=q.device, dtype=torch.float32)
    amaxes: dict[str, Tensor] = {}
    if report != "nothing":
        largest = [x.detach().abs().amax().float() for x in (q, k, v, o)]
        shared = operands.share(largest, problem.call)
        amaxes = dict(zip(("q", "k", "v", "o"), shared, strict=True)) | {"s": unit}
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    return Result(o, lse, {}, amaxes, none, None, unit, unit)


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """(o [B, Hkv, Tq, G, D], log-sum-exp [B, Hkv, Tq, G], -infinity without keys) in float64."""
    shape, sinks = problem.shape, problem.sinks
    q = operands.grouped(q.double(), shape)
    k, v = operands.along_features(k.double()), operands.along_tokens(v.double())
    m = torch.full(shape.rows, -torch.inf, dtype=torch.float64, device=q.device)
    total, o = torch.zeros_like(m), q.new_zeros(*shape.rows, v.shape[2])
    for tile in operands.tiles(problem):
        s, old = _scores(q, k, tile, problem), m[:, :, tile.rows]
        new = torch.maximum(old, s.amax(-1))
        shift = torch.where(new == -torch.inf, 0.0, new)
        c, p = (old - shift).exp(), (s - shift[..., None]).exp()
        tile_output = _products(p, v[:, :, :, tile.keys])
        total[:, :, tile.rows] = total[:, :, tile.rows] * c + p.sum(-1)
        o[:, :, tile.rows] = o[:, :, tile.rows] * c[..., None] + tile_output
        m[:, :, tile.rows] = new
    if sinks is not None:
        a = attention_sinks.by_rows(sinks, shape).double()
        new = torch.maximum(m, a)
        c = (m - new).exp()
        o, total, m = o * c[..., None], total * c + (a - new).exp(), new
    empty = total == 0
    lse = torch.where(empty, -torch.inf, m + total.log())
    return o / torch.where(empty, 1.0, total)[..., None], lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, the largest |dS|, gradient of sinks or None: float32, rounded once."""
    shape, sinks = problem.shape, problem.sinks
    o, log_sums = forward(q, k, v, problem)
    do, q = (operands.grouped(x.double(), shape) for x in (do, q))
    k, v = (operands.along_features(x.double()) for x in (k, v))
    d = (do * o).sum(-1)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    largest = torch.zeros((), dtype=torch.float64, device=q.device)
    for tile in operands.tiles(problem):
        lse = log_sums[:, :, tile.rows]
        s = _scores(q, k, tile, problem)
        p = (s - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
        do_tile = do[:, :, tile.rows]
        dp = _products(do_tile, v[:, :, tile.keys])
        ds = p * (dp - d[:, :, tile.rows, :, None]) * problem.softmax_scale
        if problem.call.softcap is not None:
            cap = float(np.float32(problem.call.softcap))
            ds = ds * (1 - torch.where(s == -torch.inf, 0.0, s / cap) ** 2)
        largest = torch.maximum(largest, ds.abs().amax())
        flat = ds.flatten(2, 3)
        dq[:, :, tile.rows] += torch.matmul(flat, k[:, :, tile.keys]).view(do_tile.shape)
        dk[:, :, tile.keys] += torch.matmul(flat.transpose(2, 3), q[:, :, tile.rows].flatten(2, 3))
        dv[:, :, tile.keys] += torch.matmul(p.flatten(2, 3).transpose(2, 3), do_tile.flatten(2, 3))
    keys = (slice(None), slice(None), slice(shape.keys), slice(shape.features))
    dsinks = None
    if sinks is not None:
        p = (attention_sinks.by_rows(sinks, shape).double() - log_sums).exp()
        dsinks = -(p * d).sum((0, 2)).flatten().float()
    dq = operands.by_head(dq, shape)
    return dq.float(), dk[keys].float(), dv[keys].float(), largest.float(), dsinks


def _scores(q: Tensor, k: Tensor, tile: operands.Tile, problem: Problem) -> Tensor:
    """Scores [B, Hkv, rows, G, keys]; -infinity for masked keys."""
    s = _products(q[:, :, tile.rows], k[:, :, tile.keys]) * problem.softmax_scale
    if problem.call.softcap is not None:
        cap = float(np.float32(problem.call.softcap))
        s = (s / cap).tanh() * cap
    visible = operands.seen(tile, problem, q.device)
    return s if visible is None else torch.where(visible, s, -torch.inf)


def _products(x: Tensor, other: Tensor) -> Tensor:
    """x [B, Hkv, rows, G, K] and other [B, Hkv, N, K] -> [B, Hkv, rows, G, N], float64."""
    sums = torch.matmul(x.flatten(2, 3), other.transpose(2, 3))
    return sums.view(*x.shape[:-1], other.shape[2])
