"""Whether Triton's kernels or XLA cast on a device.

ran = choice.explain("auto", jax.devices()[0])
with casting(choice.kernels(ran, jax.devices()[0])):
"""

import functools
import importlib.util

import jax
from jax import Array

from fp8ref.jax.gemm.blackwell import capability
from fp8ref.jax.kernels import launch
from fp8ref.jax.kernels.launch import TritonKernels
from fp8ref.shared.errors import require
from fp8ref.spec import kernels as kernel_choice
from fp8ref.spec.kernels import CAPABILITY, Choice, Kernels


@functools.cache
def explain(
    choice: Choice, device: jax.Device, *, partitioned: bool = False, abstract: bool = False
) -> Kernels:
    """What casts on a device, and why.

    choice       auto: Triton on an NVIDIA GPU of compute capability 8.9 or above where the
                 self-check passed. triton: on a CPU too, in its interpreter, which is slow.
    partitioned  whether XLA partitions the program, under plain jit on a mesh.
    abstract     whether the device is of a topology description, where no check can run.
    Raises:      ValueError: as ``spec.kernels.check``; 'triton' on a device, or in a program, that
                 has no such kernels, or where the self-check failed.
    """
    kernel_choice.check(choice)
    if choice == "plain":
        return Kernels(False, "asked for")
    on_cpu = device.platform == "cpu"
    reason = "XLA partitions the program" if partitioned else _obstacle(device, abstract)
    if choice == "auto":
        if on_cpu or (abstract and not reason):
            reason = "on a CPU" if on_cpu else "ahead of time nothing is checked"
        return Kernels(not reason, reason or "the self-check passed")
    require(
        not reason,
        "kernels 'triton' need an NVIDIA GPU whose casts pass the self-check, and shard_map on a "
        f"mesh; on {device.device_kind}: {reason}. Use 'auto' or 'plain', which give the same "
        "bits.",
    )
    return Kernels(True, "interpreted on a CPU" if on_cpu else "asked for")


def kernels(ran: Kernels, device: jax.Device) -> TritonKernels | None:
    """What ``casting`` takes, of what casts on a device."""
    if not ran.triton:
        return None
    version = capability(device)
    return TritonKernels(capability=version and version[0] * 10 + version[1])


def _obstacle(device: jax.Device, abstract: bool) -> str:
    """Why Triton's kernels cannot cast on a device; "" if they can."""
    if not kernel_choice.installed():
        return "Triton is not installed"
    if device.platform == "cpu":
        return ""
    version = capability(device)
    if version is None:
        return f"{device.platform} is no NVIDIA GPU"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed (pip install 'fp8ref[jax-kernels]')"
    if version < CAPABILITY:
        return f"compute capability {version[0]}.{version[1]} has no FP8 casts"
    return "" if abstract else failure(device)


def failure(device: jax.Device) -> str:
    """As ``fp8ref.kernels.self_check.failure``, of launches on a device. A kernel that does not
    compile or run is a failure too. It is warned of."""
    from fp8ref.kernels import self_check

    launched = kernels(Kernels(True, ""), device)
    assert launched is not None

    def run(each, inputs, outputs) -> list[Array]:
        return launch.bind(each, [jax.device_put(x, device) for x in inputs], outputs, launched)

    try:
        wrong = self_check.failure(run)
    except Exception as error:  # whatever a compiler or a driver raises
        wrong = kernel_choice.broken(error)
    if wrong:
        kernel_choice.warn(device.device_kind, wrong)
    return wrong
