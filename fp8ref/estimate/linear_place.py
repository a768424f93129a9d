"""What the place of a linear in a Llama on a mesh means for the kernels that quantize its operands:
what casts them, and what it shares, gathers and sends.
"""

from collections.abc import Mapping

from fp8ref.estimate import kernels
from fp8ref.estimate.kernels import Place
from fp8ref.recipe import ROLES, Gemm, Recipe, Role
from fp8ref.selection.linears import Decision
from fp8ref.spec import llama
from fp8ref.train.config.config import Config
from fp8ref.train.config.device_shapes import amax_handed_on, in_fp8, sharded


def of(
    decision: Decision, config: Config, backend: str, recipes: Mapping[str, Recipe] | None = None
) -> Place:
    """The place of a config's linear. recipes: of all linears by path; None: looked up."""
    keys, recipe, name = config.parallel, decision.recipe, decision.path.split(".")[-1]
    by_triton = kernels.by_triton(recipe, config, backend)
    gathered = keys.shards > 1 and in_fp8(recipe, config, backend)
    parts: dict[Role, int] = {"weight": keys.shards} if gathered else {}
    sent: list[Gemm] = []
    if backend == "jax":
        if keys.sequence and decision.path.startswith("model.layers."):
            parts["input" if name in llama.COLUMN else "grad_output"] = keys.tensor
        if keys.reduce_dtype == "bfloat16" and keys.sharing > 1:
            sent.append("grad_weight")
        rounded = keys.reduce == "rounded" and keys.tensor_reduce_dtype != "float32"
        if name in llama.ROW and keys.tensor > 1 and rounded:
            sent.append("output")
    # An input is quantized once for linears that share it.
    parent = decision.path.removesuffix(name)
    first = parent + llama.FIRST_READER.get(name, name)
    if recipes is None:
        recipes = {d.path: d.recipe for d in config.decisions()}
    shared = first != decision.path and recipes[first] == recipe
    heads, scaled = llama.COLUMN[:3], backend == "jax" and config.parallel.precompute_scales
    group = heads if name in heads else (*kernels.SWIGLU, "down_proj")
    return Place(
        linear=name,
        roles=ROLES[1:] if shared and (backend == "jax" or by_triton) else ROLES,
        parts=parts,
        sent=tuple(sent),
        by_triton=by_triton,
        fused=kernels.fuses(recipe, config, backend)
        and all(recipes.get(parent + other) == recipe for other in group),
        freed=backend == "torch" and sharded(config, backend),
        weighed=scaled and amax_handed_on(decision, config),
        products=config.numerics.products,
    )
