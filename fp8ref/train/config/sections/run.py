"""Sections statistics, run, checkpoint and log: how long a run goes on, and what it leaves."""

from dataclasses import dataclass

from fp8ref.shared.errors import require, require_least

_AT_THE_END = " (0: at the end alone)"


@dataclass(frozen=True, kw_only=True)
class StatisticsConfig:
    """Statistics of the operands of FP8 GEMMs, and of optimizer states in a layout, recorded during
    training (spec Q).
    """

    every: int | None = None
    """Record every so many steps, beginning with step 0; 0 records nothing.

    Default: the first and the last step. A record costs about as much as a step.
    """

    def __post_init__(self) -> None:
        require_least("statistics", 0, self, "every")

    def due(self, step: int, steps: int) -> bool:
        """Whether a step of so many is recorded, as the key says."""
        if self.every is None:
            return step in (0, steps - 1)
        return self.every > 0 and step % self.every == 0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length of the run, validation, and the run directory."""

    steps: int = 200
    """Optimizer steps."""
    seed: int = 0
    """Seed of the initial weights."""
    eval_every: int = 25
    """Steps between validations; 0 for none in between. The last step is always validated."""
    eval_batches: int = 4
    """Validation batches. They are the same each time."""
    out: str | None = None
    """Run directory.

    Default: runs/<config>-<backend>-<recipe> (of a schedule: a-to-b), followed by -<plan> under
    numerics.accumulate.
    """
    init_from: str | None = None
    """Start from these weights: a directory in safetensors that ``fp8ref export`` or transformers
    wrote.
    """
    allow_fallback: bool = False
    """Train even if a planned FP8 GEMM or gather is missing from the step.

    The manifest lists what is missing.
    """

    def __post_init__(self) -> None:
        require_least("run", 1, self, "steps", "eval_batches")
        require_least("run", 0, self, "eval_every", note=_AT_THE_END)
        require_least("run", 0, self, "seed")
        for key in ("out", "init_from"):
            require(
                getattr(self, key) != "",
                f"run.{key} names a directory; got ''. Leave it out for its default.",
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often checkpoints are written, and how many are kept (spec K)."""

    every: int = 100
    """Steps between checkpoints; 0 for none in between.

    The state after the last step, on SIGTERM and on Ctrl-C is always saved.
    """
    keep_last: int = 2
    """Checkpoints to keep. Older ones are removed once a newer one is complete."""

    def __post_init__(self) -> None:
        require_least("checkpoint", 0, self, "every", note=_AT_THE_END)
        require_least("checkpoint", 1, self, "keep_last")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Experiment trackers. The first process logs the metrics to them."""

    tensorboard: bool = False
    """Write TensorBoard events to the run directory. Needs tensorboardX."""
    wandb: str | None = None
    """Log to this Weights & Biases project. Needs wandb."""

    def __post_init__(self) -> None:
        require(
            self.wandb != "",
            "log.wandb is the name of a project; got ''. Leave it out to log nothing there.",
        )
