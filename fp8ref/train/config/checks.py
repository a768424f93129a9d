"""Refuse sections of a config that no backend trains together; ``sections`` check themselves."""

from collections.abc import Sequence

from fp8ref.recipe import RECIPES
from fp8ref.selection import linears as linear_selection
from fp8ref.shared.errors import ConfigError, require
from fp8ref.spec import kernels, support
from fp8ref.train.config import architecture as architectures
from fp8ref.train.config import schedule as schedules
from fp8ref.train.config.base import Sections


def check(config: Sections) -> None:
    """ValueError for sections of a config that no backend trains together."""
    require(
        config.parallel.accumulate_dtype == "float32" or config.data.microbatches > 1,
        "parallel.accumulate_dtype is of the gradients of data.microbatches, of which there is "
        "1. Leave it out, or use more.",
    )
    require(
        config.numerics.rules is None or config.parallel.devices == 1,
        f"numerics.rules are for one device; parallel has {config.parallel.devices}. Leave one "
        "of them out.",
    )
    require(
        not config.parallel.cuda_graphs or config.optimizer.keeps_masters,
        "parallel.cuda_graphs need weights at fixed addresses, and a step rounds float32 masters "
        f"to new ones; got optimizer.kind {config.optimizer.kind!r}. Use adamw_states with a "
        "layout that keeps masters, such as sqrt_e4m3_f16, or leave cuda_graphs out.",
    )
    faults = [
        *architectures.faults(config),
        *config.numerics.unattended(config.model.head_dim),
        *_without_experts(config),
    ]
    if faults:
        raise ValueError(faults[0])
    _check_attention(config)
    size = config.model.vocab_size
    require(
        256 <= size <= 2**31,
        "model.vocab_size must be between 256, for byte tokens (D-1), and 2^31, for int32; got "
        f"{size}.",
    )
    _check_schedule(config)


def _check_attention(config: Sections) -> None:
    """ValueError for attention that the other sections do not fit."""
    variant, by = config.numerics.attention, config.parallel.attention
    require(
        variant is None or by in ("xla", "tiles", "kernel"),
        "parallel.attention chooses among JAX's own attentions; numerics.attention "
        f"{variant!r} is none of them; got {by!r}. Leave one of them out.",
    )
    require(
        variant is not None or by not in ("tiles", "kernel"),
        f"parallel.attention {by!r} is of numerics.attention, which is left out. Name a variant, "
        "or leave it out.",
    )
    if by == "kernel":
        _check_kernel(config)
    if config.numerics.attention_operands is not None:
        _check_attention_operands(config, config.numerics.attention_operands)
    if config.parallel.context > 1:
        _check_context(config)
    if config.model.attention_softcap is not None or config.model.attention_sinks:
        _check_softcap_and_sinks(config)
    require(
        config.numerics.attention_arithmetic == "fast" or config.parallel.compile == "none",
        "torch.compile writes out every addition of numerics.attention_arithmetic 'stated', for "
        f"minutes or hours; got parallel.compile {config.parallel.compile!r}. Set it to none, "
        "or the arithmetic to fast.",
    )


def _check_schedule(config: Sections) -> None:
    """ValueError for a schedule whose phases begin at no step, or at what is not measured (T-9)."""
    config.scheduled()  # refuses phases that begin at no step
    require(
        bool(config.statistics.every) or not schedules.is_measured(config.numerics.schedule),
        "measurements in numerics.schedule, 'sqnr' and 'update_error', are of the steps that "
        f"statistics.every records; got {config.statistics.every or 0}. Set it to 1 or more.",
    )
    layout = config.optimizer.moment_layout
    require(
        all(phase.update_error is None for phase in config.phases)
        or (layout is not None and layout.m.fmt.bits < 32),
        "'update_error' in numerics.schedule is of states narrower than float32, by "
        "optimizer.kind 'adamw_states'; got kind "
        f"{config.optimizer.kind!r}{f' with layout {layout.name!r}' if layout else ''}. Name "
        "such a layout, or begin at a step.",
    )


def check_backend(config: Sections, backend: str) -> None:
    """ConfigError for what a backend does not train."""
    if foreign := config.parallel.foreign(backend):
        raise ConfigError(foreign[0])
    architectures.check_backend(config, backend)
    try:
        kernels.check(config.numerics.kernels)  # not with the sections: other machines read them
    except ValueError as error:
        raise ConfigError(f"numerics.kernels: {error}") from error
    parallel, optimizer = config.parallel, config.optimizer
    if (
        refused := optimizer.foreign(backend)
        + optimizer.uncut(parallel, backend)
        + parallel.unreduced(backend)
        + unswitched(config, backend)
        + undrawn(config, backend)
    ):
        raise ConfigError(refused[0])


