"""Whether Triton kernels or PyTorch's own operations cast on a device.

choice.resolve("auto", torch.device("cuda"))    # True on Hopper, if the self-check passes
"""

import functools

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from fp8ref.shared.errors import require
from fp8ref.spec import kernels
from fp8ref.spec.kernels import CAPABILITY, Choice, Kernels
from fp8ref.torch.kernels import launch

__all__ = ["explain", "resolve"]


def resolve(choice: Choice, device: torch.device) -> bool:
    """Whether Triton kernels cast on a device.

    ValueError as ``explain``.
    """
    return explain(choice, device).triton


def explain(choice: Choice, device: torch.device) -> Kernels:
    """What casts on a device, and why.

    choice    auto: Triton on an NVIDIA GPU of compute capability 8.9 or above where the self-check
              passed. triton: on a CPU too, in its interpreter, which is slow.
    Raises:   ValueError: as ``kernels.check``; 'triton' on a device that has no such kernels, or
              where the self-check failed.
    """
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return _explained(choice, device)


@functools.cache
def _explained(choice: Choice, device: torch.device) -> Kernels:
    kernels.check(choice)
    kind = device.type
    if choice == "plain":
        return Kernels(False, "asked for")
    reason = _obstacle(device)
    if choice == "auto":
        if kind == "cpu":
            return Kernels(False, "on a CPU")
        return Kernels(not reason, reason or "the self-check passed")
    if kind == "cpu":
        return Kernels(True, "interpreted on a CPU")
    require(
        not reason,
        f"kernels 'triton' need an NVIDIA GPU whose casts pass the self-check; on {kind}: "
        f"{reason}. Use 'auto' or 'plain', which give the same bits.",
    )
    return Kernels(True, "asked for")


def _obstacle(device: torch.device) -> str:
    """Why Triton kernels cannot cast on a device; "" if they can."""
    if not kernels.installed():
        return "Triton is not installed"
    if device.type == "cpu":
        return ""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{device.type} is no NVIDIA GPU"
    if (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no FP8 casts"
    return checked(device)


@functools.cache
def checked(device: torch.device) -> str:
    """``failure``, once a process and device, and a warning of one. While a compiler traces, too,
    the check runs on tensors with memory.
    """
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        wrong = failure(device)
    if wrong:
        kernels.warn(str(device), wrong)
    return wrong


def failure(device: torch.device) -> str:
    """As ``fp8ref.kernels.self_check.failure``, of launches on a device. A kernel that does not
    compile or run is a failure too."""
    from fp8ref.kernels import self_check

    def run(each, inputs, outputs) -> list[np.ndarray]:
        bits = [torch.from_numpy(x.view(f"i{x.itemsize}")) for x in inputs]
        dtypes = [getattr(torch, x.dtype.name) for x in inputs]
        tensors = [x.view(dtype).to(device) for x, dtype in zip(bits, dtypes, strict=True)]
        results = [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for shape, dtype in outputs
        ]
        launch.run(each, *tensors, *results)
        # NumPy has no bfloat16
        return [(x.view(torch.int16) if x.itemsize == 2 else x).cpu().numpy() for x in results]

    try:
        return self_check.failure(run)
    except Exception as error:  # whatever a compiler or a driver raises
        return kernels.broken(error)
