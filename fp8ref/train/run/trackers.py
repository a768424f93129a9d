"""Experiment trackers: TensorBoard and Weights & Biases get every step's metrics.

The first process writes. The packages are imported only then.
"""

import importlib
import shutil
from pathlib import Path
from typing import Any

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import LogConfig
from fp8ref.train.run.log import RunLog

EVENTS = "tensorboard"  # TensorBoard's directory in a run directory

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""{key of config.log: package of the tracker}."""


class TensorBoard:
    """Writes every step's scalars; a run that resumes hides the events after its first step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def step(self, metrics: dict) -> None:
        """Write each number of a step as a scalar."""
        if self._writer is None:
            self._writer = _package("tensorboard").SummaryWriter(
                str(self._folder), purge_step=metrics["step"]
            )
        for key, value in metrics.items():
            if key != "step" and isinstance(value, int | float):
                self._writer.add_scalar(key, value, metrics["step"])

    def close(self, failed: bool) -> None:
        """Close the writer, if anything was written."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Logs to a project of Weights & Biases; a resumed run is a new one of the directory's name."""

    def __init__(self, config: Config, out: Path) -> None:
        self._run = _package("wandb").init(
            project=config.log.wandb,
            name=out.resolve().name,
            dir=str(out),
            config=configs.to_dict(config),
        )

    def step(self, metrics: dict) -> None:
        """Log all metrics of a step."""
        values = {key: value for key, value in metrics.items() if key != "step"}
        self._run.log(values, step=metrics["step"])

    def close(self, failed: bool) -> None:
        """End the run, with exit code 1 if it failed."""
        self._run.finish(exit_code=int(failed))


def check(log: LogConfig) -> None:
    """ConfigError if a tracker's package is not installed."""
    for key in PACKAGES:
        if getattr(log, key):
            _package(key)


def attach(run: RunLog, config: Config, out: Path, *, overwrite: bool = False) -> None:
    """Attach the trackers of config.log to the log of a run in ``out``.

    overwrite: remove earlier events.

    Raises:   ConfigError: a tracker cannot start; the run is then marked as failed.
    """
    if overwrite:
        shutil.rmtree(out / EVENTS, ignore_errors=True)
    starting, remedy = "log.tensorboard", "Leave it out."
    try:
        if config.log.tensorboard:
            run.trackers.append(TensorBoard(out / EVENTS))
        if config.log.wandb:
            starting = f"log.wandb {config.log.wandb!r}"
            remedy = "Set WANDB_MODE=offline, or leave it out."
            run.trackers.append(WandB(config, out))
    except Exception as error:
        run.trackers.clear()
        run.status("failed", error=f"{type(error).__name__}: {error}")
        run.close()
        raise ConfigError(f"{starting} could not start: {error}. {remedy}") from error


def _package(key: str) -> Any:
    name = PACKAGES[key]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"log.{key} needs the package {name}, which is not installed ({error}). Install it "
            f"with: pip install {name}. Or leave it out."
        ) from error
