"""Run configuration: one TOML file for both backends.

Every key is also a command-line option, by its dotted name.

``load`` reads a file and ``override`` applies options. The keys are the fields of the dataclasses
in ``sections``.
"""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pydantic
import tyro

from fp8ref import attention, attention_casts, attention_delayed, grouped, linear_rules, linear_selection, llama
from fp8ref import configs as shipped
from fp8ref.attention import Variant
from fp8ref.errors import ConfigError, require
from fp8ref.linear_rules import Rule
from fp8ref.linear_selection import Decision
from fp8ref.llama import LlamaConfig
from fp8ref.recipe import RECIPES, Recipe
from fp8ref.train import architecture as architectures
from fp8ref.train import schedule as schedules
from fp8ref.train.schedule import Phase, Schedule
from fp8ref.train.sections import (
    ArchitectureConfig,
    CheckpointConfig,
    DataConfig,
    LogConfig,
    NumericsConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    StatisticsConfig,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The full run configuration, shared by both backends."""  # --help prints this line

    model: LlamaConfig = field(default_factory=LlamaConfig)
    architecture: ArchitectureConfig = field(default_factory=ArchitectureConfig)
    data: DataConfig = field(default_factory=DataConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    statistics: StatisticsConfig = field(default_factory=StatisticsConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        """Raises:   ValueError: a vocabulary below 256 or above int32's range. ``load`` and
        ``from_dict`` raise it, and those of the sections, as a ConfigError."""
        require(
            self.parallel.accumulate_dtype == "float32" or self.data.microbatches > 1,
            "parallel.accumulate_dtype is of the gradients of data.microbatches, of which there is 1. Leave it out, or use more.",
        )
        require(
            self.numerics.rules is None or self.parallel.devices == 1,
            f"numerics.rules are for one device; parallel has {self.parallel.devices}. Leave one of them out.",
        )
        if faults := architectures.faults(self) + self.numerics.unattended(self.model.head_dim) + self.without_experts():
            require(False, faults[0])
        require(
            self.numerics.attention is None or self.parallel.attention in ("xla", "tiles", "kernel"),
            f"parallel.attention chooses among JAX's own attentions; numerics.attention {self.numerics.attention!r} is none of them; got "
            f"{self.parallel.attention!r}. Leave one of them out.",
        )
        require(
            self.numerics.attention is not None or self.parallel.attention not in ("tiles", "kernel"),
            f"parallel.attention {self.parallel.attention!r} is of numerics.attention, which is left out. Name a variant, or leave it out.",
        )
        if self.parallel.attention == "kernel":
            self._check_kernel()
        if self.numerics.attention_operands is not None:
            self._check_attention_operands(self.numerics.attention_operands)
        if self.parallel.context > 1:
            self._check_context()
        if self.model.attention_softcap is not None or self.model.attention_sinks:
            self._check_softcap_and_sinks()
        require(
            self.numerics.attention_arithmetic == "fast" or self.parallel.compile == "none",
            "torch.compile writes out every addition of numerics.attention_arithmetic 'stated', for minutes or hours; got parallel.compile "
            f"{self.parallel.compile!r}. Set it to none, or the arithmetic to fast.",
        )
        size = self.model.vocab_size
        require(256 <= size <= 2**31, f"model.vocab_size must be between 256, for byte tokens (D-1), and 2^31, for int32; got {size}.")
        schedules.starts(self.phases, self.optimizer, self.run.steps)
        require(
            self.statistics.every > 0 or not schedules.is_measured(self.numerics.schedule),
            "measurements in numerics.schedule, 'sqnr' and 'update_error', are of the steps that statistics.every records; got 0. Set it to 1 or "
            "more.",
        )
        layout = self.optimizer.moment_layout
        require(
            all(phase.update_error is None for phase in self.phases) or (layout is not None and layout.m.fmt.bits < 32),
            "'update_error' in numerics.schedule is of states narrower than float32, by optimizer.kind 'adamw_states'; got kind "
            f"{self.optimizer.kind!r}{f' with layout {layout.name!r}' if layout else ''}. Name such a layout, or begin at a step.",
        )

    def without_experts(self) -> list[str]:
        """The error messages for keys that a model with experts does not take (M-8)."""
        keys, experts = self.parallel, self.model.num_experts
        if not experts:
            return (
                [] if keys.expert == 1 else [f"parallel.expert is for a model with experts; got {keys.expert}. Set it to 1, or use fsdp."]
            )
        return [
            f"model.num_experts is for {what}. {remedy}"
            for taken, what, remedy in (
                (
                    keys.tensor == 1,
                    f"devices that share the batch; got parallel.tensor {keys.tensor}",
                    "Set it to 1, and use parallel.expert.",
                ),
                (
                    keys.context == 1,
                    f"devices that have whole sequences; got parallel.context {keys.context}",
                    "Set it to 1.",
                ),
                (
                    experts % keys.expert == 0,
                    f"equal numbers of experts on each of parallel.expert {keys.expert}; got {experts}",
                    "Set parallel.expert to a divisor.",
                ),
                (
                    keys.devices == 1 or (keys.through, keys.reduce) == ("shard_map", "rounded"),
                    f"rows that devices send, and gradients that they round before they sum; got parallel.through {keys.through!r}, reduce "
                    f"{keys.reduce!r}",
                    "Set them to shard_map and rounded.",
                ),
                (
                    keys.reduce_dtype != "float8_e4m3fn",
                    "gradients that are summed in float32 or bfloat16; got parallel.reduce_dtype 'float8_e4m3fn'",
                    "Set it to float32.",
                ),
                (
                    keys.compile == "none",
                    f"eager PyTorch, as the host reads each group's size; got parallel.compile {keys.compile!r}",
                    "Set it to none.",
                ),
                (
                    self.numerics.accumulate in (None, "native"),
                    f"the framework's own GEMMs; got numerics.accumulate {self.numerics.accumulate!r}",
                    "Leave it out.",
                ),
                (
                    not self.optimizer.keeps_masters,
                    f"float32 masters; optimizer.layout {self.optimizer.layout!r} stores narrower ones",
                    "Name a layout of moments alone, such as sqrt_e4m3.",
                ),
            )
            if not taken
        ]

    def uncut_sequences(self) -> list[str]:
        """The error messages for a length of sequences that context and sequence parallelism do not divide (P-10, A-24)."""
        keys, length = self.parallel, self.data.sequence_length
        parts = keys.context * (keys.tensor if keys.sequence else 1)
        what = "parallel.context" + " x tensor, under parallel.sequence" * keys.sequence if keys.context > 1 else "tensor"
        under = "under parallel.sequence " * (keys.context == 1)
        return [f"{under}data.sequence_length is divisible by {what} = {parts}; got {length}."] if length % parts else []

    def _check_context(self) -> None:
        """ValueError for attention that parts of the tokens do not compute (A-21, A-24)."""
        variant, keys = self.attention_variant, self.parallel
        require(
            variant is not None and not variant.real and variant.granularity in ("tensor", None),
            "parallel.context cuts sequences, and takes attention with one scale for a tensor, or none; got numerics.attention "
            f"{self.numerics.attention!r}. Use cudnn or bf16, or leave parallel.context out.",
        )
        require(
            keys.compile == "none",
            f"parallel.context gathers keys and values within attention, which is traced eagerly alone; got parallel.compile {keys.compile!r}. Set it "
            "to none.",
        )

    def _check_softcap_and_sinks(self) -> None:
        """ValueError for attention that has neither softcap nor sinks (A-28)."""
        keys, parallel = self.model, self.parallel
        names = [f"model.attention_{name}" for name in ("softcap", "sinks") if getattr(keys, f"attention_{name}")]
        what = " and ".join(names)
        require(
            self.numerics.attention is not None and self.numerics.attention_operands is None and parallel.attention != "kernel",
            f"{what} are of attention by a whole variant, in tiles; got numerics.attention {self.numerics.attention!r}, attention_operands "
            f"{self.numerics.attention_operands} and parallel.attention {parallel.attention!r}. Name a variant, such as bf16, or leave them out.",
        )
        variant = self.attention_variant
        require(
            variant is None or not variant.smoothed,
            f"{what} are of attention whose k is not smoothed: smoothing moves all scores of a row (A-26); got numerics.attention "
            f"{self.numerics.attention!r}. Name another variant, such as fa3, or leave them out.",
        )
        require(
            parallel.context == 1 and (parallel.tensor == 1 or not keys.attention_sinks),
            f"{what} take devices that have whole sequences, and sinks all heads; got parallel.context {parallel.context} and tensor "
            f"{parallel.tensor}. Use data and fsdp.",
        )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of numerics.schedule; without one, numerics.recipe from step 0."""
        return schedules.parse(self.numerics.schedule or ((0, self.numerics.recipe),))

    @property
    def starts(self) -> tuple[int | None, ...]:
        """The step at which each phase begins; None if it is measured, or not reached.

        Raises as ``schedule.starts``.
        """
        return schedules.starts(self.phases, self.optimizer, self.run.steps)

    def scheduled(self, measured: Sequence[Sequence[int]] = ()) -> Schedule:
        """Which recipe each step runs in. measured: what a checkpoint has of ``Schedule.measured``."""
        return Schedule(self.phases, self.starts, measured)

    @property
    def recipes(self) -> tuple[str, ...]:
        """The names of the recipes of all phases, each once."""
        return tuple(dict.fromkeys(phase.recipe for phase in self.phases))

    def under(self, recipe: str) -> "Config":
        """The config of a run in this recipe alone."""
        return self.replace(numerics={"recipe": recipe, "schedule": None})

    def unswitched(self, backend: str) -> list[str]:
        """The error messages for a mesh on which this backend switches no recipe (T-9)."""
        keys = self.parallel
        if self.numerics.schedule is None or backend == "jax" or keys.devices == 1:
            return []
        if keys.tensor > 1:
            return [f"in PyTorch numerics.schedule takes parallel.tensor 1, whose hooks are of one recipe; got {keys.tensor}. Set it to 1."]
        delayed = [name for name in self.recipes if RECIPES[name].delayed]
        if keys.amax_scope == "local" and delayed:
            return [f"recipe {delayed[0]!r} keeps one state for all ranks; parallel.amax_scope is local. Set it to global."]
        gathered = [name for name in self.recipes if RECIPES[name].fp8 and RECIPES[name].serves_both("weight")]
        if keys.gather == "fp8" and gathered:
            return [
                f"in PyTorch FSDP gathers weights in one way for all phases of numerics.schedule, and {gathered[0]!r} gathers in FP8. Set "
                "parallel.gather to compute, which gives the same bits."
            ]
        return []

    def require_one_recipe(self, who: str) -> None:
        """ConfigError for a schedule, which ``who`` does not take."""
        if self.numerics.schedule is not None:
            raise ConfigError(
                f"{who} takes one recipe; got numerics.schedule with {', '.join(self.recipes)}. Leave it out, on the command line by "
                "--numerics.schedule None, and name one by --recipe."
            )

    def _check_kernel(self) -> None:
        """ValueError for a config that no library's FP8 kernel trains."""
        keys, tiles = self.numerics, "Use parallel.attention 'tiles'."
        by_flash = keys.attention in ("fa3", "fa3_promoted")  # which has gradients by attention_backward 'bf16' alone
        require(
            by_flash or (keys.attention == "cudnn" and keys.attention_scaling == "delayed" and keys.attention_backward == "own"),
            "parallel.attention 'kernel' is cuDNN's FP8 attention, which casts with scales that are given: numerics.attention 'cudnn' with "
            "numerics.attention_scaling 'delayed' and its own backward pass; or in PyTorch FlashAttention-3: 'fa3' or 'fa3_promoted' with "
            f"numerics.attention_backward 'bf16'; got {keys.attention!r} with {keys.attention_scaling!r} and {keys.attention_backward!r}. {tiles}",
        )
        if by_flash:
            require(
                self.model.head_dim % 16 == 0 and self.parallel.compile == "none" and not keys.simulates and not self.statistics.every,
                "parallel.attention 'kernel' of FlashAttention-3 takes heads of multiples of 16, in eager mode, without numerics.accumulate and "
                f"statistics.every, which look into the tiles; got {self.model.head_dim}, {self.parallel.compile!r}, {keys.accumulate!r} and "
                f"{self.statistics.every}. {tiles}",
            )
            return
        length = self.data.sequence_length
        require(
            self.model.head_dim == 128 and length % 128 == 0,
            f"parallel.attention 'kernel' takes heads of 128 features, and data.sequence_length in multiples of 128; got {self.model.head_dim} and "
            f"{length}. {tiles}",
        )
        require(
            self.parallel.devices == 1 and not keys.simulates and not self.statistics.every,
            "parallel.attention 'kernel' is of one device, without numerics.accumulate and statistics.every, which look into the tiles; got "
            f"{self.parallel.devices} devices, {keys.accumulate!r} and {self.statistics.every}. {tiles}",
        )

    def _check_attention_operands(self, operands: Sequence[str]) -> None:
        """ValueError for a config whose attention has no single casts, and for a pattern that names no layer (E-9)."""
        keys = self.parallel
        require(
            keys.devices == 1 and not keys.scan and keys.compile == "none" and keys.attention == "xla",
            f"numerics.attention_operands are of one device, eager or without a scan over layers; got {keys.devices} devices, parallel.scan "
            f"{keys.scan}, parallel.compile {keys.compile!r} and parallel.attention {keys.attention!r}. Leave one of them out.",
        )
        for operand in operands:
            pattern, slash, _ = operand.rpartition("/")
            if slash and not any(linear_selection.matches(pattern, layer) for layer in self.attention_layers):
                raise ValueError(
                    f"every pattern of numerics.attention_operands names a layer's attention (R-3); got {operand!r} for "
                    f"{', '.join(self.attention_layers)}. Write layers.0/q, or q for all."
                )

    def attention_operands(self, layer: str) -> attention_casts.Casts | None:
        """The operands of a layer's attention that alone are cast (E-9); None: it is computed by its variant, or the framework."""
        keys = self.numerics
        return None if keys.attention_operands is None else attention_casts.of(str(keys.attention), keys.attention_operands, layer)

    def require_tiles(self, who: str) -> None:
        """ConfigError for attention by a library's kernel, whose passes ``who`` cannot look into, and for one whose operands are
        cast one by one, which is no kernel's."""
        if self.numerics.attention_operands is not None:
            raise ConfigError(f"{who} takes attention by its variant; got numerics.attention_operands. Leave them out.")
        if self.parallel.attention == "kernel":
            raise ConfigError(f"{who} takes attention by tiles; got parallel.attention 'kernel', which shows nothing. Set it to tiles.")

    def require_no_experts(self, who: str) -> None:
        """ConfigError for a model with experts, which ``who`` does not take."""
        if self.model.num_experts:
            raise ConfigError(f"{who} takes no experts; got model.num_experts {self.model.num_experts}. Leave them out.")

    @property
    def attention_variant(self) -> Variant | None:
        """The variant of numerics.attention, with its backward pass; None for the framework's own attention."""
        keys = self.numerics
        return None if keys.attention is None else attention.differentiated(keys.attention, keys.attention_backward)

    @property
    def attention_casts(self) -> dict[str, attention_delayed.Casts]:
        """{name of a layer's attention: its roles with delayed scales, and how}; {} unless attention has delayed scales."""
        if self.attention_variant is None or self.numerics.attention_scaling == "current":
            return {}
        return dict.fromkeys(self.attention_in_fp8, attention_delayed.casts(self.attention_variant))

    @property
    def attention_in_fp8(self) -> list[str]:
        """The names of the layers' attention, if it is by a variant in FP8; else []."""
        low = self.attention_variant is not None and self.attention_variant.fmt.bits == 8
        return self.attention_layers if low and self.numerics.attention_operands is None else []

    @property
    def attention_layers(self) -> list[str]:
        """The names of all layers' attention, of the trainer's own Llama."""
        return [f"model.layers.{i}.self_attn" for i in range(self.model.num_hidden_layers)]

    @property
    def filter_fqns(self) -> tuple[str, ...]:
        """numerics.filter_fqns, plus lm_head, or what makes the logits of a user's model.

        It stays in high precision unless fp8_fqns names it (spec R-2).
        """
        return (*self.numerics.filter_fqns, *(head for head in self.shapes.heads if head not in self.numerics.filter_fqns))

    @property
    def shapes(self) -> architectures.Shapes:
        """The names and shapes of the model's parameters and linears; a user's model is built for them once.

        Raises as ``architecture.shapes``.
        """
        return architectures.shapes(self)

    def decisions(self) -> list[Decision]:
        """For every linear of the model, its recipe and the reason (spec R-2).

        Raises as ``linear_selection.select`` and ``linear_rules.apply``.
        """
        chosen = linear_selection.select(
            self.shapes.linears, self.numerics.recipe, filter_fqns=self.filter_fqns, fp8_fqns=self.numerics.fp8_fqns
        )
        return linear_rules.apply(self.numerics.rules or (), [self._of_experts(decision) for decision in chosen])

    def _of_experts(self, decision: Decision) -> Decision:
        """A decision with the number of its weights and the recipe of grouped linears (X-8), if it is of experts."""
        experts = llama.experts_of(decision.path, self.model)
        if experts is None:
            return decision
        return dataclasses.replace(decision, experts=experts, recipe=grouped.of_linears(decision.recipe).recipe)

    def program_linears(self) -> dict[str, Recipe]:
        """The recipe of each linear of JAX's program, by name: of each layer's, or under
        parallel.scan of all layers' together, ``llama.STACK``.

        Raises:   ConfigError: a scan over layers whose recipes differ.
        """
        found: dict[str, Recipe] = {}
        for decision in self.decisions():
            name = llama.stack_of(decision.path) if self.parallel.scan else decision.path
            if found.setdefault(name, decision.recipe) != decision.recipe:
                raise ConfigError(
                    f"parallel.scan compiles one layer for all, so a linear has the same recipe in each; {decision.path} has "
                    f"{decision.recipe.name!r}, and the same linear of the first layer {found[name].name!r}. Change numerics.filter_fqns "
                    "and fp8_fqns, or set parallel.scan to false."
                )
        return found

    def replace(self, **sections) -> "Config":
        """A copy with keys of sections replaced: ``config.replace(run={"steps": 3})``."""
        return dataclasses.replace(self, **{name: dataclasses.replace(getattr(self, name), **keys) for name, keys in sections.items()})


for _section in (
    LlamaConfig,
    ArchitectureConfig,
    DataConfig,
    NumericsConfig,
    Rule,
    OptimizerConfig,
    ParallelConfig,
    StatisticsConfig,
    RunConfig,
    CheckpointConfig,
    LogConfig,
    Config,
):
    _section.__pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True)  # type: ignore[union-attr]
