import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8ref.spec import granularity

NAMES = (
    "tensorwise",
    "rowwise",
    "blockwise_1x128",
    "blockwise_128x128",
    "mx_1x32",
    "mx_32x32",
    "nvfp4_1x16",
    "nvfp4_16x16",
)
SQUARES = ("blockwise_128x128", "mx_32x32", "nvfp4_16x16")
BLOCKS = {
    "blockwise_1x128": 128,
    "blockwise_128x128": 128,
    "mx_1x32": 32,
    "mx_32x32": 32,
    "nvfp4_1x16": 16,
    "nvfp4_16x16": 16,
}


def scale_shape_by_numpy(name: str, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape of the maxima that NumPy itself takes over each group of S-6."""
    x = np.zeros(shape, np.int8)
    if name == "tensorwise":
        return x.max().shape
    if name == "rowwise":
        return x.max(axis=axis, keepdims=True).shape
    block = BLOCKS[name]
    x = np.maximum.reduceat(x, range(0, shape[axis], block), axis=axis)
    if name in SQUARES:
        # those before it are batch dims
        for other in sorted(set(range(x.ndim)) - {axis % x.ndim})[-1:]:
            x = np.maximum.reduceat(x, range(0, shape[other], block), axis=other)
    return x.shape


@st.composite
def tensors(draw):
    """(name, shape, axis) in which blocks divide the reduced axis, and need not divide the
    others.
    """
    name = draw(st.sampled_from(NAMES))
    ndim = draw(st.integers(1, 3))
    axis = draw(st.integers(-ndim, ndim - 1))
    shape = [draw(st.integers(1, 3)) for _ in range(ndim)]
    if name in SQUARES and ndim > 1:
        shape[-2 if axis % ndim == ndim - 1 else -1] = draw(
            st.integers(1, 300 if ndim == 2 else 140)
        )
    shape[axis] = draw(st.integers(1, 3)) * BLOCKS.get(name, 1)
    return name, tuple(shape), axis


@given(tensors())
def test_scale_shape_is_that_of_the_groups_maxima(tensor):  # S-6
    assert granularity.scale_shape(*tensor) == scale_shape_by_numpy(*tensor)


@given(tensors())
def test_blocks_tile_the_tensor(tensor):  # S-6
    """Whole blocks along the reduced axis; along another the last one may reach beyond the tensor,
    but no block lies outside.
    """
    _, shape, axis = tensor
    scales, sizes = granularity.scale_shape(*tensor), granularity.blocks(*tensor)
    assert len(sizes) == len(shape)
    if not scales:
        assert sizes == shape
        return
    assert all(
        (count - 1) * size < n <= count * size
        for count, size, n in zip(scales, sizes, shape, strict=True)
    )
    assert scales[axis] * sizes[axis] == shape[axis]


@pytest.mark.parametrize(
    ("name", "shape", "axis", "scales"),
    [
        ("blockwise_128x128", (64, 256), 1, (1, 2)),
        ("blockwise_128x128", (256, 64), 0, (2, 1)),
        ("blockwise_128x128", (129, 128), 1, (2, 1)),
        ("blockwise_128x128", (128, 128), 1, (1, 1)),
        ("blockwise_128x128", (1, 128), 1, (1, 1)),
        ("blockwise_128x128", (128, 300), 0, (1, 3)),
    ],
)
def test_a_last_block_may_be_shorter_beside_the_reduced_axis(name, shape, axis, scales):  # S-6
    assert granularity.scale_shape(name, shape, axis) == scales
    assert granularity.blocks(name, shape, axis) == (128,) * len(shape)


@pytest.mark.parametrize(
    ("shape", "axis", "sizes", "scales"),
    [
        ((3, 128, 300), 1, (1, 128, 128), (3, 1, 3)),
        ((3, 300, 128), -1, (1, 128, 128), (3, 3, 1)),
        ((128, 3, 300), 0, (128, 1, 128), (1, 3, 3)),
        ((2, 3, 130, 256), -1, (1, 1, 128, 128), (2, 3, 2, 2)),
    ],
)
def test_no_block_spans_two_matrices_of_a_batch(shape, axis, sizes, scales):  # S-6, L-10
    assert granularity.blocks("blockwise_128x128", shape, axis) == sizes
    assert granularity.scale_shape("blockwise_128x128", shape, axis) == scales


@given(tensors())
def test_a_negative_axis_is_the_same_axis(tensor):
    name, shape, axis = tensor
    assert granularity.scale_shape(name, shape, axis % len(shape)) == granularity.scale_shape(
        name, shape, axis % len(shape) - len(shape)
    )


@pytest.mark.parametrize(
    ("name", "axis", "sizes", "scales"),
    [
        ("tensorwise", 1, (256, 384), ()),
        ("rowwise", 1, (1, 384), (256, 1)),
        ("rowwise", 0, (256, 1), (1, 384)),
        ("blockwise_1x128", 1, (1, 128), (256, 3)),
        ("blockwise_1x128", 0, (128, 1), (2, 384)),
        ("blockwise_128x128", 1, (128, 128), (2, 3)),
        ("blockwise_128x128", 0, (128, 128), (2, 3)),
        ("mx_1x32", 1, (1, 32), (256, 12)),
        ("mx_1x32", 0, (32, 1), (8, 384)),
    ],
)
def test_blocks_and_scales_of_a_256_by_384_matrix(name, axis, sizes, scales):  # S-6
    assert granularity.blocks(name, (256, 384), axis) == sizes
    assert granularity.scale_shape(name, (256, 384), axis) == scales


def test_a_scalar_has_one_tensorwise_scale():
    assert granularity.scale_shape("tensorwise", (), -1) == ()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0,), (0, 128), (128, 0)])
def test_an_empty_tensor_is_refused(name, shape):  # S-7
    with pytest.raises(ValueError, match="at least one element"):
        granularity.scale_shape(name, shape, -1)


@pytest.mark.parametrize(
    ("name", "shape", "axis", "said"),
    [
        ("blockwise_1x128", (64, 200), -1, "K, the reduced axis, divisible by 128"),
        ("blockwise_1x128", (200, 64), 0, "K, the reduced axis, divisible by 128"),
        ("mx_1x32", (64, 33), 1, "K, the reduced axis, divisible by 32"),
        ("blockwise_128x128", (256, 64), 1, "K, the reduced axis, divisible by 128"),
        ("blockwise_128x128", (64, 256), 0, "K, the reduced axis, divisible by 128"),
    ],
)
def test_a_block_that_does_not_divide_names_axis_shape_and_remedy(name, shape, axis, said):  # S-6
    with pytest.raises(ValueError, match=said) as error:
        granularity.scale_shape(name, shape, axis)
    assert f"got x.shape={shape}, axis={axis % 2}. Pad it with zeros or use 'rowwise'." in str(
        error.value
    )


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_is_not_there_is_refused(axis):
    with pytest.raises(ValueError, match=f"2-d tensor; got axis={axis}"):
        granularity.scale_shape("rowwise", (4, 4), axis)


@pytest.mark.parametrize(("axis", "counted"), [(0, 0), (1, 1), (2, 2), (-1, 2), (-3, 0)])
def test_normalize_axis_counts_from_the_front(axis, counted):
    assert granularity.normalize_axis(axis, 3) == counted


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'columnwise'") as error:
        granularity.by_name("columnwise")
    assert all(name in str(error.value) for name in NAMES)


def test_the_names_are_those_of_the_clause():  # S-6
    assert tuple(granularity.GRANULARITIES) == NAMES
    assert all(granularity.by_name(name).name == name for name in NAMES)
