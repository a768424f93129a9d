"""Experiment trackers: TensorBoard and Weights & Biases get every step's metrics.

The first process writes. The packages are imported only then.
"""

import importlib
import shutil
from pathlib import Path
from typing import Any, Protocol

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import LogConfig

EVENTS = "tensorboard"
"""TensorBoard's directory in a run directory."""

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""{key of config.log: package of the tracker}."""


class Log(Protocol):
    """The interface of ``log.RunLog``."""

    kept: list[dict]

    def step(self, metrics: dict) -> None:
        """Log the metrics of a step."""
        ...

    def statistics(self, line: dict) -> None:
        """Log quantization statistics of a step (Q-8)."""
        ...

    def check(self) -> None:
        """LostRunError if the run's directory is not its own any more."""
        ...

    def sync(self) -> None:
        """Write to the disk what was logged so far."""
        ...

    def status(self, status: str, **more) -> None:
        """Set the manifest's status, and more keys of the manifest."""
        ...

    def ran(self, ran: list[list]) -> None:
        """Record which recipes of a schedule ran (T-9)."""
        ...

    def close(self) -> None:
        """End the log."""
        ...


class TensorBoard:
    """Writes every step's scalars.

    A run that resumes from an earlier step hides the events after it.
    """

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
    """Logs to a project of Weights & Biases, under the directory's name.

    A resumed run is a new run of that name.
    """

    def __init__(self, config: Config, out: Path) -> None:
        self._run = _package("wandb").init(
            project=config.log.wandb,
            name=out.resolve().name,
            dir=str(out),
            config=configs.to_dict(config),
        )

    def step(self, metrics: dict) -> None:
        """Log all metrics of a step."""
        self._run.log(
            {key: value for key, value in metrics.items() if key != "step"}, step=metrics["step"]
        )

    def close(self, failed: bool) -> None:
        """End the run, with exit code 1 if it failed."""
        self._run.finish(exit_code=int(failed))


class TrackedLog:
    """A run's log that also forwards every step to trackers."""

    def __init__(self, run: Log, trackers: list) -> None:
        self._run, self._trackers, self._failed, self.kept = run, trackers, True, run.kept

    def statistics(self, line: dict) -> None:
        """Write to the run's log alone."""
        self._run.statistics(line)

    def check(self) -> None:
        """As that of the run's log."""
        self._run.check()

    def sync(self) -> None:
        """fsync the run's log."""
        self._run.sync()

    def step(self, metrics: dict) -> None:
        """Write to the run's log, then to every tracker."""
        self._run.step(metrics)
        for tracker in self._trackers:
            tracker.step(metrics)

    def status(self, status: str, **more) -> None:
        """Write to the run's log.

        Trackers report a failed run unless the last status is ``finished``.
        """
        self._failed = status != "finished"
        self._run.status(status, **more)

    def ran(self, ran: list[list]) -> None:
        """Write to the run's log alone."""
        self._run.ran(ran)

    def close(self) -> None:
        """Close the run's log, then every tracker."""
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
    starting, remedy = "log.tensorboard", "Leave it out."
    try:
        if config.log.tensorboard:
            trackers.append(TensorBoard(out / EVENTS))
        if config.log.wandb:
            starting, remedy = (
                f"log.wandb {config.log.wandb!r}",
                "Set WANDB_MODE=offline, or leave it out.",
            )
            trackers.append(WandB(config, out))
    except Exception as error:
        run.status("failed", error=f"{type(error).__name__}: {error}")
        run.close()
        raise ConfigError(f"{starting} could not start: {error}. {remedy}") from error
    return TrackedLog(run, trackers) if trackers else run


def _package(key: str) -> Any:
    name = PACKAGES[key]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"log.{key} needs the package {name}, which is not installed ({error}). Install it "
            f"with: pip install {name}. Or leave it out."
        ) from error
