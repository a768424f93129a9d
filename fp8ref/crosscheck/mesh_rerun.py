"""One linear's tensors through its GEMMs on a mesh, whole tensors in and out, for the cross-check."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax import linear, operands
from fp8ref.jax.operands import Use
from fp8ref.jax.sharding import Placement
from fp8ref.recipe import OPERANDS, ROLES, CastSpec, Gemm, Recipe, Role

Operand = tuple[np.ndarray, np.ndarray]  # codes uint8, scale float32


def replay(
    tensors: dict[Role, np.ndarray], *, recipe: Recipe, placement: Placement, mesh: Mesh, through: str
) -> dict[Gemm, tuple[Operand, Operand, np.ndarray]]:
    """Of every FP8 GEMM its operands' codes and scales, and its output, float32, computed on the mesh's devices.

    Shapes:   tensors input [M, K], weight [N, K], grad_output [M, N], float32 holding bfloat16; codes of their shapes.
    Order:    each tensor cut by the placement; quantised and multiplied by ``linear.apply``, inside shard_map or under plain jit.
    """
    cut = (jax.device_put(jnp.asarray(tensors[role], jnp.bfloat16), NamedSharding(mesh, P(*placement.at_rest(role)))) for role in ROLES)
    outputs, quantized = _program(recipe, placement, mesh, through)(*cut)
    fetched = jax.tree.map(np.asarray, quantized)
    return {which: (*fetched[which], np.asarray(outputs[which], np.float32)) for which in recipe.gemms if which in fetched}


@functools.cache
def _program(recipe: Recipe, placement: Placement, mesh: Mesh, through: str) -> Callable:
    """(input, weight, grad_output) -> the outputs of all three GEMMs, and of the FP8 ones (codes, scale) of both operands; compiled once a shape."""
    use = Use(recipe=recipe, name="replay", placement=placement, mode="shard_map" if through == "shard_map" else "jit")
    fp8 = {
        which: [(role, cast) for role, cast in zip(OPERANDS[which], (spec.a, spec.b), strict=True) if cast]
        for which, spec in recipe.gemms.items()
        if spec.fp8
    }

    def run(x: jax.Array, w: jax.Array, g: jax.Array):
        tensors: dict[Role, jax.Array] = {"input": x, "weight": w, "grad_output": g}
        y, vjp = jax.vjp(lambda x, w: linear.apply(x, w, recipe=recipe, placement=placement, name="replay")[0], x, w)
        return dict(zip(recipe.gemms, (y, *vjp(g)), strict=True)), {
            which: tuple(quantized(tensors[role], role, cast, use.axis(which, role)) for role, cast in of_gemm)
            for which, of_gemm in fp8.items()
        }

    def quantized(x: jax.Array, role: Role, cast: CastSpec, axis: int):
        q = operands.quantize(x, role, cast, axis, {}, use)
        return jax.lax.bitcast_convert_type(q.codes, jnp.uint8), q.scale

    def of_scale(role: Role, cast: CastSpec, axis: int) -> P:
        rows, columns = placement.at_rest(role)
        return P() if cast.granularity == "tensorwise" else P(rows, None) if axis == -1 else P(None, columns)

    if through == "jit":
        return jax.jit(run)
    at_rest = {role: P(*placement.at_rest(role)) for role in ROLES}
    results = dict(zip(recipe.gemms, (at_rest["grad_output"], at_rest["input"], at_rest["weight"]), strict=True))
    of_operands = {
        which: tuple((at_rest[role], of_scale(role, cast, use.axis(which, role))) for role, cast in of_gemm)
        for which, of_gemm in fp8.items()
    }
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=tuple(at_rest.values()), out_specs=(results, of_operands)))
