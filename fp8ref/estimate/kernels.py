"""The kernels that quantize a linear's FP8 operands, and the bytes that each moves.

Their number depends on what casts. Bytes assume bfloat16 tensors and one byte a code:

triton    fp8ref's own kernels, by default. A cast reads a tensor once and writes its codes in both
          orders, 2 + 2 bytes an element. Scales that need the amax first cost another reading. The
          pass that makes a tensor writes its codes in the tensor's place, as many bytes: ``FUSED``.
inductor  torchao's own list, testing/training/roofline_utils.py of 0.18. Tensorwise: an amax, a
          scale, and a cast that writes codes in every order that a GEMM wants, a weight's once in
          the forward and once in the backward pass. Rowwise: amax and cast in one, along memory;
          across it after a transpose in bfloat16.
xla       amax and cast are two kernels, a cast writes both orders. What makes a tensor takes one
          amax along: ``_taken_by_maker``; also where Triton's kernels cast, AdamW that of a weight.
eager     PyTorch without torch.compile: each operation is a kernel, and each GEMM casts anew.

Operands in blocks: torchao's Triton kernels read a tensor once, for each GEMM; XLA takes the amaxes
of blocks by another kernel. Two levels of scales need the tensor's amax before. Where nothing
multiplies them (spec G-16), they are dequantized. Rotations and random numbers are part of a cast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fp8ref.policy import POLICIES
from fp8ref.recipe import ROLES, CastSpec, Gemm, GemmSpec, OperandCast, Recipe, Role
from fp8ref.spec import granularity, products
from fp8ref.spec.products import Products
from fp8ref.train.config.config import Config
from fp8ref.train.config.device_shapes import sharded

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

SWIGLU = ("gate_proj", "up_proj")  # the linears whose outputs SwiGLU multiplies

FUSED: dict[tuple[Role, str], int] = {
    ("input", "q_proj"): 2,  # the residual
    ("input", "gate_proj"): 2,
    ("input", "down_proj"): 4,  # gate and up
    ("grad_output", "gate_proj"): 3,  # gate, up and the gradient of their product, by two
    ("grad_output", "up_proj"): 3,
    ("grad_output", "q_proj"): 2,
    ("grad_output", "k_proj"): 2,
}
"""What the pass that computes it casts in a Llama: norms, SwiGLU, gradients of SwiGLU and RoPE. The
bytes an element that an amax reads before."""


_SUMS = {("input", "down_proj"), ("grad_output", "o_proj"), ("grad_output", "down_proj")}


@dataclass(frozen=True)
class Kernel:
    """A kernel other than the GEMM: its purpose, and the bytes that it moves."""

    part: Part
    bytes: float


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a linear is in a Llama on a mesh, which says what its casts read and send. The default
    is a linear by itself, whose tensors are there in bfloat16 and which no Triton kernel casts.

    linear      its name, such as up_proj: kernels are fused with those around them.
    roles       the roles that it quantizes: its input may come quantized from another linear.
    parts       devices by role that quantize a part each, whose codes are then all-gathered.
    sent        GEMMs whose results are sums' parts in bfloat16, sent to other devices.
    by_triton   the roles that fp8ref's Triton kernels cast (``by_triton``).
    fused       whether the passes of ``FUSED`` cast what they make.
    freed       whether codes of the weight are freed, and cast again in the backward pass.
    weighed     whether AdamW takes the amax of the weight that it writes (P-9).
    products    what multiplies operands in blocks (G-26).
    """

    linear: str = ""
    roles: tuple[Role, ...] = ROLES
    parts: Mapping[Role, int] = field(default_factory=dict)
    sent: tuple[Gemm, ...] = ()
    by_triton: tuple[Role, ...] = ()
    fused: bool = False
    freed: bool = False
    weighed: bool = False
    products: Products = "auto"


ALONE = Place()  # a linear by itself


def fusion(config: Config, backend: str) -> Fusion:
    """The compiler that fuses elementwise operations into kernels."""
    if backend == "jax":
        return "xla"
    return "eager" if config.parallel.compile == "none" else "inductor"


