"""The self-check of kernels runs them by the launches of PyTorch."""

import pytest
import torch

pytest.importorskip("triton")

from fp8ref.kernels import self_check as kernel_checks
from fp8ref.torch.kernels import self_check

CPU = torch.device("cpu")


def test_interpreted_kernels_pass(monkeypatch):
    launches = list(kernel_checks._launches())[::7]
    monkeypatch.setattr(kernel_checks, "_launches", lambda: launches)
    assert self_check.failure(CPU) == ""


def test_a_wrong_result_of_a_launch_is_seen(monkeypatch):
    right = self_check.launch.run

    def run(made, *tensors):
        right(made, *tensors)
        tensors[-1].view(torch.int32).flatten()[-1] ^= 1

    monkeypatch.setattr(self_check.launch, "run", run)
    assert self_check.failure(CPU) == "results of a cast differ from those of plain operations"


def test_a_kernel_that_does_not_run_is_a_failure(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("ptxas is missing\nmore")

    monkeypatch.setattr(self_check.launch, "run", broken)
    assert self_check.failure(CPU) == (
        "RuntimeError where a kernel was compiled or run: ptxas is missing"
    )
