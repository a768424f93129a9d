"""One linear's operands through its GEMMs on a mesh, whole tensors in and out, for the cross-check."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax import linear, scaling
from fp8ref.jax.sharding import Placement
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, Gemm, Recipe, Role

Operand = tuple[np.ndarray, np.ndarray]  # codes uint8, scale float32


def replay(
    tensors: dict[Role, np.ndarray], *, recipe: Recipe, placement: Placement, mesh: Mesh, through: str
) -> dict[Gemm, tuple[Operand, Operand, np.ndarray]]:
    """Of every FP8 GEMM its operands' codes and scales, and its output, float32, computed on the mesh's devices.

    Shapes:   tensors input [M, K], weight [N, K], grad_output [M, N], float32 holding bfloat16; codes of their shapes.
    Order:    each tensor cut by the placement; quantised and multiplied as ``linear.apply`` does, inside shard_map or under plain jit.
    """
    specs = {role: P(*placement.at_rest(role)) for role in tensors}
    cut = {role: jax.device_put(jnp.asarray(v, jnp.bfloat16), NamedSharding(mesh, specs[role])) for role, v in tensors.items()}

    def run(f, roles, out_specs):
        mapped = f if through == "jit" else jax.shard_map(f, mesh=mesh, in_specs=tuple(specs[role] for role in roles), out_specs=out_specs)
        return jax.jit(mapped)(*(cut[role] for role in roles))

    def results(x, w, g):
        y, vjp = jax.vjp(lambda x, w: linear.apply(x, w, recipe=recipe, placement=placement, name="replay")[0], x, w)
        return y, *vjp(g)

    def quantized(role: Role, cast: CastSpec, axis: int) -> Operand:
        over = placement.amax_axes(role, cast.granularity, axis) if through == "shard_map" else ()

        def quantize(x):
            q = scaling.quantize(x, cast.fmt, granularity=cast.granularity, policy=cast.policy, axis=axis, over=over)
            return jax.lax.bitcast_convert_type(q.codes, jnp.uint8), q.scale

        rows, columns = placement.at_rest(role)
        of_scale = P() if cast.granularity == "tensorwise" else P(rows, None) if axis == -1 else P(None, columns)
        codes, scale = run(quantize, (role,), (specs[role], of_scale))
        return np.asarray(codes), np.asarray(scale)

    outputs = run(results, ("input", "weight", "grad_output"), (specs["grad_output"], specs["input"], specs["weight"]))
    found: dict[Gemm, tuple[Operand, Operand, np.ndarray]] = {}
    for (which, spec), out in zip(recipe.gemms.items(), outputs, strict=True):
        if spec.a is not None and spec.b is not None:
            a, b = (
                quantized(role, cast, axis - 2)
                for role, cast, axis in zip(OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True)
            )
            found[which] = a, b, np.asarray(out.astype(jnp.float32))
    return found