def by_triton(recipe: Recipe, config: Config, backend: str) -> tuple[Role, ...]:
    """The roles that fp8ref's Triton kernels cast on a GPU, where they are installed: those whose
    two GEMMs take the same cast, in JAX by one scale. Under plain jit on a mesh XLA casts."""
    keys = config.parallel
    partitioned = backend == "jax" and keys.through == "jit" and keys.devices > 1
    if config.numerics.kernels == "plain" or partitioned:
        return ()
    blocks = ("blockwise_1x128", "blockwise_128x128")
    supported = ("tensorwise",) if backend == "jax" else ("tensorwise", "rowwise", *blocks)
    roles = []
    for role, operands in _casts(recipe).items():
        casts = {operand.cast for operand in operands}
        if len(operands) == 2 and len(casts) == 1 and casts.pop().granularity in supported:
            roles.append(role)
    return tuple(roles)


def casts_by_triton(config: Config, backend: str) -> bool:
    """Whether Triton kernels cast operands of some linear."""
    recipes = {d.recipe for d in config.decisions() if d.experts is None}
    return any(by_triton(recipe, config, backend) for recipe in recipes)


def fuses(recipe: Recipe, config: Config, backend: str) -> bool:
    """Whether the passes of ``FUSED`` cast what they make for linears of one recipe: where Triton
    kernels cast all operands, and no device cuts features."""
    return config.parallel.tensor == 1 and by_triton(recipe, config, backend) == ROLES


def code_bytes(recipe: Recipe, config: Config, backend: str) -> int:
    """Bytes an element of the codes of a weight that Triton kernels cast, as the backward pass
    finds them: PyTorch casts a weight once a step and keeps both orders; JAX, and a CUDA graph,
    keep the transposed one of each pass. Sharded weights are gathered, and no codes kept."""
    if "weight" not in by_triton(recipe, config, backend) or sharded(config, backend):
        return 0
    return 1 if backend == "jax" or config.parallel.cuda_graphs else 2


def multiplies_fp8(spec: GemmSpec, backend: str, by: Products = "auto") -> bool:
    """Whether a kernel takes the codes (G-16, G-17): of all operands but those in blocks; of these
    torchao's multiplies 1x128 x 128x128, and hardware what is named for it (G-26)."""
    if spec.a is None or spec.b is None:
        return False
    return (
        granularity.by_name(spec.a.granularity).reduced is None
        or by in products.OPERATORS.values()
        or (backend == "torch" and by == "auto" and spec.a.granularity == "blockwise_1x128")
    )


def _casts(recipe: Recipe, gemms: Sequence[Gemm] = GEMMS) -> dict[Role, list[OperandCast]]:
    """What GEMMs take of each role, but for high precision."""
    casts = [operand for operand in recipe.operand_casts if operand.gemm in gemms]
    return {role: [operand for operand in casts if operand.role == role] for role in ROLES}


def linear_kernels(
    recipe: Recipe,
    sizes: Mapping[Role, float],
    fusion: Fusion,
    place: Place = ALONE,
    gemms: Sequence[Gemm] = GEMMS,
) -> list[Kernel]:
    """The kernels of one linear for one microbatch.

    sizes     elements of each role's tensor, of which this device may quantize a part.
    gemms     the GEMMs that run: ("output",) is a forward pass alone.
    """
    backend = "jax" if fusion == "xla" else "torch"
    kernels: list[Kernel] = []
    for role, casts in _casts(recipe, gemms).items():
        if role not in place.roles or not casts:
            continue
        n = sizes[role] / place.parts.get(role, 1)
        gathered = sizes[role] if role in place.parts else None
        if role in place.by_triton and gathered is None:
            kernels += _triton(role, casts[0].cast, n, fusion, place)
            continue
        by = place.products
        served = [one for one in casts if multiplies_fp8(recipe.gemms[one.gemm], backend, by)]
        kernels += _dequantized(n, fusion) * (len(casts) - len(served))
        if served and fusion == "xla":
            kernels += _xla(role, served, n, gathered, place)
        elif served:
            kernels += _torch(role, served, n, fusion, gathered)
    return kernels


def copies_weight(recipe: Recipe, config: Config, backend: str) -> bool:
    """Whether a linear's weight is written in bfloat16: XLA casts by one scale from float32."""
    if backend != "jax" or "weight" in by_triton(recipe, config, backend):
        return True
    casts = _casts(recipe)["weight"]
    return not casts or any(one.cast.granularity != "tensorwise" for one in casts)


