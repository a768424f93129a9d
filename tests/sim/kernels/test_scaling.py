"""The compiled amax and scaled cast against the plain ones, through every granularity."""

import ml_dtypes
import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E5M2, E5M2FNUZ
from fp8ref.sim import threads as parallel
from fp8ref.sim.quantize import scaling
from fp8ref.spec.granularity import GRANULARITIES, block_counts, block_sizes, lengths, scale_shape

SHAPES = [
    (256, 256),
    (300, 256),
    (256, 300),
    (3, 130, 128),
    (128,),
    (1, 128),
    (384, 128, 2),
    (64, 4096),
]


def tensor(shape, dtype):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 12, shape))).astype(np.float32)
    x.flat[[1, 3, 77]] = -0.0, np.nan, -np.inf
    return x.astype(dtype)


@pytest.mark.grid(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["float32", "bfloat16", "float16"]
)
def test_equal_to_the_plain_functions(shape, dtype):  # S-2, S-5, S-6
    x = tensor(shape, dtype)
    compared = 0
    for granularity in GRANULARITIES:
        for axis in range(-len(shape), len(shape)):
            try:
                shape_of_scales = scale_shape(granularity, shape, axis)
            except ValueError:  # K is not a multiple of the block: refused alike
                with pytest.raises(ValueError, match="divisible"):
                    scaling.amax(x, granularity, axis=axis)
                continue
            blocks = lengths(granularity, len(shape), axis)
            amax = scaling.block_amax_plain(x, blocks).reshape(shape_of_scales)[()]
            for view, threads in ((x, 1), (x, 2), (np.asfortranarray(x), 2)):
                with parallel.using(threads):
                    found = scaling.amax(view, granularity, axis=axis)
                    np.testing.assert_array_equal(found, amax)
                    assert found.shape == amax.shape
                    assert found.dtype == np.float32
                    for fmt in (E4M3FN, E5M2, E5M2FNUZ):
                        scales = scaling.scales_from_amax(amax, fmt, "torchao")
                        q = scaling.quantize_with(
                            view, scales, fmt, granularity=granularity, axis=axis
                        )
                        plain = scaling.quantize_blocks_plain(view, scales, fmt, blocks)
                        np.testing.assert_array_equal(q.codes, plain)
                        compared += 1
    assert compared >= 9


def test_nan_is_found_in_any_place_and_by_any_bits():  # S-2
    for bits in (0x7F800001, 0xFFC00000, 0x7FFFFFFF):
        for place in (0, 500, 1023):
            x = np.full(1024, 1e30, np.float32)
            x[place] = np.uint32(bits).view(np.float32)
            assert np.isnan(scaling.amax(x))
            assert np.isnan(scaling.amax(x.reshape(8, 128), "blockwise_1x128")).sum() == 1


def test_a_product_beyond_max_saturates():  # S-5: amax * scale may exceed max by rounding
    x = np.float32([3.5, 1]) * np.float32(1.0000001)
    scales = scaling.Scales(np.float32(128.00002), np.float32(1 / 128.00002))
    assert (x * scales.scale)[0] > 448
    assert scaling.quantize_with(x, scales, E4M3FN).codes[0] == E4M3FN.max_code


@pytest.mark.parametrize(
    "blocks",
    [(None,) * 4, (1, 2, None, None), (1, 1, 128, None), (1, 1, 1, 32), (1, 1, 32, 1)],
    ids=["tensor", "heads of a group", "128 rows", "MX", "MX along the tokens"],
)
def test_blocks_of_attention(blocks):  # S-2, S-5, S-6
    """Blocks that have no name: by definition, and by kernels; the last one is shorter."""
    x = tensor((2, 4, 200, 64), ml_dtypes.bfloat16)
    shape = block_counts(x.shape, blocks)
    amaxes = scaling.block_amax(x, blocks)
    np.testing.assert_array_equal(amaxes, scaling.block_amax_plain(x, blocks))
    assert amaxes.shape == shape
    sizes = block_sizes(x.shape, blocks)
    for index in np.ndindex(shape or (1,) * 4):
        block = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, sizes, strict=True))
        largest = np.abs(x[block].astype(np.float32)).max()
        np.testing.assert_array_equal(amaxes[index if shape else ()], largest)
    scales = scaling.scales_from_amax(amaxes, E4M3FN, "torchao")
    codes = scaling.quantize_blocks(x, scales, E4M3FN, blocks)
    np.testing.assert_array_equal(codes, scaling.quantize_blocks_plain(x, scales, E4M3FN, blocks))
