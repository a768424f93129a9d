"""A Hadamard rotation with random signs, which spreads outliers over all features (spec A-13), or
over the elements of a block (S-23).

The same rotation of q and k keeps their products, up to rounding: H D (H D)^T / n is I.
"""

import math

import numpy as np

from fp8ref.formats import BFLOAT16, FLOAT32, Format
from fp8ref.shared import errors
from fp8ref.sim import philox
from fp8ref.sim.quantize import cast
from fp8ref.spec.rotation import Rotation, check_size


def signs(size: int, seed: int) -> np.ndarray:
    """The signs of a rotation, float32 [size] of 1 and -1: bit 0 of word 0 of Philox's counter i,
    stream 0, set for -1.

    Raises:   ValueError: a size that is no power of two; a seed outside [0, 2^64).
    """
    check_size(size)
    errors.seed(seed)
    words = philox.words(np.arange(size, dtype=np.uint64), 0, seed)[:, 0]
    return np.where(words & np.uint32(1), np.float32(-1), np.float32(1))


def rotate_blocks(x, rotation: Rotation) -> np.ndarray:
    """Each block of ``rotation.size`` along the last axis rotated, rounded to bfloat16 (S-23).

    Shapes:   x float32, float16 or bfloat16 [..., K]; float32 of that shape.
    Order:    as ``rotate`` of each block.
    Raises:   ValueError: a K that blocks do not divide.
    """
    x = cast.array(x)
    if x.ndim == 0 or x.shape[-1] % rotation.size:
        raise ValueError(
            f"a rotation of {rotation.size} needs K divisible by it; got x.shape={x.shape}. Pad K."
        )
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // rotation.size, rotation.size)
    return rotate(blocks, np.array(rotation.signs, np.float32), BFLOAT16).reshape(x.shape)


def rotate(x, feature_signs: np.ndarray, fmt: Format = FLOAT32) -> np.ndarray:
    """x D H / sqrt(n) along the last axis, rounded to fmt.

    Shapes:   x float32, float16 or bfloat16 [..., n], n a power of two; float32 of that shape.
    Order:    x times its signs; for h = 1, 2, 4, ... below n: the elements i and i + h, i without
              bit h, become RN32(a + b) and RN32(a - b); then RN32(x * RN32(1 / sqrt(n))), then
              rounding to fmt.
    Raises:   ValueError: another number of signs than features.
    """
    value = cast.array(x).astype(np.float32)
    n = value.shape[-1]
    if feature_signs.shape != (n,):
        raise ValueError(
            f"{n} features need as many signs; got {feature_signs.shape}. Use signs({n}, seed)."
        )
    value = value * feature_signs
    h = 1
    while h < n:
        pairs = value.reshape(*value.shape[:-1], n // (2 * h), 2, h)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        with np.errstate(invalid="ignore", over="ignore"):  # infinities are results here
            value = np.stack([first + second, first - second], axis=-2).reshape(value.shape)
        h *= 2
    return cast.round_to(value * np.float32(1 / math.sqrt(n)), fmt)