def scaled_after(spec: GemmSpec, fusion: Fusion) -> bool:
    """Whether a GEMM's result is scaled by another kernel (spec G-8, G-22): under rowwise scales
    by XLA, under its slow accumulation by torchao."""
    return spec.epilogue == "unit_round_scale_round" or (fusion == "xla" and spec.rowwise)


def rescale(
    recipe: Recipe, which: Gemm, outputs: float, fusion: Fusion, place: Place = ALONE
) -> list[Kernel]:
    """The kernels that only scale a GEMM's result. XLA scales it in the kernel that uses it, but
    for outputs that SwiGLU multiplies, which the backward pass uses too, and for what is sent to
    other devices as it is."""
    spec = recipe.gemms[which]
    if not scaled_after(spec, fusion):
        return []
    if fusion == "xla":
        twice = not place.linear or (place.linear in SWIGLU and which == "output")
        written = (writes(spec, fusion) + 2) * outputs
        return [Kernel("rescale", written)] if twice or which in place.sent else []
    # eager writes the product of both scales in float32 first
    if fusion == "inductor":
        return [Kernel("rescale", 4 * outputs)]
    return [Kernel("rescale", 4 * outputs), Kernel("rescale", 8 * outputs)]


def writes(spec: GemmSpec, fusion: Fusion) -> int:
    """Bytes a result that a GEMM writes: bfloat16, or float32 that XLA scales after it (G-22)."""
    after = spec.epilogue == "unit_round_scale_round"
    rounds = spec.powers_of_two or after or not spec.rowwise
    return 2 if fusion != "xla" or rounds else 4


def _triton(role: Role, cast: CastSpec, n: float, fusion: Fusion, place: Place) -> list[Kernel]:
    again = FUSED.get((role, place.linear)) if place.fused else None
    in_blocks = granularity.by_name(cast.granularity).reduced is not None
    # PyTorch guesses scales of inputs and weights that are one power of two (spec R)
    pow2 = cast.granularity == "tensorwise" and cast.policy == POLICIES["torchao_pow2"]
    guessed = pow2 and fusion != "xla" and role != "grad_output"
    kernels = []
    if cast.delayed is not None:
        kernels = [Kernel("scale", 0)] * 2  # the state's scale, and its observation
    elif not (in_blocks or guessed or (role == "weight" and place.weighed)):
        kernels = [Kernel("amax", (again or 2) * n)]
    times = 2 if role == "weight" and place.freed else 1
    return kernels + [Kernel("cast", 4 * n)] * (times if again is None else 0)


def _torch(
    role: Role, served: list[OperandCast], n: float, fusion: Fusion, gathered: float | None
) -> list[Kernel]:
    kernels: list[Kernel] = []
    whole = [one for one in served if one.cast.granularity == "tensorwise"]
    for which, _, cast, axis in served:
        transposed = axis == 0
        if gathered is not None and transposed:
            # gathered codes are row-major, and this GEMM needs them column-major
            kernels.append(Kernel("layout", 2 * gathered))
        if granularity.by_name(cast.granularity).reduced is not None:
            kernels += [Kernel("amax", 2 * n)] * (cast.policy.two_level is not None)
            kernels.append(Kernel("cast", (2 + cast.fmt.bits / 8) * n))
        elif fusion == "eager":
            kernels += [*_eager_amax(n), *_eager_cast(n)]
            kernels += [Kernel("layout", 2 * n)] * (transposed and gathered is None)
        elif cast.granularity == "rowwise":
            turned, after = transposed and gathered is None, which != served[0].gemm
            kernels += _rowwise(role, n, transposed=turned, after=after)
    if fusion == "eager" or not whole:
        return kernels
    # Tensorwise, not eager: one amax (none under delayed scaling, which scales by its history), one
    # scale, and casts that write the codes in each memory order that a GEMM needs.
    delayed = whole[0].cast.delayed is not None
    kernels += [Kernel("scale", 0)] if delayed else [Kernel("amax", 2 * n), Kernel("scale", 0)]
    if gathered is not None:
        kernels.append(Kernel("cast", 3 * n))
    elif role == "weight":
        kernels += [Kernel("cast", 3 * n) for _ in whole]
    else:
        kernels.append(Kernel("cast", (2 + len(whole)) * n))
    return kernels


