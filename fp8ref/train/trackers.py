"""Experiment trackers: TensorBoard and Weights & Biases get every step's metrics.

The first process writes. The packages are imported only then.
"""

import importlib
import shutil
from pathlib import Path
from typing import Any, Protocol

from fp8ref.errors import ConfigError
from fp8ref.train import config as configs
from fp8ref.train.config import Config
from fp8ref.train.sections import LogConfig

EVENTS = "tensorboard"  # folder in the run directory
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # by key of config.log


class Log(Protocol):
    """The interface of ``log.RunLog``, which documents the methods."""

    kept: list[dict]

    def step(self, metrics: dict) -> None: ...
    def statistics(self, line: dict) -> None: ...
    def sync(self) -> None: ...
    def status(self, status: str, **more) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Writes every step's scalars.

    A run that resumes from an earlier step hides the events after it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def step(self, metrics: dict) -> None:
        if self._writer is None:
            self._writer = _package("tensorboard").SummaryWriter(str(self._folder), purge_step=metrics["step"])
        for key, value in metrics.items():
            if key != "step" and isinstance(value, int | float):
                self._writer.add_scalar(key, value, metrics["step"])

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Logs to a project of Weights & Biases, under the directory's name.

    A resumed run is a new run of that name.
    """

    def __init__(self, config: Config, out: Path) -> None:
        self._run = _package("wandb").init(project=config.log.wandb, name=out.resolve().name, dir=str(out), config=configs.to_dict(config))

    def step(self, metrics: dict) -> None:
        self._run.log({key: value for key, value in metrics.items() if key != "step"}, step=metrics["step"])

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class TrackedLog:
    """A run's log that also forwards every step to trackers."""

    def __init__(self, run: Log, trackers: list) -> None:
        self._run, self._trackers, self._failed, self.kept = run, trackers, True, run.kept

    def statistics(self, line: dict) -> None:
        self._run.statistics(line)

    def sync(self) -> None:
        self._run.sync()

    def step(self, metrics: dict) -> None:
        self._run.step(metrics)
        for tracker in self._trackers:
            tracker.step(metrics)

    def status(self, status: str, **more) -> None:
        self._failed = status != "finished"
        self._run.status(status, **more)

    def close(self) -> None:
        self._run.close()
        for tracker in self._trackers:
            tracker.close(self._failed)


def check(log: LogConfig) -> None:
    """ConfigError if a tracker's package is not installed."""
    for key in PACKAGES:
        if getattr(log, key):
            _package(key)


def attach(run: Log, config: Config, out: Path, *, overwrite: bool = False) -> Log:
    """The log of a run in ``out``, with the trackers of config.log attached.

    overwrite: remove earlier events.

    Raises:   ConfigError: a tracker cannot start; the run is then marked as failed.
    """
    if overwrite:
        shutil.rmtree(out / EVENTS, ignore_errors=True)
    trackers: list = []
    try:
        if config.log.tensorboard:
            trackers.append(TensorBoard(out / EVENTS))
        if config.log.wandb:
            trackers.append(WandB(config, out))
    except Exception as error:
        run.status("failed", error=f"{type(error).__name__}: {error}")
        run.close()
        raise ConfigError(f"log.wandb {config.log.wandb!r} could not begin: {error}. Set WANDB_MODE=offline, or leave it out.") from error
    return TrackedLog(run, trackers) if trackers else run


def _package(key: str) -> Any:
    name = PACKAGES[key]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"log.{key} needs the package {name}, which is not here ({error}). pip install {name}, or leave it out."
        ) from error
