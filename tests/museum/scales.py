"""Faults of scales: functions of the amaxes of blocks."""

import numpy as np
from museum import ask
from museum.arithmetic import F, bf16, bits, number
from museum.exhibit import Exhibit

from fp8ref.conformance.invariants import SCALES

MAX, TINY = np.finfo(F).max, np.finfo(F).tiny


def unbounded(amax):
    """448 / amax leaves float32's range for a tiny amax."""
    return F(448) / amax


def te_current(amax):
    """The largest float32 in its place; 1 of amaxes that have no scale."""
    scale = np.minimum(F(448) / amax, MAX)
    return np.where(np.isfinite(amax) & (amax > 0), scale, F(1)).astype(F)


def te_current_unbounded(amax):
    scale = F(448) / amax
    return np.where(np.isfinite(amax) & (amax > 0), scale, F(1)).astype(F)


def of_bounded_inverse(amax):
    """The inverse of amax / 448, which is at least the smallest normal number."""
    return F(1) / np.maximum(np.asarray(amax, F) / F(448), TINY)


def to_bfloat16(amax):
    """scale_inv stored in bfloat16, rounded to nearest."""
    return F(1) / bf16(np.asarray(amax, F) / F(448))


def up_to_bfloat16(amax):
    """The same, rounded up."""
    scale_inv = np.asarray(amax, F) / F(448)
    near = bf16(scale_inv)
    return F(1) / np.where(near < scale_inv, number(bits(near) + np.uint32(0x10000)), near)


EXHIBITS = (
    Exhibit(
        name="te-786",
        link="https://github.com/NVIDIA/TransformerEngine/pull/786",
        library="Transformer Engine",
        year=2024,
        title="A tiny amax gives an infinite scale",
        fault=te_current_unbounded,
        twin=te_current,
        ask=ask.scales("te_current"),
        named="a scale above float32's range is inf",
    ),
    Exhibit(
        name="flashinfer-2595",
        link="https://github.com/flashinfer-ai/flashinfer/issues/2595",
        library="FlashInfer",
        year=2026,
        title="448 / amax overflows for a block of subnormal size",
        fault=unbounded,
        twin=of_bounded_inverse,
        ask=ask.invariants(SCALES),
        named="finite: amax",
    ),
    Exhibit(
        name="modelopt-2314",
        link="https://github.com/NVIDIA/Model-Optimizer/pull/2314",
        library="ModelOpt",
        year=2026,
        title="A scale stored in bfloat16 is rounded down",
        fault=to_bfloat16,
        twin=up_to_bfloat16,
        ask=ask.invariants(SCALES, without=["finite"]),
        named="within_max: amax 1 times its scale is 448.876709, above max",
    ),
)
