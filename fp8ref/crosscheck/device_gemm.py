"""What a GEMM's output is held to on the device that a backend multiplies on (spec B-1, B-16).

A CPU sums float32 in its own order: the exact result, within B-1's bound. NVIDIA's tensor cores cut
off products and sums: the result under their plan, within what their steps lose.
"""

import functools
from collections.abc import Sequence

import numpy as np

from fp8ref.conformance.kit.compare import Check, compare_bits, compare_values
from fp8ref.crosscheck import bounds
from fp8ref.formats import BFLOAT16
from fp8ref.recipe import GemmSpec
from fp8ref.sim.gemm import accumulate, gemm
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import TensorCore
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec.granularity import by_name as granularity_of
from fp8ref.spec.hardware import Factor, Multiply

PLANS = {
    (8, 9): {"fast": "ada", "slow": "ada"},
    (9, 0): {"fast": "hopper_fast", "slow": "hopper_slow"},
    (10, 0): {"fast": "blackwell", "slow": "blackwell"},
    (10, 3): {"fast": "blackwell", "slow": "blackwell"},
}
"""Compute capability -> the plan of an FP8 GEMM that is fast, and of one that is slow."""


@functools.cache
def capability(backend: str) -> tuple[int, int] | None:
    """The compute capability of the first NVIDIA GPU that a backend uses; None on anything else.

    backend   "jax" and "jax <mesh>" of this process; "torch" of it, "torch <mesh>" of gloo ranks.
    """
    if backend == "torch":
        import torch

        has_gpu = torch.cuda.is_available() and torch.version.cuda
        return torch.cuda.get_device_capability() if has_gpu else None
    if backend.startswith("torch"):  # ranks compute on the CPU
        return None
    import jax

    device, on_gpu = jax.devices()[0], jax.default_backend() == "gpu"
    version = getattr(device, "compute_capability", None) if on_gpu else None
    try:
        major, minor = map(int, str(version).split("."))
    except ValueError:  # another vendor's name for it, or none
        return None
    return major, minor


def plan(backend: str, spec: GemmSpec) -> Accumulation | None:
    """The plan of the tensor cores that a backend multiplies FP8 operands on; None where there are
    none, or where operands in blocks are dequantized first (G-16)."""
    casts = [cast for cast in (spec.a, spec.b) if cast is not None]
    if spec.accumulate is None or any(granularity_of(c.granularity).reduced for c in casts):
        return None
    plans = PLANS.get(capability(backend) or (0, 0))
    accumulation = accumulate.by_name(plans[spec.accumulate]) if plans else None
    assert accumulation is None or isinstance(accumulation, Accumulation)
    return accumulation


def simulated(backend: str, a: Quantized, b: Quantized, spec: GemmSpec) -> np.ndarray:
    """The simulator's output [M, K] x [N, K] -> [M, N], bfloat16: by the device's plan, or exact.

    With tensor cores the scales of two tensors are multiplied first, as cuBLASLt does (G-14).
    """
    of = plan(backend, spec)
    tensorwise = {a.granularity, b.granularity} == {"tensorwise"}
    by_tensor = tensorwise and spec.epilogue == "scale_then_round"
    epilogue = "product_then_round" if of is not None and by_tensor else spec.epilogue
    return gemm.matmul(a, b, accumulate=of or "exact", epilogue=epilogue, out_dtype=BFLOAT16)


def compare(
    check: Check,
    backend: str,
    parts: Sequence[bounds.Part],
    spec: GemmSpec,
    out: np.ndarray,
    *,
    names: tuple[str, str],
    wide: bool = False,
) -> None:
    """Compare a GEMM's output [M, N] with the simulator's within its bound; that of several devices
    with the sum of their outputs, each rounded (P-8).

    wide   devices' outputs are summed in float32, not bfloat16.
    """
    core = unit(backend, spec)
    if len(parts) == 1:
        ((a, b, expected),) = parts
        limit = bounds.gemm(a, b, spec, out, expected, unit=core)
    else:
        total = np.sum([part.out for part in parts], axis=0, dtype=np.float32)
        expected = cast.round_to(total, BFLOAT16)
        limit = bounds.summed_gemm(parts, spec, out, wide=wide, unit=core)
    compare_values(check, out, expected, limit, names=names)


def compare_planned(
    check: Check,
    operands: tuple[Quantized, Quantized],
    spec: GemmSpec,
    out: np.ndarray,
    multiply: Multiply,
    *,
    names: tuple[str, str],
) -> None:
    """Compare a GEMM's output with that under simulated hardware, bit for bit (B-12)."""
    assert spec.accumulate is not None
    factors = (Factor(q.codes, q.scale_inv, q.fmt, q.granularity) for q in operands)
    planned = multiply(
        *factors, accumulate=spec.accumulate, epilogue=spec.epilogue, out_dtype=BFLOAT16
    )
    compare_bits(check, out, planned, names=names)


def unit(backend: str, spec: GemmSpec) -> TensorCore | None:
    """The tensor core of the plan; None where there is none."""
    of = plan(backend, spec)
    return None if of is None else of.unit
