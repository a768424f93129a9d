"""The kernels that quantize a linear's FP8 operands, and the bytes that each moves.

Their number depends on the compiler that fuses them. Bytes assume bfloat16 tensors and one byte a
code:

inductor  torchao's own list, testing/training/roofline_utils.py of 0.18. Tensorwise: an amax, a
          scale, and a cast that writes codes in every order that a GEMM wants, a weight's once in
          the forward and once in the backward pass. Rowwise: amax and cast in one, along memory;
          across it after a transpose in bfloat16.
xla       counted in programs compiled for an H200 (benchmarks/results/aot.md), whose kernels a test
          compares. Amax and cast are two kernels, a cast writes both orders at once. Which amax the
          kernel computes that makes the tensor, and what a cast reads, depends on the linear's
          place in a Llama: ``_xla``.
eager     PyTorch without torch.compile: every operation of a cast is a kernel, and each GEMM has
          its operands made anew.

Operands in blocks: torchao's Triton kernels read a tensor once; where no kernel multiplies them
(SEMANTICS G-16), they are dequantized.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fp8ref import granularity
from fp8ref.recipe import OPERANDS, REDUCED_AXES, ROLES, CastSpec, Gemm, GemmSpec, Recipe, Role
from fp8ref.train.config import Config

Part = Literal["amax", "scale", "cast", "layout", "rescale"]
"""The purpose of a kernel.

amax     read a tensor for its amax
scale    compute a scale
cast     scale a tensor and write its codes
layout   write a tensor or its codes in another memory order
rescale  scale a GEMM's result after it (G-8)
"""

Fusion = Literal["inductor", "xla", "eager"]
"""What fuses elementwise operations: ``inductor``, ``xla``, or nothing (``eager``)."""

GEMMS: tuple[Gemm, ...] = ("output", "grad_input", "grad_weight")
"""The three GEMMs of a linear, in the order in which a step computes them."""


@dataclass(frozen=True)
class Kernel:
    """A kernel other than the GEMM: its purpose, and the bytes that it moves."""

    part: Part
    bytes: float


def fusion(config: Config, backend: str) -> Fusion:
    """The compiler that fuses elementwise operations into kernels."""
    if backend == "jax":
        return "xla"
    return "eager" if config.parallel.compile == "none" else "inductor"


def multiplies_fp8(spec: GemmSpec, backend: str) -> bool:
    """Whether an FP8 kernel exists (G-16, G-17).

    It does for all but blockwise operands; of those, torchao multiplies 1x128 x 128x128.
    """
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
    linear: str = "",
    gathered: float | None = None,
) -> list[Kernel]:
    """The kernels of one linear for one microbatch.

    sizes     elements by role; the weight's may be a shard.
    gemms     the GEMMs that run: ("output",) is a forward pass alone.
    roles     the roles that this linear quantizes: its input may come quantized from another
              linear.
    linear    its name in a Llama, such as up_proj: XLA fuses kernels with those around them.
    gathered  elements of the whole weight, if its codes are gathered from shards; else None.
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
                made += _dequantized(sizes[role], how)
    for role, served in wanted.items():
        whole = gathered if role == "weight" else None
        made += _xla(role, served, sizes[role], linear, whole) if how == "xla" else _of_role(role, served, sizes[role], how, whole)
    return made


def rescale(spec: GemmSpec, outputs: float, how: Fusion, linear: str = "") -> list[Kernel]:
    """The kernels that scale a GEMM's result after it (SEMANTICS G-8, G-22).

    XLA needs one for rowwise scales, of what the GEMM writes; torchao for its slow accumulation.
    XLA's is the kernel that uses the result, where there is one such.
    """
    if how == "xla":
        after = spec.rowwise or spec.epilogue == "unit_round_scale_round"
        used_once = linear in llama.LINEARS and linear not in SWIGLU
        return [Kernel("rescale", (writes(spec, how) + 2) * outputs)] if after and not used_once else []
    if spec.epilogue != "unit_round_scale_round":
        return []
    # eager writes the product of both scales in float32 first
    return [Kernel("rescale", 4 * outputs)] if how == "inductor" else [Kernel("rescale", 4 * outputs), Kernel("rescale", 8 * outputs)]


