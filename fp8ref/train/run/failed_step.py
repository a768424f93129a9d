"""Save a step whose loss is not finite, for ``fp8ref crosscheck --replay`` (spec K-6).

RUN/failures/step-00000012/state/          the state before that step, as checkpoints have it
                           batch.npy       its global batch, int32 [batch_size, sequence_length + 1]
                           manifest.json   step, loss, gradient norm, recipe, backend and config, as
                                           checkpoints have it
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError, NonFiniteError, require
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.run import checkpoint
from fp8ref.train.run.processes import Processes, together
from fp8ref.train.run.trainer import Trainer

FOLDER = "failures"
"""The directory of failed steps in a run directory."""


@dataclass(frozen=True)
class Failure:
    """A failed step that was read back.

    metrics: step, loss and grad_norm as text: JSON has no NaN. recipe: the step's own.
    """

    state: Path
    tokens: np.ndarray
    config: Config
    backend: str
    recipe: str
    metrics: Mapping[str, str]


def write(
    out: Path,
    model: Trainer,
    config: Config,
    tokens: np.ndarray,
    metrics: Mapping[str, Any],
    processes: Processes,
    *,
    recipe: str | None = None,
) -> Path:
    """Save a failed step; every process calls it. Returns its directory.

    recipe    the step's, where the config has a schedule.

    Raises:   OSError: it could not be written; nothing of it is left.
    """
    path = checkpoint.of_step(out, metrics["step"], FOLDER)
    unfinished = path.with_name(path.name + checkpoint.UNFINISHED)
    first = processes.first
    together(processes, lambda: checkpoint.make_empty(unfinished) if first else None)

    def complete() -> None:
        np.save(unfinished / "batch.npy", np.asarray(tokens, np.int32), allow_pickle=False)
        about = {
            "backend": model.backend,
            "config": configs.to_dict(config),
            "recipe": recipe or config.numerics.recipe,
            "metrics": {k: str(v) for k, v in metrics.items()},
            "step": metrics["step"],
        }
        checkpoint.write_manifest(unfinished, about)
        checkpoint.remove(path)
        unfinished.rename(path)

    try:
        model.save(unfinished / "state")()
        together(processes, lambda: complete() if processes.first else None)
    except Exception:
        if processes.first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return path


def error(
    out: Path,
    model: Trainer,
    config: Config,
    tokens: np.ndarray,
    metrics: Mapping[str, Any],
    processes: Processes,
    *,
    recipe: str,
) -> NonFiniteError:
    """The error that ends a run at a step that is not finite, which is kept by ``write``."""
    try:
        kept = write(out, model, config, tokens, metrics, processes, recipe=recipe)
        remedy = f"{kept} has the state and the batch."
        if config.architecture.kind == "llama":
            remedy = f"fp8ref crosscheck --replay {kept} names where it began."
    except Exception as error:  # a failure to save must not hide the non-finite loss
        remedy = f"The step could not be kept: {str(error).splitlines()[0]}."
    return NonFiniteError(_explain(model, metrics, remedy))


def _explain(model: Trainer, metrics: Mapping[str, Any], remedy: str) -> str:
    bad = [name for name, value in model.weights().items() if not np.isfinite(value).all()]
    where = f"non-finite weights: {', '.join(bad)}" if bad else "all weights are finite"
    return (
        f"step {metrics['step']}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; "
        f"the optimizer step was not taken (T-4), {where}. {remedy} Lower "
        "optimizer.learning_rate, or compare with --recipe bf16."
    )


def read(path: Path) -> Failure:
    """A failed step that ``write`` saved. path: its directory, or the manifest.json in it.

    Raises:   ConfigError: path is no failed step (the message lists the run's), or damaged.
    """
    folder = path.parent if path.name == "manifest.json" else path
    if not (folder / "manifest.json").is_file() or _is_run(folder):
        problem = "is a run" if _is_run(path) else "is not one"
        if not path.is_dir():
            problem = "is a file" if path.exists() else "does not exist"
        raise ConfigError(_no_failure(path, problem))
    manifest = checkpoint.verify(folder)
    require("metrics" in manifest, _no_failure(path, "is a checkpoint"), ConfigError)
    if absent := {"step", "loss", "grad_norm"} - manifest["metrics"].keys():
        raise ConfigError(
            f"{folder / 'manifest.json'} has no metrics.{absent.pop()}: it was not written by "
            "fp8ref."
        )
    config = configs.from_dict(manifest["config"], source=str(folder / "manifest.json"))
    return Failure(
        state=folder / "state",
        tokens=_tokens(folder / "batch.npy"),
        config=config,
        backend=manifest["backend"],
        # of a step that failed before there were schedules
        recipe=manifest.get("recipe", config.numerics.recipe),
        metrics=manifest["metrics"],
    )


def _tokens(path: Path) -> np.ndarray:
    """The batch [B, T + 1]. ConfigError for anything else."""
    try:
        tokens = files.read_array(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Put the file back.") from error
    if tokens.ndim != 2 or tokens.dtype != np.int32:
        raise ConfigError(
            f"{path} holds {tokens.dtype} of shape {tokens.shape}; a batch is int32 [B, T + 1]. "
            "Put the file back."
        )
    return tokens


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def _no_failure(path: Path, problem: str) -> str:
    """What the path is instead of a failed step, and the failed steps that its run saved."""
    message = (
        "a replay takes the directory of a step that failed, "
        f"RUN/{FOLDER}/{checkpoint.PREFIX}...; {path} {problem}."
    )
    run = next((folder for folder in (path, *path.parents) if _is_run(folder)), None)
    if run is None:
        return message
    kept = ", ".join(map(str, checkpoint.directories(run / FOLDER)))
    return f"{message} {run} kept {kept or 'none: none of its steps failed'}."
