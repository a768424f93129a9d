"""Partial amaxes merged into an observation of delayed scaling (spec H-4)."""

import triton
import triton.language as tl

from fp8ref.kernels.jit import Launch

__all__ = ["merge"]

SIZE = 2048
"""How many partial amaxes are loaded at once."""


@triton.jit
def _merge(parts_ptr, seen_ptr, COUNT, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    largest = tl.zeros((SIZE,), tl.int32)
    for start in range(0, COUNT, SIZE):
        mask = start + at < COUNT
        largest = tl.maximum(largest, tl.load(parts_ptr + start + at, mask=mask, other=0))
    bits = tl.max(largest, 0)
    finite = bits < 0x7F800000
    amax = tl.where(finite, bits, 0).to(tl.float32, bitcast=True)
    tl.store(seen_ptr, tl.maximum(tl.load(seen_ptr), amax))
    not_finite = tl.where(finite, 0.0, 1.0)
    tl.store(seen_ptr + 1, tl.maximum(tl.load(seen_ptr + 1), not_finite))
    tl.store(seen_ptr + 2, 1.0)


def merge(shape: tuple[int]) -> Launch:
    """Partial amaxes, int32 [count] -> seen, float32 [3], which is changed in place: amax (of
    finite ones), not finite, seen."""
    return Launch(_merge, (1,), {"COUNT": shape[0], "SIZE": SIZE})
