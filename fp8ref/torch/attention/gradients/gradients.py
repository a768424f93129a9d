"""The backward pass of attention (spec A-15, A-16): the gradients of q, k and v, a tile of keys
after another.

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

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed

from fp8ref.spec.attention.products import Product
from fp8ref.spec.attention.variants import Arithmetic, Variant
from fp8ref.torch.attention import output as forward
from fp8ref.torch.attention import sinks as attention_sinks
from fp8ref.torch.attention import softmax
from fp8ref.torch.attention.exponentials import exponential, multiply_add, times
from fp8ref.torch.attention.observer import multiplying
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.inputs import Report, Shape, Spec
from fp8ref.torch.attention.operands.kept import Kept, Matrix
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.attention.output import Documents
from fp8ref.torch.quantize import cast, float_values
from fp8ref.torch.quantize.scales import Scales

_LOG2E = float(np.float32(math.log2(math.e)))


class Gradients(NamedTuple):
    """What a backward pass gives. Fields as in ``fp8ref.sim.attention.gradients.gradients``.

    dq, dk, dv   float32 of the shapes of q, k, v: values of the output's format, times their
                 scale_inv in FP8.
    tensors      the quantized do and, where they are in FP8, dq, dk and dv, by role.
    amaxes       of do by its groups; of ds, dq, dk and dv, unrounded.
    saturated    int64 (): elements of P and dS that their casts clipped, on this rank;
                 saturated_ds: those of dS, none under MX.
    lost         int64 (): elements of dS of at least 2^-126 that the cast made 0, on this rank;
                 under MX that along the keys.
    scale_ds     what dS was multiplied by: scale and scale_inv; 1 where it has none, or blocks.
    matrices     codes of P, dS and its codes [B, H, Tq, Tk], by ``Matrix``; {} unless asked for.
    dsinks       float32 [H]: the gradient of sinks, of this rank's rows; None without any.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    tensors: dict[str, Heads]
    amaxes: dict[str, Tensor]
    saturated: Tensor
    scale_ds: Scales
    matrices: dict[str, Tensor] = {}  # noqa: RUF012
    dsinks: Tensor | None = None
    lost: Tensor | None = None
    saturated_ds: Tensor | None = None


class Saved(NamedTuple):
    """What a backward pass takes of a forward pass: q, k and v quantized; o [B, H, Tq, D], in FP8
    its codes and scale_inv, else None; lse; and the scales of the probabilities."""

    tensors: dict[str, Heads]
    o: Tensor
    o_scale_inv: Tensor | None
    lse: Tensor
    scale_p: Tensor
    scale_inv_p: Tensor


