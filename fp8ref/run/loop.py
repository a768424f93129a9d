"""The training loop, the same for both backends: batches in, metrics out, nothing lost when it stops early."""

import importlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from fp8ref.recipe import Decision
from fp8ref.run import config as configs
from fp8ref.run import data, log, progress
from fp8ref.run.config import Config, ConfigError
from fp8ref.run.processes import Alone, Processes, together

BACKENDS = ("jax", "torch")


class Trainer(Protocol):
    """What a backend's ``train.Trainer`` offers."""

    backend: str
    decisions: list[Decision]
    device: str

    def step(self, tokens: np.ndarray) -> dict[str, float]: ...
    def evaluate(self, tokens: np.ndarray) -> float: ...
    def logits(self, tokens: np.ndarray) -> np.ndarray: ...
    def weights(self) -> dict[str, np.ndarray]: ...
    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]: ...
    def observe(self, tokens: np.ndarray, observer) -> None: ...


@runtime_checkable
class Provable(Protocol):
    """A trainer that can read its compiled step: for the manifest, after it has refused one that lacks what was planned."""

    def prove(self, tokens: np.ndarray) -> dict: ...


class NonFiniteError(RuntimeError):
    """The loss or the gradient is not finite; the weights are those before the step (SEMANTICS T-4)."""


def trainer(backend: str, config: Config, weights: dict[str, np.ndarray] | None = None) -> Trainer:
    """A fresh trainer of a backend, importing its framework only now."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend is one of {', '.join(BACKENDS)}; got {backend!r}.")
    if foreign := config.parallel.foreign(backend) + config.optimizer.foreign(backend):
        raise ConfigError(f"{', '.join(foreign)} is not a key of --backend {backend}. Leave it out.")
    return importlib.import_module(f"fp8ref.{backend}.train").Trainer(config, weights)


def train(
    config: Config, backend: str, out: Path, *, resume: bool = False, overwrite: bool = False, processes: Processes | None = None
) -> list[dict] | None:
    """Train config.run.steps steps and write the run to ``out``.

    processes  those that train it together, each calling this; the first writes.
    Returns:  the metrics of every step; None when ``resume`` finds the run finished.
    Raises:   ConfigError before anything is written; NonFiniteError, KeyboardInterrupt after the metrics so far are on disk.
    """
    processes = processes or Alone()

    def on_first(f: Callable):
        return together(processes, lambda: f() if processes.first else None)

    claimed = on_first(lambda: log.claim(out, config, backend, resume=resume, overwrite=overwrite))
    if not processes.gather(claimed)[0]:
        return None
    batches = together(processes, lambda: data.open_batches(config))
    _check_alike(processes, config, batches)
    model, proof = together(processes, lambda: _proven(config, backend, batches))
    run = on_first(
        lambda: log.create(
            out,
            config,
            backend,
            data=batches.description,
            decisions=model.decisions,
            device=model.device,
            proof=proof,
            overwrite=overwrite,
        )
    )
    run = run or log.Unwritten()
    lines = []
    try:
        with processes.telling(), progress.bar(f"{backend} {config.numerics.recipe}", config.run.steps, shown=processes.first) as advance:
            for metrics in _steps(model, batches, config):
                run.step(metrics)
                lines.append(metrics)
                advance(f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s")
        run.status("finished", final=lines[-1])
    except BaseException as error:
        run.status("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        run.close()
    return lines


def _proven(config: Config, backend: str, batches: data.Batches) -> tuple[Trainer, dict | None]:
    """A fresh trainer, and what its compiled step is, where it can read it."""
    model = trainer(backend, config)
    return model, model.prove(batches.step(0)) if isinstance(model, Provable) else None


def _check_alike(processes: Processes, config: Config, batches: data.Batches) -> None:
    """ConfigError where a process would train something else than the first; where its text lies is its own affair."""
    told = processes.gather({"config": configs.to_dict(config.replace(data={"source": "stdlib"})), "text": batches.description["sha256"]})
    for index, other in enumerate(told):
        for key, (theirs, first) in log.differences(other, told[0]).items():
            raise ConfigError(f"all processes train alike; {key} is {theirs!r} in process {index} and {first!r} in process 0.")


def _steps(model: Trainer, batches: data.Batches, config: Config):
    """Train, yielding each step's metrics."""
    tokens_per_step = config.data.batch_size * config.data.sequence_length
    start = time.perf_counter()
    for step in range(config.run.steps):
        before = time.perf_counter()
        metrics = model.step(batches.step(step))
        seconds = time.perf_counter() - before
        if not all(map(math.isfinite, metrics.values())):
            raise NonFiniteError(_explain(model, step, metrics))
        line = {"step": step, **metrics, "tokens_per_second": tokens_per_step / seconds}
        if (step + 1) % config.run.eval_every == 0 or step + 1 == config.run.steps:
            line["val_loss"] = float(np.mean([model.evaluate(batches.held_out(i)) for i in range(config.run.eval_batches)]))
            if not math.isfinite(line["val_loss"]):
                raise NonFiniteError(f"after step {step}: validation loss {line['val_loss']}. Lower optimizer.learning_rate.")
        yield {**line, "seconds": time.perf_counter() - start}


def _explain(model: Trainer, step: int, metrics: dict[str, float]) -> str:
    bad = [name for name, value in model.weights().items() if not np.isfinite(value).all()]
    where = f"non-finite weights: {', '.join(bad)}" if bad else "all weights are finite"
    return (
        f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; the optimizer step was not taken (T-4), {where}. "
        "Lower optimizer.learning_rate, or compare with --recipe bf16."
    )
