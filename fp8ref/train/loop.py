"""The training loop of both backends: steps, validation, checkpoints, logs, resuming."""

import contextlib
import functools
import importlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from fp8ref.shared import console
from fp8ref.shared.errors import (
    ConfigError,
    LostProcessError,
    NonFiniteError,
    StoppedError,
    require,
)
from fp8ref.spec import gradient_reduction, llama
from fp8ref.spec.kernels import Kernels
from fp8ref.spec.states import health
from fp8ref.train.config import architecture, device_shapes, hardware
from fp8ref.train.config import config as configs
from fp8ref.train.config.checks import check_backend
from fp8ref.train.config.config import Config
from fp8ref.train.config.schedule import Schedule, measured
from fp8ref.train.data import loader
from fp8ref.train.models import export
from fp8ref.train.run import (
    coverage,
    failed_step,
    log,
    profiling,
    run_dir,
    signals,
    trackers,
    train_state,
)
from fp8ref.train.run.checkpoint import Checkpoints
from fp8ref.train.run.processes import Alone, Processes, together
from fp8ref.train.run.trainer import Provable, Trainer

__all__ = ["train", "trainer"]

BACKENDS = ("jax", "torch")
"""The backends that train, by name."""


def trainer(
    backend: str, config: Config, weights: Mapping[str, llama.Weight] | None = None
) -> Trainer:
    """A new trainer of a backend, whose framework is imported only now.

    weights   float32 by parameter name, to start from; each process reads its shards. None:
              ``llama.lazy_initial_weights`` of the config's seed.
    Raises:   ConfigError: an unknown backend; a key that it does not have; simulated hardware that
              the recipe or the mesh cannot use; a config that the backend refuses. ImportError: its
              framework is not installed.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend is one of {', '.join(BACKENDS)}; got {backend!r}.")
    check_backend(config, backend)
    if config.architecture.kind == "llama":
        refused = device_shapes.unrotated(config)
        require(not refused, "".join(refused[:1]), ConfigError)
    multiply = hardware.of(config, backend)
    library = importlib.import_module(f"fp8ref.train.{backend}.trainer")
    return library.Trainer(config, weights, multiply=multiply)


def train(
    config: Config,
    backend: str,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    processes: Processes | None = None,
) -> list[dict] | None:
    """Train config.run.steps steps and write the run to ``out``.

    resume     continue from the last checkpoint; overwrite: replace a run.

    processes  the processes that train together and all call this; None: this one alone.
    Returns:  the metrics of every step; None if ``resume`` finds the run finished.
    Raises:   ConfigError before anything is written; NonFiniteError, StoppedError or
              KeyboardInterrupt once everything so far is on disk.
    """
    processes = processes or Alone()
    with signals.deferring_sigterm() as stop_requested, contextlib.closing(run_dir.Lock()) as held:
        # Only the first process touches the run directory. Every process still waits for the
        # result, so that an error there ends all of them with the same exit code.
        def on_first(f: Callable):
            return together(processes, lambda: f() if processes.first else None)

        def claimed() -> bool:
            trackers.check(config.log)
            return run_dir.claim(out, config, backend, held, resume=resume, overwrite=overwrite)

        if not processes.gather(on_first(claimed))[0]:
            return None
        batches = together(processes, lambda: loader.open_batches(config, first=processes.first))
        _check_alike(processes, config, batches)
        resumed = on_first(lambda: _resumed(out, config, backend, batches) if resume else None)
        path, start, measured = processes.gather(resumed or (None, 0, []))[0]
        # it was killed between its last checkpoint and the final manifest
        if start == config.run.steps:
            on_first(lambda: log.finish(out))
            return None
        profiling.begin()
        # Everything that can be refused is refused before run_dir.make: a faulty config leaves no
        # directory behind, and does not disturb the run that --overwrite would replace.
        model, proofs = together(
            processes, lambda: _proven(config, backend, batches, initial=path is None)
        )
        if path is not None:
            together(processes, lambda: model.load(Path(path), start))
        on_first(lambda: run_dir.make(out, held))
        phases, data = config.scheduled(measured), batches.description
        ran = phases.ran(start)
        begin = functools.partial(_begin_log, out, config, model, data, proofs, ran)
        run = on_first(lambda: begin(start, overwrite=overwrite)) or log.Unwritten()
        return _Training(model, batches, config, out, run, processes, stop_requested, phases).all(
            start
        )


def _begin_log(
    out: Path,
    config: Config,
    model: Trainer,
    data: dict,
    proofs: dict[str, dict],
    ran: list[list],
    start: int,
    *,
    overwrite: bool,
) -> log.RunLog:
    """Say what runs, and begin to log it in the directory and by trackers."""
    _say_what_runs(config, model.kernels)
    path = config.run.init_from
    if path and not start and (text := export.dequantized(Path(path))):
        console.say(text)
    manifest = log.manifest(
        config,
        model.backend,
        data=data,
        decisions=model.decisions,
        device=model.device,
        kernels=model.kernels,
        proofs=proofs,
        ran=ran,
    )
    run = log.create(out, config, manifest, overwrite=overwrite, start=start)
    trackers.attach(run, config, out, overwrite=overwrite)
    return run


def _resumed(
    out: Path, config: Config, backend: str, batches: loader.Batches
) -> tuple[str, int, list] | None:
    """(state, steps, phases measured) of the last checkpoint, if there is one."""
    last = run_dir.last_checkpoint(out, config, backend, batches.description)
    if last is None:
        return None
    return str(last.state), last.step, last.manifest.get("measured", [])


def _say_what_runs(config: Config, kernels: Mapping[str, Kernels]) -> None:
    in_fp8 = 0
    for recipe in config.recipes:
        alone = config.under(recipe)
        name = f"{recipe}: " * (config.numerics.schedule is not None)
        share = coverage.of(alone, alone.decisions())
        in_fp8 += share["linears"]
        console.say(name + share["summary"])
    for device, ran in kernels.items() if in_fp8 else ():
        console.say(f"Casts on {device}: {ran.text}.")
    if (warmup := config.optimizer.warmup_steps) > config.run.steps:
        console.say(
            f"optimizer.warmup_steps {warmup:,} is more than run.steps {config.run.steps:,}: the "
            "learning rate never reaches optimizer.learning_rate"
        )


def _proven(
    config: Config, backend: str, batches: loader.Batches, *, initial: bool
) -> tuple[Trainer, dict[str, dict]]:
    """A new trainer and each recipe's proof, if ``Provable``. initial: from run.init_from."""
    path = config.run.init_from if initial else None
    try:
        model = trainer(backend, config, export.weights_of(Path(path), config) if path else None)
    except MemoryError as error:
        raise ConfigError(
            f"the model does not fit into memory: {error}. Lower the sizes of model.*; "
            "--dry-run shows the memory that they need."
        ) from error
    if not isinstance(model, Provable):
        return model, {}
    first, *others = config.recipes
    proofs = {first: model.prove(batches.step(0))}
    for recipe in others:  # now: a phase that could not be proven would end the run in its middle
        model.switch(recipe)
        proofs[recipe] = model.prove(batches.step(0))
    if others:
        model.switch(first)
    return model, proofs


