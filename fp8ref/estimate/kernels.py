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
(spec G-16), they are dequantized.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fp8ref.recipe import OPERANDS, REDUCED_AXES, ROLES, CastSpec, Gemm, GemmSpec, Recipe, Role
from fp8ref.spec import granularity, llama
from fp8ref.train.config.config import Config

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


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a linear is in a Llama on a mesh, which says what its casts read and send. The default
    is a linear by itself, whose tensors are there in bfloat16.

    linear      its name, such as up_proj: XLA fuses kernels with those around them.
    roles       the roles that it quantizes: its input may come quantized from another linear.
    parts       devices by role that quantize a part each, whose codes are then all-gathered.
    sent        GEMMs whose results are sums' parts in bfloat16, sent to other devices.
    norm_bytes  bytes an element of what XLA computes a norm's result from again: the residual in
                float32, or what is added up to it.
    pieces      whether each of several sequences is cut over tensor. Then the rows of an operand
                whose products are scattered are put in order of pieces for that GEMM, and in their
                own order for grad_weight, by a kernel each; and gathered gradients of o and down
                are written in order of pieces, by kernels that take no amax.
    """

    linear: str = ""
    roles: tuple[Role, ...] = ROLES
    parts: Mapping[Role, int] = field(default_factory=dict)
    sent: tuple[Gemm, ...] = ()
    norm_bytes: float = 4
    pieces: bool = False


ALONE = Place()  # a linear by itself

_Served = tuple[Gemm, CastSpec, int]
"""A GEMM that an operand serves, its cast, and the axis that the GEMM reduces."""

SWIGLU = ("gate_proj", "up_proj")  # the linears whose outputs SwiGLU multiplies

_SOURCES: dict[tuple[Role, str], str] = {
    ("input", "q_proj"): "norm",
    ("input", "gate_proj"): "norm",
    ("input", "o_proj"): "attention",
    ("input", "down_proj"): "elementwise",
    ("grad_output", "k_proj"): "attention",
    ("grad_output", "v_proj"): "attention",
    ("grad_output", "o_proj"): "elementwise",
    ("grad_output", "down_proj"): "elementwise",
}
"""What makes an operand in a Llama, where XLA's kernels depend on it."""


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
    return granularity.by_name(spec.a.granularity).reduced is None or (
        backend == "torch" and spec.a.granularity == "blockwise_1x128"
    )


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
    gathered = {role: sizes[role] for role in place.parts}
    sizes = {role: size / place.parts.get(role, 1) for role, size in sizes.items()}
    backend = "jax" if fusion == "xla" else "torch"
    role_casts: dict[Role, list[_Served]] = {}
    kernels: list[Kernel] = []
    for which in gemms:
        spec = recipe.gemms[which]
        for role, cast, axis in zip(
            OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True
        ):
            if cast is None or role not in place.roles:
                continue
            if multiplies_fp8(spec, backend):
                role_casts.setdefault(role, []).append((which, cast, axis))
            else:
                kernels += _dequantized(sizes[role], fusion)
    for role, served in role_casts.items():
        whole = gathered.get(role)
        paired = fusion == "xla" and role == "grad_output" and recipe.pairs_gradients
        if paired and whole is not None:
            kernels += _paired(sizes[role], whole)
        elif fusion == "xla":
            kernels += _xla(role, served, sizes[role], whole, place)
        else:
            kernels += _role_kernels(role, served, sizes[role], fusion, whole)
    return kernels


def copies_weight(recipe: Recipe, fusion: Fusion, linear: str, *, gathered: bool = False) -> bool:
    """Whether a linear's weight is written in bfloat16.

    XLA quantizes from float32 what it can. gathered: of pieces.
    """
    specs = {
        spec.b.granularity
        for spec in (recipe.output, recipe.grad_input)
        if spec.b is not None and multiplies_fp8(spec, "jax")
    }
    return fusion != "xla" or not specs or _copies(specs, linear, gathered=gathered)


def scaled_after(spec: GemmSpec, fusion: Fusion) -> bool:
    """Whether a GEMM's result is scaled by another kernel (spec G-8, G-22): under rowwise scales
    by XLA, under its slow accumulation by torchao."""
    return spec.epilogue == "unit_round_scale_round" or (fusion == "xla" and spec.rowwise)


