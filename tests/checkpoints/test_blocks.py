"""The largest and the mean code of blocks, in one piece and in many, are those of the definition."""

import numpy as np
import pytest
from checkpoints import made, models

from fp8ref.checkpoints import blocks, weights
from fp8ref.checkpoints.tensors import stored
from fp8ref.sim.quantize import cast


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    ("rule", "shape", "size"),
    [
        ("vllm_block", (300, 200), (128, 128)),
        ("vllm_group", (70, 256), (1, 128)),
        ("torchao_row", (70, 200), (1, 200)),
        ("torchao_tensor", (70, 200), (70, 200)),
        ("te_mxfp8_mx", (300, 128), (1, 32)),
    ],
)
def test_of_fp8(tmp_path, monkeypatch, rule, shape, size, small):
    if small:
        monkeypatch.setattr(blocks, "PIECE", 1000)
        monkeypatch.setattr(blocks, "BLOCKS", 8)
    x = models.spread(shape, 0)
    x[0, 0] = 0
    tensors = models.quantized({"m": x}, models.fp8(rule, ".weight_scale_inv"))
    codes = tensors["m.weight"].view(np.uint8)
    codes[3, 5] = 0x7F
    check(tmp_path, tensors, np.nan_to_num(np.abs(cast.decode(codes, "e4m3fn"))), size)
    held = [s for s in sections(tmp_path) if s.nan_at is not None]
    assert [s.nan_at for s in held] == [(3, 5)]


def test_of_packed_codes(tmp_path):
    tensors = models.quantized(
        {"m": models.spread((40, 64), 0)},
        models.nvfp4(".weight_scale_2", False)({"m": models.spread((40, 64), 0)}),
    )
    packed = tensors["m.weight"]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(40, 64)
    check(tmp_path, tensors, np.abs(cast.decode(codes, "e2m1fn")), (1, 16))


def sections(path) -> list[blocks.Section]:
    (weight,) = weights.find(stored(path)).values()
    return list(blocks.sections(weight))


def check(path, tensors, numbers: np.ndarray, size: tuple[int, int]) -> None:
    held = sections(made.write(path, tensors))
    (n, k), (height, width) = numbers.shape, size
    rows = [numbers[i : i + height] for i in range(0, n, height)]
    split = [[r[:, j : j + width] for j in range(0, k, width)] for r in rows]
    assert np.array_equal(
        np.concatenate([s.largest for s in held]), [[b.max() for b in r] for r in split]
    )
    means = np.concatenate([s.mean for s in held])
    assert np.allclose(means, [[b.mean() for b in r] for r in split], rtol=1e-6)
    assert sum(int(s.counts.sum()) for s in held) == numbers.size
    (weight,) = weights.find(stored(path)).values()
    counts = means.shape
    assert np.array_equal(np.concatenate([s.scales for s in held]), weight.scales.reshape(counts))
