"""The backward pass of attention whose operands have MX blocks (spec A-16).

A block lies along the axis that a product sums over, so that q, k, do and dS are quantized twice.
Products are float32 GEMMs of dequantized codes (G-16).
"""

from collections.abc import Collection

import torch
from torch import Tensor

from fp8ref.formats import Format
from fp8ref.spec.attention.products import Role
from fp8ref.spec.attention.variant import MX
from fp8ref.spec.granularity import Blocks
from fp8ref.torch.attention import output as forward
from fp8ref.torch.attention import products
from fp8ref.torch.attention.gradients import parts
from fp8ref.torch.attention.gradients.parts import Saved, Sums
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.kept import Kept, Matrix, Tally
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.attention.operands.problem import Problem, Report
from fp8ref.torch.quantize.scales import Scales

P_SCALE = 256.0
"""What P is multiplied by before its cast."""

ALONG_KEYS, ALONG_QUERIES = (1, 1, 1, 1, MX), (1, 1, MX, 1, 1)
"""Blocks of dS [B, Hkv, rows, G, keys]."""


def run(
    do: Tensor,
    do8: Heads,
    saved: Saved,
    problem: Problem,
    *,
    report: Report,
    keep: Collection[Matrix],
) -> Sums:
    """The pass, of what a forward pass saved, its q and k and do in high precision, and do as it is
    quantized along the features.

    Order:    A-16; sums over keys are added tile by tile, in float32.
    """
    backward = _Pass(do, do8, saved, problem, report, keep)
    for tile in operands.tiles(problem, MX):
        backward.add(tile)
    unit = torch.ones((), device=do.device, dtype=torch.float32)
    raw = parts.without_padding(backward.dq, backward.dk, backward.dv, problem.shape)
    d = parts.by_rows(backward.d, problem.shape)
    return Sums(raw, d, backward.tally_p, backward.tally_ds, Scales(unit, unit), backward.kept)


class _Pass:
    """The padded sums dq [B, Hkv, Tq, G, D], dk and dv [B, Hkv, Tk, D], and operands."""

    def __init__(
        self,
        do: Tensor,
        do8: Heads,
        saved: Saved,
        problem: Problem,
        report: Report,
        keep: Collection[Matrix],
    ) -> None:
        assert saved.inputs is not None
        self.saved, self.problem, self.variant = saved, problem, problem.variant
        shape, device, tensors = problem.shape, do.device, saved.tensors
        q, k, _ = saved.inputs
        q_along, k_along, do_along = (
            heads.dequantize(x)
            for x in (
                along_tokens(q, "q", problem),
                along_tokens(k, "k", problem),
                along_tokens(do, "do", problem),
            )
        )
        self.do = operands.grouped(heads.dequantize(do8), shape, MX)
        self.do_tokens, self.q_tokens = (
            parts.tokens_of(operands.grouped(x, shape, MX)) for x in (do_along, q_along)
        )
        self.k_tokens = operands.along_tokens(k_along)
        self.q = operands.grouped(heads.dequantize(tensors["q"]), shape, MX)
        self.k = operands.along_features(heads.dequantize(tensors["k"]))
        self.v = operands.along_features(heads.dequantize(tensors["v"]))
        self.lse = parts.rows_of(saved.lse, shape, MX)
        short, o = (
            operands.grouped(x, shape, MX) for x in (heads.rounded(do, self.variant.out), saved.o)
        )
        self.d = parts.sums_of_rows(short, o, shape.features, problem.call.arithmetic)
        self.dq = torch.zeros(*self.q.shape, device=device, dtype=torch.float32)
        self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.k)
        self.tally_p = Tally(self.variant.fmt, report, device)
        self.tally_ds = Tally(problem.gradient_fmt, report, device)
        self.kept = Kept(keep, (*self.q.shape[:-1], self.k.shape[2]), device)

    def add(self, tile: Tile) -> None:
        """Add a tile to all sums."""
        variant, rows = self.variant, tile.rows
        s = forward.scores(self.q, self.k, tile, variant)
        p, slope = parts.again(s, self.lse[:, :, rows], tile, self.saved.tensors, self.problem)
        p8 = heads.codes(p * P_SCALE, variant.fmt)
        dp = products.rows(
            "grad_probabilities", self.do[:, :, rows], self.v[:, :, tile.keys], variant
        )
        ds = dp - self.d[:, :, rows, :, None]
        ds = parts.score_gradients(ds, p, slope, self.problem)
        self.kept.put("p_codes", tile.place, p8)
        self.kept.put("ds", tile.place, ds)
        if self.tally_ds.report != "nothing":
            self.tally_ds.enlarge(ds.abs().amax())
        self.tally_p.count(p, P_SCALE)
        p8 = p8.float() / P_SCALE
        dv = products.heads("grad_v", p8, self.do_tokens, tile, variant)
        parts.add_heads(self.dv, dv, tile)
        ds8 = _dequantized(ds, ALONG_KEYS, self.problem.gradient_fmt, variant.policy)
        self.tally_ds.count_lost(ds, ds8)
        k_tokens = self.k_tokens[:, :, :, tile.keys]
        dq = products.rows("grad_q", ds8, k_tokens, variant)
        self.dq[:, :, rows] = self.dq[:, :, rows] + dq
        ds8 = _dequantized(ds, ALONG_QUERIES, self.problem.gradient_fmt, variant.policy)
        dk = products.heads("grad_k", ds8, self.q_tokens, tile, variant)
        parts.add_heads(self.dk, dk, tile)


def along_tokens(x: Tensor, role: Role, problem: Problem) -> Heads:
    """q, k or do as a product over tokens takes it: with blocks along them."""
    fmt = problem.gradient_fmt if role == "do" else problem.variant.fmt
    blocks = 1, 1, MX, 1
    return heads.quantize(x, fmt, blocks, problem.variant.policy, amax=heads.amax(x, blocks))


def _dequantized(ds: Tensor, blocks: Blocks, fmt: Format, policy: str) -> Tensor:
    """dS [B, Hkv, rows, G, keys], quantized in blocks and dequantized."""
    return heads.dequantize(heads.quantize(ds, fmt, blocks, policy, amax=heads.amax(ds, blocks)))