def rescale(
    recipe: Recipe,
    which: Gemm,
    outputs: float,
    fusion: Fusion,
    linear: str = "",
    *,
    sent: bool = False,
) -> list[Kernel]:
    """The kernels that only scale a GEMM's result. XLA scales it in the kernel that uses it, but
    for outputs that SwiGLU multiplies, which the backward pass uses too, and for what is sent to
    other devices as it is."""
    spec = recipe.gemms[which]
    if not scaled_after(spec, fusion):
        return []
    if fusion == "xla":
        fused = (
            linear in (*llama.COLUMN, *llama.ROW)
            and not (linear in SWIGLU and which == "output")
            and not sent
        )
        # gradients of q, k and v are one array, which q's kernel reads, and one of k and v
        times = 2 if which == "grad_weight" and linear in llama.COLUMN[:3] else 1
        return [] if fused else [Kernel("rescale", (times * writes(spec, fusion) + 2) * outputs)]
    # eager writes the product of both scales in float32 first
    if fusion == "inductor":
        return [Kernel("rescale", 4 * outputs)]
    return [Kernel("rescale", 4 * outputs), Kernel("rescale", 8 * outputs)]


def writes(spec: GemmSpec, fusion: Fusion) -> int:
    """Bytes of each result that a GEMM itself writes: bfloat16, or the float32 that XLA scales
    after it (spec G-22)."""
    rounds = spec.powers_of_two or spec.epilogue == "unit_round_scale_round" or not spec.rowwise
    return 2 if fusion != "xla" or rounds else 4


def _role_kernels(
    role: Role, served: list[_Served], n: float, fusion: Fusion, gathered: float | None
) -> list[Kernel]:
    kernels: list[Kernel] = []
    whole = [one for one in served if one[1].granularity == "tensorwise"]
    for which, cast, axis in served:
        transposed = axis == 0
        if gathered is not None and transposed:
            # gathered codes are row-major, and this GEMM needs them column-major
            kernels.append(Kernel("layout", 2 * gathered))
        if granularity.by_name(cast.granularity).reduced is not None:
            kernels.append(Kernel("cast", 3 * n))
        elif fusion == "eager":
            kernels += [*_eager_amax(n), *_eager_cast(n)]
            kernels += [Kernel("layout", 2 * n)] * (transposed and gathered is None)
        elif cast.granularity == "rowwise":
            turned, after = transposed and gathered is None, which != served[0][0]
            kernels += _rowwise(role, n, transposed=turned, after=after)
    if fusion == "eager" or not whole:
        return kernels
    # Tensorwise, not eager: one amax (none under delayed scaling, which scales by its history), one
    # scale, and casts that write the codes in each memory order that a GEMM needs.
    delayed = whole[0][1].delayed is not None
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
    role: Role, served: list[_Served], n: float, gathered: float | None, place: Place
) -> list[Kernel]:
    """Kernels that XLA compiles, but those that also make the tensor: bfloat16 weights from masters
    (with an amax across memory), norms, SwiGLU and sums (with an amax along memory)."""
    linear, pieces = place.linear, place.pieces
    source = _SOURCES.get((role, linear), "") if role != "weight" else "masters" if linear else ""
    whole, rows = (
        [one for one in served if one[1].granularity == name] for name in ("tensorwise", "rowwise")
    )
    delayed = bool(whole) and whole[0][1].delayed is not None
    copied = source == "masters" and _copies(
        {cast.granularity for _, cast, _ in served}, linear, gathered=gathered is not None
    )
    # A norm whose amax is needed before its cast is computed again.
    again = source == "norm" and whole
    read = place.norm_bytes if again else 4 if source == "masters" and not copied else 2
    # XLA multiplies q, k and v's input by one array, of their codes under scales of rows
    joined = bool(rows) and linear in llama.COLUMN[:3]
    scattered = pieces and linear in {"input": llama.ROW, "grad_output": llama.COLUMN}.get(role, ())
    with_maker = source == "elementwise" and not (pieces and role == "grad_output")
    kernels = [Kernel("scale", 0) for _ in range(bool(whole) + len(rows))]
    if whole and not rows and not with_maker and not (delayed and source in ("masters", "norm")):
        kernels.append(Kernel("amax", read * n))
    for *_, axis in rows:
        along = axis == 1
        # taken by what makes the tensor; where each order has a kernel of its own, and none turns
        # it, by the other order's cast
        by_cast = (copied and gathered is not None and not whole) or (
            scattered and role == "grad_output" and linear in SWIGLU
        )
        by_others = source in ("elementwise", "norm") or by_cast if along else copied
        if not by_others:
            # attention's output is in the order of heads: the kernel of one amax writes magnitudes
            # in that of tokens, for the other's
            both = role == "input" and along and len(rows) == 2
            turned = 2 if source == "attention" and both and not pieces else 0
            kernels.append(Kernel("amax", (read + turned) * n))
    orders = 1 if gathered is not None and not rows else len(served)
    apart = (
        source == "attention"
        or (role == "weight" and joined)
        or scattered
        or (gathered is not None and rows and not (whole and copied))
    )
    if orders == 2 and scattered and whole:
        kernels += _in_pieces(n, read, linear, heads=source == "attention")
    elif (
        orders == 2 and apart
    ):  # heads are transposed; weights of one input are joined; each order is gathered
        turns = source == "attention" and not rows and linear != "v_proj"
        kernels += [
            Kernel("cast", (read + 1) * n),
            Kernel("layout", 2 * n) if turns else Kernel("cast", (read + 1) * n),
        ]
    else:
        kernels.append(Kernel("cast", (read + orders) * n))
    if source == "attention" and role == "input" and scattered and rows:
        kernels.append(Kernel("layout", 2 * n))  # from the order of tokens to that of pieces
    if role == "grad_output" and linear == "q_proj" and len(rows) == 2 and not pieces:
        # the kernel that casts gradients of k and v into the joined array also copies q's codes
        kernels.append(Kernel("cast", 2 * n))
    if gathered is not None:
        # rows of a weight are gathered in order, tokens of several sequences are not; joined
        # weights are laid out
        kernels += [
            Kernel("layout", 2 * gathered)
            for *_, axis in served
            if axis == 0 or role != "weight" or joined
        ]
    return kernels


