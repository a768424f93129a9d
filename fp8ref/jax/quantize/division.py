"""Float32 quotients and square roots that are rounded once, to nearest even, on a GPU too.

On a CPU these are XLA's own. On an NVIDIA GPU XLA divides by PTX's ``div.full.f32`` and
``rcp.approx.f32`` and takes roots by ``sqrt.approx.f32``, which may be an ulp or two off
(openxla/xla, xla/service/gpu/llvm_gpu_backend/nvptx_backend.cc, commit 73190db, sets
``-nvptx-prec-divf32=1``). There they are computed in float64, whose instructions round correctly.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def product(a, b) -> Array:
    """RN32(a * b), clipped to float32's range, which only keeps XLA from fusing it with a sum."""
    largest = np.finfo(np.float32).max
    return jnp.clip(a * b, -largest, largest)


def divide(a, b) -> Array:
    """RN32(a / b), of float32 arrays that broadcast against each other, or numbers.

    Specials: as in IEEE 754. A quotient below 2^-126 may be an ulp off, or zero.
    """
    # Broadcast first: all branches then have one shape.
    a, b = jnp.broadcast_arrays(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    return lax.platform_dependent(a, b, cuda=divide_in_float64, default=lax.div)


def sqrt(x: Array) -> Array:
    """RN32(sqrt(x)), float32 of any shape. Specials: as in IEEE 754."""
    return lax.platform_dependent(x, cuda=sqrt_in_float64, default=lax.sqrt)


def divide_in_float64(a: Array, b: Array) -> Array:
    """``divide`` on a GPU: 2 a times the reciprocal of 2 b. LLVM makes a float64 quotient of
    float32 numbers, rounded to float32, a float32 quotient again, but not a product, nor 1 / (2 b).

    Its error, of two roundings, is below 2^-52 of the quotient. A quotient of 24-bit numbers a / b
    is no midpoint t of two float32 numbers, which has 25 bits: t * b would have more than 24. And
    t * b has at most 49 bits, so that a differs from it, and the quotient from t, by 2^-49 or more.
    """
    with jax.enable_x64(True):
        a64, b64 = (lax.convert_element_type(x, np.float64) * np.float64(2) for x in (a, b))
        quotient = lax.convert_element_type(a64 * (np.float64(1) / b64), np.float32)
    return _kept(quotient, a)


def sqrt_in_float64(x: Array) -> Array:
    """``sqrt`` on a GPU.

    Rounding twice is rounding once, as float64 has more than 2 * 24 + 1 bits.
    """
    with jax.enable_x64(True):
        root = lax.convert_element_type(
            lax.sqrt(lax.convert_element_type(x, np.float64)), np.float32
        )
    return _kept(root, x)


def _kept(rounded: Array, x: Array) -> Array:
    """The rounded result of x; a choice keeps XLA from dropping the rounding."""
    return jnp.where(jnp.isnan(x), x, rounded)
