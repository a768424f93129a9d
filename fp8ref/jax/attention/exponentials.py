"""Float32 exponentials, logarithms, tanh and fused products for attention (A-5, A-7, A-11, A-22).

XLA's float32 exponentials are approximations. ``exponential`` takes them (``fast``), or computes in
float64 and rounds (``stated``). The rest is always computed in float64.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fp8ref.jax.states import moments
from fp8ref.spec.attention.variants import Arithmetic


def times(a: ArrayLike, b: ArrayLike, arithmetic: Arithmetic) -> Array:
    """a * b, float32: ``stated``, rounded before any sum; ``fast``, as XLA compiles it."""
    return jnp.multiply(a, b) if arithmetic == "fast" else moments.product(a, b)


def exponential(x: Array, base: str, arithmetic: Arithmetic) -> Array:
    """2^x or e^x, float32 of any shape, of numbers below 128, or below 88.

    Specials: 0 of numbers below -200. XLA flushes results below 2^-126 to zero.
    fast      errs by 2 units of 2^-23. On a CPU XLA makes e^(x ln 2) of 2^x, which adds |x| / 2
              such units.
    stated    is RN32 of a float64 number that errs by less than 2^-50 of itself, of which 2^-52 are
              the library's and 2^-54 the argument's. It differs from the simulator's where a
              midpoint of float32 numbers lies that near: of numbers at random, in one case of 2^25.
    """
    if arithmetic == "fast":
        return jnp.exp2(x) if base == "2" else jnp.exp(x)
    with jax.enable_x64(True):
        wide = lax.convert_element_type(jnp.maximum(x, np.float32(-200)), np.float64)
        if base == "2":
            whole = lax.round(wide)
            power = lax.convert_element_type(whole, np.int64) + np.int64(1023)
            # The product with a power of two, made of its bits, is exact.
            power = lax.bitcast_convert_type(power << np.int64(52), np.float64)
            wide_exp = lax.exp((wide - whole) * np.float64(math.log(2))) * power
        else:
            wide_exp = lax.exp(wide)
        rounded = lax.convert_element_type(wide_exp, np.float32)
    return jnp.where(x < -200, jnp.float32(0), _kept(rounded, x))


def logarithm(x: Array, base: str) -> Array:
    """RN32 of ln x or log2 x in float64, float32 of positive numbers of any shape; as rare an
    exception as that of ``exponential``."""
    with jax.enable_x64(True):
        wide_log = lax.log(lax.convert_element_type(x, np.float64))
        if base == "2":
            wide_log = wide_log * np.float64(1 / math.log(2))
        rounded = lax.convert_element_type(wide_log, np.float32)
    return _kept(rounded, x)


def tanh(x: Array, arithmetic: Arithmetic) -> Array:
    """The hyperbolic tangent of float32 numbers of any shape.

    fast      XLA's own, which errs by 8 units of 2^-23 at most.
    stated    RN32 in float64, as rare an exception as that of ``exponential``.
    """
    if arithmetic == "fast":
        return jnp.tanh(x)
    with jax.enable_x64(True):
        wide = lax.tanh(lax.convert_element_type(x, np.float64))
        rounded = lax.convert_element_type(wide, np.float32)
    return _kept(rounded, x)


def fused(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Array:
    """RN32(a * b + c), rounded once: float32 of finite numbers that broadcast against each other.

    Order:    the product is exact in float64; so is the sum, in two float64 numbers. The first is
              moved by one unit towards the second, to an odd last bit, unless the second is zero.
              Rounding that to float32 is rounding the exact sum, as float64 has 29 bits more
              (Boldo, Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
              using rounding to odd", 2008).
    Specials: as XLA, which flushes subnormal results to zero.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(v) for v in (a, b, c)))
    with jax.enable_x64(True):
        a64, b64, c64 = (
            jnp.broadcast_to(lax.convert_element_type(v, np.float64), shape) for v in (a, b, c)
        )
        product = a64 * b64
        total = product + c64
        rest = total - product
        error = (product - (total - rest)) + (c64 - rest)
        bits = lax.bitcast_convert_type(total, np.int64)
        step = jnp.where((error > 0) == (total > 0), np.int64(1), np.int64(-1))
        odd = jnp.where((error == 0) | ((bits & np.int64(1)) == 1), bits, bits + step)
        rounded = lax.convert_element_type(lax.bitcast_convert_type(odd, np.float64), np.float32)
    return _kept(rounded, jnp.broadcast_to(jnp.asarray(a, jnp.float32), shape))


def ascending_sum(x: Array) -> Array:
    """The sum over the last axis, ascending from +0, each addition rounded: float32 [...].

    The additions are written out: XLA keeps their order, and no loop runs on the device. Without
    the barrier it would compute each column where it is added, in code as long as the row.
    """
    x = lax.optimization_barrier(x)
    total = jnp.zeros(x.shape[:-1], jnp.float32)
    for j in range(x.shape[-1]):
        total = total + x[..., j]
    return total


def _kept(rounded: Array, x: Array) -> Array:
    """The rounded result of x; a choice keeps XLA from dropping it (``division``)."""
    return jnp.where(jnp.isnan(x), x, rounded)
