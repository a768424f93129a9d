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
from fp8ref.torch.attention.gradients import parts
from fp8ref.torch.attention.gradients.parts import Saved, Sums
from fp8ref.torch.attention.gradients.stated import Factors, Pass
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.kept import Matrix
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
    variant, fmt = problem.variant, problem.gradient_fmt
    factors = _factors(do, do8, saved, problem)
    backward = Pass(factors, do8, saved, problem, report=report, keep=keep)
    unit = torch.ones((), device=do.device, dtype=torch.float32)
    scales = Scales(unit, unit)
    for tile in operands.tiles(problem, MX):
        p, ds = backward.score_gradients(tile)
        p8 = heads.codes(p * P_SCALE, variant.fmt)
        backward.kept.put("p_codes", tile.place, p8)
        backward.kept.put("ds", tile.place, ds)
        if report != "nothing":
            backward.tally_ds.enlarge(ds.abs().amax())
        backward.tally_p.count(p, P_SCALE)
        backward.add_dv(p8.float() / P_SCALE, tile)
        ds_keys, ds_queries = (
            _dequantized(ds, blocks, fmt, variant.policy) for blocks in (ALONG_KEYS, ALONG_QUERIES)
        )
        backward.tally_ds.count_lost(ds, ds_keys)
        backward.add_dq_and_dk(ds_keys, ds_queries, scales, tile)
    return backward.sums(scales)


def _factors(do: Tensor, do8: Heads, saved: Saved, problem: Problem) -> Factors:
    assert saved.inputs is not None
    shape, arithmetic = problem.shape, problem.call.arithmetic
    q, k, v = (heads.dequantize(saved.tensors[role]) for role in ("q", "k", "v"))
    inputs: tuple[tuple[Role, Tensor], ...] = (
        ("q", saved.inputs[0]),
        ("k", saved.inputs[1]),
        ("do", do),
    )
    along = {role: heads.dequantize(along_tokens(x, role, problem)) for role, x in inputs}
    short, o = (
        operands.grouped(x, shape, MX) for x in (heads.rounded(do, problem.variant.out), saved.o)
    )
    return Factors(
        q=operands.grouped(q, shape, MX),
        do=operands.grouped(heads.dequantize(do8), shape, MX),
        k=operands.along_features(k),
        v=operands.along_features(v),
        q_tokens=parts.tokens_of(operands.grouped(along["q"], shape, MX)),
        do_tokens=parts.tokens_of(operands.grouped(along["do"], shape, MX)),
        k_tokens=operands.along_tokens(along["k"]),
        d=parts.sums_of_rows(short, o, shape.features, arithmetic),
    )


def along_tokens(x: Tensor, role: Role, problem: Problem) -> Heads:
    """q, k or do as a product over tokens takes it: with blocks along them."""
    fmt = problem.gradient_fmt if role == "do" else problem.variant.fmt
    blocks = 1, 1, MX, 1
    return heads.quantize(x, fmt, blocks, problem.variant.policy, amax=heads.amax(x, blocks))


def _dequantized(ds: Tensor, blocks: Blocks, fmt: Format, policy: str) -> Tensor:
    """dS [B, Hkv, rows, G, keys], quantized in blocks and dequantized."""
    return heads.dequantize(heads.quantize(ds, fmt, blocks, policy, amax=heads.amax(ds, blocks)))
