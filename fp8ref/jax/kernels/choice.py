"""Whether Triton's kernels or XLA cast on a device.

ran = choice.explain("auto", jax.devices()[0])
with casting(choice.kernels(ran, jax.devices()[0])):
"""

import functools
import importlib.util
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.kernels import casts, launch
from fp8ref.jax.kernels.launch import TritonKernels
from fp8ref.jax.quantize import scales, scaling
from fp8ref.shared.errors import require
from fp8ref.spec import kernels as kernel_choice
from fp8ref.spec.kernels import CAPABILITY, Choice, Kernels

__all__ = ["explain", "kernels"]


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
    capability = _capability(device)
    return TritonKernels(capability=capability and capability[0] * 10 + capability[1])


def _capability(device: jax.Device) -> tuple[int, int] | None:
    """An NVIDIA GPU's compute capability."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _obstacle(device: jax.Device, abstract: bool) -> str:
    """Why Triton's kernels cannot cast on a device; "" if they can."""
    if not kernel_choice.installed():
        return "Triton is not installed"
    if device.platform == "cpu":
        return ""
    capability = _capability(device)
    if capability is None:
        return f"{device.platform} is no NVIDIA GPU"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed (pip install 'fp8ref[jax-kernels]')"
    if capability < CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no FP8 casts"
    return "" if abstract else failure(device)


def failure(device: jax.Device) -> str:
    """The first result of a kernel on a device that is not XLA's, in a few words; "" if none is. A
    kernel that does not compile or run is a failure too. It is warned of."""
    try:
        wrong = next(_differences(device), "")
        if not wrong and device.platform != "cpu":
            wrong = fused(device)
    except Exception as error:  # whatever a compiler or a driver raises
        wrong = kernel_choice.broken(error)
    if wrong:
        kernel_choice.warn(device.device_kind, wrong)
    return wrong


def _differences(device: jax.Device) -> Iterator[str]:
    """What differs of casts of every bfloat16 number, in whole and in ragged tiles."""
    launched = kernels(Kernels(True, ""), device)
    assert launched is not None
    bits = jnp.arange(65536, dtype=jnp.uint32).astype(jnp.uint16).reshape(256, 256)
    every = jax.device_put(lax.bitcast_convert_type(bits, jnp.bfloat16), device)
    by = scales.with_inverse(jax.device_put(jnp.float32(3.1415927), device))
    for x in (every, every[:200, :136], jnp.nan_to_num(every, posinf=1e38, neginf=-1e38)):
        for fmt in (E4M3FN, E5M2):
            plain = scaling.quantize(x, fmt, by=by).codes.astype(jnp.float32)
            q = casts.quantize(x, by, fmt, -1, launched)
            assert q.transposed is not None
            assert q.amax is not None
            for codes, order in ((q.codes, "as it lies"), (q.transposed.T, "transposed")):
                if not jnp.array_equal(codes.astype(jnp.float32), plain, equal_nan=True):
                    yield f"cast to {fmt.name}, {order}, has other codes"
            if not jnp.array_equal(q.amax, scaling.amax(x), equal_nan=True):
                yield "cast has another amax"


def fused(device: jax.Device) -> str:
    """As ``fp8ref.kernels.self_check.failure``, of launches on a device."""
    from fp8ref.kernels import self_check

    launched = kernels(Kernels(True, ""), device)
    assert launched is not None

    def run(each, inputs, outputs) -> list[jax.Array]:
        return launch.run(each, [jax.device_put(x, device) for x in inputs], outputs, launched)

    return self_check.failure(run)