def _check_alike(processes: Processes, config: Config, batches: loader.Batches) -> None:
    """ConfigError if a process has another config, text or set for validation than the first.

    Their paths may differ, because the hashes are compared.
    """
    without_paths = config.replace(data={"source": "stdlib", "mixture": None, "evaluation": None})
    descriptions = processes.gather(
        {
            "config": configs.to_dict(without_paths),
            "text": batches.description["sha256"],
            "evaluation": run_dir.evaluated(batches.description),
        }
    )
    for index, other in enumerate(descriptions):
        for key, (theirs, first) in configs.differences(other, descriptions[0]).items():
            raise ConfigError(
                f"all processes have one config, one text and the same data.evaluation; {key} "
                f"is {theirs!r} in process {index} and {first!r} in process 0."
            )


class _Training:
    """The loop itself: steps, and what happens between them. Every process has one."""

    def __init__(
        self,
        model: Trainer,
        batches: loader.Batches,
        config: Config,
        out: Path,
        run: log.RunLog | log.Unwritten,
        processes: Processes,
        stop_requested: Callable[[], bool],
        phases: Schedule,
    ) -> None:
        """stop_requested: whether SIGTERM came to this process."""
        self.stop_requested = stop_requested
        self.phases, self.recipe = phases, config.numerics.recipe
        self.model = model
        self.batches = batches
        self.config = config
        self.out = out
        self.run = run
        self.processes = processes
        about = {
            "backend": model.backend,
            "config": configs.to_dict(config),
            "data": batches.description,
            "hardware": hardware.to_manifest(config),
            "model": architecture.described(config),
        }
        about = {key: value for key, value in about.items() if value}
        size = train_state.disk_bytes(config, model.backend)
        kept = config.checkpoint.keep_last
        self.checkpoints = Checkpoints(
            out, about, keep_last=kept, processes=processes, size=size, check=run.check
        )
        self.watch = profiling.Stopwatch()
        self.interrupted: Callable[[], bool] = lambda: False

    def all(self, start: int) -> list[dict]:
        """Train from step ``start`` to the last.

        Returns the metrics of every step, earlier ones included.
        """
        run, lines, steps = self.run, list(self.run.kept), self.config.run.steps
        if self.processes.first and len(lines) < start:
            console.say(
                f"{self.out}: metrics of {start - len(lines)} of the {start} steps before are "
                "lost; training resumes from the checkpoint."
            )
        if self.processes.first and start:
            console.say(f"{self.out}: resumed at step {start:,} of {steps:,}")
        before = sum(line["seconds"] for line in lines[-1:])
        title = f"{self.model.backend} {', '.join(self.config.recipes)}"
        try:
            with (
                self.processes.naming_lost_processes(),
                console.bar(title, steps, shown=self.processes.first, done=start) as advance,
                signals.deferring_ctrl_c() as self.interrupted,
            ):
                if stop := self.stop():
                    raise stop("before a step was taken; --resume continues.")
                for step in range(start, steps):
                    metrics = self.step(step) | {"seconds": before + self.watch.total}
                    run.step(metrics)
                    lines.append(metrics)
                    advance(
                        f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s"
                    )
                    self.save(step + 1, stop=self.stop())
                memory = profiling.memory(self.model, self.processes)
            run.status(
                "finished",
                final=lines[-1],
                seconds={"total": self.watch.total, **self.watch.seconds},
                memory=memory,
            )
        except BaseException as error:
            # without all processes the checkpoint cannot be completed
            if not isinstance(error, LostProcessError):
                with contextlib.suppress(OSError):
                    self.checkpoints.finish()
            status = {KeyboardInterrupt: "interrupted", StoppedError: "stopped"}.get(
                type(error), "failed"
            )
            with contextlib.suppress(OSError):  # a full disk must not hide the error itself
                run.status(status, error=f"{type(error).__name__}: {error}")
            raise
        finally:
            run.close()
        return lines

    def step(self, step: int) -> dict:
        """Train on one batch.

        Returns its metrics, with statistics and validation if they are due.
        """
        config, watch = self.config, self.watch
        self.switch(step)
        with watch("data"):
            tokens = self.batches.step(step)
        columns: dict[str, float] = {}
        begun = time.perf_counter()
        if self.measures(step):
            with watch("measured step"):
                metrics, statistics, states = self.measured(step, tokens)
            factors = self.model.gradient_factors() if config.parallel.auto_scale else {}
            more = {"states": states, "gradients": factors}
            self.run.statistics(
                {"step": step, "statistics": statistics}
                | {key: value for key, value in more.items() if value}
            )
            columns = health.columns(states) | gradient_reduction.columns(factors)
            self.decide(step, statistics, states)
        else:
            with watch("step"):
                metrics = self.model.step(tokens)
        seconds = time.perf_counter() - begun
        if not all(map(math.isfinite, metrics.values())):
            # first the checkpoint being written: two saves at once would mix up their messages
            with contextlib.suppress(OSError):
                self.checkpoints.finish()
            raise failed_step.error(
                self.out,
                self.model,
                config,
                tokens,
                {"step": step} | metrics,
                self.processes,
                recipe=self.recipe,
            )
        speed = config.data.batch_size * config.data.sequence_length / seconds
        line = {"step": step, **metrics, "tokens_per_second": speed} | columns
        every = config.run.eval_every
        if (every and (step + 1) % every == 0) or step + 1 == config.run.steps:
            with watch("evaluation"):
                line |= self.validated(step)
        return line

    def measured(
        self, step: int, tokens: np.ndarray
    ) -> tuple[dict[str, float], dict[str, dict], dict[str, dict]]:
        """``measured_step``; without statistics, a step, where the key that asks for them is not
        set and they cannot be taken, as of a linear that a pass calls twice."""
        try:
            return self.model.measured_step(tokens)
        except ValueError as error:
            if self.config.statistics.every is not None:
                raise
            if self.processes.first:
                console.say(f"step {step}: no FP8 statistics: {error}")
            return self.model.step(tokens), {}, {}

    def measures(self, step: int) -> bool:
        """Whether statistics of a step are recorded: by default where there is something to record,
        and where attention is no kernel, into whose tiles nothing looks."""
        config = self.config
        if not config.statistics.due(step, config.run.steps):
            return False
        if config.statistics.every is not None:
            return True
        in_fp8 = any(d.fp8 for d in self.model.decisions) or bool(config.attention_in_fp8)
        has_records = in_fp8 or config.optimizer.moment_layout is not None
        return has_records and config.parallel.attention != "kernel"

    def validated(self, step: int) -> dict[str, float]:
        """Validation losses after a step: ``val_loss``, and ``val_loss_<name>`` by evaluation set.

        Raises:   NonFiniteError: one that is not finite.
        """
        sets: dict[str, Callable[[int], np.ndarray]] = {"val_loss": self.batches.held_out}
        sets |= {
            f"val_loss_{name}": functools.partial(self.batches.of_set, name)
            for name in self.batches.evaluation
        }
        losses = {}
        for key, batch in sets.items():
            batches = map(batch, range(self.config.run.eval_batches))
            losses[key] = float(np.mean([self.model.evaluate(tokens) for tokens in batches]))
            if not math.isfinite(losses[key]):
                raise NonFiniteError(
                    f"after step {step}: validation loss {losses[key]} ({key}). Lower "
                    "optimizer.learning_rate."
                )
        return losses

    def switch(self, step: int) -> None:
        """Go over to the recipe of a step, where its phase has another (T-9)."""
        recipe = self.phases.recipe(step)
        if recipe != self.recipe:
            self.model.switch(recipe)
            self.recipe = recipe
            self.run.ran(self.phases.ran(step))
            if self.processes.first:
                console.say(f"step {step}: recipe {recipe}")

    def decide(self, step: int, statistics: dict[str, dict], states: dict[str, dict]) -> None:
        """Begin the next phase after a step, if it waits for what the step's record has."""
        phase = self.phases.waits(step)
        if phase is None:
            return
        # the first process decides for all
        worst = self.processes.gather(measured(phase, statistics, states))[0]
        if worst is not None and self.phases.measure(step, worst[0]) and self.processes.first:
            has = f"an error of {worst[0]:.3g}, above"
            if phase.sqnr is not None:
                has = f"an SQNR of {worst[0]:.2f} dB, below"
            console.say(f"step {step}: {worst[1]} has {has} that of the next phase")

    def stop(self) -> Callable[[str], BaseException] | None:
        """The error that stops the run, on all processes, if SIGTERM or Ctrl-C came to any.

        Raises:   the error of an unwritten checkpoint; on the others a ConfigError that reports it.
        """
        error = self.checkpoints.error()
        came = self.processes.gather(
            (self.stop_requested(), self.interrupted(), error and str(error))
        )
        if error is not None:
            raise error
        for index, (_, _, failed) in enumerate(came):
            if failed is not None:
                raise ConfigError(f"process {index}: {failed}")
        if any(sigterm for sigterm, _, _ in came):
            return lambda saved: StoppedError(f"stopped by SIGTERM {saved}")
        if any(ctrl_c for _, ctrl_c, _ in came):
            return lambda saved: KeyboardInterrupt(f"interrupted {saved}")
        return None

    def save(self, done: int, *, stop: Callable[[str], BaseException] | None) -> None:
        """After ``done`` steps: save a checkpoint if one is due or the run stops, then raise it."""
        last, every = done == self.config.run.steps, self.config.checkpoint.every
        with self.watch("checkpoint"):
            if last or stop or (every and done % every == 0):
                # metrics first: a checkpoint that is newer would leave a gap in them
                together(self.processes, self.run.sync)
                self.checkpoints.save(self.model, done, measured=self.phases.measured)
            if last or stop:  # no process may end before the first has completed the checkpoint
                together(self.processes, self.checkpoints.finish)
        if stop and not last:
            raise stop(
                f"after {done} {'step, which is' if done == 1 else 'steps, which are'} saved; "
                "--resume continues."
            )
