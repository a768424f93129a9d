"""The sections of a config, and what follows from them without the model."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from fp8ref.selection import attention_casts
from fp8ref.spec.attention import delayed as attention_delayed
from fp8ref.spec.attention import variants as attention
from fp8ref.spec.attention.variants import Variant
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config import schedule as schedules
from fp8ref.train.config.schedule import Phase, Schedule
from fp8ref.train.config.sections import (
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
class Sections:
    """The keys of a config."""

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

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of numerics.schedule; without one, numerics.recipe from step 0."""
        return schedules.parse(self.numerics.schedule or ((0, self.numerics.recipe),))

    @property
    def starts(self) -> tuple[int | None, ...]:
        """The step at which each phase begins; None if it is measured, or not reached.

        Raises:   ValueError: as ``OptimizerConfig.first_below``; phases in another order.
        """
        phases, steps = self.phases, self.run.steps
        first_below = self.optimizer.first_below
        rates = [p.learning_rate for p in phases]
        starts = [
            p.step if rate is None else first_below(rate, steps)
            for p, rate in zip(phases, rates, strict=True)
        ]
        fixed = [(at, p) for at, p in zip(starts, phases, strict=True) if at is not None]
        for (before, first), (start, second) in itertools.pairwise(fixed):
            if start <= before:
                raise ValueError(
                    f"phases of numerics.schedule begin one after the other; {second.recipe!r} "
                    f"would begin at step {start}, and {first.recipe!r}, before it, at step "
                    f"{before}. Change one of them."
                )
        return tuple(starts)

    def scheduled(self, measured: Sequence[Sequence[int]] = ()) -> Schedule:
        """Which recipe each step runs in; measured: ``Schedule.measured``, of a checkpoint."""
        return Schedule(self.phases, self.starts, measured)

    @property
    def recipes(self) -> tuple[str, ...]:
        """The names of the recipes of all phases, each once."""
        return tuple(dict.fromkeys(phase.recipe for phase in self.phases))

    def attention_operands(self, layer: str) -> attention_casts.Casts | None:
        """The only operands of a layer's attention that are cast (E-9); None: all, or none."""
        keys = self.numerics
        if keys.attention_operands is None:
            return None
        return attention_casts.of(str(keys.attention), keys.attention_operands, layer)

    @property
    def attention_variant(self) -> Variant | None:
        """The variant of numerics.attention, with its backward pass; None: the framework's own."""
        keys = self.numerics
        if keys.attention is None:
            return None
        return attention.differentiated(keys.attention, keys.attention_backward)

    @property
    def attention_casts(self) -> dict[str, attention_delayed.Casts]:
        """{name of a layer's attention: its roles with delayed scales, and how}; {} without any."""
        if self.attention_variant is None or self.numerics.attention_scaling == "current":
            return {}
        return dict.fromkeys(self.attention_in_fp8, attention_delayed.casts(self.attention_variant))

    @property
    def attention_in_fp8(self) -> list[str]:
        """The names of the layers' attention, if it is by a variant in FP8; else []."""
        low = self.attention_variant is not None and self.attention_variant.fmt.bits == 8
        if not low or self.numerics.attention_operands is not None:
            return []
        return self.attention_layers

    @property
    def attention_layers(self) -> list[str]:
        """The names of all layers' attention, of the trainer's own Llama."""
        return [f"model.layers.{i}.self_attn" for i in range(self.model.num_hidden_layers)]
