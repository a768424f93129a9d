"""Operands of grouped linears, and what a backend makes of them, group by group."""

import numpy as np

from fp8ref.formats import BFLOAT16
from fp8ref.recipe import OPERANDS, RECIPES
from fp8ref.selection.grouped import GROUPED_RECIPES, GroupedRecipe
from fp8ref.sim.experts import grouped as sim
from fp8ref.sim.quantize import cast

OFFS = (40, 40, 41, 137)  # sizes 40, 0, 1 and 96; the last 13 rows are in no group
SIZES = tuple(int(n) for n in np.diff([0, *OFFS]))
M, K, N, E = 150, 256, 128, 4
GEMMS = tuple(OPERANDS)
TENSORS_OF_ALL = GroupedRecipe(recipe=RECIPES["tensorwise"], amax="all")
ROWS_OF_ALL = GroupedRecipe(recipe=GROUPED_RECIPES["rowwise"].recipe, amax="all")
DYNAMIC = [
    "tensorwise",
    "rowwise",
    "rowwise_with_gw_hp",
    "tensorwise_pow2",
    "rowwise_native",
    "blockwise",
    "blockwise_deepgemm",
    "blockwise_ue8m0",
    "mxfp8",
    "mxfp4",
    "mxfp8_32x32",
]
EVERY = [*DYNAMIC, TENSORS_OF_ALL, ROWS_OF_ALL]


def name_of(recipe):
    return recipe if isinstance(recipe, str) else f"{recipe.name}_of_{recipe.amax}"


def tensors(rng):
    """x, w, g: numbers of bfloat16; rows, columns and experts differ in size.

    NaN and infinity in rows of no group.
    """

    def like(shape, size):
        sizes = np.exp(rng.standard_normal(shape[-1])) * np.exp(
            rng.standard_normal((*shape[:-1], 1))
        )
        return cast.round_to(rng.standard_normal(shape) * sizes * size, BFLOAT16)

    x, w, g = like((M, K), 1), like((E, N, K), 0.1), like((M, N), 1e-3)
    x[OFFS[-1] :], g[OFFS[-1] :] = np.nan, np.inf
    return x, w, g


def integers(rng):
    """x, w, g: small integers over powers of two, so that sums under scales of all of K are
    exact.
    """
    x, w, g = (
        rng.integers(-7, 8, s).astype(np.float32) * f
        for s, f in (((M, K), 1), ((E, N, K), 2.0**-6), ((M, N), 2.0**-10))
    )
    x[OFFS[-1] :], g[OFFS[-1] :] = np.nan, np.nan
    return x, w, g


def simulated(x, w, g, recipe, offs=OFFS, **options):
    """{GEMM: result}, float32."""
    grad_input, grad_weight = sim.backward(g, x, w, offs, recipe, **options)
    return {
        "output": sim.forward(x, w, offs, recipe, **options),
        "grad_input": grad_input,
        "grad_weight": grad_weight,
    }


def operands(x, w, g, recipe, scales=None):
    """{GEMM: for each group its operands a and b, or None}, by the simulator."""
    found = {"input": x, "weight": w, "grad_output": g}
    return {
        which: sim.quantize_operands(which, {r: found[r] for r in roles}, OFFS, recipe, scales)
        for which, roles in OPERANDS.items()
    }


def parts(which):
    """(e, rows or e): where each group that has rows is in a GEMM's result."""
    return [
        (e, e if which == "grad_weight" else slice(end - size, end))
        for e, (size, end) in enumerate(zip(SIZES, OFFS, strict=True))
        if size
    ]


def of_group(codes, table, q, role, which, e):
    """Group e of a backend's codes and table of scale_inv, laid out as the simulator's q. Weights
    are [E, N, K]; scales of groups, of blocks along the rows and of rows as the tables of X-3 say.
    """
    begin, end = OFFS[e] - SIZES[e], OFFS[e]
    block = {"mx_1x32": 32, "blockwise_1x128": 128}.get(q.granularity, 0)
    if role == "weight":
        codes, table = codes[e], table if table.ndim == 0 else table[e]
        turned = which == "grad_input"
    elif which != "grad_weight":
        codes, turned = codes[begin:end], False
        table = (
            table
            if table.ndim == 0
            else table[e]
            if q.granularity == "tensorwise"
            else table[begin:end]
        )
    else:
        codes, turned = codes[begin:end], True
        if block:
            first = sum(-(-n // block) for n in SIZES[:e])
            table = table[first : first + -(-len(codes) // block)]
        elif table.ndim:
            table = table[e if len(table) > 1 else 0][None]
    codes, table = (codes.T, table.T) if turned else (codes, table)
    return codes, table.reshape(q.scale_inv.shape)
