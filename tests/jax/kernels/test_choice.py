"""Whether Triton's kernels cast: by the choice, the device, the packages and the self-check."""

import importlib.util
import types

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from fp8ref.jax.kernels import TritonKernels, choice, launch
from fp8ref.spec import kernels
from fp8ref.spec.kernels import Kernels

CPU = jax.devices("cpu")[0]
GPU = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
OLD = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
OTHER = types.SimpleNamespace(platform="gpu", device_kind="MI300", compute_capability="gfx942")


@pytest.fixture
def gpu(monkeypatch):
    """The self-check passes, as far as the choice sees."""
    monkeypatch.setattr(choice, "failure", lambda device: "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return monkeypatch


def explained(asked, device, **options):
    return choice.explain.__wrapped__(asked, device, **options)


def test_a_cpu_casts_by_xla_unless_asked():
    assert explained("auto", CPU) == Kernels(False, "on a CPU")
    assert explained("plain", CPU) == Kernels(False, "asked for")
    assert explained("triton", CPU) == Kernels(True, "interpreted on a CPU")
    assert choice.kernels(Kernels(True, ""), CPU) == TritonKernels()


def test_a_gpu_casts_by_triton_unless_asked(gpu):
    assert explained("auto", GPU) == Kernels(True, "the self-check passed")
    assert explained("triton", GPU) == Kernels(True, "asked for")
    assert explained("plain", GPU) == Kernels(False, "asked for")
    assert choice.kernels(Kernels(True, ""), GPU) == TritonKernels(capability=90)
    assert choice.kernels(Kernels(False, ""), GPU) is None


@pytest.mark.parametrize(
    ("device", "options", "reason"),
    [
        (OLD, {}, "compute capability 8.0 has no FP8 casts"),
        (OTHER, {}, "gpu is no NVIDIA GPU"),
        (GPU, {"partitioned": True}, "XLA partitions the program"),
    ],
    ids=["old", "other", "plain jit"],
)
def test_what_has_no_kernels_casts_by_xla(device, options, reason, gpu):
    assert explained("auto", device, **options) == Kernels(False, reason)
    with pytest.raises(ValueError, match=f"{reason}. Use 'auto' or 'plain'"):
        explained("triton", device, **options)


def test_ahead_of_time_triton_casts_where_it_is_asked_for(gpu):
    assert not explained("auto", GPU, abstract=True).triton
    assert explained("triton", GPU, abstract=True).triton


def test_without_a_package(gpu):
    gpu.setattr(importlib.util, "find_spec", lambda name: None if name == "jax_triton" else name)
    assert "jax-kernels" in explained("auto", GPU).reason
    gpu.setattr(kernels, "installed", lambda: False)
    assert explained("auto", GPU) == Kernels(False, "Triton is not installed")


def test_a_failed_self_check_turns_triton_off(gpu):
    gpu.setattr(choice, "failure", lambda device: "cast to e4m3fn has other codes")
    assert explained("auto", GPU) == Kernels(False, "cast to e4m3fn has other codes")


def failing(monkeypatch, change, expected):
    """The self-check warns of a launch whose results a device changes."""
    right = launch.bind

    def bind(*arguments):
        return [change(x) for x in right(*arguments)]

    monkeypatch.setattr(launch, "bind", bind)
    with pytest.warns(UserWarning, match=f"plain operations cast on cpu.*{expected}"):
        assert choice.failure(CPU) == expected


def test_the_self_check_passes_here():
    assert choice.failure(CPU) == ""


@pytest.mark.parametrize(("kind", "flip"), [(jnp.uint8, 1), (jnp.int32, 1 << 20)])
def test_the_self_check_sees_wrong_codes_and_amaxes(kind, flip, monkeypatch):
    def change(x):
        return x ^ kind(flip) if x.dtype == kind else x

    failing(monkeypatch, change, "results of a cast differ from those of plain operations")


def test_a_kernel_that_does_not_run_is_a_failure(monkeypatch):
    def change(x):
        raise RuntimeError("ptxas is missing\nmore")

    message = "RuntimeError where a kernel was compiled or run: ptxas is missing"
    failing(monkeypatch, change, message)
