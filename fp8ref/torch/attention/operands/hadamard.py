"""A Hadamard rotation with random signs, which spreads outliers over all features (spec A-13)."""

import math

import numpy as np
import torch
from torch import Tensor

from fp8ref.shared import errors
from fp8ref.spec import rotation
from fp8ref.torch.quantize import philox


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
    """x D H / sqrt(n) along the last axis.

    Shapes:   x hp [..., n], n a power of two; feature_signs [n]; float32 of x's shape.
    Order:    x times its signs; for h = 1, 2, 4, ... below n: the elements i and i + h, i without
              bit h, become RN32(a + b) and RN32(a - b); then RN32(x * RN32(1 / sqrt(n))).
    """
    shape, n = x.shape, x.shape[-1]
    value = x.float() * feature_signs
    h = 1
    while h < n:
        first, second = value.reshape(*shape[:-1], n // (2 * h), 2, h).unbind(-2)
        value = torch.stack([first + second, first - second], dim=-2).reshape(shape)
        h *= 2
    return value * float(np.float32(1 / math.sqrt(n)))
