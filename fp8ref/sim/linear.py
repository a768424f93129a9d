"""A linear layer by a recipe, forward and backward: three GEMMs (spec L).

    output      [M, N] = input [M, K]       x weight [N, K], reduces K
    grad_input  [M, K] = grad_output [M, N] x weight [K, N], reduces N
    grad_weight [N, K] = grad_output [N, M] x input [K, M], reduces M

Order: leading dims flatten to M; each operand is quantized from its high-precision tensor along the
axis that its GEMM reduces (L-3), so a tensor may have several FP8 forms, rotated first where its
cast says so (S-23); accumulate; epilogue; round to out_dtype.
"""

import math
import zlib
from collections.abc import Mapping

import numpy as np

from fp8ref import recipe as recipes
from fp8ref.formats import BFLOAT16, Format
from fp8ref.recipe import OPERANDS, CastSpec, Gemm, GemmSpec, Recipe, Role
from fp8ref.selection.rules import casts_of
from fp8ref.sim import philox
from fp8ref.sim.attention.operands import hadamard
from fp8ref.sim.gemm import accumulate as sums
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import K_STEP
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized, Scales

__all__ = ["backward", "forward"]

Accumulate = str | Accumulation | Mapping[Gemm, str | Accumulation]
"""How GEMMs accumulate: one plan or its name for all, or one for each GEMM by the GEMM's name."""

Operand = np.ndarray | Quantized
"""An operand of a GEMM: in high precision, or quantized."""

# granularities whose scales do not change when K is padded with zeros
_WHOLE_LINES = ("tensorwise", "rowwise")


def forward(
    x,
    w,
    recipe: str | Recipe,
    *,
    accumulate: Accumulate = "exact",
    out_dtype: Format = BFLOAT16,
    scales: Mapping[Role, Scales] | None = None,
    seed: int | None = None,
) -> np.ndarray:
    """output [..., N] = input x [..., K] x weight w [N, K], reduces K.

    seed      of stochastic rounding, in [0, 2^64): where this GEMM rounds so, and nowhere else
              (S-24).

    Shapes:   x [..., K] and w [N, K], float32, float16 or bfloat16, in high precision float64 too;
              float32 [..., N] holding values of out_dtype.
    Order:    leading dims flatten to M; quantize both along K; accumulate; epilogue; where an
              operand is rowwise, rounded to bfloat16 and then to out_dtype (G-8). ``accumulate`` is
              what gemm.matmul takes, or one such for each GEMM by its name, or ``hopper``: the fast
              or slow plan that the recipe asks of the hardware.
    Specials: as scaling.quantize and gemm.matmul. No rows give no outputs, and gradients of zeros
    (L-9).
    Raises:   ValueError: an unknown recipe, rule or out_dtype; w not 2-d, K's that differ; under
              FP8 or FP4 N or K that is no multiple of 16 (L-5) or of a block; for a recipe
              with delayed scaling, roles without ``scales`` (``delayed.scales(state, ...)``);
              scales of any other role; a mapping without the GEMM's name, or with another.
    Source:   spec L-1 to L-6.
    """
    recipe = recipes.by_name(recipe)
    x, w = check_operands(x, w, recipe, scales)
    _check_seed(recipe, ("output",), seed)
    tensors: dict[Role, np.ndarray] = {"input": _lines(x), "weight": w}
    # [M, K] x [N, K] -> [M, N]
    y = _gemm("output", tensors, recipe, accumulate, out_dtype, scales, seed)
    return y.reshape(*x.shape[:-1], len(w))


