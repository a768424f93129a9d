"""Train under simulated hardware: a function on the host computes the FP8 GEMMs (spec G-19).

with hardware.simulating(sim_hardware.by_name("hopper")):  # sim_hardware is
fp8ref.sim.gemm.hardware
    loss(model(x)).backward()

One operator takes the place of torch._scaled_mm and torchao's kernels, eagerly and in compiled
graphs. It names the accumulation plan. A graph keeps the plan that it was compiled under: compile
and run inside the context.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torchao.float8 import float8_ops

from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32
from fp8ref.spec import support
from fp8ref.spec.hardware import Factor, Multiply
from fp8ref.torch.gemm.kind import GemmKind
from fp8ref.torch.quantize import cast

__all__ = ["OPERATOR", "active", "multiply", "simulating"]

REPLACED = "addmm_float8_unwrapped"
"""The private function of torchao that multiplies FP8 matrices in training."""

PARAMETERS = (
    "a_data",
    "a_scale",
    "b_data",
    "b_scale",
    "output_dtype",
    "output_scale",
    "bias",
    "use_fast_accum",
)
"""The parameters of that function in torchao 0.18."""

_OUT = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
# by name: an operator takes tensors, numbers and strings, but no function
_known: dict[str, Multiply] = {}
_active: list[Multiply] = []


@contextmanager
def simulating(multiply: Multiply | None) -> Iterator[None]:
    """In this context, multiply computes every FP8 GEMM of ``linear.Linear`` and Float8Linear.

    None changes nothing.

    Scope:    torchao's function is replaced for all threads, and restored at the end, after errors
              too.
    Raises:   ImportError: torchao has no such function, or one of other parameters.
    """
    if multiply is None:
        yield
        return
    original, problem = getattr(float8_ops, REPLACED, None), ""
    if original is None:
        problem = "is not there"
    elif original is not _addmm:
        parameters = tuple(inspect.signature(original).parameters)
        problem = f"takes {', '.join(parameters)}" if parameters != PARAMETERS else ""
    if problem:
        raise ImportError(
            "simulated hardware replaces "
            f"torchao.float8.float8_ops.{REPLACED}({', '.join(PARAMETERS)}), as of torchao "
            f"0.18; it {problem}. Install torchao 0.18, or use accumulate 'native'."
        )
    _known[multiply.name] = multiply
    _active.append(multiply)
    setattr(float8_ops, REPLACED, _addmm)
    try:
        yield
    finally:
        setattr(float8_ops, REPLACED, original)
        _active.pop()


def active() -> Multiply | None:
    """The function of the innermost context; None outside all contexts."""
    return _active[-1] if _active else None


@torch.library.custom_op("fp8ref::simulated_gemm", mutates_args=())
def multiply(
    codes_a: Tensor,
    codes_b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    kind: str,
    out_dtype: torch.dtype,
    plan: str,
) -> Tensor:
    """[M, K] x [N, K] -> [M, N] of out_dtype: the plan's function sums, scales and rounds.

    kind      text of a ``GemmKind``.
    Shapes:   float8 codes and float32 scale_inv (), [M, 1] or of blocks, in any strides.
    Raises:   ValueError: tensors on another device than the CPU.
    """
    support.require("devices of simulated hardware", "torch", codes_a.device.type)
    gemm = GemmKind.parse(kind)
    a, b = (
        Factor(
            codes.view(torch.uint8).numpy(), scale.numpy(), cast.FORMATS[codes.dtype], granularity
        )
        for codes, scale, granularity in (
            (codes_a, scale_inv_a, gemm.granularity_a),
            (codes_b, scale_inv_b, gemm.granularity_b),
        )
    )
    out = _known[plan](
        a,
        b,
        accumulate=gemm.accumulate,  # type: ignore[arg-type]
        epilogue=gemm.epilogue,
        out_dtype=_OUT[out_dtype],
    )
    return torch.from_numpy(out).to(out_dtype)  # exact: the function rounded to out_dtype


@multiply.register_fake
def _(codes_a, codes_b, scale_inv_a, scale_inv_b, kind, out_dtype, plan):
    return codes_a.new_empty((codes_a.shape[0], codes_b.shape[0]), dtype=out_dtype)


OPERATOR = torch.ops.fp8ref.simulated_gemm.default
"""The operator that ``multiply`` is in graphs and in dispatch."""


def _addmm(
    a_data,
    a_scale,
    b_data,
    b_scale,
    output_dtype,
    output_scale=None,
    bias=None,
    use_fast_accum=False,
) -> Tensor:
    """Replaces torchao's function: a_data [M, K] x b_data [K, N] -> [M, N].

    As in torchao, a rowwise GEMM rounds to bfloat16 (G-8), and a slow rowwise one runs under unit
    scales, is rounded, scaled and rounded again (G-5). The simulator computes these roundings too.
    """
    if output_scale is not None:
        raise ValueError(
            "simulated hardware has no outputs in FP8; torchao asked for an output_scale. Use "
            "accumulate 'native'."
        )
    by = active()
    assert by is not None
    m, n = a_data.shape[0], b_data.shape[1]
    rowwise = a_scale.shape == (m, 1) and b_scale.shape == (1, n)
    scaled = "rowwise" if rowwise else "tensorwise"
    inverse_a, inverse_b = a_scale.reciprocal(), b_scale.reciprocal()
    scales = (
        (inverse_a, inverse_b.t()) if rowwise else (inverse_a.reshape(()), inverse_b.reshape(()))
    )
    epilogue = "unit_round_scale_round" if rowwise and not use_fast_accum else "scale_then_round"
    kind = GemmKind(scaled, scaled, "fast" if use_fast_accum else "slow", epilogue)
    rounded = torch.bfloat16 if rowwise else output_dtype
    out = multiply(a_data, b_data.t(), *scales, kind.text, rounded, by.name).to(output_dtype)
    return out if bias is None else out + bias
