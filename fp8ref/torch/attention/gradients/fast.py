"""The backward pass of attention in the fast form: torch's own sums and functions (spec A-18).

    for each tile of keys:
        p              <- exp(q @ k.T scale - lse)       [Tq x G, D] @ [D, keys]
        ds = (do @ v.T - d) p scale                      [Tq x G, D] @ [D, keys]
        dv += p8.T @ do                                  [keys, Tq x G] @ [Tq x G, D]
        dk += ds8.T @ q                                  [keys, Tq x G] @ [Tq x G, D]
        dq += ds8 @ k                                    [Tq x G, keys] @ [keys, D]

The products sum the query heads of a head of keys. Codes, scales and casts are ``gradients``'s.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from fp8ref.spec.attention.products import Product
from fp8ref.torch.attention.fast.operands import Layout
from fp8ref.torch.attention.fast.output import exponential_
from fp8ref.torch.attention.gradients import parts
from fp8ref.torch.attention.gradients.parts import Raw, Saved, Sums
from fp8ref.torch.attention.observer import multiplying
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.kept import Kept, Matrix, Tally
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.attention.operands.problem import STEP, Problem, Report
from fp8ref.torch.gemm import batched as batched_gemm
from fp8ref.torch.quantize.scales import Scales


def run(
    do8: Heads, saved: Saved, problem: Problem, *, report: Report, keep: Collection[Matrix]
) -> Sums:
    """The pass, of what a forward pass saved and do as it is quantized.

    Order:    A-18.
    """
    backward = Pass(do8, saved, problem, report, keep)
    unit = torch.ones((), device=do8.codes.device, dtype=torch.float32)
    scales = Scales(unit, unit)
    if "ds" in problem.scales:
        scales = heads.given(problem.scales["ds"])
    elif problem.low:
        backward.walk(None)
        scales = parts.scale_of_ds(backward.tally_ds, problem)
    backward.walk(scales)
    raw, d = backward.raw(scales), backward.layout.by_head(backward.d[..., None])[..., 0]
    return Sums(raw, d, backward.tally_p, backward.tally_ds, scales, backward.kept)


class Pass:
    """The sums dq, dk and dv over tiles, in GEMM layouts, before tensor and head scales."""

    def __init__(
        self, do8: Heads, saved: Saved, problem: Problem, report: Report, keep: Collection[Matrix]
    ) -> None:
        self.do8, self.saved, self.problem, self.variant = do8, saved, problem, problem.variant
        self.layout = layout = Layout(saved.tensors, problem, STEP)
        self.do = layout.query_rows(do8)
        self.d = self._row_sums()
        self.lse = layout.rows(parts.rows_of(saved.lse, problem.shape, STEP))
        if self.variant.base == "2":
            self.lse = self.lse * math.log2(math.e)
        self.tiles = operands.tiles(problem, STEP)
        # GEMMs of codes take them along the axis of the sum.
        self.do_tokens, self.q_tokens, self.k_tokens = (
            x.transpose(1, 2).contiguous() if layout.codes else x.transpose(1, 2)
            for x in (self.do, layout.q, layout.k)
        )
        device = layout.q.device
        self.dq, self.dk, self.dv = (
            torch.zeros(x.shape, device=device, dtype=torch.float32)
            for x in (layout.q, layout.k, layout.v)
        )
        self.tally_p = Tally(self.variant.fmt, report, device)
        self.tally_ds = Tally(problem.gradient_fmt, report, device)
        self._has_dv = False
        self.kept = Kept(keep, (*layout.q.shape[:-1], layout.k.shape[1]), device)

    def _row_sums(self) -> Tensor:
        """D of each row (A-15), dequantized."""
        layout, saved = self.layout, self.saved
        o = layout.rows(operands.grouped(saved.o, self.problem.shape, STEP)).float()
        d = (self.do.float() * o).sum(-1)
        if layout.codes and self.variant.granularity is not None:
            d = d * self._row_scale(self.do8.scale_inv)
        return d if saved.o_scale_inv is None else d * saved.o_scale_inv

    def _row_scale(self, scale: Tensor) -> Tensor:
        """A scale of a tensor or of heads, broadcastable to [B x Hkv, rows]."""
        scale = self.layout.head_scale(scale)
        return scale[:, None] if scale.ndim else scale

    def walk(self, scales: Scales | None) -> None:
        """Pass all tiles: without scales of dS for its amax and dv, with them for the rest."""
        layout, softmax_scale = self.layout, self.problem.softmax_scale
        measures = scales is None or (self.tally_ds.report != "nothing" and not self._has_dv)
        for tile in self.tiles:
            at, hidden = layout.at(tile), layout.hidden(tile)
            for part in layout.parts(tile):
                s, slope = layout.scores_and_slope(part, tile, hidden)
                p = exponential_(s.sub_(self.lse[part, at, None]), self.variant)
                ds = self._grad_probabilities(part, tile).sub_(self.d[part, at, None])
                ds = ds.mul_(p).mul_(softmax_scale)
                ds = ds if slope is None else ds.mul_(slope)
                if measures:
                    low, high = torch.aminmax(ds)
                    self.tally_ds.enlarge(torch.maximum(-low, high))
                if not self._has_dv:
                    self._add_dv(p, part, tile)
                if scales is not None:
                    self._add_others(ds, scales.scale, part, tile)
        self._has_dv = True

    def _grad_probabilities(self, part: slice, tile: Tile) -> Tensor:
        layout, factor = self.layout, None
        if layout.codes and self.variant.granularity is not None:
            factor = layout.head_scale(self.do8.scale_inv * self.saved.tensors["v"].scale_inv)
            factor = factor[part] if factor.ndim else factor
        a, b = self.do[part, layout.at(tile)], layout.v[part, tile.keys]
        with multiplying("grad_probabilities"):
            return batched_gemm.products(
                a, b, fast=layout.fast, factor=factor, out=layout.scratch(1, part, tile)
            )

    def _add_dv(self, p: Tensor, part: slice, tile: Tile) -> None:
        fmt, scale = self.variant.fmt, self.saved.scale_p.scale
        self.tally_p.count(p, scale)
        if self.problem.low and self.variant.p_scale != 1:
            p = p.mul_(scale)
        if "p_codes" in self.kept:
            self.kept.put("p_codes", self.layout.place(part, tile), heads.codes(p, fmt))
        p8 = self.layout.narrow(p, fmt, part, tile)
        self.dv[part, tile.keys] += self._over_rows("grad_v", p8, self.do_tokens, part, tile)

    def _add_others(self, ds: Tensor, scale: Tensor, part: slice, tile: Tile) -> None:
        layout, fmt, place = self.layout, self.problem.gradient_fmt, self.layout.place(part, tile)
        self.kept.put("ds", place, ds)
        self.tally_ds.count(ds, scale)
        if self.problem.low:
            ds = ds.mul_(scale)
        if "ds_codes" in self.kept:
            self.kept.put("ds_codes", place, heads.codes(ds, fmt))
        ds8 = layout.narrow(ds, fmt, part, tile)
        k_tokens = self.k_tokens[part, :, tile.keys]
        with multiplying("grad_q"):
            dq = batched_gemm.products(ds8, k_tokens, fast=layout.fast)
        self.dq[part, layout.at(tile)] += dq
        self.dk[part, tile.keys] += self._over_rows("grad_k", ds8, self.q_tokens, part, tile)

    def _over_rows(
        self, product: Product, x: Tensor, other: Tensor, part: slice, tile: Tile
    ) -> Tensor:
        """Sums over a tile's rows: x [n, rows, keys], other [B x Hkv, D, rows] -> [n, keys, D]."""
        with multiplying(product):
            return batched_gemm.products(
                x.transpose(1, 2), other[part, :, self.layout.at(tile)], fast=self.layout.fast
            )

    def raw(self, scales: Scales) -> Raw:
        """The gradients, times the scales that their operands do not have."""
        layout, tensors, variant = self.layout, self.saved.tensors, self.variant
        dq_factor = dk_factor = scales.scale_inv
        dv_factor = self.saved.scale_p.scale_inv
        if not layout.codes:  # q has the scale of scores
            dk_factor = dk_factor / layout.scale
        elif variant.granularity is not None:
            dq_factor = dq_factor * layout.head_scale(tensors["k"].scale_inv)
            dk_factor = dk_factor * layout.head_scale(tensors["q"].scale_inv)
            dv_factor = dv_factor * layout.head_scale(self.do8.scale_inv)
        dq, dk, dv = (
            x.mul_(factor.view(-1, 1, 1) if factor.ndim else factor)
            for x, factor in ((self.dq, dq_factor), (self.dk, dk_factor), (self.dv, dv_factor))
        )
        shape = self.problem.shape
        key_shape = shape.batch, shape.key_heads, -1, dk.shape[-1]
        dk, dv = (x.view(key_shape)[:, :, : shape.keys, : shape.features] for x in (dk, dv))
        return Raw(layout.by_head(dq), dk, dv)
