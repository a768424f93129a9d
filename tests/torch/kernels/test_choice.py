"""Whether Triton kernels cast: by the choice, the device, the package and the self-check."""

import pytest
import torch

pytest.importorskip("triton")

from fp8ref.spec import kernels
from fp8ref.torch.kernels import choice, self_check

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of compute capability 9.0 whose self-check passes, as far as the choice sees."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(self_check, "failure", lambda device: "")
    choice._explained.cache_clear()
    yield monkeypatch
    choice._explained.cache_clear()


def test_a_cpu_casts_by_plain_operations_unless_asked():
    assert not choice.resolve("auto", CPU)
    assert not choice.resolve("plain", CPU)
    assert choice.resolve("triton", CPU)


def test_a_gpu_casts_by_triton_unless_asked(gpu):
    assert choice.resolve("auto", GPU)
    assert choice.resolve("triton", GPU)
    assert not choice.resolve("plain", GPU)


def test_an_old_gpu_casts_by_plain_operations(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choice.explain("auto", GPU).reason == "compute capability 8.0 has no FP8 casts"
    with pytest.raises(ValueError, match=r"compute capability 8\.0"):
        choice.resolve("triton", GPU)


def test_a_failed_self_check_turns_triton_off(gpu):
    gpu.setattr(self_check, "failure", lambda device: "cast to e4m3fn has other codes")
    assert choice.explain("auto", GPU) == kernels.Kernels(False, "cast to e4m3fn has other codes")
    with pytest.raises(ValueError, match="has other codes"):
        choice.resolve("triton", GPU)


def test_without_triton(gpu):
    gpu.setattr(kernels, "installed", lambda: False)
    assert not choice.resolve("auto", GPU)
    with pytest.raises(ValueError, match="pip install"):
        choice.resolve("triton", CPU)


def test_the_self_check_passes_here_and_sees_wrong_codes(monkeypatch):
    assert self_check.failure(CPU) == ""
    right = self_check.casts.cast

    def wrong(x, scale, e5m2):
        codes, transposed, parts = right(x, scale, e5m2)
        transposed.view(torch.uint8)[3, 5] ^= 1
        return codes, transposed, parts

    monkeypatch.setattr(self_check.casts, "cast", wrong)
    assert self_check.failure(CPU) == "cast to e4m3fn, transposed, has other codes"
