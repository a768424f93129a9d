"""A grouped linear by a recipe, forward and backward: three GEMMs for each group of rows
(spec X).

Group e is the rows offs[e - 1] to below offs[e], with weight e:

    output      [M_e, N] = input [M_e, K]       x weight[e] [N, K], reduces K
    grad_input  [M_e, K] = grad_output [M_e, N] x weight[e] [K, N], reduces N
    grad_weight [N, K]   = grad_output [N, M_e] x input [K, M_e],   reduces M_e

A grouped GEMM is one GEMM of ``linear`` for each group. This module cuts the rows, gives each group
its scales, and says what becomes of groups without rows and of rows without a group.
"""

from collections.abc import Mapping

import numpy as np

from fp8ref.formats import BFLOAT16, Format
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, Gemm, Recipe, Role
from fp8ref.selection import grouped
from fp8ref.selection.grouped import GroupedRecipe
from fp8ref.shared.errors import require
from fp8ref.sim import delayed, linear
from fp8ref.sim.delayed import Observation
from fp8ref.sim.gemm import gemm
from fp8ref.sim.linear import Accumulate, Operand
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Scales


def forward(
    x,
    w,
    offs,
    recipe: str | Recipe | GroupedRecipe,
    *,
    accumulate: Accumulate = "exact",
    out_dtype: Format = BFLOAT16,
    scales: Mapping[Role, Scales] | None = None,
) -> np.ndarray:
    """output [M, N] = each group's rows of x [M, K] x its weight of w [E, N, K].

    Shapes:   x [M, K] and w [E, N, K], float32, float16 or bfloat16; offs integers [E], the end of
              each group, cumulative; float32 [M, N] holding values of out_dtype.
    Order:    for each group as ``linear.forward``; scales are of a group or of all (X-3).
    Specials: a row of no group is not read, and its output is +0 (X-5). NaN and infinities of a
              group stay in it, unless all groups share a scale.
    Raises:   ValueError: offs that descend, or leave [0, M]; shapes that do not fit; as
              ``linear.forward``, except that a group may have no rows.
    Source:   spec X-1 to X-7.
    """
    recipe = grouped.checked(recipe)
    x, w, ends = _checked(x, w, offs, recipe, scales)
    tensors: dict[Role, np.ndarray] = {"input": x, "weight": w}
    return _rows("output", tensors, ends, recipe, accumulate, out_dtype, scales)