class Raw(NamedTuple):
    """Gradients before they are rounded to the output's format, float32 of the shapes of q, k and
    v.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Pass:
    """The parts of a backward pass without blocks, in the layouts of GEMMs; sums go into dq, dk and
    dv.
    """

    def __init__(
        self,
        do: Tensor,
        saved: Saved,
        spec: Spec,
        shape: Shape,
        documents: Documents,
        role_scales: dict[str, Tensor],
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
        self.variant, self.role_scales = spec.variant, role_scales
        self.fmt = spec.variant.gradient_fmt or spec.variant.fmt
        self.do = quantized_do(do, spec, role_scales, shape, report=report)
        tensors = saved.tensors
        step = operands.STEP
        self.q, self.do_rows = (
            operands.grouped(x.codes, shape, step) for x in (tensors["q"], self.do)
        )
        self.k, self.v = (operands.along_features(tensors[role].codes) for role in ("k", "v"))
        self.d = self._row_sums()
        self.lse = rows_of(saved.lse, shape, step)
        self.tiles = operands.tiles(spec, shape, step)
        device = do.device
        self.largest = torch.zeros((), device=device, dtype=torch.float32)
        self.saturated = torch.zeros((), dtype=torch.int64, device=device)
        self.lost, self.saturated_ds = (
            torch.zeros_like(self.saturated),
            torch.zeros_like(self.saturated),
        )
        self.kept = Kept(keep, (*self.q.shape[:-1], self.k.shape[2]), device)

    def _row_sums(self) -> Tensor:
        """D of each row [B, Hkv, Tq, G] (A-15)."""
        o = operands.grouped(self.saved.o, self.shape, operands.STEP)
        d = sums_of_rows(self.do_rows, o, self.shape.features)
        if self.variant.granularity is None:
            return d
        d = times(d, self._query_scale(self.do)[..., 0])
        return d if self.saved.o_scale_inv is None else times(d, self.saved.o_scale_inv)

    def _query_scale(self, x: Heads) -> Tensor:
        return (
            x.scale_inv[..., None]
            if self.variant.granularity == "head"
            else x.scale_inv[(None,) * 5]
        )

    def _key_scale(self, role: str) -> Tensor:
        scale_inv = self.saved.tensors[role].scale_inv
        return scale_inv[..., None] if self.variant.granularity == "head" else scale_inv

    def scaled(self, x: Tensor, *scales: Tensor) -> Tensor:
        """x times each scale_inv in order; in high precision there are none."""
        if self.variant.granularity is None:
            return x
        for scale in scales:
            x = times(x, scale)
        return x

    def probabilities(self, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """(P of a tile again, from the log-sum-exp; the slope of a softcap): float32 [B, Hkv, rows,
        G, keys].
        """
        s = forward.scores(self.q, self.k, tile, self.variant)
        return again(
            s,
            self.lse[:, :, tile.rows],
            tile,
            self.saved.tensors,
            self.spec,
            self.shape,
            self.documents,
        )

    def ds(self, p: Tensor, slope: Tensor | None, tile: Tile) -> Tensor:
        """dS of a tile, before its scale."""
        do_tile = self.do_rows[:, :, tile.rows]
        with multiplying("grad_probabilities"):
            dp = operands.products(
                do_tile.flatten(2, 3), self.v[:, :, tile.keys], self.variant
            ).view(p.shape)
        dp = self.scaled(dp, self._query_scale(self.do), self._key_scale("v"))
        return score_gradients(
            dp - self.d[:, :, tile.rows, :, None], p, slope, self.spec, self.shape
        )

    def run(self) -> tuple[Raw, Scales]:
        """All sums, and the scales of dS."""
        shape, low = self.shape, self.variant.fmt.bits == 8
        rows = (shape.batch, shape.key_heads)
        width = self.k.shape[-1]
        dk = torch.zeros(*rows, self.k.shape[2], width, device=self.k.device, dtype=torch.float32)
        dv, dq = (
            torch.zeros_like(dk),
            torch.zeros(*self.q.shape, device=self.k.device, dtype=torch.float32),
        )
        unit = torch.ones((), device=dk.device, dtype=torch.float32)
        scales = Scales(unit, unit)
        early = low and "ds" not in self.role_scales
        do_tokens, q_tokens, k_tokens = (
            tokens_of(self.do_rows),
            tokens_of(self.q),
            operands.along_tokens(self.saved.tensors["k"].codes),
        )
        if "ds" in self.role_scales:
            scales = Scales(self.role_scales["ds"], heads.inverse(self.role_scales["ds"]))
        elif early:
            for tile in self.tiles:
                p, slope = self.probabilities(tile)
                self._add_dv(dv, p, do_tokens, tile)
                self.largest = torch.maximum(self.largest, self.ds(p, slope, tile).abs().amax())
            (self.largest,) = operands.share([self.largest], self.spec)
            scales = heads.scales_of(self.largest, self.fmt, self.variant.policy)
        for tile in self.tiles:
            p, slope = self.probabilities(tile)
            ds = self.ds(p, slope, tile)
            if not early:
                self._add_dv(dv, p, do_tokens, tile)
                if self.report != "nothing":
                    self.largest = torch.maximum(self.largest, ds.abs().amax())
            ds8 = self._cast_ds(ds, scales.scale)
            self.kept.put("ds", _at(tile), ds)
            self.kept.put("ds_codes", _at(tile), ds8)
            with multiplying("grad_q"):
                dq_tile = operands.products(
                    ds8.flatten(2, 3), k_tokens[:, :, :, tile.keys].contiguous(), self.variant
                )
            dq[:, :, tile.rows] = dq[:, :, tile.rows] + dq_tile.view(*ds8.shape[:-1], -1)
            q_scale_inv = self._query_scale(self.saved.tensors["q"])
            add_heads(
                dk,
                self.scaled(
                    products_of_heads("grad_k", ds8, q_tokens, tile, self.variant),
                    scales.scale_inv,
                    q_scale_inv,
                ),
                tile,
            )
        if not early and self.report != "nothing":
            (self.largest,) = operands.share([self.largest], self.spec)
        dq = self.scaled(dq, scales.scale_inv, self._key_scale("k"))
        keys = (slice(None), slice(None), slice(shape.keys), slice(shape.features))
        return Raw(operands.by_head(dq, shape), dk[keys], dv[keys]), scales

    def _add_dv(self, dv: Tensor, p: Tensor, do_tokens: Tensor, tile: Tile) -> None:
        p8 = forward.round_probabilities(p, self.saved.scale_p, self.variant)
        self.kept.put("p_codes", _at(tile), p8)
        if self.report == "all":
            self.saturated = self.saturated + forward.count_clipped(
                p, self.saved.scale_p, self.variant
            )
        dv_tile = products_of_heads("grad_v", p8, do_tokens, tile, self.variant)
        add_heads(
            dv, self.scaled(dv_tile, self.saved.scale_inv_p, self._query_scale(self.do)), tile
        )

    def _cast_ds(self, ds: Tensor, scale: Tensor) -> Tensor:
        if self.fmt.bits != 8:
            return heads.rounded(ds, self.fmt)
        scaled = ds * scale
        if self.report == "all":
            self.saturated_ds = self.saturated_ds + heads.above_range(scaled.abs(), self.fmt).sum()
        codes = cast.to_fp8(scaled, self.fmt)
        if self.report == "all":
            self.lost = self.lost + forward.count_lost(ds, codes, self.fmt)
        return codes


def _at(tile: Tile) -> tuple:
    return slice(None), slice(None), tile.rows, slice(None), tile.keys


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

    Order:    A-15; sums over keys are added tile by tile, in float32.
    """
    backward = Pass(do, saved, spec, shape, documents, role_scales, report=report, keep=keep)
    raw, scales = backward.run()
    raw = own_keys(raw, spec, shape)
    saturated = backward.saturated + backward.saturated_ds
    grads = rounded(
        raw, backward.do, backward.largest, saturated, scales, spec, role_scales, report=report
    )
    dsinks = (
        None
        if sinks is None
        else attention_sinks.gradient(by_rows(backward.d, shape), saved.lse, sinks, spec)
    )
    counts: dict = {"lost": backward.lost, "saturated_ds": backward.saturated_ds}
    return grads._replace(matrices=backward.kept.all(shape), dsinks=dsinks, **counts)


