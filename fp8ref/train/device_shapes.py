"""How a config cuts a model and its batches over devices, from shapes alone (SEMANTICS P-10, P-14): what dry runs count with."""

import math

from fp8ref import llama
from fp8ref.recipe import Recipe
from fp8ref.train.config import Config


def tokens(config: Config) -> int:
    """Of one part of a batch, those that a device trains, before tensor parallelism cuts any."""
    shared = config.parallel.data * config.parallel.fsdp * config.data.microbatches
    return config.data.batch_size // shared * config.data.sequence_length


def used(linear: str, shape: tuple[int, int], config: Config) -> tuple[int, int]:
    """[N, K] of a linear's weight as a device multiplies by it: cut by tensor parallelism, and gathered over fsdp."""
    (n, k), last, tensor = shape, linear.split(".")[-1], config.parallel.tensor
    return (n // tensor if last in llama.COLUMN else n), (k // tensor if last in llama.ROW else k)


def at_rest(parameter: str, shape: tuple[int, ...], config: Config, backend: str) -> tuple[int, ...]:
    """A parameter's piece on a device, the largest of all: JAX cuts matrices over fsdp, evenly; FSDP2 everything, the last pieces shorter."""
    cut = used(parameter.removesuffix(".weight"), shape, config) if len(shape) == 2 else shape
    if backend == "jax" and len(shape) < 2:
        return cut
    return (-(-cut[0] // config.parallel.fsdp), *cut[1:])


def sharded(config: Config, backend: str) -> bool:
    """Whether parameters are gathered for use, and gradients reduced."""
    return config.parallel.fsdp > 1 or (backend == "torch" and config.parallel.data > 1)


def in_fp8(recipe: Recipe, config: Config, backend: str) -> bool:
    """Whether a weight of this recipe moves as codes over fsdp."""
    if not recipe.output.fp8:
        return False
    return backend == "jax" or (config.parallel.gather == "fp8" and recipe.serves_both("weight"))


def kinds(config: Config) -> dict[str, int]:
    """How many parameters of each kind there are, and in all."""
    found = dict.fromkeys(("embedding", "attention", "mlp", "norms", "lm_head"), 0)
    for name, shape in llama.parameter_shapes(config.model).items():
        parts = name.split(".")
        kind = "embedding" if name == llama.EMBEDDING else "norms" if len(shape) < 2 else "lm_head" if parts[0] == "lm_head" else ""
        found[kind or ("attention" if "self_attn" in parts else "mlp")] += math.prod(shape)
    return found | {"all": sum(found.values())}
