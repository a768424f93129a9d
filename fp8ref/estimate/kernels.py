"""The kernels that make a linear's FP8 operands, one after the other, and the bytes that each moves.

How many there are depends on who fuses them. Bytes are of tensors of two bytes an element, codes of one:

inductor  torchao's own list, testing/training/roofline_utils.py of 0.18. Tensorwise: an amax, a scale, and a cast that writes codes in every order
          that a GEMM wants, a weight's once in the forward and once in the backward pass. Rowwise: amax and cast in one, along memory;
          across it after a transpose in bfloat16.
xla       counted in programs compiled for an H200 (benchmarks/results/aot.md): amax and cast are two kernels, a cast writes all orders at once.
eager     PyTorch without torch.compile: every operation of a cast is a kernel, and each GEMM has its operands made anew.

Operands in blocks: torchao's Triton kernels read a tensor once; where no kernel multiplies them (SEMANTICS G-16), they are dequantised.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fp8ref import granularity
from fp8ref.recipe import OPERANDS, REDUCED_AXES, ROLES, CastSpec, Gemm, GemmSpec, Recipe, Role
from fp8ref.train.config import Config

Part = Literal["amax", "scale", "cast", "layout", "rescale"]
Fusion = Literal["inductor", "xla", "eager"]
GEMMS: tuple[Gemm, ...] = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True)
class Kernel:
    """A kernel beside the GEMM: what it is for, and bytes that it moves."""

    part: Part
    bytes: float


def fusion(config: Config, backend: str) -> Fusion:
    """Who fuses elementwise work into kernels."""
    if backend == "jax":
        return "xla"
    return "eager" if config.parallel.compile == "none" else "inductor"


def multiplies_fp8(spec: GemmSpec, backend: str) -> bool:
    """Whether there is a kernel: not of operands in blocks, but for torchao's of 1x128 and 128x128 (G-16, G-17)."""
    if spec.a is None:
        return False
    return granularity.by_name(spec.a.granularity).reduced is None or (backend == "torch" and spec.a.granularity == "blockwise_1x128")


def of_linear(
    recipe: Recipe,
    sizes: Mapping[Role, float],
    how: Fusion,
    *,
    gemms: Sequence[Gemm] = GEMMS,
    roles: Collection[Role] = ROLES,
    gathered: float | None = None,
) -> list[Kernel]:
    """Those of one linear and one part of a batch.

    sizes     elements by role, of which the weight's may be a shard.
    gemms     those that run: ("output",) is a forward pass alone.
    roles     those that it casts itself: another linear may have cast their input.
    gathered  elements of a whole weight whose codes are gathered from shards; None where they are not.
    """
    backend = "jax" if how == "xla" else "torch"
    wanted: dict[Role, list[tuple[Gemm, CastSpec, int]]] = {}
    made: list[Kernel] = []
    for which in gemms:
        spec = recipe.gemms[which]
        for role, cast, axis in zip(OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True):
            if cast is None or role not in roles:
                continue
            if multiplies_fp8(spec, backend):
                wanted.setdefault(role, []).append((which, cast, axis))
            else:
                made += _dequantised(sizes[role], how)
    for role, served in wanted.items():
        made += _of_role(role, served, sizes[role], how, gathered if role == "weight" else None)
    return made


def rescale(spec: GemmSpec, outputs: float, how: Fusion) -> list[Kernel]:
    """What multiplies a GEMM's result by its scales after it (SEMANTICS G-8): all rowwise ones of XLA, float32 then; torchao's slow ones."""
    if how == "xla":
        return [Kernel("rescale", 6 * outputs)] if spec.rowwise else []
    if spec.epilogue != "unit_round_scale_round":
        return []
    # eager writes the product of both scales in float32 first
    return [Kernel("rescale", 4 * outputs)] if how == "inductor" else [Kernel("rescale", 4 * outputs), Kernel("rescale", 8 * outputs)]


def _of_role(role: Role, served: list[tuple[Gemm, CastSpec, int]], n: float, how: Fusion, gathered: float | None) -> list[Kernel]:
    made: list[Kernel] = []
    whole = [one for one in served if one[1].granularity == "tensorwise"]
    for which, cast, axis in served:
        transposed = axis == 0
        if gathered is not None and transposed:
            made.append(Kernel("layout", 2 * gathered))  # what is gathered lies along memory; a GEMM wants it across
        if granularity.by_name(cast.granularity).reduced is not None:
            made.append(Kernel("cast", 3 * n))
        elif how == "eager":
            made += [*_eager_amax(n), *_eager_cast(n), *([Kernel("layout", 2 * n)] if transposed and gathered is None else [])]
        elif cast.granularity == "rowwise":
            made += _rowwise(role, n, how, transposed=transposed and gathered is None, after=which != served[0][0])
    if how == "eager" or not whole:
        return made
    delayed = whole[0][1].delayed is not None
    made += [Kernel("scale", 0)] if delayed else [Kernel("amax", 2 * n), Kernel("scale", 0)]
    if gathered is not None:
        made.append(Kernel("cast", 3 * n))
    elif how == "inductor" and role == "weight":
        made += [Kernel("cast", 3 * n) for _ in whole]
    else:
        made.append(Kernel("cast", (2 + len(whole)) * n))
    return made


def _rowwise(role: Role, n: float, how: Fusion, *, transposed: bool, after: bool) -> list[Kernel]:
    if how == "xla":
        return [Kernel("amax", 2 * n), Kernel("cast", 3 * n)]
    if not transposed:
        return [Kernel("cast", 3 * n)]
    # the cast along memory, where there is one, writes the transposed tensor beside its codes; a weight's is of another pass
    read = 0 if after and role != "weight" else 2 * n
    return [Kernel("layout", read + 2 * n), Kernel("cast", 3 * n)]


def _dequantised(n: float, how: Fusion) -> list[Kernel]:
    """Quantised and back to bfloat16."""
    if how == "eager":
        return [*_eager_amax(n), *_eager_cast(n), Kernel("cast", 5 * n), Kernel("cast", 8 * n), Kernel("cast", 6 * n)]
    return [Kernel("amax", 2 * n), Kernel("cast", 4 * n)] if how == "xla" else [Kernel("cast", 4 * n)]


def _eager_amax(n: float) -> list[Kernel]:
    """abs writes a tensor, max reads it; float64, clamp, quotient, float32, reciprocal are of one number or of a row's."""
    return [Kernel("amax", 4 * n), Kernel("amax", 2 * n), *(Kernel("scale", 0) for _ in range(5))]


def _eager_cast(n: float) -> list[Kernel]:
    """To float32, times the scale, clamped, to FP8."""
    return [Kernel("cast", 6 * n), Kernel("cast", 8 * n), Kernel("cast", 8 * n), Kernel("cast", 5 * n)]
