"""The gradient of RMSNorm, and of the residual stream that it reads (spec M-11).

h and gradients are [M, N], contiguous; weight is [N]. Each program has some rows, and sums their
part of weight's gradient. Sums of a row, and of rows, are in no stated order.
"""

import triton
import triton.language as tl

from fp8ref.kernels import casts
from fp8ref.kernels.casts import Shape, magnitude
from fp8ref.kernels.jit import Launch, Numbers

__all__ = ["PROGRAMS", "gradient"]

PROGRAMS = 264
"""Programs of a launch, at most: two for each of an H100's processors."""


@triton.jit
def _row(x_ptr, row, N: tl.constexpr, BN: tl.constexpr):
    at = tl.arange(0, BN)
    return tl.load(x_ptr + row * N + at, mask=at < N, other=0.0).to(tl.float32)


@triton.jit
def _rounded(x, like_ptr):
    return x.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _gradient(
    first_ptr, second_ptr, third_ptr, total_ptr, h_ptr, factor_ptr, weight_ptr, h_gradient_ptr,
    weight_gradient_ptr, amax_ptr, M, COUNT: tl.constexpr, N: tl.constexpr, BN: tl.constexpr,
    READERS: tl.constexpr
):  # fmt: skip
    at, program = tl.arange(0, BN), tl.program_id(0)
    inside = at < N
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight_gradient = tl.zeros((BN,), tl.float32)
    largest = tl.zeros((BN,), tl.int32)
    for index in range(program, M, COUNT):
        row = tl.full((), index, tl.int64)  # the interpreter's index is Python's
        d = _row(second_ptr, row, N, BN)
        if READERS == 3:
            d = _rounded(_row(third_ptr, row, N, BN) + d, first_ptr)
        d = _rounded(d + _row(first_ptr, row, N, BN), first_ptr)
        factor = tl.load(factor_ptr + row)
        normed = _row(h_ptr, row, N, BN) * factor
        weight_gradient += d * normed
        d = d * weight
        mean = tl.div_rn(tl.sum(d * normed, 0), N * 1.0)
        h_gradient = _rounded(factor * (d - normed * mean), h_gradient_ptr)
        h_gradient = _rounded(_row(total_ptr, row, N, BN) + h_gradient, h_gradient_ptr)
        largest = tl.maximum(largest, magnitude(h_gradient))
        first = h_gradient_ptr + row * N
        tl.store(first + at, h_gradient, mask=inside)
    tl.store(weight_gradient_ptr + program * N + at, weight_gradient, mask=inside)
    tl.store(amax_ptr + program, tl.max(largest, 0))


@triton.jit
def _gradient_of_two(
    first_ptr, second_ptr, total_ptr, h_ptr, factor_ptr, weight_ptr, h_gradient_ptr,
    weight_gradient_ptr, amax_ptr, M, COUNT: tl.constexpr, N: tl.constexpr, BN: tl.constexpr,
    READERS: tl.constexpr
):  # fmt: skip
    _gradient(
        first_ptr, second_ptr, second_ptr, total_ptr, h_ptr, factor_ptr, weight_ptr,
        h_gradient_ptr, weight_gradient_ptr, amax_ptr, M, COUNT, N, BN, READERS
    )  # fmt: skip


def gradient(shape: Shape, readers: int) -> Launch:
    """The gradients by two or three readers of the norm, that of the sum behind it, h, factors of
    ``norms.statistics`` and weight -> the gradient of h, parts of weight's, float32 [programs, N],
    and partial amaxes of h's.

    Order:    d = RN(RN(third + second) + first), to their dtype; n = h * factor; t = mean(d weight
              n); factor * (d weight - n t), rounded to h's dtype; plus the sum's gradient, rounded.
    """
    count = min(shape[0], PROGRAMS)
    size = triton.next_power_of_2(shape[1])
    numbers: Numbers = {"M": shape[0], "COUNT": count, "N": shape[1], "BN": size}
    numbers |= {"READERS": readers}
    outputs = ((shape, "like"), ((count, shape[1]), "float32"), *casts.parts_of((count,)))
    kernel = _gradient if readers == 3 else _gradient_of_two
    return Launch(kernel, (count,), numbers, outputs)
