"""The backward pass of attention in the stated arithmetic (spec A-15), one tile of keys at a time.

    for each tile:
        p              <- q8 @ k8.T, lse                 [Tq x G, D] @ [D, keys]
        dp = do8 @ v8.T                                  [Tq x G, D] @ [D, keys]
        ds = (dp - d) p scale
        dv += p8.T @ do8                                 [keys, Tq] @ [Tq, D], a GEMM for each query
                                                         head
        dq += ds8 @ k8                                   [Tq x G, keys] @ [keys, D]
        dk += ds8.T @ q8                                 [keys, Tq] @ [Tq, D], a GEMM for each query
                                                         head

The scale of ds needs the amax of all of ds. Unless it is given, tiles are passed twice: for the
amax and dv, then for dq and dk. Nothing quadratic is kept. ``mx`` has the operands of MX blocks.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from fp8ref.torch.attention import output as forward
from fp8ref.torch.attention import products
from fp8ref.torch.attention.exponentials import times
from fp8ref.torch.attention.gradients import parts
from fp8ref.torch.attention.gradients.parts import Saved, Sums
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.kept import Kept, Matrix, Tally
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.attention.operands.problem import STEP, Problem, Report
from fp8ref.torch.quantize.scales import Scales


class Factors(NamedTuple):
    """The operands of a pass, padded, for GEMMs: q and do [B, Hkv, Tq, G, D], k and v [B, Hkv, Tk,
    D]; for sums over tokens [B, Hkv, G, D, Tq] and [B, Hkv, D, Tk]; D of the rows [B, Hkv, Tq, G]
    (A-15).
    """

    q: Tensor
    do: Tensor
    k: Tensor
    v: Tensor
    q_tokens: Tensor
    do_tokens: Tensor
    k_tokens: Tensor
    d: Tensor


def run(
    do8: Heads, saved: Saved, problem: Problem, *, report: Report, keep: Collection[Matrix]
) -> Sums:
    """The pass, of what a forward pass saved and do as it is quantized.

    Order:    A-15; sums over keys are added tile by tile, in float32.
    """
    variant = problem.variant
    backward = Pass(_factors(do8, saved, problem), do8, saved, problem, report=report, keep=keep)
    tiles = operands.tiles(problem, STEP)
    unit = torch.ones((), device=do8.codes.device, dtype=torch.float32)
    scales, twice = Scales(unit, unit), problem.low and "ds" not in problem.scales
    scale_p = saved.scale_p.scale

    def add_dv(p: Tensor, tile: Tile) -> None:
        p8 = heads.codes(p, variant.fmt, None if variant.p_scale == 1 else scale_p)
        backward.kept.put("p_codes", tile.place, p8)
        backward.tally_p.count(p, scale_p)
        backward.add_dv(p8, tile)

    if twice:
        for tile in tiles:
            p, ds = backward.score_gradients(tile)
            add_dv(p, tile)
            backward.tally_ds.enlarge(ds.abs().amax())
        scales = parts.scale_of_ds(backward.tally_ds, problem)
    elif problem.low:
        scales = heads.given(problem.scales["ds"])
    for tile in tiles:
        p, ds = backward.score_gradients(tile)
        if not twice:
            add_dv(p, tile)
            if report != "nothing":
                backward.tally_ds.enlarge(ds.abs().amax())
        ds8 = heads.codes(ds, problem.gradient_fmt, scales.scale)
        backward.tally_ds.count(ds, scales.scale)
        backward.kept.put("ds", tile.place, ds)
        backward.kept.put("ds_codes", tile.place, ds8)
        backward.add_dq_and_dk(ds8, ds8, scales, tile)
    return backward.sums(scales)


def _factors(do8: Heads, saved: Saved, problem: Problem) -> Factors:
    q, k, v = (saved.tensors[role].codes for role in ("q", "k", "v"))
    q, do, o = (operands.grouped(x, problem.shape, STEP) for x in (q, do8.codes, saved.o))
    d = parts.sums_of_rows(do, o, problem.shape.features)
    if problem.variant.granularity is not None:
        d = times(d, do8.scale_inv)
        d = d if saved.o_scale_inv is None else times(d, saved.o_scale_inv)
    return Factors(
        q=q,
        do=do,
        k=operands.along_features(k),
        v=operands.along_features(v),
        q_tokens=parts.tokens_of(q),
        do_tokens=parts.tokens_of(do),
        k_tokens=operands.along_tokens(k),
        d=d,
    )


class Pass:
    """The padded sums dq [B, Hkv, Tq, G, D], dk and dv [B, Hkv, Tk, D], of codes or of dequantized
    MX blocks, whose scales are in the operands."""

    def __init__(
        self,
        factors: Factors,
        do8: Heads,
        saved: Saved,
        problem: Problem,
        *,
        report: Report,
        keep: Collection[Matrix],
    ) -> None:
        self.factors, self.do_inverse, self.saved = factors, do8.scale_inv, saved
        self.problem, self.variant = problem, problem.variant
        q, k, device = factors.q, factors.k, do8.codes.device
        self.lse = parts.rows_of(saved.lse, problem.shape, q.shape[2])
        self.dq = torch.zeros(q.shape, device=device, dtype=torch.float32)
        self.dk = torch.zeros(k.shape, device=device, dtype=torch.float32)
        self.dv = torch.zeros(k.shape, device=device, dtype=torch.float32)
        self.tally_p = Tally(self.variant.fmt, report, device)
        self.tally_ds = Tally(problem.gradient_fmt, report, device)
        self.kept = Kept(keep, (*q.shape[:-1], k.shape[2]), device)

    def _scaled(self, x: Tensor, *scales: Tensor) -> Tensor:
        """x [B, Hkv, ...] of five dims times each scale_inv, in order; unchanged without codes."""
        if self.variant.granularity in (None, "mx_1x32"):
            return x
        for scale in scales:
            x = times(x, scale[..., None] if scale.ndim else scale)
        return x

    def score_gradients(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """(a tile's P from the log-sum-exp, dS uncast): float32 [B, Hkv, rows, G, keys]."""
        factors, rows, problem = self.factors, tile.rows, self.problem
        s = forward.scores(factors.q, factors.k, tile, self.variant)
        p, slope = parts.again(s, self.lse[:, :, rows], tile, self.saved.tensors, problem)
        do, v = factors.do[:, :, rows], factors.v[:, :, tile.keys]
        dp = products.rows("grad_probabilities", do, v, self.variant)
        dp = self._scaled(dp, self.do_inverse, self.saved.tensors["v"].scale_inv)
        return p, parts.score_gradients(dp - factors.d[:, :, rows, :, None], p, slope, problem)

    def add_dv(self, p: Tensor, tile: Tile) -> None:
        """Add a tile to dv."""
        dv = products.heads("grad_v", p, self.factors.do_tokens, tile, self.variant)
        dv = self._scaled(dv, self.saved.scale_p.scale_inv, self.do_inverse)
        parts.add_heads(self.dv, dv, tile)

    def add_dq_and_dk(
        self, ds_keys: Tensor, ds_queries: Tensor, scales: Scales, tile: Tile
    ) -> None:
        """Add a tile to dq and dk, of dS as each sums it."""
        k_tokens = self.factors.k_tokens[:, :, :, tile.keys]
        if self.variant.granularity != "mx_1x32":
            k_tokens = k_tokens.contiguous()
        dq = products.rows("grad_q", ds_keys, k_tokens, self.variant)
        self.dq[:, :, tile.rows] = self.dq[:, :, tile.rows] + dq
        dk = products.heads("grad_k", ds_queries, self.factors.q_tokens, tile, self.variant)
        dk = self._scaled(dk, scales.scale_inv, self.saved.tensors["q"].scale_inv)
        parts.add_heads(self.dk, dk, tile)

    def sums(self, scales: Scales) -> Sums:
        """The sums over all tiles, of dS by these scales."""
        shape, k_scale_inv = self.problem.shape, self.saved.tensors["k"].scale_inv
        dq = self._scaled(self.dq, scales.scale_inv, k_scale_inv)
        raw = parts.without_padding(dq, self.dk, self.dv, shape)
        d = parts.by_rows(self.factors.d, shape)
        return Sums(raw, d, self.tally_p, self.tally_ds, scales, self.kept)
