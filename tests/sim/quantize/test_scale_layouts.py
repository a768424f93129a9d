"""Layouts of scales, against torchao's and a transcription of DeepGEMM's (spec S-25)."""

import numpy as np
import pytest

from fp8ref.sim.quantize.scale_layouts import SCALE_LAYOUTS, load, store

SHAPES = [(1, 1), (3, 5), (32, 4), (128, 4), (130, 9), (256, 8), (257, 3)]


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_load_inverts_store(layout, shape, rng):  # S-25
    scales = rng.integers(1, 256, shape).astype(np.uint8)
    memory = store(scales, layout)
    np.testing.assert_array_equal(load(memory, layout, shape), scales)
    # every scale lies somewhere, and zeros between them
    assert memory.view(np.uint8).sum(dtype=int) == scales.sum(dtype=int)
    places = SCALE_LAYOUTS[layout].places(shape, 1)
    assert np.unique(places).size == scales.size


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swizzled_is_torchaos(shape, rng):  # S-25
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scales = rng.integers(0, 256, shape).astype(np.uint8)
    blocked = utils.to_blocked(torch.from_numpy(scales)).numpy()
    np.testing.assert_array_equal(store(scales, "swizzled_128x4"), blocked)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_is_deepgemms(shape, rng):  # S-25
    """DeepGEMM's own test: exponent bits of float32 scales, padded, four to an int32, transposed."""
    codes = rng.integers(0, 255, shape).astype(np.uint8)
    rows, columns = shape
    aligned = -(-rows // 4) * 4  # 16 bytes of int32
    padded = np.zeros((aligned, -(-columns // 4) * 4), np.uint8)
    padded[:rows, :columns] = codes
    expected = np.ascontiguousarray(padded.view(np.int32).T)  # [columns / 4, aligned rows]
    np.testing.assert_array_equal(store(codes, "packed_ue8m0"), expected.reshape(-1))
    # of float32 scales the unpacked form: each column begins at a multiple of 16 bytes
    scales = rng.random(shape).astype(np.float32)
    memory = store(scales, "mn_major").reshape(columns, aligned)
    np.testing.assert_array_equal(memory[:, :rows].T, scales)
    assert not memory[:, rows:].any()


def test_bad_input():
    with pytest.raises(ValueError, match="layout is a ScaleLayout or one of row_major"):
        store(np.zeros((2, 2)), "swizzled")
    with pytest.raises(ValueError, match=r"packed_ue8m0 holds e8m0 codes, uint8 \[R, C\]; got fl"):
        store(np.zeros((2, 2)), "packed_ue8m0")
    with pytest.raises(ValueError, match=r"mn_major holds scales \[R, C\]; got float64 \(3,\)"):
        store(np.zeros(3), "mn_major")
    with pytest.raises(ValueError, match=r"of scales \[3, 5\] has 1024 of 1 bytes; got 511"):
        load(np.zeros(511, np.uint8), "swizzled_128x4", (3, 5))