def backward(
    g,
    x,
    w,
    recipe: str | Recipe,
    *,
    accumulate: Accumulate = "exact",
    out_dtype: Format = BFLOAT16,
    scales: Mapping[Role, Scales] | None = None,
    seed: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(grad_input [..., K], grad_weight [N, K]) of grad_output g [..., N], x [..., K], w [N, K].

    seed      as forward's, of either GEMM. A step that rounds afresh has another seed.

    Shapes:   g, x and w of dtypes as forward's; both results float32, holding values as forward's
              output does.
    Order:    grad_input = g [M, N] x w [K, N], reduces N; grad_weight = g [N, M] x x [K, M],
              reduces M; each operand is quantized again from its hp tensor along the axis its GEMM
              reduces (L-3).
    Specials: as forward.
    Raises:   ValueError: as forward, and g whose shape is not the output's.
    Source:   spec L-2 to L-6.
    """
    recipe = recipes.by_name(recipe)
    x, w = check_operands(x, w, recipe, scales)
    g = cast.array(g)
    if g.shape != (*x.shape[:-1], len(w)):
        raise ValueError(
            f"grad_output has the output's shape {(*x.shape[:-1], len(w))}; got {g.shape}."
        )
    _check_seed(recipe, ("grad_input", "grad_weight"), seed)
    tensors: dict[Role, np.ndarray] = {"input": _lines(x), "weight": w, "grad_output": _lines(g)}
    # [M, N] x [K, N] -> [M, K]
    grad_input = _gemm("grad_input", tensors, recipe, accumulate, out_dtype, scales, seed)
    # [N, M] x [K, M] -> [N, K]
    grad_weight = _gemm("grad_weight", tensors, recipe, accumulate, out_dtype, scales, seed)
    return grad_input.reshape(x.shape), grad_weight


def _lines(x: np.ndarray) -> np.ndarray:
    """[..., K] -> [M, K]. M is computed: reshape(-1, K) cannot infer it where K is 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _gemm(
    which: Gemm,
    tensors: Mapping[Role, np.ndarray],
    recipe: Recipe,
    accumulate: Accumulate,
    out_dtype: Format,
    scales: Mapping[Role, Scales] | None,
    seed: int | None,
) -> np.ndarray:
    """One of the GEMMs: operands with the reduced axis last, quantized, multiplied.

    [M, K] x [N, K] -> [M, N], with M, N and K of that GEMM.
    """
    gemm.check_out_dtype(out_dtype)
    if not all(map(len, tensors.values())):  # no tokens (L-9)
        rows = [
            tensors[role].shape[1 - axis]
            for role, axis in zip(OPERANDS[which], recipes.REDUCED_AXES[which], strict=True)
        ]
        return np.zeros(rows, np.float32)
    return multiply(
        which,
        *quantize_operands(which, tensors, recipe, scales, seed),
        recipe,
        accumulate=accumulate,
        out_dtype=out_dtype,
    )


def quantize_operands(
    which: Gemm,
    tensors: Mapping[Role, np.ndarray],
    recipe: Recipe,
    scales: Mapping[Role, Scales] | None = None,
    seed: int | None = None,
) -> tuple[Operand, Operand]:
    """The operands a and b of one GEMM, each with its reduced axis last, and quantized along it by
    its own cast; as they are in high precision, and dequantized if cast beside one that is (L-2 to
    L-4).

    tensors   input [M, K], weight [N, K], grad_output [M, N]: those that the GEMM takes.
    scales    of roles that are not scaled by their own amax, of their granularity's shape.
    seed      of stochastic rounding; each GEMM derives its own from it (S-24).
    Raises:   ValueError: as ``scaling.quantize``; a role with delayed scaling that has no scales.
    """
    own = None if seed is None else seed_of(seed, which)
    ragged = which == "grad_weight"  # the last block of rows may be shorter (L-5)
    spec = recipe.gemms[which]
    both = spec.a is not None and spec.b is not None
    operands: list[Operand] = []
    for role, axis, cast_spec in zip(
        OPERANDS[which], recipes.REDUCED_AXES[which], (spec.a, spec.b), strict=True
    ):
        x = tensors[role] if axis == 1 else tensors[role].T  # reduced axis last
        if cast_spec is None:
            operands.append(x)
            continue
        q = _quantize(x, cast_spec, role, scales, own, ragged)
        # beside an operand in high precision: the codes' numbers, in the tensor's dtype (L-4)
        operands.append(q if both else scaling.dequantize(q).astype(x.dtype))
    return operands[0], operands[1]


def _check_seed(recipe: Recipe, gemms: tuple[Gemm, ...], seed: int | None) -> None:
    """ValueError unless a seed is passed exactly when one of these GEMMs rounds stochastically."""
    casts = [spec for (which, _), spec in casts_of(recipe).items() if spec and which in gemms]
    needed = any(spec.stochastic for spec in casts)
    if needed != (seed is not None):
        phrase = "rounds stochastically in" if needed else "rounds nothing stochastically in"
        raise ValueError(
            f"recipe {recipe.name!r} {phrase} {' and '.join(gemms)} (S-24); got seed={seed}. "
            f"{'Give a seed' if needed else 'Leave it out'}."
        )


def seed_of(seed: int, which: Gemm) -> int:
    """The seed of a GEMM's operands, of a linear's (S-24)."""
    cast.check_seed(seed)
    return philox.derived(seed, list(OPERANDS).index(which), 2)


def seed_in_run(run_seed: int, step: int, name: str, part: int = 0) -> int:
    """The seed of a linear in a run, by its name, at a step and a microbatch, both from 0 (S-24).

    >>> hex(seed_in_run(0, 0, "layers.0.mlp.up_proj"))
    '0xb567264ec2fcf7ff'
    """
    own = philox.derived(run_seed, step, 4 + part)
    return philox.derived(own, zlib.crc32(bytes(name, "utf-8")), 3)


def multiply(
    which: Gemm,
    a: Operand,
    b: Operand,
    recipe: Recipe,
    *,
    accumulate: Accumulate,
    out_dtype: Format,
) -> np.ndarray:
    """The product of what ``quantize_operands`` gives, [M, K] x [N, K] -> [M, N], by the recipe's
    accumulation and epilogue (L-6, G-8). Raises as ``gemm.matmul``."""
    spec = recipe.gemms[which]
    accumulation = _rule(which, spec, accumulate)
    if not isinstance(a, Quantized) or not isinstance(b, Quantized):
        return gemm.matmul_hp(a, b, out_dtype=out_dtype)
    if a.granularity in _WHOLE_LINES and b.granularity in _WHOLE_LINES:
        # As a kernel's tile that passes K: cores take 32 of K; zeros change no bit (G-12).
        a, b = (
            q._replace(codes=np.pad(q.codes, ((0, 0), (0, -q.codes.shape[1] % K_STEP))))
            for q in (a, b)
        )
    out = gemm.matmul(
        a,
        b,
        accumulate=accumulation,
        epilogue=spec.epilogue,
        out_dtype=BFLOAT16 if spec.rowwise else out_dtype,
    )
    return cast.round_to(out, out_dtype) if spec.rowwise else out


def _rule(which: Gemm, spec: GemmSpec, accumulate: Accumulate) -> str | Accumulation:
    """The accumulation of one GEMM; 'hopper' becomes the plan of the recipe."""
    if isinstance(accumulate, Mapping):
        if which not in accumulate or not set(accumulate) <= set(OPERANDS):
            raise ValueError(
                f"accumulate is one rule, or one for each GEMM by name; {which} needs one of "
                f"{', '.join(OPERANDS)}; got {', '.join(accumulate) or 'none'}."
            )
        accumulate = accumulate[which]
    if accumulate == "hopper":
        # in high precision there is nothing to choose
        return f"hopper_{spec.accumulate}" if spec.fp8 else "exact"
    return sums.by_name(accumulate)


def _quantize(
    x: np.ndarray,
    spec: CastSpec,
    role: Role,
    scales: Mapping[Role, Scales] | None,
    seed: int | None,
    ragged: bool,
) -> Quantized:
    if spec.delayed is None and role not in (scales or ()):
        return cast_operand(x, spec, seed, ragged=ragged)
    if scales is None or role not in scales:
        raise ValueError(
            f"delayed scaling takes the scales of {role} from its state; got "
            f"{'none' if scales is None else ', '.join(scales)}. Pass "
            f"scales={{role: delayed.scales(state, config, fmt)}}."
        )
    return scaling.quantize_with(
        x,
        scales[role],
        spec.fmt,
        granularity=spec.granularity,
        policy=spec.policy,
        rounding=spec.rounding,
        seed=seed if spec.stochastic else None,
    )


def cast_operand(
    x: np.ndarray, spec: CastSpec, seed: int | None = None, *, ragged: bool = False
) -> Quantized:
    """An operand [..., K], its reduced axis last, rotated and quantized by its own amax (S-5, S-22
    to S-24).

    seed      the GEMM's, which a cast to nearest ignores.
    ragged    the last block along K may be shorter.
    """
    if spec.rotation is not None:
        x = hadamard.rotate_blocks(x, spec.rotation)
    return scaling.quantize(
        x,
        spec.fmt,
        granularity=spec.granularity,
        policy=spec.policy,
        rounding=spec.rounding,
        seed=seed if spec.stochastic else None,
        ragged=ragged,
    )


def check_operands(
    x, w, recipe: Recipe, scales: Mapping[Role, Scales] | None
) -> tuple[np.ndarray, np.ndarray]:
    """x and w as arrays; ValueError for shapes, dtypes or scales that do not fit the recipe."""
    x, w = cast.array(x), cast.array(w)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"a linear takes x [..., K] and w [N, K] with one K; got {x.shape} and {w.shape}."
        )
    if recipe.fp8 and (w.shape[0] % 16 or w.shape[1] % 16):
        raise ValueError(
            f"FP8 needs N and K in multiples of 16; got w.shape={w.shape}. Pad the layer or use "
            "recipe 'bf16' (L-5)."
        )
    for tensor in (x, w):
        cast.check_dtype(tensor)
    delayed = {role for (_, role), spec in casts_of(recipe).items() if spec and spec.delayed}
    if not set(scales or ()) <= delayed:
        got = ", ".join(sorted(set(scales or ()) - delayed))
        raise ValueError(
            f"dynamic scaling takes no scales; got some for {got}. Leave them out, or use recipe "
            "'delayed'."
        )
    return x, w
