"""Inputs for tests of attention in the backends, and the bounds that two implementations keep to
each other.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.gemm.bound import gamma
from fp8ref.sim.attention.operands import heads as head_scaling
from fp8ref.sim.attention.operands import inputs as attention_inputs
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask, Variant

F = np.float32
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window=(30, 5)),
    "causal window": Mask(causal=True, window=(40, None)),
    "from the start": Mask(causal=True, alignment="start"),
}


def normal(b=2, h=4, heads=2, tq=70, tk=150, d=64, *, seed=0) -> tuple[np.ndarray, ...]:
    """q, k, v and do, normally distributed."""
    rng = np.random.default_rng(seed)
    return tuple(
        rng.normal(size=(b, n, t, d)).astype(F)
        for n, t in ((h, tq), (heads, tk), (heads, tk), (h, tq))
    )


def integers(b=2, h=4, heads=2, tq=70, tk=150, d=64, *, seed=0) -> tuple[np.ndarray, ...]:
    """q, k, v and do of integers from -2 to 2, and 7 once in each head: the scale 448 / 7 is a
    power of two, in blocks of MX too.

    Codes are the integers times 64, or a power of two, so that sums of their products are exact in
    float32 in any order.
    """
    rng = np.random.default_rng(seed)
    found = [
        rng.integers(-2, 3, (b, n, t, d)).astype(F)
        for n, t in ((h, tq), (heads, tk), (heads, tk), (h, tq))
    ]
    for x in found:
        x[:, :, -1, -1] = 7
    return tuple(found)


SCALE = 1 / 64
"""A softmax scale under which probabilities of ``integers`` lie within 2^5 of each other: their
codes times integers have exact sums.
"""


def documents(b=2, tq=70, tk=150) -> tuple[np.ndarray, np.ndarray]:
    """Three documents, of which queries of the last sequence see other keys than those of the
    first.
    """
    return np.stack([np.arange(tq) * (3 + i) // tq for i in range(b)]), np.stack(
        [np.arange(tk) * (3 + i) // tk for i in range(b)]
    )


def native(name: str) -> Variant:
    """The variant with sums as a library has them where they are exact: no tensor core's, a tile at
    a time.
    """
    variant = VARIANTS[name]
    if variant.real or variant.fmt.bits != 8:
        return variant
    return dataclasses.replace(variant, plan="exact", promotion=1)


class Bound(NamedTuple):
    """How far two implementations may be apart, from the simulator's quantized tensors.

    exponent   [B, H, Tq, 1]: of an exponent, in units of ln.
    weights    [B, H, Tq, Tk]: probabilities of real arithmetic on the dequantized tensors.
    v          [B, H, Tk, D]: dequantized.
    """

    exponent: np.ndarray
    weights: np.ndarray
    v: np.ndarray

    def differing(self) -> float:
        """How many codes of P may differ. One does if a midpoint between two codes lies between
        both P, a relative distance of 2 E. Midpoints of e4m3 are a relative distance of 2^-4 apart
        at least, so that this happens in a share of 2 E 2^4 of all cases at most. Six standard
        deviations are added, and one."""
        mean = float((32 * self.exponent * (self.weights > 0)).sum())
        return mean + 6 * math.sqrt(mean) + 1

    def output(self, found: np.ndarray, differing: np.ndarray, bits: int) -> np.ndarray:
        """Of an output that is rounded to so many mantissa bits, where these codes of P differ:
        each by a unit, 2^-3 of it; a cast P is at most 1 + 2^-4 of it. All others share a relative
        error of two exponents (P's and that of the sum), and of the roundings of a sum over the
        keys, of its 2 factors c a tile, and of 8 operations at the end."""
        v, keys = np.abs(self.v), self.v.shape[2]
        flipped = (self.weights * differing * 2.0**-3 * (1 + 2.0**-4)) @ v
        rounded = (np.exp(2 * self.exponent) - 1 + gamma(3 * keys + 8)) * (
            (self.weights * (1 + 2.0**-4)) @ v
        )
        # Both are rounded to nearest: neighbors at most, where they lie on both sides of a
        # midpoint.
        return 1.01 * (flipped + rounded) + 2.0**-bits * np.abs(found) + 1e-30


def call_options(**options) -> dict:
    """Options of a forward pass, those that are static in one Call, or in JAX's ``DeviceCall``."""
    kind = Call
    if {"over", "tokens", "layer"} & set(options):
        from fp8ref.jax.attention import DeviceCall

        kind = DeviceCall
    names = {field.name for field in dataclasses.fields(kind)}
    static = {name: options.pop(name) for name in names & set(options)}
    return {"variant": kind(**static), **options}


def backward_options(**options) -> dict:
    """Those of the backward pass: its result has the documents and the sinks."""
    for name in ("documents", "sinks"):
        options.pop(name, None)
    return call_options(**options)


def bound(
    variant: Variant,
    q,
    k,
    v,
    tensors: dict,
    *,
    mask: Mask,
    scale,
    documents,
    exponential_error: float,
    softcap=None,
    sinks=None,
) -> Bound:
    """The bound, of a variant on these inputs.

    exponential_error  of each exponential and hyperbolic tangent, relative.
    """
    call = Call(variant=variant, mask=mask, scale=scale, softcap=softcap)
    problem = attention_inputs.prepare(q, k, v, call, documents, sinks)
    granularity = variant.granularity or "tensor"
    wide = {}
    for role, x in (("q", q), ("k", k), ("v", v)):
        of_role = head_scaling.spread(
            tensors[role].scale_inv, x.shape, granularity, along_tokens=role == "v"
        )
        wide[role] = tensors[role].values.astype(np.float64) * of_role
    of_q, of_k, of_v = (
        wide["q"],
        *(np.repeat(wide[role], problem.group, axis=1) for role in ("k", "v")),
    )
    seen = np.stack([attention_inputs.allowed(problem, i) for i in range(len(q))])[:, None]
    s = of_q @ of_k.swapaxes(-1, -2) * float(problem.scale)
    s = np.where(seen, s if softcap is None else softcap * np.tanh(s / softcap), -np.inf)
    sizes = np.where(
        seen, np.abs(of_q) @ np.abs(of_k).swapaxes(-1, -2) * float(problem.scale), 0
    ).max(axis=-1, keepdims=True)
    of_sink = (
        np.full((1, 1, 1, 1), -np.inf) if sinks is None else sinks.astype(float)[:, None, None]
    )
    m = np.maximum(s.max(axis=-1, keepdims=True), of_sink)
    m = np.where(np.isfinite(m), m, 0)
    e = np.exp(s - m)
    weights = e / np.maximum(e.sum(axis=-1, keepdims=True) + np.exp(of_sink - m), 1e-300)
    # A score and a maximum each err by their sums, of D products, four factors and both sides'
    # roundings. The exponent is rounded twice on either side, as are the c of each tile: of a size
    # below 2 * sizes + 16, in base 2 by 1.5 more.
    tiles = -(-k.shape[2] // variant.tile(q.shape[3], mask))
    roundings = 2 * (1 + tiles) * 2.0**-23 * 1.5 * (2 * sizes + 16)
    # A-18's term of a softcap
    capped = 0 if softcap is None else 2 * softcap * (exponential_error + 2.0**-22)
    return Bound(
        2 * gamma(q.shape[3] + 8) * sizes + roundings + (1 + tiles) * exponential_error + capped,
        weights,
        of_v,
    )
