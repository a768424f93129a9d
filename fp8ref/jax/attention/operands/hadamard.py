"""A Hadamard rotation with random signs (spec A-13), in the simulator's order of additions."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8ref.jax.quantize import cast, philox
from fp8ref.shared import errors
from fp8ref.spec import rotation


def signs(size: int, seed: int) -> Array:
    """The signs of a rotation, float32 [size] of 1 and -1.

    Raises:   ValueError: a size that is no power of two; a seed outside [0, 2^64).
    """
    rotation.check_size(size)
    errors.seed(seed)
    key = jnp.uint32(seed & 0xFFFFFFFF), jnp.uint32(seed >> 32)
    word = philox.words(jnp.arange(size, dtype=jnp.uint32), 0, key)[0]
    return jnp.where((word & jnp.uint32(1)) == 1, jnp.float32(-1), jnp.float32(1))


def rotate(x: Array, signs: Array) -> Array:
    """x D H / sqrt(n) along the last axis, float32.

    Shapes:   x float32, float16 or bfloat16 [..., n], n a power of two; signs [n].
    Order:    x times its signs; for h = 1, 2, 4, ... below n: the elements i and i + h, i without
              bit h, become RN32(a + b) and RN32(a - b); then RN32(x * RN32(1 / sqrt(n))).
    """
    n = x.shape[-1]
    value = cast.to_f32(x) * signs
    h = 1
    while h < n:
        pairs = value.reshape(*value.shape[:-1], n // (2 * h), 2, h)
        if n <= 16:  # b + a and -b + a: XLA fuses them, and makes each sum anew for two others
            value = jnp.flip(pairs, -2) + pairs * np.array([1, -1], np.float32)[:, None]
        else:
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            value = jnp.stack([first + second, first - second], axis=-2)
        value = value.reshape(x.shape)
        h *= 2
    return value * np.float32(1 / math.sqrt(n))
