import numpy as np
from numba import njit

from fp8ref.sim.kernels import bits

u32, f32 = np.uint32, np.float32


@njit
def apply(x, shift):
    return bits.as_bits(x), bits.as_float(bits.as_bits(x)), bits.shift_right(bits.as_bits(x), shift)


def test_operations_on_lanes():
    for x in (0.0, -0.0, 1.5, -2.75, 1e-45, 123456.78, -(2.0**31) + 128):
        as_bits, as_float, shifted = apply(f32(x), u32(3))
        expected = f32(x).view(u32)
        assert (as_bits, as_float, shifted) == (expected, f32(x), expected >> u32(3))
        assert np.signbit(as_float) == np.signbit(f32(x))


def test_shifts_are_of_32_bits():
    assert apply(f32(-1.0), u32(31))[2] == 1


def test_wide_vectors_are_asked_for():
    @njit
    def one_more(x):
        bits.prefer_wide_vectors()
        return x + 1

    assert one_more(1) == 2
    assert '"prefer-vector-width"="512"' in "".join(one_more.inspect_llvm().values())


def test_what_is_fetched_ahead_changes_nothing_and_may_lie_past_the_end(rng):
    @njit
    def summed(x, piece):
        total = u32(0)
        for begin in range(0, x.size, piece):
            bits.fetch_ahead(x, begin, piece)
            for value in x[begin : begin + piece]:
                total += value
        return total

    for size in (0, 1, bits.AT_A_TIME, 5 * bits.AT_A_TIME + 3):
        x = rng.integers(0, 1 << 20, size).astype(u32)
        for piece in (bits.AT_A_TIME, 100, 1):
            assert summed(x, piece) == x.sum()
    assert "llvm.prefetch" in "".join(summed.inspect_llvm().values())