def _paired(n: float, gathered: float) -> list[Kernel]:
    """Codes of rows and of columns that are gathered as one of them and a bit an element (P-6):
    both amaxes, codes, bits; and both codes of what is gathered, of which one kernel reads codes
    twice, of both neighbours, and writes bytes beside."""
    sent = [Kernel("scale", 0), Kernel("amax", 2 * n)] * 2 + [
        Kernel("cast", 3 * n),
        Kernel("cast", (2 + 1 / 8) * n),
    ]
    return [*sent, Kernel("layout", (2 + 1 / 8) * gathered), Kernel("layout", 4 * gathered)]


def _in_pieces(n: float, read: float, linear: str, *, heads: bool) -> list[Kernel]:
    """Codes by one scale in order of pieces and in their own: of what has heads from codes in order
    of tokens, which v's cast writes in its own order too."""
    if not heads:
        return [Kernel("cast", (read + 1) * n)] * 2
    if linear == "v_proj":
        return [Kernel("cast", (read + 2) * n), Kernel("layout", 2 * n)]
    return [Kernel("cast", (read + 1) * n)] + [Kernel("layout", 2 * n)] * 2


def _copies(granularities: Collection[str], linear: str, *, gathered: bool) -> bool:
    """Whether XLA writes a weight in bfloat16 before it quantizes it: for a scale of rows. Beside
    one of the whole tensor, as compiled, not where the float32 master's kernel takes both: of q, o
    and down, or of pieces those of attention."""
    if "rowwise" not in granularities or "tensorwise" not in granularities:
        return "rowwise" in granularities
    if gathered:
        return linear.endswith(("gate_proj", "up_proj", "down_proj"))
    return linear not in ("q_proj", "o_proj", "down_proj")


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
    return [Kernel("amax", 4 * n), Kernel("amax", 2 * n), *(Kernel("scale", 0) for _ in range(5))]


def _eager_cast(n: float) -> list[Kernel]:
    """To float32, times the scale, clamped, to FP8."""
    return [Kernel("cast", size * n) for size in (6, 8, 8, 5)]