def _without_experts(config: Sections) -> list[str]:
    """The error messages for keys that a model with experts does not take (M-8)."""
    keys, experts = config.parallel, config.model.num_experts
    if not experts:
        alone = (
            f"parallel.expert is for a model with experts; got {keys.expert}. Set it to 1, or use "
            "fsdp."
        )
        return [] if keys.expert == 1 else [alone]
    wrong = {
        f"devices that share the batch; got parallel.tensor {keys.tensor}. Set it to 1, and use "
        "parallel.expert.": keys.tensor > 1,
        f"devices that have whole sequences; got parallel.context {keys.context}. Set it to 1.": (
            keys.context > 1
        ),
        f"equal numbers of experts on each of parallel.expert {keys.expert}; got {experts}. Set "
        "parallel.expert to a divisor.": experts % keys.expert != 0,
        "rows that devices send, and gradients that they round before they sum; got "
        f"parallel.through {keys.through!r}, reduce {keys.reduce!r}. Set them to shard_map and "
        "rounded.": keys.devices > 1 and (keys.through, keys.reduce) != ("shard_map", "rounded"),
        "gradients that are summed in float32 or bfloat16; got parallel.reduce_dtype "
        "'float8_e4m3fn'. Set it to float32.": keys.reduce_dtype == "float8_e4m3fn",
        "eager PyTorch, as the host reads each group's size; got parallel.compile "
        f"{keys.compile!r}. Set it to none.": keys.compile != "none",
        "the framework's own GEMMs; got numerics.accumulate "
        f"{config.numerics.accumulate!r}. Leave it out.": config.numerics.simulates,
        "GEMMs of groups; got numerics.products. Leave it out.": config.numerics.products != "auto",
        f"float32 masters; optimizer.layout {config.optimizer.layout!r} stores narrower ones. Name "
        "a layout of moments alone, such as sqrt_e4m3.": config.optimizer.keeps_masters,
    }
    return [f"model.num_experts is for {text}" for text, is_so in wrong.items() if is_so]


def uncut_sequences(config: Sections) -> list[str]:
    """The error messages for sequences that context and sequence parallelism do not divide."""
    keys, length = config.parallel, config.data.sequence_length
    parts = keys.context * (keys.tensor if keys.sequence else 1)
    axes = "tensor"
    if keys.context > 1:
        axes = "parallel.context" + " x tensor, under parallel.sequence" * keys.sequence
    under = "under parallel.sequence " * (keys.context == 1)
    if length % parts:
        return [f"{under}data.sequence_length is divisible by {axes} = {parts}; got {length}."]
    return []


def _check_context(config: Sections) -> None:
    """ValueError for attention that parts of the tokens do not compute (A-21, A-24)."""
    variant, keys = config.attention_variant, config.parallel
    require(
        variant is not None and support.takes("attention over cut tokens", "jax", variant),
        "parallel.context cuts sequences, and takes attention with one scale for a tensor, or "
        f"none; got numerics.attention {config.numerics.attention!r}. Use cudnn or bf16, or "
        "leave parallel.context out.",
    )
    require(
        keys.compile == "none",
        "parallel.context gathers keys and values within attention, which is traced eagerly "
        f"alone; got parallel.compile {keys.compile!r}. Set it to none.",
    )


def _check_softcap_and_sinks(config: Sections) -> None:
    """ValueError for attention that has neither softcap nor sinks (A-28)."""
    keys, parallel = config.model, config.parallel
    names = [
        f"model.attention_{name}"
        for name in ("softcap", "sinks")
        if getattr(keys, f"attention_{name}")
    ]
    subject = " and ".join(names)
    require(
        config.numerics.attention is not None
        and config.numerics.attention_operands is None
        and parallel.attention != "kernel",
        f"{subject} are of attention by a whole variant, in tiles; got numerics.attention "
        f"{config.numerics.attention!r}, attention_operands "
        f"{config.numerics.attention_operands} and parallel.attention {parallel.attention!r}. "
        "Name a variant, such as bf16, or leave them out.",
    )
    require(
        parallel.context == 1 and (parallel.tensor == 1 or not keys.attention_sinks),
        f"{subject} take devices that have whole sequences, and sinks all heads; got "
        f"parallel.context {parallel.context} and tensor {parallel.tensor}. Use data and fsdp.",
    )


