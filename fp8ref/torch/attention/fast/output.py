"""The forward pass of attention in the fast form: torch's own sums and functions (spec A-18).

    for each tile of keys:
        s = q @ k.T scale      [Tq x G, D] @ [D, keys], all sequences and heads at once
        p = exp(s - m)         in the memory of s
        o = o c + p8 @ v       [Tq x G, keys] @ [keys, D]
    o, lse                     <- o / sum

Codes, scales, tiles and their order, the rescale rule and casts of probabilities are ``output``'s.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from fp8ref.spec.attention.variants import Variant
from fp8ref.torch.attention import output, softmax
from fp8ref.torch.attention import sinks as attention_sinks
from fp8ref.torch.attention.fast.operands import Layout
from fp8ref.torch.attention.observer import multiplying
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.kept import Kept, Matrix, Tally
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.attention.operands.problem import Problem, Report
from fp8ref.torch.attention.output import Result
from fp8ref.torch.gemm import batched as batched_gemm


def run(
    tensors: dict[str, Heads], problem: Problem, *, report: Report, keep: Collection[Matrix] = ()
) -> Result:
    """The pass, of quantized q, k and v.

    Order:    A-18.
    """
    output.check_hardware(problem.variant)
    forward = _Pass(tensors, problem, report, keep)
    forward.walk()
    o, lse = forward.divided()
    return output.result(o, lse, tensors, forward.tally, forward.kept, forward.scale_p, problem)


class _Pass:
    """The sums of a pass over tiles, o [B x Hkv, rows, D]; maxima and sums of rows."""

    def __init__(
        self, tensors: dict[str, Heads], problem: Problem, report: Report, keep: Collection[Matrix]
    ) -> None:
        self.problem, self.variant = problem, problem.variant
        self.layout = layout = Layout(tensors, problem)
        device, (n, rows, _) = layout.q.device, layout.q.shape
        self.scale_p = operands.probability_scale(problem, device)
        self.maximum = torch.full((n, rows), -torch.inf, device=device, dtype=torch.float32)
        self.sums = torch.zeros(n, rows, device=device, dtype=torch.float32)
        self.o = torch.zeros(n, rows, layout.v.shape[-1], device=device, dtype=torch.float32)
        self.tally = Tally(self.variant.fmt, report, device)
        self.kept = Kept(keep, (n, rows, layout.k.shape[1]), device)
        # GEMMs of codes take them along the tokens.
        v = layout.v.transpose(1, 2)
        self.v = v.contiguous() if layout.codes else v

    def walk(self) -> None:
        """Pass all tiles."""
        inside = _inside(self.problem)
        for tile in operands.tiles(self.problem):
            hidden = self.layout.hidden(tile)
            for part in self.layout.parts(tile):
                s = self.layout.scores(part, tile, hidden)
                self.kept.put("scores", self.layout.place(part, tile), s)
                p, c = self._probabilities(s, part, tile)
                if self.tally.report != "nothing":
                    self.tally.enlarge(p.amax())
                self.tally.count(p, self.scale_p.scale)
                if self.problem.low and self.variant.p_scale != 1:
                    p = p.mul_(self.scale_p.scale)
                if "p_codes" in self.kept:
                    p8 = heads.codes(p, self.variant.fmt)
                    self.kept.put("p_codes", self.layout.place(part, tile), p8)
                p8 = self.layout.narrow(p, self.variant.fmt, part, tile, inside=inside)
                self._add_values(p8, c, part, tile)

    def _probabilities(self, s: Tensor, part: slice, tile: Tile) -> tuple[Tensor, Tensor]:
        """(P in the memory of s, the factor of earlier sums); updates maxima and sums."""
        variant, at = self.variant, self.layout.at(tile)
        old = self.maximum[part, at]
        new = _maximum(old, s.amax(-1), variant)
        # Without documents a tile's rows each see a key of it.
        shift = new if self.problem.documents.q is None else softmax.finite(new)
        c = exponential_(old - shift, variant)
        exponent = shift - float(variant.offset) if variant.offset else shift
        p = exponential_(s.sub_(exponent[..., None]), variant)
        old.copy_(new)
        self.sums[part, at].mul_(c).add_(p.sum(-1))
        return p, c

    def _add_values(self, p8: Tensor, c: Tensor, part: slice, tile: Tile) -> None:
        layout, v = self.layout, self.v[part, :, tile.keys]
        o = self.o[part, layout.at(tile)].mul_(c[..., None])
        with multiplying("values"):
            if not layout.codes:
                o.baddbmm_(p8, v.transpose(1, 2))
                return
            values = batched_gemm.products(p8, v, fast=layout.fast)
        if self.variant.granularity == "rows_128":
            scale_inv = operands.key_scale(layout.tensors["v"].scale_inv, tile, self.variant)
            values = values * layout.head_scale(scale_inv).view(-1, 1, 1)[part]
        o.add_(values)

    def divided(self) -> tuple[Tensor, Tensor]:
        """The output [B, H, Tq, D] and the log-sum-exp of rows [B, H, Tq] (A-10, A-11)."""
        layout, problem, shape = self.layout, self.problem, self.problem.shape
        o, sums, maximum = self.o, self.sums, self.maximum
        if problem.sinks is not None:
            row_sinks = attention_sinks.by_rows(problem.sinks, shape)
            row_sinks = layout.rows(row_sinks.expand(shape.batch, -1, shape.queries, -1))
            rows = o, sums, maximum, row_sinks
            o, sums, maximum = attention_sinks.add(*rows, None, problem.call)
        factor = self._factor()
        factor = factor.view(-1, 1) if isinstance(factor, Tensor) and factor.ndim else factor
        o = layout.by_head(o.mul_(_inverse(sums, factor, self.variant)[..., None]))
        lse = _log_sum(maximum, sums, self.variant)
        return o, layout.by_head(lse[..., None])[..., 0]

    def _factor(self) -> Tensor | float:
        """The factor of outputs: scales of v and P that no operand has."""
        variant, layout = self.variant, self.layout
        tile_scales = self.problem.low and variant.out_scales == "tile"
        p_factor = self.scale_p.scale_inv if tile_scales else 1.0
        if layout.codes and variant.granularity in ("tensor", "head"):
            return layout.head_scale(layout.tensors["v"].scale_inv) * p_factor
        return p_factor


def _inside(problem: Problem) -> bool:
    """Whether no probability leaves the format's range, by A-8's bound with 2^-10 for roundings."""
    variant = problem.variant
    if not problem.low or "s" in problem.scales:
        return False
    # The scale of a state without one is max / 1, rounded down to a power of two or not at all.
    scale = variant.fmt.max if variant.p_scale == "state" else variant.p_scale
    roundings = 1 + (variant.base == "2") * 2.0**-10
    return variant.largest_probability * scale * roundings <= variant.fmt.max


def exponential_(x: Tensor, variant: Variant) -> Tensor:
    """2^x or e^x, in the memory of x."""
    return x.exp2_() if variant.base == "2" else x.exp_()


def _maximum(old: Tensor, largest: Tensor, variant: Variant) -> Tensor:
    """The rescale rule (A-7), in the variant's base."""
    new = torch.maximum(old, largest)
    return torch.where(new - old <= variant.threshold, old, new) if variant.threshold else new


def _inverse(sums: Tensor, factor: Tensor | float, variant: Variant) -> Tensor:
    """factor / the sums of rows (A-10); finite for a row without keys, whose output is 0."""
    whole = sums.clamp(min=1.0) if variant.finish == "divide" else torch.where(sums == 0, 1.0, sums)
    return factor / whole


def _log_sum(maximum: Tensor, sums: Tensor, variant: Variant) -> Tensor:
    """The LSE of rows (A-11), in torch's float32."""
    empty = sums == 0
    maximum, sums = torch.where(empty, 0.0, maximum), torch.where(empty, 1.0, sums)
    if variant.base == "2":
        lse = (maximum + (sums.log2() - float(variant.offset))) * math.log(2)
    else:
        lse = maximum + sums.log()
    return torch.where(empty, -torch.inf, lse)
