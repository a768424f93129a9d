"""A linear layer is three GEMMs (SEMANTICS L): what the forward and the backward pass of a recipe mean."""

import numpy as np

from fp8ref import recipe as recipes
from fp8ref.formats import BFLOAT16, Format
from fp8ref.recipe import GemmSpec, Recipe
from fp8ref.sim import cast, gemm, scaling
from fp8ref.sim.gemm import Accumulate


def forward(x, w, recipe: str | Recipe, *, accumulate: Accumulate = "exact", out_dtype: Format = BFLOAT16) -> np.ndarray:
    """output [..., N] = input x [..., K] x weight w [N, K], reduces K.

    Shapes:   x [..., K] and w [N, K] hp; float32 [..., N] holding values of out_dtype.
    Order:    leading dims flatten to M; quantise both along K; accumulate; epilogue.
    Specials: as scaling.quantize and gemm.matmul.
    Raises:   ValueError: w not 2-d, K's that differ, dims of an FP8 linear that are not multiples of 16 (L-5).
    Source:   SEMANTICS L-1 to L-5.
    """
    recipe = recipes.by_name(recipe)
    x, w = _operands(x, w, recipe)
    y = _gemm(x.reshape(-1, x.shape[-1]), w, recipe.output, accumulate, out_dtype)  # [M, K] x [N, K] -> [M, N]
    return y.reshape(*x.shape[:-1], len(w))


def backward(
    g, x, w, recipe: str | Recipe, *, accumulate: Accumulate = "exact", out_dtype: Format = BFLOAT16
) -> tuple[np.ndarray, np.ndarray]:
    """(grad_input [..., K], grad_weight [N, K]) from grad_output g [..., N], input x [..., K], weight w [N, K].

    Order:    grad_input = g [M, N] x w [K, N], reduces N; grad_weight = g [N, M] x x [K, M], reduces M; each operand is quantised
              again from its hp tensor along the axis its GEMM reduces (L-3).
    Raises:   ValueError: as forward, and g whose shape is not the output's.
    """
    recipe = recipes.by_name(recipe)
    x, w = _operands(x, w, recipe)
    g = np.asarray(g)
    if g.shape != (*x.shape[:-1], len(w)):
        raise ValueError(f"grad_output has the output's shape {(*x.shape[:-1], len(w))}; got {g.shape}.")
    x2, g2 = x.reshape(-1, x.shape[-1]), g.reshape(-1, len(w))
    grad_input = _gemm(g2, w.T, recipe.grad_input, accumulate, out_dtype)  # [M, N] x [K, N] -> [M, K]
    grad_weight = _gemm(g2.T, x2.T, recipe.grad_weight, accumulate, out_dtype)  # [N, M] x [K, M] -> [N, K]
    return grad_input.reshape(x.shape), grad_weight


def _gemm(a: np.ndarray, b: np.ndarray, spec: GemmSpec, accumulate: Accumulate, out_dtype: Format) -> np.ndarray:
    if spec.a is None or spec.b is None:
        return gemm.matmul_hp(a, b, out_dtype=out_dtype)
    qa, qb = (
        scaling.quantize(v, cast.fmt, granularity=cast.granularity, policy=cast.policy, axis=-1) for v, cast in ((a, spec.a), (b, spec.b))
    )
    return gemm.matmul(qa, qb, accumulate=accumulate, epilogue=spec.epilogue, out_dtype=BFLOAT16 if spec.rowwise else out_dtype)


def _operands(x, w, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    x, w = np.asarray(x), np.asarray(w)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"a linear takes x [..., K] and w [N, K] with the same K; got {x.shape} and {w.shape}.")
    if recipe.fp8 and (w.shape[0] % 16 or w.shape[1] % 16):
        raise ValueError(f"FP8 needs N and K to be multiples of 16 (L-5); got w.shape={w.shape}. Pad the layer or use recipe 'bf16'.")
    cast.exact(x[:0]), cast.exact(w[:0])  # refuses dtypes that are not floating point
    return x, w