def _rowwise(role: Role, n: float, *, transposed: bool, after: bool) -> list[Kernel]:
    if not transposed:
        return [Kernel("cast", 3 * n)]
    # An earlier row-major cast also writes the transposed tensor, so that it need not be read
    # again. A weight's earlier cast ran in another pass.
    read = 0 if after and role != "weight" else 2 * n
    return [Kernel("layout", read + 2 * n), Kernel("cast", 3 * n)]


def _xla(
    role: Role, served: list[OperandCast], n: float, gathered: float | None, place: Place
) -> list[Kernel]:
    """One scale of the whole tensor or one for each order, an amax for each but the one that the
    tensor's maker takes, and a cast; of blocks an amax and a cast for each GEMM. Gathered codes of
    one scale are laid out in the other order; those of rows each have been cast apart."""
    if any(granularity.by_name(one.cast.granularity).reduced is not None for one in served):
        return [kernel for one in served for kernel in _xla_blocks(one, n)]
    rows = sum(one.cast.granularity == "rowwise" for one in served)
    whole = next((one.cast for one in served if one.cast.granularity == "tensorwise"), None)
    scales = rows + (whole is not None)
    masters = role == "weight" and place.linear and not rows  # read in float32
    read = 4 if masters else 2
    amaxes = scales - _taken_by_maker(role, place, rows, whole)
    kernels = [Kernel("scale", 0)] * scales + [Kernel("amax", read * n)] * amaxes
    orders = len(served) if gathered is None or rows else 1
    kernels.append(Kernel("cast", (read + orders) * n))
    if gathered is not None:
        turned = sum(one.axis == 0 or role != "weight" for one in served)
        kernels += [Kernel("layout", 2 * gathered)] * turned
    return kernels


def _xla_blocks(operand: OperandCast, n: float) -> list[Kernel]:
    """The tensor's amax if scales have two levels, the blocks', and a cast; codes of blocks along
    the rows are laid out again."""
    cast, code = operand.cast, operand.cast.fmt.bits / 8
    amaxes = 1 + (cast.policy.two_level is not None)
    turned = [Kernel("layout", 2 * code * n)] * (operand.axis == 0)
    return [*[Kernel("amax", 2 * n)] * amaxes, Kernel("cast", (2 + code) * n), *turned]


def _taken_by_maker(role: Role, place: Place, rows: int, whole: CastSpec | None) -> bool:
    """Whether the kernel that writes a tensor in a Llama takes one of its amaxes: SwiGLU's and
    those of sums; of a norm and of a weight's bfloat16 copy only amaxes of rows, because they are
    computed again once a scale is known; under delayed scaling, where it is, any. AdamW takes those
    of weights that it writes."""
    linear = place.linear
    if (role, linear) in _SUMS or (role == "weight" and place.weighed):
        return True
    after_norm = role == "input" and linear in ("q_proj", "gate_proj")
    again = bool(linear) and (role == "weight" or after_norm)
    return again and bool(rows or (whole is not None and whole.delayed is not None))


def _dequantized(n: float, fusion: Fusion) -> list[Kernel]:
    """Quantize, and dequantize to bfloat16: no FP8 GEMM exists."""
    if fusion == "eager":
        dequantized = [Kernel("cast", size * n) for size in (5, 8, 6)]
        return [*_eager_amax(n), *_eager_cast(n), *dequantized]
    if fusion == "xla":
        return [Kernel("amax", 2 * n), Kernel("cast", 4 * n)]
    return [Kernel("cast", 4 * n)]


def _eager_amax(n: float) -> list[Kernel]:
    """abs writes a tensor and max reads it.

    Then five operations on scalars or rows: float64, clamp, quotient, float32, reciprocal.
    """
    scales = [Kernel("scale", 0)] * 5
    return [Kernel("amax", 4 * n), Kernel("amax", 2 * n), *scales]


def _eager_cast(n: float) -> list[Kernel]:
    """To float32, times the scale, clamped, to FP8."""
    return [Kernel("cast", size * n) for size in (6, 8, 8, 5)]
