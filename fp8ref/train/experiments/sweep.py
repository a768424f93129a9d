"""Train a config in several recipes with several seeds, and judge them by bf16 (spec E).

    plan = sweep.plan(config, ["jax"], ["bf16", "tensorwise"], seeds=3, out=Path("sweep"))
    sweep.train(plan)                                   # trains what is not finished
    sweep.report(plan, Path("sweep/report.html"))

The i-th seed of every recipe is (run.seed + i, data.seed + i), so that runs of a seed are matched:
they begin with the same weights and see the same batches.
"""

import concurrent.futures
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8ref.recipe import RECIPES
from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError, NonFiniteError, require
from fp8ref.train.config import config as configs
from fp8ref.train.config import user_model
from fp8ref.train.config.config import Config
from fp8ref.train.run import log, run_dir

__all__ = ["plan", "report", "train"]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run of a sweep: its config, backend and directory."""

    config: Config
    backend: str
    out: Path

    @property
    def ended(self) -> bool:
        """Whether it is finished, or ended by a loss that is not finite, which training again would
        repeat; with as many steps as are planned.
        """
        try:
            manifest = log.read_manifest(self.out)
        except ConfigError:
            return False
        section = manifest.get("config", {}).get("run", {})
        steps = section.get("steps", self.config.run.steps)
        diverged = str(manifest.get("error", "")).startswith(NonFiniteError.__name__)
        ended = manifest["status"] == "finished" or diverged
        return ended and steps == self.config.run.steps


def plan(
    config: Config, backends: Sequence[str], recipes: Sequence[str], *, seeds: int, out: Path
) -> list[Planned]:
    """The runs of a sweep, seed after seed, so that an unfinished sweep has matched runs.

    Raises:   ConfigError: no recipe, an unknown or repeated one; no seed; a config's schedule.
    """
    config.require_one_recipe("a sweep")
    unknown = [name for name in recipes if name not in RECIPES]
    if unknown or not recipes or len(set(recipes)) < len(recipes):
        raise ConfigError(
            f"--recipes takes names of {', '.join(RECIPES)}, each once; got "
            f"{', '.join(recipes) or 'none'}."
        )
    require(seeds >= 1, f"--seeds is at least 1; got {seeds}.", ConfigError)
    runs = []
    for seed in range(seeds):
        for backend in backends:
            for recipe in recipes:
                # bf16 has no FP8 GEMM to run under simulated hardware
                kept = {} if RECIPES[recipe].fp8 else {"accumulate": None}
                trial = config.replace(
                    numerics={"recipe": recipe, **kept},
                    run={"seed": config.run.seed + seed, "out": None},
                    data={"seed": config.data.seed + seed},
                )
                trial.decisions()  # refuses a recipe that converts nothing before any run trains
                directory = out / f"{backend}-{recipe}-seed{trial.run.seed}"
                runs.append(Planned(config=trial, backend=backend, out=directory))
    return runs


def train(planned: Sequence[Planned], *, jobs: int = 1) -> None:
    """Train the runs that have not ended, ``jobs`` at a time, in processes that are kept.

    A stopped run resumes from its last checkpoint; a non-finite loss ends its run alone.

    Raises:   ConfigError before any run trains: a directory holds a run with other settings, or no
              run; and what ``loop.train`` raises, of the first run that could not train.
    """
    for run in planned:
        _check(run)
    left = [run for run in planned if not run.ended]
    if len(left) < len(planned):
        console.say(
            f"{len(planned) - len(left)} of {len(planned)} runs have ended before; {len(left)} "
            "are left"
        )
    if not left:
        return
    context = multiprocessing.get_context("spawn")  # no fork: JAX and torch have threads
    with (
        concurrent.futures.ProcessPoolExecutor(
            min(jobs, len(left)), mp_context=context, initializer=follow_parent
        ) as pool,
        console.bar("sweep", len(planned), done=len(planned) - len(left)) as advance,
    ):
        waiting = {}
        for run in left:
            config = json.dumps(configs.to_dict(run.config))
            waiting[pool.submit(_one, config, run.backend, str(run.out))] = run
        try:
            for done in concurrent.futures.as_completed(waiting):
                summary = done.result()
                advance(waiting[done].out.name)
                console.say(f"{waiting[done].out}: {summary}")
        except BaseException:
            for future in waiting:
                future.cancel()
            raise


def report(
    planned: Sequence[Planned], out: Path, *, confidence: float, margin: float | None
) -> str:
    """Write one report on all runs of a sweep, and return the verdicts as text."""
    from fp8ref.train.report import page, runs

    trained = runs.read_all([run.out for run in planned])
    return page.write(trained, out, confidence=confidence, margin=margin)


def _check(run: Planned) -> None:
    """ConfigError for a run that this one could not resume, or that would pass for it."""
    held = run_dir.Lock()
    try:
        run_dir.claim(run.out, run.config, run.backend, held, resume=True, overwrite=False)
    except ConfigError as error:
        remedy = "Repeat the sweep's own settings, or name another directory with --out."
        raise ConfigError(
            str(error).replace("Resume with the same configuration, or use --overwrite.", remedy)
        ) from error
    finally:
        held.close()


_IDLE = threading.Event()  # set while this process of a pool trains nothing
_IDLE.set()


def follow_parent() -> None:
    """End this process of a pool after its parent, as by SIGTERM; a run first saves its state."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        if not _IDLE.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        _IDLE.wait()
        os._exit(1)  # a pool's process waits for its next task forever

    threading.Thread(target=wait, daemon=True).start()


def _one(config: str, backend: str, out: str) -> str:
    """One run, in a process of the pool."""
    _IDLE.clear()
    try:
        return _train(config, backend, out)
    finally:
        _IDLE.set()


def _train(config: str, backend: str, out: str) -> str:
    from fp8ref.train import loop

    run_config = configs.from_dict(json.loads(config))
    if run_config.architecture.source:  # the parent has imported it, to plan the run
        user_model.trust(run_config.architecture.source)
    try:
        lines = loop.train(run_config, backend, Path(out), resume=True)
    except NonFiniteError as error:
        return str(error)
    if lines is None:
        return "finished"
    return f"loss {lines[-1]['loss']:.4f}, validation loss {lines[-1]['val_loss']:.4f}"
