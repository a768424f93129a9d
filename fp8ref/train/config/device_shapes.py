"""Shapes on each device, and whether a backend can train them (spec P-10, P-14).

Computed from the configuration alone, for dry runs and estimates without devices or data.
"""

import math

from fp8ref import recipe as recipes
from fp8ref.recipe import OPERANDS, REDUCED_AXES, Recipe
from fp8ref.selection import grouped
from fp8ref.selection.linears import Decision
from fp8ref.shared.errors import ConfigError, require
from fp8ref.spec import granularity, llama, products
from fp8ref.train.config import checks
from fp8ref.train.config.config import Config


def tokens(config: Config) -> int:
    """Tokens of one microbatch on a device, before tensor parallelism cuts any."""
    return sequences(config) * config.data.sequence_length // config.parallel.context


def sequences(config: Config) -> int:
    """Sequences of one microbatch that a device has, or has a part of."""
    return config.data.batch_size // (config.parallel.batch_parts * config.data.microbatches)


def style(linear: str) -> recipes.Style | None:
    """How tensor parallelism cuts a linear; None: it does not."""
    last = linear.rpartition(".")[2]
    if last in llama.COLUMN:
        return "colwise"
    return "rowwise" if last in llama.ROW else None


def used(linear: str, shape: tuple[int, int], config: Config) -> tuple[int, int]:
    """[N, K] of a linear's weight, or each expert's, in GEMMs, cut by tensor parallelism."""
    (n, k), cut, tensor = shape, style(linear), config.parallel.tensor
    return (n // tensor if cut == "colwise" else n), (k // tensor if cut == "rowwise" else k)


def at_rest(
    parameter: str, shape: tuple[int, ...], config: Config, backend: str
) -> tuple[int, ...]:
    """Shape of the largest piece of a parameter that a device stores.

    JAX cuts matrices over fsdp, context and expert, evenly, but routers. FSDP2 cuts all; last
    pieces may be shorter. Experts are cut by their number, over fsdp and expert.
    """
    cut = shape
    if len(shape) == 2:
        cut = used(parameter.removesuffix(".weight"), shape, config)
    if backend == "jax" and (len(shape) < 2 or llama.is_router(parameter)):
        return cut
    if len(shape) > 2:  # each device's own experts first
        cut = (cut[0] // config.parallel.expert, *cut[1:])
        return (-(-cut[0] // config.parallel.fsdp), *cut[1:])
    return (-(-cut[0] // config.parallel.shards), *cut[1:])


def sharded(config: Config, backend: str) -> bool:
    """Whether parameters are all-gathered for use, and gradients reduce-scattered."""
    return config.parallel.shards > 1 or (backend == "torch" and config.parallel.data > 1)


def ranks_share_amaxes(config: Config) -> bool:
    """Whether PyTorch's ranks share amaxes: their linears, fp8ref's own, then pad and gather."""
    return config.parallel.sharing > 1 and config.parallel.amax_scope == "global"


def runs_output_again(linear: str, config: Config, backend: str) -> bool:
    """Whether JAX runs a linear's output GEMM again in the backward pass, with its collectives. No
    gradient needs the output of the last linear of a layer."""
    return (
        backend == "jax"
        and config.parallel.checkpointing == "full"
        and "layers" in linear
        and not linear.endswith("down_proj")
    )


def in_fp8(recipe: Recipe, config: Config, backend: str) -> bool:
    """Whether fsdp gathers a weight of this recipe in FP8."""
    if not recipe.output.fp8:
        return False
    return backend == "jax" or (config.parallel.gather == "fp8" and recipe.serves_both("weight"))


def copied(config: Config, backend: str) -> dict[str, Recipe]:
    """{linear: recipe} of weights that the optimizer keeps in FP8, by a layout with masters (O-16).

    That changes no bit. In PyTorch a schedule's recipes share one weight, a compiled linear casts
    its own, and FSDP gathers codes only where ``parallel.gather`` is fp8: then nothing is kept.
    """
    if not config.optimizer.keeps_masters:
        return {}
    keys = config.parallel
    if backend == "torch" and keys.tensor > 1:
        return {}
    possible = keys.gather == "fp8" or not sharded(config, backend)
    if backend == "torch" and not (possible and len(config.recipes) == 1):
        return {}
    return {
        d.path: d.recipe
        for d in config.decisions()
        if d.experts is None and recipes.casts_weight_once(d.recipe)
    }


def scaled_first(config: Config) -> dict[str, Recipe]:
    """{linear: recipe} whose weights' scales JAX makes once a step, at its beginning (spec P-9)."""
    if not config.parallel.precompute_scales:
        return {}
    return {d.path: d.recipe for d in config.decisions() if amax_handed_on(d, config)}


def amax_handed_on(decision: Decision, config: Config) -> bool:
    """Whether a step in JAX that precomputes scales takes the amax of a linear's new weight (spec
    P-9). Of masters that a layout stores the optimizer keeps copies in FP8 instead."""
    return (
        not config.optimizer.keeps_masters
        and decision.experts is None
        and recipes.casts_weight_once(decision.recipe)
    )


def kinds(config: Config) -> dict[str, int]:
    """Number of parameters by kind, and in all."""
    experts = ["experts"] * bool(config.model.num_experts)
    kinds = ("embedding", "attention", "mlp", *experts, "norms", "lm_head")
    counts = dict.fromkeys(kinds, 0)
    for name, shape in llama.parameter_shapes(config.model).items():
        counts[_kind(name, shape)] += math.prod(shape)
    return counts | {"all": sum(counts.values())}


def _kind(name: str, shape: tuple[int, ...]) -> str:
    parts = name.split(".")
    if name == llama.EMBEDDING:
        return "embedding"
    if parts[0] == "lm_head":
        return "lm_head"
    if len(shape) < 2 and not llama.is_sinks(name):
        return "norms"
    if "self_attn" in parts:
        return "attention"
    return "experts" if len(shape) > 2 else "mlp"


def active(config: Config) -> int:
    """Number of parameters in a token's forward pass: of experts those of its own."""
    counts, model = kinds(config), config.model
    if not model.num_experts:
        return counts["all"]
    return (
        counts["all"]
        - counts["experts"]
        + counts["experts"] * model.num_experts_per_tok // model.num_experts
    )


def unmultiplied(config: Config, backend: str) -> list[str]:
    """The error messages for numerics.products that a backend or a linear lacks (G-26)."""
    by = config.numerics.products
    decisions = [d for r in config.recipes for d in config.under(r).decisions()]
    blocks = [d.recipe for d in decisions if d.recipe.in_blocks]
    try:
        products.check_backend(by, backend)
        text = "products are of operands in blocks; no linear has any. Leave it out."
        require(by == "auto" or len(blocks) > 0, text)
        for spec in [s for recipe in blocks for s in recipe.gemms.values() if s.fp8]:
            _ = by in ("auto", "emulated") or products.kind(spec.a, spec.b, by)
    except ValueError as error:
        return [f"numerics.{error}"]
    return []


def check(config: Config, backend: str) -> None:
    """ConfigError, a line for each fault, if the backend would refuse this config on any mesh."""
    faults = [
        *config.parallel.foreign(backend),
        *config.optimizer.foreign(backend),
        *uncut(config, backend),
        *config.optimizer.uncut(config.parallel, backend),
        *config.parallel.unreduced(backend),
        *checks.unswitched(config, backend),
        *checks.undrawn(config, backend),
    ]
    for recipe_config in map(config.under, config.recipes):
        decisions: list[Decision] = []
        try:
            # one layer stands for all
            decisions = [
                d
                for d in recipe_config.decisions()
                if d.path.startswith("model.layers.0.") or d.path == "lm_head"
            ]
            for d in decisions:
                _ = d.experts is None or grouped.checked(d.recipe)
        except ValueError as error:
            faults.append(str(error))
        faults += (_jax if backend == "jax" else _torch)(recipe_config, decisions)
    faults = list(dict.fromkeys(faults)) or [*unmultiplied(config, backend), *unrotated(config)]
    text = "\n  ".join(["this config cannot be trained:", *faults] if len(faults) > 1 else faults)
    require(not faults, text, ConfigError)


def check_on_gpu(config: Config, backend: str) -> None:
    """ConfigError if a GPU's kernels would refuse what a CPU's accept.

    Sums over tokens are not padded to 16 where tensor parallelism cuts torchao's linears (L-5).
    """
    count = tokens(config)
    if (
        backend == "jax"
        or config.parallel.tensor == 1
        or ranks_share_amaxes(config)
        or count % 16 == 0
    ):
        return
    for d in (d for recipe in config.recipes for d in config.under(recipe).decisions()):
        spec = d.recipe.grad_weight
        if (
            spec.a is not None
            and spec.a.delayed is None
            and granularity.by_name(spec.a.granularity).reduced is None
        ):
            raise ConfigError(
                "on a GPU PyTorch's FP8 GEMMs reduce multiples of 16 (L-5), and grad_weight of "
                f"{d.path} reduces over a device's tokens of a part of a batch, without padding "
                f"under parallel.tensor; got {count}. Change data.sequence_length, batch_size "
                "or microbatches."
            )


def uncut(config: Config, backend: str) -> list[str]:
    """The error messages for what the mesh does not divide: batch, sequences, heads, words."""
    keys, model, data, faults = config.parallel, config.model, config.data, []
    if data.batch_size % (keys.batch_parts * data.microbatches):
        faults.append(data.indivisible(keys.batch_keys, "devices"))
    faults += checks.uncut_sequences(config)
    faults += [
        f"model.{key} is divisible by parallel.tensor = {keys.tensor}; got "
        f"{getattr(model, key)}. Change one of them."
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        if getattr(model, key) % keys.tensor
    ]
    faults += [
        f"model.{key} is divisible by parallel.{keys.shard_keys}; got {getattr(model, key)}. "
        "Change one of them."
        for key in ("vocab_size", "num_experts")
        if backend == "jax" and getattr(model, key) % keys.shards
    ]
    return faults


def unequal_pieces(config: Config) -> list[str]:
    """The error messages for a mesh that cuts a parameter unequally under ``adamw_fp8`` (T-6).

    Ranks would keep its moments in different formats, which no checkpoint holds together, and
    torchao compiles one step for all.
    """
    keys = config.parallel
    if config.optimizer.kind != "adamw_fp8" or keys.shards == 1:
        return []
    for name, shape in llama.parameter_shapes(config.model).items():
        rows = shape[0]
        if len(shape) == 2:
            rows, _ = used(name.removesuffix(".weight"), shape, config)
        if rows % keys.shards:
            return [
                "optimizer.kind 'adamw_fp8' keeps moments of each rank's piece (T-6), and the "
                f"pieces of a parameter are equal: parallel.{keys.shard_keys} divides its rows; "
                f"{name} has {rows}. Change one of them, or use adamw_states."
            ]
    return []


def _jax(config: Config, decisions: list[Decision]) -> list[str]:
    """JAX's faults: pieces must be equal, and hold whole blocks (P-1, P-5)."""
    keys = config.parallel
    faults = keys.unattended(config.model.head_dim)
    if keys.devices > 1 and keys.amax_scope == "local":
        states = dict.fromkeys(d.recipe.name for d in decisions if d.recipe.delayed)
        faults += [
            f"recipe {name!r} keeps one state for all devices; parallel.amax_scope is local. "
            "Set it to global."
            for name in states
        ]
    if decisions:
        try:
            config.program_linears()
        except ConfigError as error:
            faults.append(str(error))
    if keys.loss == "chunked" and any(d.fp8 and d.path == "lm_head" for d in decisions):
        faults.append(
            "parallel.loss 'chunked' takes a last linear in bfloat16; lm_head is in FP8. Name "
            "it in filter_fqns, or use loss 'whole'."
        )

    for d in decisions:
        if d.experts is not None:
            continue
        parts = keys.shards * (keys.tensor if style(d.path) == "colwise" else 1)
        if d.shape[0] % parts:
            faults.append(
                f"{d.path}: its {d.shape[0]} rows must be divisible by the {parts} pieces that "
                "parallel cuts them into."
            )
        elif d.fp8 and keys.devices > 1 and keys.through == "shard_map":
            faults += _blocks(d, config)
    return faults


def unrotated(config: Config) -> list[str]:
    """The error messages for rotations of a device's tokens whose size does not divide these
    (S-23)."""
    count = tokens(config)
    rotated = [
        (d.recipe.name, operand.cast.rotation.size)
        for name in config.recipes
        for d in config.under(name).decisions()
        for operand in d.recipe.operand_casts
        if operand.gemm == "grad_weight" and operand.cast.rotation is not None
    ]
    return [
        f"recipe {name!r} rotates {size} tokens at a time in grad_weight; a device has {count} in "
        "a pass. Change data.batch_size, data.microbatches or data.sequence_length, or add a rule: "
        'layers ["*"], gemms ["grad_weight"], rotation "none".'
        for name, size in dict.fromkeys(rotated)
        if count % size
    ]


def _blocks(decision: Decision, config: Config) -> list[str]:
    """Faults of a linear's weight if tensor or fsdp cuts it inside a block."""
    keys, by_tensor, faults = config.parallel, style(decision.path), []
    n, k = used(decision.path, decision.shape, config)
    # whether the mesh cuts rows (fsdp, and tensor if colwise), and columns (tensor if rowwise)
    cuts = (
        keys.shards > 1 or (keys.tensor > 1 and by_tensor == "colwise"),
        keys.tensor > 1 and by_tensor == "rowwise",
    )
    for which, spec in decision.recipe.gemms.items():
        if (
            spec.b is None
            or "weight" not in OPERANDS[which]
            or granularity.by_name(spec.b.granularity).reduced is None
        ):
            continue
        sizes = granularity.blocks(spec.b.granularity, decision.shape, REDUCED_AXES[which][1])
        for dimension, length, size, cut in zip(
            ("rows", "columns"), (n // keys.shards, k), sizes, cuts, strict=True
        ):
            if cut and length % size:
                faults.append(
                    f"{decision.path}: no layout cuts a block (P-5), so its pieces hold a "
                    f"multiple of {size} {dimension}; they hold {length}."
                )
    return list(dict.fromkeys(faults))


def _torch_blocks(config: Config, decisions: list[Decision]) -> list[str]:
    """Faults of linears of which tensor-parallel ranks would cut a block of any operand (P-5)."""
    ranks, faults = config.parallel.tensor, []
    for d in decisions:
        cut = style(d.path)
        if not d.fp8 or cut is None:
            continue
        multiple = d.recipe.multiple(cut)
        length = used(d.path, d.shape, config)[cut == "rowwise"]
        if length % multiple:
            dimension = "rows" if cut == "colwise" else "columns"
            faults.append(
                f"{d.path}: no rank boundary cuts a block (P-5), so each of parallel.tensor = "
                f"{ranks} pieces holds a multiple of {multiple} {dimension} under recipe "
                f"{d.recipe.name!r}; it holds {length}. Lower parallel.tensor, or name it in "
                "filter_fqns."
            )
    return faults


def _torch(config: Config, decisions: list[Decision]) -> list[str]:
    """PyTorch's faults: the limits of FSDP2 and tensor parallelism (P-13, P-14)."""
    keys, faults = config.parallel, unequal_pieces(config)
    shared, recipe = keys.sharing, recipes.by_name(config.numerics.recipe)
    if shared > 1 and keys.amax_scope == "local" and recipe.delayed:
        faults.append(
            f"recipe {recipe.name!r} keeps one state for all ranks; parallel.amax_scope is "
            "local. Set it to global."
        )
    if keys.reduction == "ordered" and keys.data > 2:
        faults.append(
            "parallel.reduction 'ordered' adds over at most 2 ranks along data; got "
            f"{keys.data}. Make data 1 or 2."
        )
    if keys.tensor > 1 and recipe.fp8:
        faults += _torch_blocks(config, decisions) or [
            f"{d.path} is FP8, and its piece of {keys.tensor} is not a multiple of 16: "
            f"{length}. Lower parallel.tensor, or name it in filter_fqns."
            for d in decisions
            if d.fp8
            for length in used(d.path, d.shape, config)
            if length % 16
        ]
    return faults
