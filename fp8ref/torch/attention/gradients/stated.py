"""The backward pass of attention in the stated arithmetic (spec A-15), a tile of keys after
another.

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


def run(
    do8: Heads, saved: Saved, problem: Problem, *, report: Report, keep: Collection[Matrix]
) -> Sums:
    """The pass, of what a forward pass saved and do as it is quantized.

    Order:    A-15; sums over keys are added tile by tile, in float32.
    """
    backward = _Pass(do8, saved, problem, report, keep)
    tiles = operands.tiles(problem, STEP)
    unit = torch.ones((), device=do8.codes.device, dtype=torch.float32)
    scales, twice = Scales(unit, unit), problem.low and "ds" not in problem.scales
    if twice:
        for tile in tiles:
            p, slope = backward.probabilities(tile)
            backward.add_dv(p, tile)
            backward.tally_ds.enlarge(backward.ds(p, slope, tile).abs().amax())
        scales = parts.scale_of_ds(backward.tally_ds, problem)
    elif problem.low:
        scales = heads.given(problem.scales["ds"])
    for tile in tiles:
        p, slope = backward.probabilities(tile)
        ds = backward.ds(p, slope, tile)
        if not twice:
            backward.add_dv(p, tile)
            if report != "nothing":
                backward.tally_ds.enlarge(ds.abs().amax())
        backward.add_dq_and_dk(ds, scales, tile)
    return backward.sums(scales)


class _Pass:
    """The padded sums dq [B, Hkv, Tq, G, D], dk and dv [B, Hkv, Tk, D], and operands for GEMMs."""

    def __init__(
        self, do8: Heads, saved: Saved, problem: Problem, report: Report, keep: Collection[Matrix]
    ) -> None:
        self.do8, self.saved, self.problem, self.variant = do8, saved, problem, problem.variant
        shape, device, codes = problem.shape, do8.codes.device, saved.tensors
        self.q = operands.grouped(codes["q"].codes, shape, STEP)
        self.do = operands.grouped(do8.codes, shape, STEP)
        self.k, self.v = (operands.along_features(codes[role].codes) for role in ("k", "v"))
        self.do_tokens, self.q_tokens = parts.tokens_of(self.do), parts.tokens_of(self.q)
        self.k_tokens = operands.along_tokens(codes["k"].codes)
        self.d = self._row_sums()
        self.lse = parts.rows_of(saved.lse, shape, STEP)
        self.dq = torch.zeros(*self.q.shape, device=device, dtype=torch.float32)
        self.dk = torch.zeros(*self.k.shape, device=device, dtype=torch.float32)
        self.dv = torch.zeros_like(self.dk)
        self.tally_p = Tally(self.variant.fmt, report, device)
        self.tally_ds = Tally(problem.gradient_fmt, report, device)
        self.kept = Kept(keep, (*self.q.shape[:-1], self.k.shape[2]), device)

    def _row_sums(self) -> Tensor:
        """D of each row [B, Hkv, Tq, G] (A-15)."""
        o = operands.grouped(self.saved.o, self.problem.shape, STEP)
        d = parts.sums_of_rows(self.do, o, self.problem.shape.features)
        if self.variant.granularity is None:
            return d
        d = times(d, self.do8.scale_inv)
        return d if self.saved.o_scale_inv is None else times(d, self.saved.o_scale_inv)

    def _scaled(self, x: Tensor, *scales: Tensor) -> Tensor:
        """x [B, Hkv, ...] of five dims times each scale_inv, in order; unchanged if hp."""
        if self.variant.granularity is None:
            return x
        for scale in scales:
            x = times(x, scale[..., None] if scale.ndim else scale)
        return x

    def probabilities(self, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """(P of a tile again, from the log-sum-exp; the slope of a softcap): float32 [B, Hkv, rows,
        G, keys].
        """
        s = forward.scores(self.q, self.k, tile, self.variant)
        return parts.again(s, self.lse[:, :, tile.rows], tile, self.saved.tensors, self.problem)

    def ds(self, p: Tensor, slope: Tensor | None, tile: Tile) -> Tensor:
        """dS of a tile, before its scale."""
        dp = products.rows(
            "grad_probabilities", self.do[:, :, tile.rows], self.v[:, :, tile.keys], self.variant
        )
        dp = self._scaled(dp, self.do8.scale_inv, self.saved.tensors["v"].scale_inv)
        return parts.score_gradients(dp - self.d[:, :, tile.rows, :, None], p, slope, self.problem)

    def add_dv(self, p: Tensor, tile: Tile) -> None:
        """Add a tile to dv."""
        scale, scale_inv = self.saved.scale_p
        p8 = heads.codes(p, self.variant.fmt, None if self.variant.p_scale == 1 else scale)
        self.kept.put("p_codes", tile.place, p8)
        self.tally_p.count(p, scale)
        dv = products.heads("grad_v", p8, self.do_tokens, tile, self.variant)
        parts.add_heads(self.dv, self._scaled(dv, scale_inv, self.do8.scale_inv), tile)

    def add_dq_and_dk(self, ds: Tensor, scales: Scales, tile: Tile) -> None:
        """Add a tile to dq and dk."""
        ds8 = heads.codes(ds, self.problem.gradient_fmt, scales.scale)
        self.tally_ds.count(ds, scales.scale)
        self.kept.put("ds", tile.place, ds)
        self.kept.put("ds_codes", tile.place, ds8)
        k_tokens = self.k_tokens[:, :, :, tile.keys].contiguous()
        dq = products.rows("grad_q", ds8, k_tokens, self.variant)
        self.dq[:, :, tile.rows] = self.dq[:, :, tile.rows] + dq
        dk = products.heads("grad_k", ds8, self.q_tokens, tile, self.variant)
        dk = self._scaled(dk, scales.scale_inv, self.saved.tensors["q"].scale_inv)
        parts.add_heads(self.dk, dk, tile)

    def sums(self, scales: Scales) -> Sums:
        """The sums over all tiles, of dS by these scales."""
        shape, k_scale_inv = self.problem.shape, self.saved.tensors["k"].scale_inv
        dq = self._scaled(self.dq, scales.scale_inv, k_scale_inv)
        raw = parts.without_padding(dq, self.dk, self.dv, shape)
        d = parts.by_rows(self.d, shape)
        return Sums(raw, d, self.tally_p, self.tally_ds, scales, self.kept)
