"""Whether Triton kernels cast: by the choice, the device, the package and the self-check."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from fp8ref.kernels import self_check as kernel_checks
from fp8ref.spec import kernels
from fp8ref.torch.kernels import choice

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of compute capability 9.0 whose self-check passes, as far as the choice sees."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choice, "failure", lambda device: "")
    for cache in (choice._explained, choice.checked):
        cache.cache_clear()
    yield monkeypatch
    for cache in (choice._explained, choice.checked):
        cache.cache_clear()


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
    gpu.setattr(choice, "failure", lambda device: "cast to e4m3fn has other codes")
    with pytest.warns(UserWarning, match="has other codes"):
        explained = choice.explain("auto", GPU)
    assert explained == kernels.Kernels(False, "cast to e4m3fn has other codes")
    with pytest.raises(ValueError, match="has other codes"):
        choice.resolve("triton", GPU)


def test_without_triton(gpu):
    gpu.setattr(kernels, "installed", lambda: False)
    assert not choice.resolve("auto", GPU)
    with pytest.raises(ValueError, match="pip install"):
        choice.resolve("triton", CPU)


def test_a_failed_self_check_is_warned_of_once_a_device(monkeypatch):
    monkeypatch.setattr(choice, "failure", lambda device: "codes differ")
    choice.checked.cache_clear()
    with pytest.warns(UserWarning, match=r"plain operations cast on cpu.*: codes differ\. Please"):
        assert choice.checked(CPU) == "codes differ"
    assert choice.checked(CPU) == "codes differ"  # without a warning, which would be an error
    choice.checked.cache_clear()


def test_a_gpu_without_an_index_is_the_current_one(gpu):
    gpu.setattr(torch.cuda, "is_available", lambda: True)
    gpu.setattr(torch.cuda, "current_device", lambda: 0)
    assert all(choice.resolve("auto", torch.device(name)) for name in ("cuda", "cuda:0"))
    assert choice._explained.cache_info().currsize == 1


@torch._dynamo.allow_in_graph
class Checked(torch.autograd.Function):
    """x, in whose passes the self-check runs."""

    @staticmethod
    def forward(ctx, x):
        assert choice.checked(CPU) == ""
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("inference", [False, True])
def test_the_self_check_runs_on_real_tensors_while_a_compiler_traces(inference, monkeypatch):
    first = list(itertools.islice(kernel_checks._launches(), 2))
    monkeypatch.setattr(kernel_checks, "_launches", lambda: first)
    choice.checked.cache_clear()
    f = torch.compile(lambda x: Checked.apply(x) * 2, fullgraph=True, backend="aot_eager")
    with torch.inference_mode(inference):
        x = torch.ones(3) if inference else torch.ones(3, requires_grad=True)
        assert torch.equal(f(x), torch.full((3,), 4.0))
    assert choice.checked.cache_info().misses == 1


def test_interpreted_kernels_pass(monkeypatch):
    launches = list(kernel_checks._launches())[::7]
    monkeypatch.setattr(kernel_checks, "_launches", lambda: launches)
    assert choice.failure(CPU) == ""


def test_a_wrong_result_of_a_launch_is_seen(monkeypatch):
    right = choice.launch.run

    def run(made, *tensors):
        right(made, *tensors)
        tensors[-1].view(torch.int32).flatten()[-1] ^= 1

    monkeypatch.setattr(choice.launch, "run", run)
    assert choice.failure(CPU) == "results of a cast differ from those of plain operations"


def test_a_kernel_that_does_not_run_is_a_failure(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("ptxas is missing\nmore")

    monkeypatch.setattr(choice.launch, "run", broken)
    assert choice.failure(CPU) == (
        "RuntimeError where a kernel was compiled or run: ptxas is missing"
    )
