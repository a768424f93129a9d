"""An H200 that torch's build for CPUs takes for present, so that inductor generates its kernels:
import this before torch.

Tensors of device "cuda" are FakeTensors: they have shapes and dtypes, and no memory. Nothing can
run on the device. What torch and inductor ask of it they are told: in C++ that CUDA is there, by
two registrations (``REGISTRATIONS``, compiled by g++), and in Python its properties. Everything
that inductor decides for an H200 it decides as there, but for what it would measure: it autotunes
no GEMM.

    fake_h200.install()
    with fake_h200.tensors():
        x = torch.empty(8, 8, device="cuda")
"""

import contextlib
import ctypes
import importlib.util
import subprocess
import sys
import tempfile
import types
from pathlib import Path

REGISTRATIONS = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>)
namespace at {
struct CUDAHooks : CUDAHooksInterface {  // the registry knows it by this name
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
"""
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 * 10**9,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    L2_cache_size=50 * 2**20,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
)


def install(*, b200: bool = False) -> None:
    """Make the device known to torch, which this imports; once a process. b200: one of compute
    capability 10.0, with an H200's memory and registers.

    Raises:   RuntimeError: torch is imported already, or its build has CUDA.
    """
    if "torch" in sys.modules:
        raise RuntimeError(
            "torch reads which devices there are once. Call fake_h200.install before torch is "
            "imported."
        )
    if b200:
        vars(PROPERTIES).update(name="NVIDIA B200", major=10, multi_processor_count=148)
    _register()
    import torch
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._subclasses import fake_tensor
    from torch.utils import _triton

    if torch.backends.cuda.is_built():
        raise RuntimeError(
            f"a device is faked in torch's build for CPUs; got {torch.__version__}. Install "
            f"torch {torch.__version__}+cpu."
        )
    torch.version.cuda = "13.0"
    answers = {
        "is_available": True,
        "is_initialized": False,  # there is no state of random numbers to keep
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": PROPERTIES,
        "get_device_name": PROPERTIES.name,
        "_lazy_init": None,
        "synchronize": None,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_rng_state": torch.empty(0, dtype=torch.uint8),
        "set_rng_state": None,
    }
    interface = device_interface.CudaInterface
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
        for kind in (interface, interface.Worker):
            if name.lstrip("_") in vars(kind):
                setattr(kind, name.lstrip("_"), staticmethod(_always(answer)))
    torch._C._cuda_cudaCachingAllocator_is_enabled = _always(True)
    torch._C._cuda_getCurrentRawStream = _always(0)
    # a constant is copied to no device
    fake_tensor.FakeTensorMode.avoid_device_init = property(_always(True))
    # the constants that inductor folds, which are of one element, it computes on the host
    global _kernels
    _kernels = torch.library.Library("aten", "IMPL", "CUDA")
    _kernels.impl(
        "empty.memory_format",
        lambda size, *, dtype=None, **_: torch.empty(size, dtype=dtype, device="cpu"),
    )
    _kernels.impl(
        "empty_strided",
        lambda size, stride, *, dtype=None, **_: torch.empty_strided(
            size, stride, dtype=dtype, device="cpu"
        ),
    )
    torch.nn.functional.scaled_dot_product_attention = _attention
    # Triton's source is text, which inductor writes without Triton
    if importlib.util.find_spec("triton") is None:
        scheduler.has_triton = _always(True)
        _triton.triton_hash_with_backend = _always("")
    else:
        _target_triton()


@contextlib.contextmanager
def tensors():
    """In this context new tensors are fake, and on the device unless another one is named."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        yield


def _always(answer):
    return lambda *_, **__: answer


def _attention(q, k, v, *, is_causal: bool, enable_gqa: bool):
    """What torch's build for CUDA calls: flash attention, which takes fewer heads of k and v than
    of q as they are, as cuDNN's does (``sdp_utils.cpp``; pytorch#139586).

    The build for CPUs has no choice to make for CUDA.
    """
    import torch

    assert enable_gqa or q.shape[1] == k.shape[1]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def _register() -> None:
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "registrations.cpp", Path(folder) / "registrations.so"
        source.write_text(REGISTRATIONS)
        flags = [
            "-std=c++20",
            "-fPIC",
            "-shared",
            f"-I{torch / 'include'}",
            f"-L{torch / 'lib'}",
            f"-Wl,-rpath,{torch / 'lib'}",
        ]
        subprocess.run(["g++", *flags, source, "-o", library, "-lc10", "-ltorch_cpu"], check=True)
        ctypes.CDLL(str(library))


def _target_triton() -> None:
    import torch
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", PROPERTIES.major * 10 + PROPERTIES.minor, PROPERTIES.warp_size)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = _always(None)
