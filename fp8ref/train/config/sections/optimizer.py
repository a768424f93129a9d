"""Section optimizer: AdamW, its schedule and the layout of its states (spec T, O)."""

import bisect
import math
from dataclasses import dataclass
from typing import Literal, get_args

from fp8ref.shared.errors import require, require_least
from fp8ref.spec import support
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states import parts as layout_parts
from fp8ref.train.config.sections.parallel import ParallelConfig

Decay = Literal["cosine", "linear", "sqrt", "none"]
"""The shapes of the learning rate's decay (spec T-3)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up, decay and clipping (spec T)."""

    kind: Literal["adamw", "adamw_fused", "adamw_fp8", "adamw_states"] = "adamw"
    """AdamW in float32 (adamw), or with the states of optimizer.layout (adamw_states). PyTorch:
    also torch's fused AdamW, or torchao's AdamW with e4m3 moments in blocks of 256, which stores
    small second moments as 0: their updates explode."""
    layout: str | None = None
    """How adamw_states keeps its moments: float32, bfloat16, msamp, fishman, sqrt_e5m2, sqrt_e4m3,
    torchao, te or coat; and masters in float16 too: msamp_o2 or sqrt_e4m3_f16. Or some parts of
    one, with the others in float32: te/m, te/v, msamp_o2/v+master, te/none. Default: sqrt_e4m3."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    min_learning_rate: float = 1e-4
    """Learning rate at the end of the decay."""
    warmup_steps: int = 5
    """Steps of linear warm-up."""
    decay: Decay = "cosine"
    """How the learning rate falls to min_learning_rate: as a half cosine, a line, or a line in the
    root of the steps; none: it stays at its peak.
    """
    decay_steps: int | None = None
    """The last steps of the run, in which it falls; before them it stays at its peak (warm-up,
    stable, decay: WSD). Default: all after the warm-up.
    """
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay, of matrices only."""
    max_norm: float = 1.0
    """Clip gradients to this global norm."""

    def __post_init__(self) -> None:
        require(
            0 <= self.min_learning_rate <= self.learning_rate,
            f"0 <= optimizer.min_learning_rate <= learning_rate; got {self.min_learning_rate} "
            f"and {self.learning_rate}.",
        )
        require(
            0 < self.learning_rate < math.inf,
            f"optimizer.learning_rate is positive and finite; got {self.learning_rate}.",
        )
        require_least("optimizer", 0, self, "warmup_steps")
        decays = get_args(Decay)
        require(
            self.decay in decays,
            f"optimizer.decay is one of {', '.join(decays)}; got {self.decay!r}.",
        )
        require_least("optimizer", 1, self, "decay_steps")
        require(
            self.decay_steps is None or self.decay != "none",
            "optimizer.decay 'none' has no steps; got optimizer.decay_steps "
            f"{self.decay_steps}. Leave one of them out.",
        )
        for key in ("beta1", "beta2"):
            require(
                0 <= getattr(self, key) < 1,
                f"optimizer.{key} must be in [0, 1); got {getattr(self, key)}.",
            )
        require(0 < self.eps < math.inf, f"optimizer.eps is positive and finite; got {self.eps}.")
        require(
            self.max_norm > 0,
            f"optimizer.max_norm is positive (inf: no clipping); got {self.max_norm}.",
        )
        require(
            0 <= self.weight_decay < math.inf,
            f"optimizer.weight_decay is finite and not negative; got {self.weight_decay}.",
        )
        self._check_layout()

    def _check_layout(self) -> None:
        """ValueError for a layout that there is not, or that the kind or its numbers do not fit."""
        require(
            self.layout is None or self.kind == "adamw_states",
            f"optimizer.layout is of optimizer.kind 'adamw_states'; got layout {self.layout!r} "
            f"with kind {self.kind!r}. Leave one of them out.",
        )
        names = (*states.LAYOUTS, *states.WITH_MASTERS)
        name, slash, _ = (self.layout or "sqrt_e4m3").partition("/")
        require(
            name in names, f"optimizer.layout is one of {', '.join(names)}; got {self.layout!r}."
        )
        if slash:
            layout_parts.by_name(str(self.layout))  # refuses parts that it has not
        require(
            self.kind != "adamw_states" or self.learning_rate <= 1024,
            "optimizer.learning_rate is at most 1024 under optimizer.kind 'adamw_states' (O-2); "
            f"got {self.learning_rate}.",
        )
        if self.moment_layout is not None:
            try:
                states.check(
                    b1=self.beta1,
                    b2=self.beta2,
                    eps=self.eps,
                    weight_decay=self.weight_decay,
                    layout=self.moment_layout,
                )
            except ValueError as error:
                raise ValueError(
                    f"optimizer.kind 'adamw_states' takes the numbers of O-2: {error}"
                ) from None

    def foreign(self, backend: str) -> list[str]:
        """The error messages for a kind that this backend does not have."""
        fault = support.refusal("optimizers of the trainer", backend, self.kind)
        return [] if fault is None else [fault]

    @property
    def moment_layout(self) -> states.Layout | None:
        """The layout of moments and masters under ``adamw_states``; None under other kinds."""
        if self.kind != "adamw_states":
            return None
        return layout_parts.by_name(self.layout or "sqrt_e4m3")

    @property
    def keeps_masters(self) -> bool:
        """Whether masters are stored narrower than float32 (O-14)."""
        layout = self.moment_layout
        return layout is not None and layout.keeps_master

    def uncut(self, parallel: ParallelConfig, backend: str) -> list[str]:
        """The error messages for a mesh that does not cut the layout of the moments (O-11)."""
        layout = self.moment_layout
        if layout is None:
            return []
        moments = (layout.m, layout.v)
        if (
            backend == "torch"
            and parallel.tensor > 1
            and any(moment.block is not None for moment in moments)
        ):
            return [
                f"optimizer.layout {layout.name!r} has blocks of consecutive elements, which "
                f"parallel.tensor = {parallel.tensor} cuts by columns (O-11). Use a layout with "
                "one scale a tensor, such as sqrt_e5m2, or parallel.tensor 1."
            ]
        return []

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step of ``steps``, from 0: warm-up, peak, decay (spec T-3)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        begin = self.warmup_steps
        if self.decay_steps is not None:
            begin = max(begin, steps - self.decay_steps)
        if step < begin or self.decay == "none":
            return self.learning_rate
        done = (step - begin) / (steps - begin)
        shapes = {
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "linear": 1 - done,
            "sqrt": 1 - math.sqrt(done),
        }
        span = self.learning_rate - self.min_learning_rate
        return self.min_learning_rate + span * shapes[self.decay]

    def first_below(self, rate: float, steps: int) -> int | None:
        """The first step after warm-up, of ``steps``, with a lower learning rate than one of
        numerics.schedule (T-9); None: not reached. ValueError for one that no step falls below."""
        low, high = self.min_learning_rate, self.learning_rate
        require(
            low < rate <= high,
            f"a learning rate of numerics.schedule is above optimizer.min_learning_rate = {low} "
            f"and at most optimizer.learning_rate = {high}, so that the rate falls below it; "
            f"got {rate}.",
        )
        require(
            self.decay != "none",
            "a learning rate of numerics.schedule is one that the run's falls below; "
            f"optimizer.decay is 'none', got {rate}. Name a step.",
        )
        after_warmup = range(self.warmup_steps, steps)
        index = bisect.bisect_left(
            after_warmup, True, key=lambda step: self.learning_rate_at(step, steps) < rate
        )
        return after_warmup[index] if index < len(after_warmup) else None