def by_rows(d: Tensor, shape: Shape) -> Tensor:
    """D of rows [B, Hkv, Tq, G], padded, as [B, H, Tq]."""
    return operands.by_head(d[..., None], shape)[..., 0]


def own_keys(raw: Raw, spec: Spec, shape: Shape) -> Raw:
    """Of ranks that have parts of the queries: the gradients of this rank's own keys and values,
    the ranks' sums added in their order. Without such ranks, as they are."""
    if spec.context is None:
        return raw
    group = spec.ranks
    size = group.size()

    def summed(x: Tensor) -> Tensor:
        pieces = torch.stack(x.split(shape.keys // size, dim=2)).contiguous()  # of each rank's keys
        received = torch.empty_like(pieces)
        distributed.all_to_all_single(received, pieces, group=group)
        total = received[0]
        for piece in received[1:]:
            total = total + piece
        return total

    return Raw(raw.dq, summed(raw.dk), summed(raw.dv))


def rounded(
    raw: Raw,
    do: Heads,
    largest: Tensor,
    saturated: Tensor,
    scales: Scales,
    spec: Spec,
    role_scales: dict[str, Tensor],
    *,
    report: Report,
) -> Gradients:
    """The gradients in the output's format, with their amaxes."""
    variant = spec.variant
    none = torch.zeros((), device=largest.device, dtype=torch.float32)
    by_role: dict[str, Any] = {}
    amaxes, coded = {"do": do.amax, "ds": largest}, {"do": do}
    tensors = {"dq": raw.dq, "dk": raw.dk, "dv": raw.dv}
    low = variant.out.bits == 8
    needed = report != "nothing" or (low and not role_scales.keys() >= tensors.keys())
    output_amaxes = (
        operands.share([x.abs().amax() for x in tensors.values()], spec) if needed else [none] * 3
    )
    for (role, x), amax in zip(tensors.items(), output_amaxes, strict=True):
        amaxes[role] = amax
        scaling = forward.output_scaling(variant)
        kept = heads.quantize(
            x, variant.out, *scaling, amax_of_groups=amax, scale=role_scales.get(role)
        )
        by_role[role] = (
            float_values.decode(kept.codes).mul_(kept.scale_inv) if low else kept.codes.float()
        )
        if low:
            coded[role] = kept
    return Gradients(**by_role, tensors=coded, amaxes=amaxes, saturated=saturated, scale_ds=scales)


def quantized_do(
    do: Tensor, spec: Spec, role_scales: dict[str, Tensor], shape: Shape, *, report: Report
) -> Heads:
    """do as q is quantized (A-15)."""
    variant = spec.variant
    fmt = variant.gradient_fmt or variant.fmt
    if report == "nothing" and (variant.granularity is None or "do" in role_scales):
        amax = torch.zeros((), device=do.device, dtype=torch.float32)
    else:
        amax = heads.amax(do, variant.granularity, heads=shape.key_heads)
        if variant.granularity in ("tensor", None):
            (amax,) = operands.share([amax], spec)
    return heads.quantize(
        do,
        fmt,
        variant.granularity,
        variant.policy,
        amax_of_groups=amax,
        scale=role_scales.get("do"),
    )


def score_gradients(
    ds: Tensor, p: Tensor, slope: Tensor | None, spec: Spec, shape: Shape
) -> Tensor:
    """dS of dP - D, in the order of A-15 and A-22."""
    ds = ds * p
    return (ds if slope is None else times(ds, slope)) * spec.softmax_scale(shape.features)


def again(
    s: Tensor,
    lse: Tensor,
    tile: Tile,
    tensors: dict[str, Heads],
    spec: Spec,
    shape: Shape,
    documents: Documents,
) -> tuple[Tensor, Tensor | None]:
    """(P from sums of products s and the log-sum-exp of rows, 0 where a key is not seen; the slope
    of a softcap).
    """
    s, factors = operands.capped(s, operands.score_factors(tensors, tile, spec, shape), spec)
    slope = operands.slope(s, spec)
    if spec.variant.scores == "raw":
        bias = -times(lse, _LOG2E)
        p = exponential(multiply_add(s, factors[0], bias[..., None]), "2", spec.arithmetic)
    else:
        p = exponential(softmax.scaled(s, factors) - lse[..., None], "e", spec.arithmetic)
    visible = operands.seen(tile, spec, shape, documents, s.device)
    return (p if visible is None else torch.where(visible, p, 0.0)), slope


def rows_of(lse: Tensor, shape: Shape, step: int) -> Tensor:
    """The log-sum-exp [B, H, Tq] as [B, Hkv, Tq, G], padded; 0 of rows that see no key."""
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    return (
        heads.pad(lse, 2, step).view(shape.batch, shape.key_heads, shape.group, -1).transpose(2, 3)
    )


def sums_of_rows(a: Tensor, b: Tensor, features: int, arithmetic: Arithmetic = "stated") -> Tensor:
    """The sum of products over the last axis: stated, ascending, each addition rounded; fast, in
    torch's order.
    """
    if arithmetic == "fast":
        return (a.float() * b.float()).sum(-1)
    each = (a.float() * b.float()).unbind(-1)  # products of two short numbers are exact
    total = each[0]
    for product in each[1:features]:
        total = total + product
    return total


def tokens_of(x: Tensor) -> Tensor:
    """[B, Hkv, T, G, D] as [B, Hkv, G, D, T]: for GEMMs that sum over queries."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def products_of_heads(
    product: Product, x: Tensor, other: Tensor, tile: Tile, variant: Variant
) -> Tensor:
    """Sums over a tile's queries of x [B, Hkv, rows, G, keys] and other [B, Hkv, G, D, Tq], for
    each query head: [B, Hkv, G, keys, D]."""
    a = x.permute(0, 1, 3, 4, 2).flatten(1, 2).contiguous()  # [B, H, keys, rows]
    b = other[..., tile.rows].flatten(1, 2).contiguous()
    with multiplying(product):
        return operands.products(a, b, variant).unflatten(1, other.shape[1:3])


def add_heads(total: Tensor, head_sums: Tensor, tile: Tile) -> None:
    """Add those of the query heads of a head of keys, ascending: head_sums [B, Hkv, G, keys, D] to
    total [B, Hkv, Tk, D].
    """
    part = total[:, :, tile.keys]
    for head_sum in head_sums.unbind(2):
        part = part + head_sum
    total[:, :, tile.keys] = part