def writes(spec: GemmSpec, how: Fusion) -> int:
    """Bytes of each result that a GEMM itself writes: bfloat16, or the float32 that XLA scales after
    it (SEMANTICS G-22)."""
    rounds = spec.powers_of_two or spec.epilogue == "unit_round_scale_round" or not spec.rowwise
    return 2 if how != "xla" or rounds else 4


def _of_role(role: Role, served: list[_Served], n: float, how: Fusion, gathered: float | None) -> list[Kernel]:
    made: list[Kernel] = []
    whole = [one for one in served if one[1].granularity == "tensorwise"]
    for which, cast, axis in served:
        transposed = axis == 0
        if gathered is not None and transposed:
            made.append(Kernel("layout", 2 * gathered))  # gathered codes are row-major, and this GEMM needs them column-major
        if granularity.by_name(cast.granularity).reduced is not None:
            made.append(Kernel("cast", 3 * n))
        elif how == "eager":
            made += [*_eager_amax(n), *_eager_cast(n), *([Kernel("layout", 2 * n)] if transposed and gathered is None else [])]
        elif cast.granularity == "rowwise":
            made += _rowwise(role, n, transposed=transposed and gathered is None, after=which != served[0][0])
    if how == "eager" or not whole:
        return made
    # Tensorwise, not eager: one amax (none under delayed scaling, which scales by its history), one
    # scale, and casts that write the codes in each memory order that a GEMM needs.
    delayed = whole[0][1].delayed is not None
    made += [Kernel("scale", 0)] if delayed else [Kernel("amax", 2 * n), Kernel("scale", 0)]
    if gathered is not None:
        made.append(Kernel("cast", 3 * n))
    elif role == "weight":
        made += [Kernel("cast", 3 * n) for _ in whole]
    else:
        made.append(Kernel("cast", (2 + len(whole)) * n))
    return made


def _rowwise(role: Role, n: float, *, transposed: bool, after: bool) -> list[Kernel]:
    if not transposed:
        return [Kernel("cast", 3 * n)]
    # An earlier row-major cast also writes the transposed tensor, so that it need not be read
    # again. A weight's earlier cast ran in another pass.
    read = 0 if after and role != "weight" else 2 * n
    return [Kernel("layout", read + 2 * n), Kernel("cast", 3 * n)]


def _xla(role: Role, served: list[_Served], n: float, linear: str, gathered: float | None) -> list[Kernel]:
    raise NotImplementedError


def _dequantized(n: float, how: Fusion) -> list[Kernel]:
    """Quantize, and dequantize to bfloat16: no FP8 GEMM exists."""
    if how == "eager":
        return [*_eager_amax(n), *_eager_cast(n), Kernel("cast", 5 * n), Kernel("cast", 8 * n), Kernel("cast", 6 * n)]
    return [Kernel("amax", 2 * n), Kernel("cast", 4 * n)] if how == "xla" else [Kernel("cast", 4 * n)]


def _eager_amax(n: float) -> list[Kernel]:
    """abs writes a tensor and max reads it.

    Then five operations on scalars or rows: float64, clamp, quotient, float32, reciprocal.
    """
    return [Kernel("amax", 4 * n), Kernel("amax", 2 * n), *(Kernel("scale", 0) for _ in range(5))]


def _eager_cast(n: float) -> list[Kernel]:
    """To float32, times the scale, clamped, to FP8."""
    return [Kernel("cast", 6 * n), Kernel("cast", 8 * n), Kernel("cast", 8 * n), Kernel("cast", 5 * n)]
