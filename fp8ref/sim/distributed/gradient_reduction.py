"""Gradients summed over ranks in FP8, by one scale for all ranks (spec P-21 to P-24).

``reduce`` is the sum of this project: codes travel, and each is added once, in float32. ``ring`` is
what a collective would give that adds in FP8 itself, as NCCL does: the sum is rounded after every
hop, so that it depends on the order of the ring; ``ring_bound`` bounds its error. ``accumulate``
adds microbatches in FP8.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fp8ref.formats import E4M3FN, Format
from fp8ref.policy import ScalePolicy
from fp8ref.shared.errors import require
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scales import Scales, scale_inv_from_scale, scales_from_amax
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import gradient_reduction
from fp8ref.spec.gradient_reduction import AutoScale, PreScale, Result

__all__ = ["reduce", "ring", "share"]


class Shared(NamedTuple):
    """The gradients of all ranks, cast by one scale.

    codes      uint8, an array for each rank.
    scale      float32 (): multiplied into FP8, factors included.
    scale_inv  float32 (): multiplies out of it.
    saturated  elements of all ranks that were clipped by more than a rounding (P-22).
    """

    codes: list[np.ndarray]
    scale: np.ndarray
    scale_inv: np.ndarray
    fmt: Format
    saturated: int


class Reduced(NamedTuple):
    """The sum or mean over ranks: value float32; under result ``codes`` also its codes, uint8,
    which ``scale_inv`` multiplies; and the saturated elements of casts and of sums."""

    value: np.ndarray
    codes: np.ndarray | None
    scale_inv: np.ndarray
    saturated: int


def shared_scales(
    amax,
    fmt: Format,
    policy: str | ScalePolicy = "torchao",
    *,
    prescale: PreScale = "one",
    ranks: int,
    mu=1.0,
) -> Scales:
    """The scale that all ranks share, from the largest amax of theirs, and RN32(1 / scale).

    Shapes:   amax float32 (), reduced over the ranks with P-3's flag; mu a number or float32 ().
    Order:    amax in [2^-90, 2^90], else NaN; the policy's scale; RN32(prescale * mu); their
              product.
    Specials: an infinite, NaN or larger amax gives NaN; a smaller one counts as 2^-90.
    Raises:   ValueError: a policy that divides or makes scale_inv; as
              ``gradient_reduction.factor``.
    Source:   spec P-21.
    """
    policy, amax = gradient_reduction.check_policy(policy), np.float32(amax)
    if not amax <= gradient_reduction.LARGEST:
        nan = np.asarray(np.nan, np.float32)
        return Scales(nan, nan)
    floored = np.maximum(amax, np.float32(gradient_reduction.SMALLEST))
    mu = gradient_reduction.constant_mu(float(mu))
    factor = gradient_reduction.factor(prescale, ranks) * mu
    scale = scales_from_amax(floored, fmt, policy).scale * factor
    return Scales(scale, scale_inv_from_scale(scale))


def share(
    grads: Sequence[np.ndarray],
    fmt: Format = E4M3FN,
    *,
    policy: str | ScalePolicy = "torchao",
    prescale: PreScale = "one",
    mu=1.0,
) -> Shared:
    """Cast each rank's gradient by the scale that all share.

    Shapes:   grads[r] float32, float16 or bfloat16, all of one shape; codes of that shape.
    Order:    amax of each rank; their maximum; ``shared_scales``; RN32(f32(g) * scale); clip to
              +-fmt.max; round to nearest even.
    Specials: an Inf or NaN of any rank makes every code of every rank NaN, zeros too.
    Raises:   ValueError: no ranks, or several shapes; empty gradients (S-7); a dtype wider than
              float32; a fmt that is not FP8; as ``shared_scales``.
    Source:   spec P-21; MS-AMP msamp/nn/distributed.py, _reduce_bucket.
    """
    gradient_reduction.check_format(fmt)
    shapes = {np.shape(g) for g in grads}
    text = f"the gradients of all ranks have one shape; got {sorted(shapes) or 'no ranks'}."
    require(len(shapes) == 1, text)
    amaxes = [scaling.amax(g) for g in grads]
    # np.max keeps a NaN, and so a NaN of any rank: P-3's flag.
    scales = shared_scales(np.max(amaxes), fmt, policy, prescale=prescale, ranks=len(grads), mu=mu)
    codes, saturated = [], 0
    for g in grads:
        scaled = scaling.scale_blocks(np.asarray(g), scales, (None,) * np.ndim(g))
        saturated += int(np.sum(np.abs(scaled) > gradient_reduction.saturates_above(fmt)))
        codes.append(scaling.saturate(scaled, fmt))
    return Shared(codes, scales.scale, scales.scale_inv, fmt, saturated)


def add(shared: Shared) -> np.ndarray:
    """The float32 sum of all ranks' codes: acc = RN32(acc + code), r ascending."""
    total = cast.decode(shared.codes[0], shared.fmt)
    for codes in shared.codes[1:]:
        total = total + cast.decode(codes, shared.fmt)
    return total


