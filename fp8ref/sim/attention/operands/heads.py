"""Quantize q, k and v of attention: which elements share a scale, codes and values (spec A-2).

Tensors are [batch, heads, tokens, features]. The casts and scales are those of sections C and S;
only the groups are attention's own.
"""

from typing import NamedTuple

import numpy as np

from fp8ref import policy as policies
from fp8ref.formats import Format
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scales import magnitudes, scale_inv_from_scale, scales_from_amax
from fp8ref.spec.attention.variants import Granularity

MX = 32
"""Elements of an MX block."""

ROWS = 128
"""Tokens of a block of ``rows_128``."""


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
    magnitude = np.abs(x)
    b, h, t, d = x.shape
    if granularity == "tensor":
        return magnitude.max()[()]
    if granularity == "head":
        return magnitude.reshape(b, heads, -1).max(axis=-1)[:, :, None, None]
    if granularity == "rows_128":
        return padded(magnitude, ROWS).reshape(b, h, -1, ROWS * d).max(axis=-1)[..., None]
    if along_tokens:
        return padded(magnitude, MX).reshape(b, h, -1, MX, d).max(axis=3)
    if d % MX:
        raise ValueError(f"mx_1x32 needs features divisible by {MX}; got {d}. Pad them with zeros.")
    return magnitude.reshape(b, h, t, d // MX, MX).max(axis=-1)


def spread(
    scale: np.ndarray,
    shape: tuple[int, ...],
    granularity: Granularity,
    *,
    along_tokens: bool = False,
) -> np.ndarray:
    """Scales repeated over their groups, so that they broadcast against a tensor of this shape."""
    h, t = shape[1:3]
    if granularity == "tensor":
        return scale
    if granularity == "head":
        return np.repeat(scale, h // scale.shape[1], axis=1)
    if granularity == "rows_128":
        return np.repeat(scale, ROWS, axis=2)[:, :, :t]
    return np.repeat(scale, MX, axis=2)[:, :, :t] if along_tokens else np.repeat(scale, MX, axis=3)


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
    amaxes = amax(x, granularity, heads=heads, along_tokens=along_tokens)
    if scale is None:
        scales = scales_from_amax(amaxes, fmt, policies.by_name(policy))
        multiplier, inverse = scales.scale, scales.scale_inv
    else:
        multiplier = given_scale(scale, np.shape(amaxes))
        inverse = scale_inv_from_scale(multiplier)
    with np.errstate(over="ignore"):  # a given scale may clip
        scaled = x * spread(multiplier, x.shape, granularity, along_tokens=along_tokens)
    codes = cast.encode(scaled, fmt)
    return Heads(cast.decode(codes, fmt), codes, amaxes, multiplier, inverse)


def given_scale(scale, shape: tuple[int, ...]) -> np.ndarray:
    """A scale of earlier steps.

    ValueError: another shape, dtype, or a scale that is not positive and finite.
    """
    scale = magnitudes(np.asarray(scale), "scale")
    if scale.shape != shape:
        raise ValueError(f"a given scale has the shape of its groups, {shape}; got {scale.shape}.")
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise ValueError(f"a given scale is positive and finite; got {scale!r}.")
    return scale


def padded(x: np.ndarray, block: int) -> np.ndarray:
    """x with zeros behind its tokens, up to a multiple of block."""
    return np.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % block), (0, 0)])