def _check_kernel(config: Sections) -> None:
    """ValueError for a config that no library's FP8 kernel trains."""
    keys, tiles = config.numerics, "Use parallel.attention 'tiles'."
    # which has gradients by attention_backward 'bf16' alone
    by_flash = keys.attention in ("fa3", "fa3_promoted")
    require(
        by_flash
        or (
            keys.attention == "cudnn"
            and keys.attention_scaling == "delayed"
            and keys.attention_backward == "own"
        ),
        "parallel.attention 'kernel' is cuDNN's FP8 attention, which casts with scales that are "
        "given: numerics.attention 'cudnn' with numerics.attention_scaling 'delayed' and its "
        "own backward pass; or in PyTorch FlashAttention-3: 'fa3' or 'fa3_promoted' with "
        f"numerics.attention_backward 'bf16'; got {keys.attention!r} with "
        f"{keys.attention_scaling!r} and {keys.attention_backward!r}. {tiles}",
    )
    if by_flash:
        require(
            config.model.head_dim % 16 == 0
            and config.parallel.compile == "none"
            and not keys.simulates
            and not config.statistics.every,
            "parallel.attention 'kernel' of FlashAttention-3 takes heads of multiples of 16, in "
            "eager mode, without numerics.accumulate and statistics.every, which look into the "
            f"tiles; got {config.model.head_dim}, {config.parallel.compile!r}, "
            f"{keys.accumulate!r} and {config.statistics.every}. {tiles}",
        )
        return
    length = config.data.sequence_length
    require(
        config.model.head_dim == 128 and length % 128 == 0,
        "parallel.attention 'kernel' takes heads of 128 features, and data.sequence_length in "
        f"multiples of 128; got {config.model.head_dim} and {length}. {tiles}",
    )
    require(
        config.parallel.devices == 1 and not keys.simulates and not config.statistics.every,
        "parallel.attention 'kernel' is of one device, without numerics.accumulate and "
        f"statistics.every, which look into the tiles; got {config.parallel.devices} devices, "
        f"{keys.accumulate!r} and {config.statistics.every}. {tiles}",
    )


def _check_attention_operands(config: Sections, operands: Sequence[str]) -> None:
    """ValueError for attention without single casts, and a pattern that names no layer (E-9)."""
    keys = config.parallel
    require(
        keys.devices == 1 and not keys.scan and keys.compile == "none" and keys.attention == "xla",
        "numerics.attention_operands are of one device, eager or without a scan over layers; "
        f"got {keys.devices} devices, parallel.scan {keys.scan}, parallel.compile "
        f"{keys.compile!r} and parallel.attention {keys.attention!r}. Leave one of them out.",
    )
    for operand in operands:
        pattern, slash, _ = operand.rpartition("/")
        if slash and not any(
            linear_selection.matches(pattern, layer) for layer in config.attention_layers
        ):
            raise ValueError(
                "every pattern of numerics.attention_operands names a layer's attention (R-3); "
                f"got {operand!r} for {', '.join(config.attention_layers)}. Write layers.0/q, "
                "or q for all."
            )


def unswitched(config: Sections, backend: str) -> list[str]:
    """The error messages for a mesh on which this backend switches no recipe (T-9)."""
    keys = config.parallel
    if config.numerics.schedule is None or backend == "jax" or keys.devices == 1:
        return []
    fault = support.refusal("tensor parallelism under a schedule", backend, keys.tensor)
    if fault is not None:
        return [fault]
    delayed = [name for name in config.recipes if RECIPES[name].delayed]
    if keys.amax_scope == "local" and delayed:
        return [
            f"recipe {delayed[0]!r} keeps one state for all ranks; parallel.amax_scope is "
            "local. Set it to global."
        ]
    gathered = [
        name for name in config.recipes if RECIPES[name].fp8 and RECIPES[name].serves_both("weight")
    ]
    if keys.gather == "fp8" and gathered:
        return [
            "in PyTorch FSDP gathers weights in one way for all phases of numerics.schedule, "
            f"and {gathered[0]!r} gathers in FP8. Set parallel.gather to compute, which gives "
            "the same bits."
        ]
    return []


def undrawn(config: Sections, backend: str) -> list[str]:
    """The error messages for stochastic rounding of a tensor whose places a rank does not know."""
    keys = config.parallel
    stochastic = [name for name in config.recipes if RECIPES[name].stochastic]
    if backend == "jax" or not stochastic:
        return []
    cuts = {"context": keys.context > 1, "amax_scope": keys.amax_scope == "local"}
    return [
        f"in PyTorch recipe {stochastic[0]!r} rounds by the places of tokens in the whole batch; "
        f"got parallel.{key} {getattr(keys, key)!r}. Leave it out."
        for key, cut in cuts.items()
        if cut and keys.devices > 1
    ]