def reduce(
    grads: Sequence[np.ndarray],
    fmt: Format = E4M3FN,
    *,
    policy: str | ScalePolicy = "torchao",
    prescale: PreScale = "one",
    mu=1.0,
    mean: bool = True,
    result: Result = "float32",
) -> Reduced:
    """The sum or mean of all ranks' gradients, exchanged as codes.

    A reduce-scatter gives each rank its piece of it, an all-reduce the whole.

    Shapes:   grads as in ``share``; value float32 of their shape.
    Order:    ``share``; ``add``; under result ``codes`` the sum clipped and rounded to a code;
              scale_inv, times RN32(1 / ranks) of a mean; value = RN32(sum * scale_inv).
    Specials: an Inf or NaN of any rank makes the whole value NaN; a sum above fmt.max saturates
              under result ``codes``, and only there.
    Raises:   ValueError: as ``share``; an unknown result.
    Source:   spec P-21.

    >>> reduce([np.float32([1, 2]), np.float32([3, -8])]).value
    array([ 1.9285715, -3.0000002], dtype=float32)
    """
    gradient_reduction.check_result(result)
    shared = share(grads, fmt, policy=policy, prescale=prescale, mu=mu)
    total, codes, saturated = add(shared), None, shared.saturated
    if result == "codes":
        saturated += int(np.sum(np.abs(total) > gradient_reduction.saturates_above(fmt)))
        codes = scaling.saturate(total, fmt)
        total = cast.decode(codes, fmt)
    scale_inv = shared.scale_inv
    if mean:
        scale_inv = shared.scale_inv * gradient_reduction.share_of(len(grads))
    return Reduced(total * scale_inv, codes, scale_inv, saturated)


def next_mu(
    mu, saturated: int, elements: int, auto: AutoScale = gradient_reduction.AUTO
) -> np.float32:
    """mu of the next step, from the saturated elements of this one.

    Order:    above the threshold mu / 2, else RN32(mu * growth); within MU_MIN and MU_MAX.
    Source:   spec P-22; FP8-LM (arXiv:2310.18313), section 2.1.
    """
    mu = np.float32(mu)
    mu = mu * np.float32(0.5) if saturated > auto.allowed(elements) else mu * auto.growth
    return np.clip(mu, np.float32(gradient_reduction.MU_MIN), np.float32(gradient_reduction.MU_MAX))


def ring(
    codes: Sequence[np.ndarray],
    fmt: Format = E4M3FN,
    *,
    order: Sequence[int] | None = None,
    start: int = 1,
) -> np.ndarray:
    """The codes that a ring of ranks gives, which adds in FP8: rounded after each hop.

    order    the ranks along the ring, by default ascending.
    start    piece i begins at place start + i of the ring, and visits all places from there. 1 is
             NCCL's.
    Shapes:  codes uint8, an array for each rank, of one shape, and so the result; its pieces are
             the ranks' by P-1's ``ceil``, of the flattened array.
    Order:   acc = code of the first rank; at each hop acc = cast(acc + code), saturating.
    Raises:  ValueError: an order that is no permutation of the ranks.
    Source:  spec P-23; NCCL src/device/reduce_kernel.h, FuncSum<__nv_fp8_e4m3>.
    """
    n = len(codes)
    order = list(range(n)) if order is None else list(order)
    if sorted(order) != list(range(n)):
        raise ValueError(f"a ring visits each of {n} ranks once; got order {order}.")
    flat = np.stack([np.reshape(c, -1) for c in codes])
    sum_codes, size = np.empty(flat.shape[1], np.uint8), max(1, -(-flat.shape[1] // n))
    for i, begin in enumerate(range(0, flat.shape[1], size)):
        piece = slice(begin, begin + size)
        visits = [order[(start + i + step) % n] for step in range(n)]
        acc = flat[visits[0], piece]
        for rank in visits[1:]:
            # Rounded to float32 and then to FP8, a sum of two codes is the sum rounded once: 24
            # bits are at least twice those of FP8, and two (Figueroa, 1995). So are the 11 of
            # float16.
            with np.errstate(invalid="ignore"):  # Inf - Inf of e5m2, which ``share`` never makes
                hop = cast.decode(acc, fmt) + cast.decode(flat[rank, piece], fmt)
            acc = scaling.saturate(hop, fmt)
        sum_codes[piece] = acc
    return sum_codes.reshape(np.shape(codes[0]))


def ring_bound(codes: Sequence[np.ndarray], fmt: Format = E4M3FN) -> np.ndarray:
    """A bound on |decode(ring(codes)) - exact sum|, float64 in units of codes, for all orders.

    Source:   spec P-23, which derives it.
    """
    hops = len(codes) - 1
    size = np.sum([np.abs(cast.decode(c, fmt).astype(np.float64)) for c in codes], axis=0)
    relative = 2.0 ** -(fmt.mantissa_bits + 1)
    least = 2.0 ** (fmt.emin - fmt.mantissa_bits - 1)
    bound = ((1 + relative) ** hops - 1) * (size + least / relative)
    return np.where(size + bound > fmt.max, fmt.max + size, bound)


def accumulate(
    total: Quantized | None, g, fmt: Format = E4M3FN, *, policy: str | ScalePolicy = "torchao"
) -> Quantized:
    """Add the gradient of a microbatch to a sum that is kept in FP8.

    total     the sum so far; None before the first microbatch.
    Shapes:   g float32, float16 or bfloat16; codes of its shape, scales ().
    Order:    RN32(RN32(code * scale_inv) + f32(g)); its amax; scale; codes, as in ``share``, of one
              rank.
    Specials: an Inf or NaN in the sum or in g makes every code NaN, from then on.
    Raises:   ValueError: as ``share``; a g of another shape; a sum in another format.
    Source:   spec P-24; MS-AMP msamp/operators/arithmetic, add_to_fp8.
    """
    gradient_reduction.check_format(fmt)
    value = scaling.tensor(g).astype(np.float32)
    if total is not None:
        text = f"microbatches have gradients of one shape, {total.codes.shape}; got {value.shape}."
        require(total.codes.shape == value.shape, text)
        text = f"the format of a sum cannot change: it is {total.fmt}; got {fmt}. Use one fmt."
        require(total.fmt == fmt, text)
        with np.errstate(over="ignore", invalid="ignore"):
            value = scaling.dequantize(total) + value
    shared = share([value], fmt, policy=policy)
    return Quantized(shared.codes[0], shared.scale, shared.scale_inv, fmt, "tensorwise", -1)
