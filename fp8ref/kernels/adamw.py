"""A step of AdamW with float32 moments that also casts the weight (spec O-2 to O-6).

The step has the new weight in registers: it writes it rounded to the dtype of the model, its codes
in both orders by a scale that is known before, and its amax, of which the next scale is made.
"""

import triton
import triton.language as tl

from fp8ref.kernels import casts
from fp8ref.kernels.casts import Shape, load_tile, store_amax, store_cast, store_tile
from fp8ref.kernels.jit import Launch, Numbers

__all__ = ["NUMBERS", "step", "step_and_cast"]

NUMBERS = (
    "b1",
    "a1",
    "b2",
    "a2",
    "inverse1",
    "inverse2",
    "bound",
    "learning_rate",
    "eps",
    "weight_decay",
    "factor",
)
"""The numbers of a step, float32 [11], in order: of ``spec.states.layouts.Scalars``, and the factor
of gradients, such as of clipping; NaN skips the step, so that nothing changes."""


TILE = (32, 64)
"""Of four float32 tiles in registers; a line of 32 codes is a sector of the transposed ones."""


@triton.jit
def zero_below(x, least: tl.constexpr):
    """x with +0 in place of magnitudes below a number; NaN stays."""
    return tl.where(tl.abs(x) < least, 0.0, x)


@triton.jit
def averages(g, m, v, numbers_ptr, LERP: tl.constexpr):
    """The new moments, of a gradient that is put in range (O-2, O-5)."""
    g = g * tl.load(numbers_ptr + 10)
    g = tl.where(
        tl.abs(g) <= 72057594037927936.0, zero_below(g, 1.3877787807814457e-17), float("nan")
    )  # 2^56, 2^-56
    a1, a2 = tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 3)
    least: tl.constexpr = 7.888609052210118e-31 if LERP else 2.350988701644575e-38  # 2^-100, 2^-125
    if LERP:
        m, v = m + a1 * (g - m), v + a2 * (g * g - v)
    else:
        m, v = tl.load(numbers_ptr) * m + a1 * g, tl.load(numbers_ptr + 2) * v + a2 * (g * g)
    return zero_below(m, least), zero_below(v, least)


@triton.jit
def changed(p, m, root, numbers_ptr, BOUNDED: tl.constexpr):
    """The new weight, of the new moments and the root of v (O-6)."""
    divisor = root * tl.load(numbers_ptr + 5) + tl.load(numbers_ptr + 8)
    ratio = tl.div_rn(m * tl.load(numbers_ptr + 4), divisor)
    if BOUNDED:
        bound = tl.load(numbers_ptr + 6)
        ratio = tl.where(ratio > bound, bound, tl.where(ratio < -bound, -bound, ratio))
    change = tl.load(numbers_ptr + 7) * (ratio + tl.load(numbers_ptr + 9) * p)
    return p - zero_below(change, 8.077935669463161e-28)  # 2^-90


@triton.jit
def _new(
    p_ptr, g_ptr, m_ptr, v_ptr, numbers_ptr, M, N, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """This program's tile of the new weight and moments."""
    p = load_tile(p_ptr, N, 1, M, N, BM, BN, EVEN)
    old_m = load_tile(m_ptr, N, 1, M, N, BM, BN, EVEN)
    old_v = load_tile(v_ptr, N, 1, M, N, BM, BN, EVEN)
    g = load_tile(g_ptr, N, 1, M, N, BM, BN, EVEN)
    m, v = averages(g, old_m, old_v, numbers_ptr, False)
    # O-4 reads a master that is no float32 parameter
    read = p if p_ptr.dtype.element_ty == tl.float32 else zero_below(p, 2.350988701644575e-38)
    new = changed(read, m, tl.sqrt_rn(v), numbers_ptr, False)
    factor = tl.load(numbers_ptr + 10)
    skipped = factor != factor
    return tl.where(skipped, p, new), tl.where(skipped, old_m, m), tl.where(skipped, old_v, v)


@triton.jit
def _store(
    p, m, v, p_ptr, m_ptr, v_ptr, weight_ptr, M, N, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, OWN: tl.constexpr
):  # fmt: skip
    """Store a tile's state and its weight; return the weight as it is stored, float32."""
    if not OWN:
        store_tile(p, p_ptr, M, N, BM, BN, EVEN)
    store_tile(m, m_ptr, M, N, BM, BN, EVEN)
    store_tile(v, v_ptr, M, N, BM, BN, EVEN)
    weight = p.to(weight_ptr.dtype.element_ty)
    store_tile(weight, weight_ptr, M, N, BM, BN, EVEN)
    return weight.to(tl.float32)


@triton.jit
def _step(
    p_ptr, g_ptr, m_ptr, v_ptr, numbers_ptr, new_p_ptr, new_m_ptr, new_v_ptr,
    weight_ptr, amax_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, OWN: tl.constexpr
):  # fmt: skip
    p, m, v = _new(p_ptr, g_ptr, m_ptr, v_ptr, numbers_ptr, M, N, BM, BN, EVEN)
    w = _store(p, m, v, new_p_ptr, new_m_ptr, new_v_ptr, weight_ptr, M, N, BM, BN, EVEN, OWN)
    store_amax(w, amax_ptr)


@triton.jit
def _step_and_cast(
    p_ptr, g_ptr, m_ptr, v_ptr, numbers_ptr, scale_ptr, new_p_ptr, new_m_ptr,
    new_v_ptr, weight_ptr, q_ptr, t_ptr, amax_ptr, M, N, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, OWN: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    p, m, v = _new(p_ptr, g_ptr, m_ptr, v_ptr, numbers_ptr, M, N, BM, BN, EVEN)
    w = _store(p, m, v, new_p_ptr, new_m_ptr, new_v_ptr, weight_ptr, M, N, BM, BN, EVEN, OWN)
    store_cast(w, tl.load(scale_ptr), q_ptr, t_ptr, M, N, BM, BN, EVEN, E5M2)
    store_amax(w, amax_ptr)


def step(shape: Shape, *, own: bool = False) -> Launch:
    """p, g, m, v [M, N] and the ``NUMBERS`` -> p, m, v, the weight, and its partial amaxes.

    p, m and v are float32 or bfloat16, and may be updated in place; g is float32, float16 or
    bfloat16.
    own      whether the weight is p, in one memory.
    Order:   g times the factor, in O-2's range; O-5 by products; O-6 unbounded; each product, sum,
             quotient and root rounded to float32; p, m, v and the weight rounded to the dtypes of
             their pointers, each from float32.
    """
    return Launch(_step, casts.tiles(*shape, TILE), _numbers(shape, own), warps=4)


def step_and_cast(shape: Shape, *, own: bool = False, e5m2: bool) -> Launch:
    """p, g, m, v, the ``NUMBERS`` and a scale () -> p, m, v, the weight, its codes [M, N] and
    [N, M], and its partial amaxes; as ``step``."""
    numbers = _numbers(shape, own) | {"E5M2": e5m2}
    return Launch(_step_and_cast, casts.tiles(*shape, TILE), numbers, warps=4)


def _numbers(shape: Shape, own: bool) -> Numbers:
    numbers = casts.matrix(shape, (shape[1], 1), TILE) | {"OWN": own}
    del numbers["stride_m"], numbers["stride_n"]
    return numbers
