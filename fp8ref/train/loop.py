"""The training loop, the same for both backends: batches in, metrics out, nothing lost when it stops early."""

import contextlib
import importlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from fp8ref import console
from fp8ref.errors import ConfigError, LostProcessError, NonFiniteError, StoppedError
from fp8ref.recipe import Decision
from fp8ref.train import checkpoint, export, failed_step, hardware, log, profiling, run_dir, signals, trackers, train_state
from fp8ref.train import config as configs
from fp8ref.train.checkpoint import Checkpoint, Checkpoints
from fp8ref.train.config import Config
from fp8ref.train.data import loader
from fp8ref.train.processes import Alone, Processes, together

BACKENDS = ("jax", "torch")


class Trainer(Protocol):
    """What a backend's ``train.Trainer`` offers. Batches of tokens are integers [B, T + 1], weights and gradients float32 by parameter's name.

    step, evaluate       train on a batch, giving loss and grad_norm before the update, which is left out where either is not finite (T-4);
                         the mean loss of a batch, in nats, with the weights as they are.
    logits               float32 [B, T, vocab_size] of inputs [B, T].
    weights, moments     of every parameter, whole; moments by which, then by parameter.
    save, load           begin to write the state into a directory, giving what waits until it is written; read that of a step.
    gradients            of a batch's mean loss, before clipping.
    observe              one forward and backward pass, whose FP8 GEMMs are told to observer(layer, gemm, a, b, out).
    statistics, measured_step
                         what quantising does to a batch's operands (Q-8), by itself, or beside a step.
    fp8_states           those of delayed scaling by "<layer>/<role>": stored scale, history and step.
    peak_memory          bytes in use on a device at most; None where devices do not count, as CPUs.
    """

    backend: str
    decisions: list[Decision]
    device: str

    def step(self, tokens: np.ndarray) -> dict[str, float]: ...
    def evaluate(self, tokens: np.ndarray) -> float: ...
    def logits(self, tokens: np.ndarray) -> np.ndarray: ...
    def weights(self) -> dict[str, np.ndarray]: ...
    def moments(self) -> dict[str, dict[str, np.ndarray]]: ...
    def save(self, directory: Path) -> Callable[[], None]: ...
    def load(self, directory: Path, step: int) -> None: ...
    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]: ...
    def observe(self, tokens: np.ndarray, observer) -> None: ...
    def statistics(self, tokens: np.ndarray) -> dict[str, dict]: ...
    def measured_step(self, tokens: np.ndarray) -> tuple[dict[str, float], dict[str, dict]]: ...
    def fp8_states(self) -> dict[str, tuple[np.ndarray, ...]]: ...
    def peak_memory(self) -> int | None: ...


@runtime_checkable
class Provable(Protocol):
    """A trainer that can read its compiled step: for the manifest, after it has refused one that lacks what was planned."""

    def prove(self, tokens: np.ndarray) -> dict:
        """The proof of a step on this batch, as the manifest keeps it."""
        ...


