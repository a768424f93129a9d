"""A launch on a GPU, which is a recording here: its tensors, its numbers and its options."""

import contextlib
import types

import pytest
import torch

pytest.importorskip("triton")

from fp8ref.kernels import casts
from fp8ref.torch.kernels import launch


def test_a_gpu_contracts_no_products_and_sums(monkeypatch):  # M-11
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *tensors, **options: calls.append((grid, tensors, options))

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    made = casts.transpose((256, 128), (128, 1))
    planted = types.SimpleNamespace(
        kernel=Kernel(), grid=made.grid, numbers=made.numbers, warps=made.warps
    )
    codes = torch.empty(256, 128, dtype=torch.float8_e4m3fn, device="meta")
    launch.run(planted, codes, torch.empty(128, 256, dtype=torch.uint8, device="meta"))
    [(grid, tensors, options)] = calls
    assert grid == made.grid
    assert [x.dtype for x in tensors] == [torch.uint8, torch.uint8]  # triton#11111
    assert options == made.numbers | {"num_warps": made.warps, "enable_fp_fusion": False}
