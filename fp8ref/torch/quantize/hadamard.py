"""A Hadamard rotation with random signs, which spreads outliers over all features (spec A-13), or
over the elements of a block (S-23)."""

import math

import numpy as np
import torch
from torch import Tensor

from fp8ref.shared import errors
from fp8ref.spec import rotation
from fp8ref.spec.rotation import Rotation
from fp8ref.torch.quantize import philox
from fp8ref.torch.quantize.float_values import SMALL, in_pieces


def signs(size: int, seed: int, device: torch.device) -> Tensor:
    """The signs of a rotation, float32 [size] of 1 and -1: bit 0 of word 0 of Philox's counter i,
    stream 0, set for -1.

    Raises:   ValueError: a size that is no power of two; a seed outside [0, 2^64).
    """
    rotation.check_size(int(size))  # a torch.SymInt, where a compiler traces
    errors.seed(seed)
    words = philox.words(torch.arange(size, device=device), 0, (seed & 0xFFFFFFFF, seed >> 32))[0]
    return 1.0 - 2.0 * (words & 1).float()


def rotate(x: Tensor, feature_signs: Tensor) -> Tensor:
    """x D H / sqrt(n) along the last axis; or of n features of several elements each, side by side.

    Shapes:   x hp [..., n] or [..., n m], n a power of two; feature_signs [n]; float32 of x's
              shape.
    Order:    x times its signs; for h = 1, 2, 4, ... below n: the elements i and i + h, i without
              bit h, become RN32(a + b) and RN32(a - b); then RN32(x * RN32(1 / sqrt(n))).
    """
    shape, n = x.shape, len(feature_signs)
    value = (x.float().unflatten(-1, (n, -1)) * feature_signs[:, None]).reshape(shape)
    h = 1
    while h < n:
        first, second = value.reshape(*shape[:-1], n // (2 * h), 2, -1).unbind(-2)
        value = torch.stack([first + second, first - second], dim=-2).reshape(shape)
        h *= 2
    return value * float(np.float32(1 / math.sqrt(n)))


def _fixed_signs(rotation: Rotation, device: torch.device) -> Tensor:
    """Those of a rotation, float32, made on the device: copying them there would make the host
    wait."""
    bits = [
        sum((s < 0) << i for i, s in enumerate(rotation.signs[k : k + 32]))
        for k in range(0, rotation.size, 32)
    ]
    places = torch.arange(min(rotation.size, 32), device=device)
    return torch.cat([1.0 - 2.0 * ((word >> places) & 1).float() for word in bits])


def rotate_blocks(x: Tensor, rotation: Rotation, axis: int) -> Tensor:
    """Each block of ``rotation.size`` along an axis rotated, rounded to bfloat16 (S-23).

    Shapes:   x hp [M, K]; axis -1 or -2; bfloat16 of that shape.
    Raises:   ValueError: a length of the axis that blocks do not divide.
    """
    size = rotation.size
    errors.require(
        x.shape[axis] % size == 0,
        f"a rotation of {size} needs the reduced axis divisible by it; got "
        f"x.shape={tuple(x.shape)}, axis={axis}. Pad it, or take a recipe without a rotation.",
    )
    feature_signs = _fixed_signs(rotation, x.device)
    inner = 1 if axis == -1 else x.shape[1]  # elements of a feature lie side by side
    blocks = x.detach().reshape(x.numel() // (size * inner), size * inner)
    rotated = in_pieces(
        lambda part, _: rotate(part, feature_signs).to(torch.bfloat16),
        blocks,
        torch.bfloat16,
        size=SMALL,
    )
    return rotated.view(x.shape)