def trainer(backend: str, config: Config, weights: dict[str, np.ndarray] | None = None) -> Trainer:
    """A fresh trainer of a backend, importing its framework only now.

    weights   float32 by parameter's name, to start from; None: ``llama.initial_weights`` of the config's seed.
    Raises:   ConfigError: an unknown backend, a key that it has no use for, simulated hardware that the recipe or the mesh cannot run under, and
              what the backend itself refuses; ImportError: its framework is not installed.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend is one of {', '.join(BACKENDS)}; got {backend!r}.")
    if foreign := config.parallel.foreign(backend) + config.optimizer.foreign(backend):
        raise ConfigError(f"{', '.join(foreign)} is not a key of --backend {backend}. Leave it out.")
    multiply = hardware.of(config, backend)
    return importlib.import_module(f"fp8ref.train.{backend}.trainer").Trainer(config, weights, multiply=multiply)


def train(
    config: Config, backend: str, out: Path, *, resume: bool = False, overwrite: bool = False, processes: Processes | None = None
) -> list[dict] | None:
    """Train config.run.steps steps and write the run to ``out``, from its last checkpoint under ``resume``.

    processes  those that train it together, each calling this; the first writes.
    Returns:  the metrics of every step; None when ``resume`` finds the run finished.
    Raises:   ConfigError before anything is written; NonFiniteError, StoppedError, KeyboardInterrupt after all so far is on disk.
    """
    processes = processes or Alone()
    with signals.asked() as asked, contextlib.closing(run_dir.Lock()) as held:

        def on_first(f: Callable):
            return together(processes, lambda: f() if processes.first else None)

        def claimed() -> bool:
            trackers.check(config.log)
            return run_dir.claim(out, config, backend, held, resume=resume, overwrite=overwrite)

        if not processes.gather(on_first(claimed))[0]:
            return None
        batches = together(processes, lambda: loader.open_batches(config, first=processes.first))
        _check_alike(processes, config, batches)
        found = on_first(lambda: _last(out, config, backend, batches) if resume else None)
        path, start = processes.gather((str(found.state), found.step) if found else (None, 0))[0]
        if start == config.run.steps:  # it ended between its last checkpoint and saying so
            on_first(lambda: log.finish(out))
            return None
        profiling.begin()
        model, proof = together(processes, lambda: _proven(config, backend, batches, initial=path is None))
        if path is not None:
            together(processes, lambda: model.load(Path(path), start))
        on_first(lambda: run_dir.make(out, held))
        run = on_first(
            lambda: trackers.beside(
                log.create(
                    out,
                    config,
                    backend,
                    data=batches.description,
                    decisions=model.decisions,
                    device=model.device,
                    proof=proof,
                    overwrite=overwrite,
                    start=start,
                ),
                config,
                out,
                overwrite=overwrite,
            )
        )
        return _Training(model, batches, config, out, run or log.Unwritten(), processes, asked).all(start)


def _last(out: Path, config: Config, backend: str, batches: loader.Batches) -> Checkpoint | None:
    """The checkpoint that a run resumes from.

    Raises:   ConfigError: none is intact; it is another run's; other data than it was trained on; moments in FP8 of another mesh.
    """
    found = checkpoint.latest(out, console.say)
    if found is None:
        if (out / log.METRICS).exists():
            console.say(f"{out} has no checkpoint yet: it starts again from step 0.")
        return None
    mine = {"backend": backend, "config": configs.to_dict(config), "hardware": hardware.told(config)}
    for key, (here, there) in run_dir.changed(mine, found.manifest).items():
        raise ConfigError(
            f"{found.path} is of another run: its {key} is {there!r}, and this run's {here!r}. Put the run's own checkpoints back."
        )
    if found.step > config.run.steps:
        raise ConfigError(f"{found.path} is of another run: it is of step {found.step}, and run.steps is {config.run.steps}. Take it away.")
    before, now = found.manifest["data"]["sha256"], batches.description["sha256"]
    if before != now:
        raise ConfigError(
            f"{found.path} was trained on other data: their sha256 was {before} and is {now}. Put the data back, or start another run from these "
            "weights: fp8ref export, then run.init_from."
        )
    mesh = configs.differences(found.manifest["config"].get("parallel"), configs.to_dict(config)["parallel"])
    for key in ("data", "fsdp", "tensor"):
        if config.optimizer.kind == "adamw_fp8" and key in mesh:
            raise ConfigError(
                f"moments in FP8 lie in blocks of each process's piece (T-6): {found.path} has parallel.{key} {mesh[key][0]}; got {mesh[key][1]}. "
                "Resume on the mesh that saved it."
            )
    return found


def _proven(config: Config, backend: str, batches: loader.Batches, *, initial: bool) -> tuple[Trainer, dict | None]:
    """A fresh trainer, and what its compiled step is, where it can read it. initial: its weights are those that training starts from."""
    given = config.run.init_from if initial else None
    try:
        model = trainer(backend, config, export.read(Path(given), config.model) if given else None)
    except MemoryError as error:
        raise ConfigError(
            f"the model does not fit into memory: {error}. Lower the sizes of model.*; --dry-run tells what they take."
        ) from error
    return model, model.prove(batches.step(0)) if isinstance(model, Provable) else None


def _check_alike(processes: Processes, config: Config, batches: loader.Batches) -> None:
    """ConfigError where a process would train something else than the first; where its text lies is its own affair."""
    told = processes.gather({"config": configs.to_dict(config.replace(data={"source": "stdlib"})), "text": batches.description["sha256"]})
    for index, other in enumerate(told):
        for key, (theirs, first) in configs.differences(other, told[0]).items():
            raise ConfigError(f"all processes train alike; {key} is {theirs!r} in process {index} and {first!r} in process 0.")


class _Training:
    """The steps of one run and what happens between them; every process has one."""

    def __init__(
        self,
        model: Trainer,
        batches: loader.Batches,
        config: Config,
        out: Path,
        run: log.RunLog | trackers.Tracked | log.Unwritten,
        processes: Processes,
        asked: Callable[[], bool],
    ) -> None:
        """asked: whether this process was told to stop."""
        self.asked = asked
        self.model, self.batches, self.config, self.out, self.run, self.processes = model, batches, config, out, run, processes
        about = {"backend": model.backend, "config": configs.to_dict(config), "data": batches.description}
        about |= {"hardware": simulated} if (simulated := hardware.told(config)) else {}
        size = train_state.disk_bytes(config, model.backend)
        self.checkpoints = Checkpoints(out, about, keep_last=config.checkpoint.keep_last, processes=processes, size=size)
        self.watch = profiling.Stopwatch()

    def all(self, start: int) -> list[dict]:
        """Train from step ``start`` to the last; the metrics of every step, those before it included."""
        run, lines, steps = self.run, list(self.run.kept), self.config.run.steps
        if self.processes.first and len(lines) < start:
            console.say(
                f"{self.out}: metrics of {start - len(lines)} of the {start} steps before are lost; training goes on from the checkpoint."
            )
        before = sum(line["seconds"] for line in lines[-1:])
        title = f"{self.model.backend} {self.config.numerics.recipe}"
        try:
            with self.processes.telling(), console.bar(title, steps, shown=self.processes.first, done=start) as advance:
                if self.stop():
                    raise StoppedError("stopped by SIGTERM before a step was taken; --resume continues.")
                for step in range(start, steps):
                    metrics = self.step(step) | {"seconds": before + self.watch.total}
                    run.step(metrics)
                    lines.append(metrics)
                    advance(f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s")
                    self.save(step + 1, stop=self.stop())
                memory = profiling.memory(self.model, self.processes)
            run.status("finished", final=lines[-1], seconds={"total": self.watch.total, **self.watch.seconds}, memory=memory)
        except BaseException as error:
            if not isinstance(error, LostProcessError):  # one that is gone keeps a checkpoint from being whole
                with contextlib.suppress(OSError):
                    self.checkpoints.finish()
            status = {KeyboardInterrupt: "interrupted", StoppedError: "stopped"}.get(type(error), "failed")
            with contextlib.suppress(OSError):  # of a full disk, which must not hide what happened
                run.status(status, error=f"{type(error).__name__}: {error}")
            raise
        finally:
            run.close()
        return lines

    def step(self, step: int) -> dict:
        """One step's metrics; its statistics and validation where they are due."""
        config, watch = self.config, self.watch
        with watch("data"):
            tokens = self.batches.step(step)
        begun = time.perf_counter()
        if config.statistics.every and step % config.statistics.every == 0:
            with watch("measured step"):
                metrics, found = self.model.measured_step(tokens)
            self.run.statistics({"step": step, "statistics": found})
        else:
            with watch("step"):
                metrics = self.model.step(tokens)
        seconds = time.perf_counter() - begun
        if not all(map(math.isfinite, metrics.values())):
            try:
                kept = failed_step.write(self.out, self.model, config, tokens, {"step": step} | metrics, self.processes)
                remedy = f"fp8ref crosscheck --replay {kept} names where it began."
            except Exception as error:  # which must not hide what happened
                remedy = f"The step could not be kept: {str(error).splitlines()[0]}."
            raise NonFiniteError(_explain(self.model, step, metrics, remedy))
        line = {"step": step, **metrics, "tokens_per_second": config.data.batch_size * config.data.sequence_length / seconds}
        if (step + 1) % config.run.eval_every == 0 or step + 1 == config.run.steps:
            with watch("evaluation"):
                losses = [self.model.evaluate(self.batches.held_out(i)) for i in range(config.run.eval_batches)]
            line["val_loss"] = float(np.mean(losses))
            if not math.isfinite(line["val_loss"]):
                raise NonFiniteError(f"after step {step}: validation loss {line['val_loss']}. Lower optimizer.learning_rate.")
        return line

    def stop(self) -> bool:
        """Whether any process was told to; the same answer on all."""
        return any(self.processes.gather(self.asked()))

    def save(self, done: int, *, stop: bool) -> None:
        """After ``done`` steps: save the state where it is due, and stop where that was asked."""
        last, every = done == self.config.run.steps, self.config.checkpoint.every
        with self.watch("checkpoint"):
            self.checkpoints.check()
            if last or stop or (every and done % every == 0):
                self.run.sync()
                self.checkpoints.save(self.model, done)
            if last or stop:  # none leaves before the first has made it whole
                together(self.processes, self.checkpoints.finish)
        if stop and not last:
            raise StoppedError(f"stopped by SIGTERM after {done} steps, which are saved; --resume continues.")


def _explain(model: Trainer, step: int, metrics: dict[str, float], remedy: str) -> str:
    bad = [name for name, value in model.weights().items() if not np.isfinite(value).all()]
    where = f"non-finite weights: {', '.join(bad)}" if bad else "all weights are finite"
    return (
        f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; the optimizer step was not taken (T-4), {where}. "
        f"{remedy} Lower optimizer.learning_rate, or compare with --recipe bf16."
    )
