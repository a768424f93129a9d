import numpy as np
import pytest

from fp8ref.sim.quantize import packing


def test_pairs():  # F-5
    codes = np.random.default_rng(0).integers(0, 16, (3, 8), dtype=np.uint8)
    packed = packing.pack(codes)
    assert packed.shape == (3, 4)
    assert packed[0, 0] == codes[0, 0] + 16 * codes[0, 1]
    np.testing.assert_array_equal(packing.unpack(packed), codes)


def test_errors():
    for call, message in (
        (lambda: packing.pack(np.uint8([1])), "an even number in the last axis"),
        (lambda: packing.pack(np.uint8([16, 0])), "codes up to 15"),
        (lambda: packing.unpack(np.ones(2)), "takes uint8 pairs"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_largest_code_is_said():
    with pytest.raises(ValueError, match=r"got uint8 \(2,\), the largest 16"):
        packing.pack(np.uint8([3, 16]))
