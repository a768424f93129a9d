"""Quantize q, k and v of attention: which elements share a scale, codes and values (spec A-2).

Tensors are [batch, heads, tokens, features]. The casts and scales are those of sections C and S;
only the groups are attention's own.
"""

from typing import NamedTuple

import numpy as np

from fp8ref import policy as policies
from fp8ref.formats import Format
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scales import Scales, magnitudes, scale_inv_from_scale, scales_from_amax
from fp8ref.spec.attention.variant import Granularity, blocks


class Heads(NamedTuple):
    """A tensor of attention: hp ~ values * scale_inv, scales spread over their groups.

    values       float32 [B, H, T, D] of numbers of fmt.
    codes        uint8 of that shape; None in high precision.
    amax         float32 of ``scale``'s shape: the amaxes of the groups.
    scale        float32: () for ``tensor``; [B, Hkv, 1, 1] for ``head``; [B, H, ceil(T / 128), 1]
                 for ``rows_128``; [B, H, T, D / 32], or along the tokens [B, H, ceil(T / 32), D],
                 for ``mx_1x32``.
    scale_inv    float32 of that shape.
    """

    values: np.ndarray
    codes: np.ndarray | None
    amax: np.ndarray
    scale: np.ndarray
    scale_inv: np.ndarray


def amax(
    x: np.ndarray, granularity: Granularity, *, heads: int, along_tokens: bool = False
) -> np.ndarray:
    """The amax of each group of x [B, H, T, D], as ``Heads`` shapes them.

    Raises:   ValueError: for mx_1x32, features that 32 does not divide.
    """
    return scaling.block_amax(
        x, blocks(granularity, x.shape, heads=heads, along_tokens=along_tokens)
    )


def spread(
    scale: np.ndarray,
    shape: tuple[int, ...],
    granularity: Granularity | None,
    *,
    along_tokens: bool = False,
) -> np.ndarray:
    """Scales repeated over their groups, so that they broadcast against a tensor of this shape."""
    heads = scale.shape[1] if granularity == "head" else shape[1]
    return scaling.spread(
        scale, shape, blocks(granularity, shape, heads=heads, along_tokens=along_tokens)
    )


def quantize(
    x: np.ndarray,
    fmt: Format,
    granularity: Granularity | None,
    policy: str,
    *,
    heads: int,
    along_tokens: bool = False,
    scale=None,
) -> Heads:
    """Codes and values of x; in high precision x rounded to fmt.

    heads         heads of keys and values, whose groups ``head`` means.
    along_tokens  MX blocks lie along the tokens.
    scale         given, of earlier steps; None: made of x's amaxes.
    Shapes:   x float32 [B, H, T, D]; see ``Heads``.
    Order:    amax; scale by the policy (S-9, S-14); RN32(x * scale); saturate; round to nearest
              even (S-5).
    Raises:   ValueError: a given scale of another shape, or not positive and finite; as amax.
    """
    if granularity is None:
        unit = np.ones((), np.float32)
        return Heads(cast.round_to(x, fmt), None, np.abs(x).max()[()], unit, unit)
    block = blocks(granularity, x.shape, heads=heads, along_tokens=along_tokens)
    amaxes = scaling.block_amax(x, block)
    if scale is None:
        by = scales_from_amax(amaxes, fmt, policies.by_name(policy))
    else:
        by = given_scales(scale, np.shape(amaxes))
    codes = scaling.quantize_blocks(x, by, fmt, block)
    return Heads(cast.decode(codes, fmt), codes, amaxes, by.scale, by.scale_inv)


def given_scales(scale, shape: tuple[int, ...]) -> Scales:
    """A passed scale with its scale_inv; ValueError for an unusable one."""
    scale = magnitudes(np.asarray(scale), "scale")
    if scale.shape != shape:
        raise ValueError(f"the shape of a passed scale is {shape}; got {scale.shape}.")
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise ValueError(f"a passed scale is positive and finite; got {scale!r}.")
    return Scales(scale, scale_inv_from_scale(scale))
