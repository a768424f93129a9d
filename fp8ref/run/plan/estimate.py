"""Every GEMM of a step on one device, and what FP8 would gain by data sheets: estimates, not measurements.

The model: a GEMM takes the longer of its FLOPs (2 M N K) at the tensor cores' peak and of its operands and result at the memory's full
bandwidth, bfloat16 of two bytes an element, FP8 of one, results of two. In FP8, casts come on top: bytes at full bandwidth. Whatever else
there is (launches, less than peak, other work at the same time) is left out, so that small layers gain less than this says.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fp8ref import granularity
from fp8ref.recipe import OPERANDS, Decision, Gemm, GemmSpec, Recipe, Role
from fp8ref.run.config import Config
from fp8ref.run.plan.hardware import Gpu
from fp8ref.run.plan.pieces import in_fp8, tokens, used


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


def multiplies_fp8(spec: GemmSpec, backend: str) -> bool:
    """Whether there is a kernel: not of operands in blocks, but for torchao's of 1x128 and 128x128 (G-16, G-17)."""
    if spec.a is None:
        return False
    return granularity.by_name(spec.a.granularity).reduced is None or (backend == "torch" and spec.a.granularity == "blockwise_1x128")


def casts(recipe: Recipe, sizes: dict[Role, int]) -> int:
    """Bytes that a linear's casts of one part move, each linear's its own. sizes: elements, of two bytes, by role.

    One scale of a whole tensor serves both of a role's GEMMs; scales along what a GEMM reduces are another cast for each. A cast reads its
    tensor, once more before for an amax of the whole (delayed scaling has it beforehand), and writes codes for each GEMM that it serves,
    which want them in orders of their own.
    """
    served: dict[tuple, int] = {}
    for which, spec in recipe.gemms.items():
        for role, cast in zip(OPERANDS[which], (spec.a, spec.b), strict=True):
            if cast is not None:
                key = (role, cast, None if cast.granularity == "tensorwise" else which)
                served[key] = served.get(key, 0) + 1
    return sum(
        sizes[role] * ((2 if cast.granularity == "tensorwise" and cast.delayed is None else 0) + 2 + gemms)
        for (role, cast, _), gemms in served.items()
    )


def seconds(shape: Shape, gpu: Gpu, *, fp8: bool) -> float:
    flops, bytes_ = 2 * shape.m * shape.n * shape.k, (1 if fp8 else 2) * shape.k * (shape.m + shape.n) + 2 * shape.m * shape.n
    return max(flops / (gpu.fp8 if fp8 else gpu.bf16), bytes_ / gpu.bandwidth)


def speedup(decision: Decision, config: Config, backend: str, gpu: Gpu) -> float | None:
    """Of a linear's three GEMMs and casts, bfloat16's time by FP8's; None of one that stays in high precision. Below 1, FP8 is slower."""
    if not decision.fp8:
        return None
    shapes = list(gemms(decision, config, backend))
    m, (n, k) = shapes[0].m, used(decision.path, decision.shape, config)
    own = n * k // (config.parallel.fsdp if in_fp8(decision.recipe, config, backend) else 1)  # each device casts its shard
    moved = casts(decision.recipe, {"input": m * k, "weight": own, "grad_output": m * n})
    bf16 = sum(seconds(shape, gpu, fp8=False) for shape in shapes)
    return bf16 / (sum(seconds(shape, gpu, fp8=shape.fp8) for shape in shapes) + moved / gpu.bandwidth)
