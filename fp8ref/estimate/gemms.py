"""Every GEMM of a step on one device: its shape, and what it runs in. What each takes, ``ledger`` says."""

from collections.abc import Iterator
from dataclasses import dataclass

from fp8ref.estimate.kernels import multiplies_fp8
from fp8ref.recipe import Decision, Gemm, GemmSpec
from fp8ref.train.config import Config
from fp8ref.train.device_shapes import tokens, used


@dataclass(frozen=True)
class Shape:
    """One GEMM on one device: [M, K] x [N, K] -> [M, N], of a linear, and how it runs."""

    linear: str
    which: Gemm
    m: int
    n: int
    k: int
    how: str
    fp8: bool


def name(linear: str) -> str:
    """model.layers.7.mlp.up_proj -> up_proj."""
    return linear.split(".")[-1]


def gemms(decision: Decision, config: Config, backend: str) -> Iterator[Shape]:
    """The three of a linear, of one part of a batch (SEMANTICS L-2)."""
    m, (n, k) = tokens(config), used(decision.path, decision.shape, config)
    if name(decision.path) == "lm_head" and config.parallel.sequence and backend == "jax":
        m //= config.parallel.tensor  # whole along tensor, of its own tokens
    for which, dims in (("output", (m, n, k)), ("grad_input", (m, k, n)), ("grad_weight", (n, k, m))):
        spec = decision.recipe.gemms[which]  # type: ignore[index]
        yield Shape(decision.path, which, *dims, how(spec, backend), multiplies_fp8(spec, backend))  # type: ignore[arg-type]


def how(spec: GemmSpec, backend: str) -> str:
    """Formats, granularities and accumulation of a GEMM, as on an H100 or H200."""
    if spec.a is None or spec.b is None:
        return "bf16"
    operands = " x ".join(f"{cast.fmt.name} {cast.granularity}" + " delayed" * (cast.delayed is not None) for cast in (spec.a, spec.b))
    return f"{operands}, {spec.accumulate}" if multiplies_fp8(spec, backend) else f"{operands}, dequantised: no FP8 GEMM (G-16)"
