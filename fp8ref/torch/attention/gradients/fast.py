"""The backward pass of attention in the fast form: torch's own sums and functions (spec A-18).

    for each tile of keys:
        p              <- exp(q @ k.T scale - lse)       [Tq x G, D] @ [D, keys]
        ds = (do @ v.T - d) p scale                      [Tq x G, D] @ [D, keys]
        dv += p8.T @ do                                  [keys, Tq x G] @ [Tq x G, D]
        dk += ds8.T @ q                                  [keys, Tq x G] @ [Tq x G, D]
        dq += ds8 @ k                                    [Tq x G, keys] @ [keys, D]

The query heads of a head of keys are summed by the products. Codes, scales and casts are those of
``gradients``.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from fp8ref.spec.attention.products import Product
from fp8ref.torch.attention import output as forward
from fp8ref.torch.attention import sinks as attention_sinks
from fp8ref.torch.attention.fast.operands import Layout
from fp8ref.torch.attention.fast.output import exponential_
from fp8ref.torch.attention.gradients import gradients as attention_gradients
from fp8ref.torch.attention.gradients.gradients import Gradients, Raw, Saved
from fp8ref.torch.attention.observer import multiplying
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.inputs import Report, Shape, Spec
from fp8ref.torch.attention.operands.kept import Kept, Matrix
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.attention.output import Documents
from fp8ref.torch.gemm import batched as batched_gemm
from fp8ref.torch.quantize import cast
from fp8ref.torch.quantize.scales import Scales


def gradients(
    do: Tensor,
    saved: Saved,
    spec: Spec,
    shape: Shape,
    documents: Documents,
    role_scales: dict[str, Tensor],
    *,
    report: Report,
    keep: Collection[Matrix] = (),
    sinks: Tensor | None = None,
) -> Gradients:
    """The pass, of what a forward pass saved.

    Order:    A-18.
    """
    do8 = attention_gradients.quantized_do(do, spec, role_scales, shape, report=report)
    backward = Pass(do8, saved, spec, shape, documents, report=report, keep=keep)
    low = spec.variant.fmt.bits == 8
    unit = torch.ones((), device=do.device, dtype=torch.float32)
    scales = Scales(unit, unit)
    if "ds" in role_scales:
        scales = Scales(role_scales["ds"], heads.inverse(role_scales["ds"]))
    elif low:
        backward.walk(None)
        (backward.largest,) = operands.share([backward.largest], spec)
        scales = heads.scales_of(backward.largest, backward.fmt, spec.variant.policy)
    backward.walk(scales)
    if ("ds" in role_scales or not low) and report != "nothing":
        (backward.largest,) = operands.share([backward.largest], spec)
    raw = attention_gradients.own_keys(backward.raw(scales), spec, shape)
    grads = attention_gradients.rounded(
        raw,
        do8,
        backward.largest,
        backward.saturated + backward.saturated_ds,
        scales,
        spec,
        role_scales,
        report=report,
    )
    dsinks = (
        None
        if sinks is None
        else attention_sinks.gradient(backward.d_by_head(), saved.lse, sinks, spec)
    )
    counts: dict = {"lost": backward.lost, "saturated_ds": backward.saturated_ds}
    return grads._replace(matrices=backward.kept.all(shape), dsinks=dsinks, **counts)


class Pass:
    """The sums dq, dk and dv over tiles, each in its layout of GEMMs, before scales of tensors and
    heads.
    """

    def __init__(
        self,
        do8,
        saved: Saved,
        spec: Spec,
        shape: Shape,
        documents: Documents,
        *,
        report: Report,
        keep: Collection[Matrix] = (),
    ) -> None:
        self.spec, self.shape, self.documents, self.saved, self.report = (
            spec,
            shape,
            documents,
            saved,
            report,
        )
        self.variant, self.fmt, self.do8 = (
            spec.variant,
            spec.variant.gradient_fmt or spec.variant.fmt,
            do8,
        )
        step = operands.STEP
        self.layout = layout = Layout(saved.tensors, spec, shape, step)
        self.do = layout.query_rows(do8)
        self.d = self._row_sums()
        self.lse = layout.rows(attention_gradients.rows_of(saved.lse, shape, step))
        if self.variant.base == "2":
            self.lse = self.lse * math.log2(math.e)
        self.tiles = operands.tiles(spec, shape, step)
        # GEMMs of codes take them along the axis of the sum.
        self.do_tokens, self.q_tokens, self.k_tokens = (
            x.transpose(1, 2).contiguous() if layout.codes else x.transpose(1, 2)
            for x in (self.do, layout.q, layout.k)
        )
        device = layout.q.device
        self.dq = torch.zeros(layout.q.shape, device=device, dtype=torch.float32)
        self.dk, self.dv = (
            torch.zeros(layout.k.shape, device=device, dtype=torch.float32),
            torch.zeros(layout.v.shape, device=device, dtype=torch.float32),
        )
        self.largest, self.saturated = (
            torch.zeros((), device=device, dtype=torch.float32),
            torch.zeros((), dtype=torch.int64, device=device),
        )
        self.lost, self.saturated_ds = (
            torch.zeros_like(self.saturated),
            torch.zeros_like(self.saturated),
        )
        self._has_dv = False
        self.kept = Kept(keep, (*layout.q.shape[:-1], layout.k.shape[1]), device)

    def _row_sums(self) -> Tensor:
        """D of each row (A-15), of dequantized numbers."""
        layout, saved = self.layout, self.saved
        o = layout.rows(operands.grouped(saved.o, self.shape, operands.STEP)).float()
        d = (self.do.float() * o).sum(-1)
        if layout.codes and self.variant.granularity is not None:
            d = d * self._row_scale(self.do8.scale_inv)
        return d if saved.o_scale_inv is None else d * saved.o_scale_inv

    def d_by_head(self) -> Tensor:
        """D of rows [B, H, Tq]."""
        return self.layout.by_head(self.d[..., None])[..., 0]

    def _row_scale(self, scale: Tensor) -> Tensor:
        """A scale of a tensor or of heads, to be multiplied into [B x Hkv, rows]."""
        scale = self.layout.head_scale(scale)
        return scale[:, None] if scale.ndim else scale

    def walk(self, scales: Scales | None) -> None:
        """Pass all tiles: without scales of dS for its amax and for dv, which is not computed again
        with them.
        """
        layout, softmax_scale = self.layout, self.spec.softmax_scale(self.shape.features)
        measures = scales is None or (self.report != "nothing" and not self._has_dv)
        for tile in self.tiles:
            at, hidden = layout.at(tile), layout.hidden(tile, self.documents)
            for part in layout.parts(tile):
                s, slope = layout.scores_and_slope(part, tile, hidden)
                p = exponential_(s.sub_(self.lse[part, at, None]), self.variant)
                ds = (
                    self._grad_probabilities(part, tile)
                    .sub_(self.d[part, at, None])
                    .mul_(p)
                    .mul_(softmax_scale)
                )
                ds = ds if slope is None else ds.mul_(slope)
                if measures:
                    low, high = torch.aminmax(ds)
                    self.largest = torch.maximum(self.largest, torch.maximum(-low, high))
                if not self._has_dv:
                    self._add_dv(p, part, tile)
                if scales is not None:
                    self._add_others(ds, scales, part, tile)
        self._has_dv = True

    def _grad_probabilities(self, part: slice, tile: Tile) -> Tensor:
        """The gradient of probabilities [n, rows, keys]."""
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
        if self.report == "all":
            self.saturated = self.saturated + forward.count_clipped(
                p, self.saved.scale_p, self.variant
            )
        if self.variant.fmt.bits == 8 and self.variant.p_scale != 1:
            p = p.mul_(self.saved.scale_p)
        if "p_codes" in self.kept:
            self.kept.put(
                "p_codes", (part, self.layout.at(tile), tile.keys), cast.to_fp8(p, self.variant.fmt)
            )
        p8 = self.layout.narrow(p, self.variant.fmt, part, tile)
        self.dv[part, tile.keys] += self._over_rows("grad_v", p8, self.do_tokens, part, tile)

    def _add_others(self, ds: Tensor, scales: Scales, part: slice, tile: Tile) -> None:
        layout, at = self.layout, self.layout.at(tile)
        self.kept.put("ds", (part, at, tile.keys), ds)
        if self.fmt.bits == 8:
            if self.report == "all":
                self.lost = self.lost + forward.count_lost(
                    ds, cast.to_fp8(ds * scales.scale, self.fmt), self.fmt
                )
            ds = ds.mul_(scales.scale)
            if self.report == "all":
                self.saturated_ds = self.saturated_ds + heads.above_range(ds.abs(), self.fmt).sum()
        if "ds_codes" in self.kept:
            self.kept.put("ds_codes", (part, at, tile.keys), cast.to_fp8(ds, self.fmt))
        ds8 = layout.narrow(ds, self.fmt, part, tile)
        with multiplying("grad_q"):
            dq_tile = batched_gemm.products(
                ds8, self.k_tokens[part, :, tile.keys], fast=layout.fast
            )
        self.dq[part, at] += dq_tile
        self.dk[part, tile.keys] += self._over_rows("grad_k", ds8, self.q_tokens, part, tile)

    def _over_rows(
        self, product: Product, x: Tensor, other: Tensor, part: slice, tile: Tile
    ) -> Tensor:
        """Sums over a tile's rows of x [n, rows, keys] and other [B x Hkv, D, rows]: [n, keys,
        D].
        """
        with multiplying(product):
            return batched_gemm.products(
                x.transpose(1, 2), other[part, :, self.layout.at(tile)], fast=self.layout.fast
            )

    def raw(self, scales: Scales) -> Raw:
        """The gradients, times the scales that their operands do not have."""
        layout, tensors, variant = self.layout, self.saved.tensors, self.variant
        dq_factor, dk_factor, dv_factor = scales.scale_inv, scales.scale_inv, self.saved.scale_inv_p
        if not layout.codes:  # q has the scale of scores
            dk_factor = dk_factor / layout.scale
        elif variant.granularity is not None:
            dq_factor, dk_factor, dv_factor = (
                own * layout.head_scale(x)
                for own, x in (
                    (dq_factor, tensors["k"].scale_inv),
                    (dk_factor, tensors["q"].scale_inv),
                    (dv_factor, self.do8.scale_inv),
                )
            )
        dq, dk, dv = (
            x.mul_(factor.view(-1, 1, 1) if factor.ndim else factor)
            for x, factor in ((self.dq, dq_factor), (self.dk, dk_factor), (self.dv, dv_factor))
        )
        key_shape = self.shape.batch, self.shape.key_heads, -1, dk.shape[-1]
        at = (slice(None), slice(None), slice(self.shape.keys), slice(self.shape.features))
        return Raw(layout.by_head(dq), dk.view(key_shape)[at], dv.view(key_shape)[at])