def backward(
    g,
    x,
    w,
    offs,
    recipe: str | Recipe | GroupedRecipe,
    *,
    accumulate: Accumulate = "exact",
    out_dtype: Format = BFLOAT16,
    scales: Mapping[Role, Scales] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(grad_input [M, K], grad_weight [E, N, K]) from grad_output g [M, N], x [M, K], w [E, N, K].

    Shapes:   as forward's; both results float32, holding values of out_dtype.
    Order:    for each group as ``linear.backward``; where grad_weight scales in blocks, they begin
              with the group's first row (X-7).
    Specials: a row of no group is not read, and its grad_input is +0; grad_weight of a group
    without
              rows is +0 (X-4, X-5).
    Raises:   ValueError: as forward, and g whose shape is not the output's.
    Source:   spec X-1 to X-7.
    """
    recipe = grouped.checked(recipe)
    x, w, ends = _checked(x, w, offs, recipe, scales)
    g = cast.array(g)
    cast.check_dtype(g)
    text = f"grad_output has the output's shape {(len(x), w.shape[1])}; got {g.shape}."
    require(g.shape == (len(x), w.shape[1]), text)
    tensors: dict[Role, np.ndarray] = {"input": x, "weight": w, "grad_output": g}
    grad_input = _rows("grad_input", tensors, ends, recipe, accumulate, out_dtype, scales)
    grad_weight = np.zeros(w.shape, np.float32)
    for e, pair in enumerate(quantize_operands("grad_weight", tensors, ends, recipe, scales)):
        if pair is not None:
            grad_weight[e] = linear.multiply(
                "grad_weight", *pair, recipe.recipe, accumulate=accumulate, out_dtype=out_dtype
            )
    return grad_input, grad_weight


def quantize_operands(
    which: Gemm,
    tensors: Mapping[Role, np.ndarray],
    offs,
    recipe: str | Recipe | GroupedRecipe,
    scales: Mapping[Role, Scales] | None = None,
) -> list[tuple[Operand, Operand] | None]:
    """For each group the operands a and b of one GEMM, as ``linear.quantize_operands`` gives them;
    None for a group without rows.

    tensors   input [M, K], weight [E, N, K] and grad_output [M, N]: those that the GEMM takes.
    """
    recipe = grouped.checked(recipe)
    ends = ends_of(offs, len(next(v for role, v in tensors.items() if role != "weight")))
    shared = _shared_scales(which, tensors, ends, recipe) | dict(scales or {})
    operand_pairs: list[tuple[Operand, Operand] | None] = []
    for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if begin == end:
            operand_pairs.append(None)
            continue
        own: dict[Role, np.ndarray] = {
            role: v[e] if role == "weight" else v[begin:end] for role, v in tensors.items()
        }
        group_scales = {
            role: _group_scales(s, role, which, begin, end, e)
            for role, s in shared.items()
            if role in own
        }
        operand_pairs.append(linear.quantize_operands(which, own, recipe.recipe, group_scales))
    return operand_pairs


def observe(role: Role, x, offs) -> Observation:
    """What the delayed state of a role observes of its tensor, x [M, ...] or w [E, N, K] (spec
    X-9): the amax of all rows in a group, or of all weights; not seen if no group has rows.

    Raises:   ValueError: as ``ends_of``, for rows, and ``scaling.amax``.
    """
    x = cast.array(x)
    last = (
        max(ends_of(offs, len(x)), default=0) if role != "weight" else int(np.max(offs, initial=0))
    )
    if not last:
        return delayed.observe(np.float32(0), seen=False)
    return delayed.observe(scaling.amax(x if role == "weight" else x[:last]))


def ends_of(offs, rows: int) -> list[int]:
    """The end of each group; ValueError unless offs ascend within [0, rows] (X-1)."""
    offsets = np.asarray(offs)
    if offsets.ndim != 1 or not (np.issubdtype(offsets.dtype, np.integer) or offsets.size == 0):
        raise ValueError(
            f"offs are integers [E], group ends; got {offsets.dtype} {offsets.shape}. Use cumsum."
        )
    ends = [int(end) for end in offsets]
    if any(a > b for a, b in zip([0, *ends], [*ends, rows], strict=True)):
        raise ValueError(
            f"offs ascend from 0 to at most M={rows}; got {ends}. Use np.cumsum of group sizes."
        )
    return ends


def _rows(
    which: Gemm,
    tensors: Mapping[Role, np.ndarray],
    ends: list[int],
    recipe: GroupedRecipe,
    accumulate: Accumulate,
    out_dtype: Format,
    scales: Mapping[Role, Scales] | None,
) -> np.ndarray:
    """The output or grad_input: one GEMM per group, zeros in rows without a group."""
    gemm.check_out_dtype(out_dtype)
    m, (n, k) = len(tensors[OPERANDS[which][0]]), tensors["weight"].shape[1:]
    out = np.zeros((m, n if which == "output" else k), np.float32)
    for begin, end, pair in zip(
        [0, *ends], ends, quantize_operands(which, tensors, ends, recipe, scales), strict=False
    ):
        if pair is not None:
            out[begin:end] = linear.multiply(
                which, *pair, recipe.recipe, accumulate=accumulate, out_dtype=out_dtype
            )
    return out


def _shared_scales(
    which: Gemm, tensors: Mapping[Role, np.ndarray], ends: list[int], recipe: GroupedRecipe
) -> dict[Role, Scales]:
    """The scales that all groups share, from amaxes of all grouped rows; {} if each has its own."""
    spec = recipe.recipe.gemms[which]
    casts = zip(OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True)
    if recipe.amax == "group" or not ends or not ends[-1]:
        return {}
    return {
        role: _scales_of_all(
            tensors[role] if role == "weight" else tensors[role][: ends[-1]], c, axis
        )
        for role, c, axis in casts
        if c is not None and c.delayed is None
    }


def _scales_of_all(x: np.ndarray, spec: CastSpec, axis: int) -> Scales:
    """Scales of all rows [M, columns] or weights [E, N, K]; axis as in one group's matrix."""
    q = scaling.quantize(
        x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis - 2
    )
    return Scales(q.scale, q.scale_inv)


def _group_scales(scales: Scales, role: Role, which: Gemm, begin: int, end: int, e: int) -> Scales:
    """One group's part of shared scales, with the reduced axis last."""

    def part(scale: np.ndarray) -> np.ndarray:
        if scale.ndim == 0:
            return scale
        if role == "weight":
            scale = scale[e]
        elif len(scale) > 1 or which != "grad_weight":  # a scale for each row
            scale = scale[begin:end]
        return scale if REDUCED_AXES[which][OPERANDS[which].index(role)] == 1 else scale.T

    return Scales(*map(part, scales))


def _checked(
    x, w, offs, recipe: GroupedRecipe, scales: Mapping[Role, Scales] | None
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    x, w = cast.array(x), cast.array(w)
    if w.ndim != 3 or x.ndim != 2:
        raise ValueError(
            f"a grouped linear takes x [M, K], w [E, N, K]; got {x.shape} and {w.shape}."
        )
    linear.check_operands(
        x, w[0] if len(w) else np.zeros(w.shape[1:], w.dtype), recipe.recipe, scales
    )
    ends = ends_of(offs, len(x))
    text = f"offs have one end for each of E groups; got {len(ends)} for w {w.shape}."
    require(len(ends) == len(w), text)
    return x, w, ends