_ADAPTER = pydantic.TypeAdapter(Config)

INSTEAD = {
    (
        "parallel.compile",
        "traced",
    ): "parallel.compile is none, block or model; got 'traced'. The trainer shards with FSDP2, whose collectives no "
    "graph contains. Use 'model', which gives the same bits, or fp8ref.torch.compiled_fsdp.shard in your own training loop."
}
"""Values that a key does not take, and what to use instead."""


TABLES = ("numerics.rules",)
"""Keys that are tables of a file, and no options."""


def load(path: str | Path) -> Config:
    """The configuration in a TOML file, or the package's of that name (``fp8ref.configs``).

    Raises:   ConfigError: no such file, no TOML, an unknown key (naming the nearest known one), a
              value of the wrong type or range.
    """
    path = shipped.find(path)
    try:
        keys = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Name a TOML file, or one of {', '.join(shipped.NAMES)}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}.") from error
    return from_dict(keys, source=str(path))


def from_dict(keys: dict, *, source: str = "config") -> Config:
    """The configuration in a nested dict, as TOML gives it.

    Raises as ``load``; messages begin with ``source``.
    """
    try:
        return _ADAPTER.validate_json(json.dumps(keys, default=str), strict=True)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_explain(e)}" for e in error.errors())) from error


def to_dict(config: Config) -> dict:
    """The nested dict that ``from_dict`` reads, without keys that are None: TOML has no null."""

    def prune(value):
        if isinstance(value, list):
            return [prune(v) for v in value]
        return {k: prune(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    return prune(json.loads(_ADAPTER.dump_json(config)))


def completed(keys: dict) -> dict:
    """A manifest's config with the keys that came after it was written, which take their defaults.

    One that is no config of this version is given back as it is.
    """
    try:
        return to_dict(from_dict(keys))
    except ConfigError:
        return keys


def differences(a, b, path: str = "") -> dict:
    """{dotted key: (value in a, value in b)} where two nested dicts differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        found: dict = {}
        for key in {**a, **b}:
            found |= differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        return found
    return {} if a == b else {path: (a, b)}


def override(config: Config, options: Sequence[str], *, prog: str) -> Config:
    """config with command-line options applied, ``--run.steps 20``.

    tyro reports a value that it cannot use and exits with code 2.

    Raises:   ConfigError: an unknown option, naming the nearest known one; a value of ``INSTEAD``.
    """
    known = _known_keys()
    for option, following in zip(options, [*options[1:], ""], strict=False):
        key = option[2:].split("=")[0].replace("-", "_").replace(".no_", ".")
        if option.startswith("--") and key not in (*known, "help", "recipe"):
            raise ConfigError(f"unknown option {option.split('=')[0]!r}; {_nearest(key, known)}")
        if option.startswith("--") and key in TABLES:
            raise ConfigError(f"{key} are tables of a config file, [[{key}]], and no option. Write them in CONFIG.")
        if instead := INSTEAD.get((key, option.partition("=")[2] or following)):
            raise ConfigError(instead)
    return tyro.cli(Config, default=config, args=list(options), prog=prog, use_underscores=True)


def _explain(error) -> str:
    *parents, key = [str(part) for part in error["loc"]] or [""]
    dotted = ".".join([*parents, key])
    if error["type"] == "unexpected_keyword_argument":
        return f"unknown key {dotted!r}; {_nearest(dotted, _known_keys())}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "literal_error" and (instead := INSTEAD.get((dotted, str(error["input"])))):
        return instead
    return f"{dotted}: {error['msg']}; got {error['input']!r}."


def _nearest(key: str, known: list[str]) -> str:
    """The key that was probably meant: the nearest one, or one with a similar last part.

    If there is none, the known keys of its section.
    """
    section, _, last = key.rpartition(".")
    candidates = [k for k in known if ("." in k) == bool(section)]
    ends = {k.split(".")[-1]: k for k in known if "." in k}
    near = difflib.get_close_matches(key, candidates, n=1, cutoff=0.7) or [
        ends[e] for e in difflib.get_close_matches(last, ends, n=1, cutoff=0.7)
    ]
    siblings = [k for k in candidates if not section or k.startswith(f"{section}.")] or known
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(siblings)}."


def _known_keys() -> list[str]:
    sections = dataclasses.fields(Config)
    return [s.name for s in sections] + [f"{s.name}.{f.name}" for s in sections for f in dataclasses.fields(s.default_factory)]  # type: ignore[arg-type]
