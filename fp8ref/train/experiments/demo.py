"""The runs of a demo: recipes by seeds, each backend in a process of its own, so that both train at
once.
"""

import concurrent.futures
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fp8ref.selection.rules import Rule
from fp8ref.train import loop
from fp8ref.train.config.config import Config
from fp8ref.train.experiments import sweep

__all__ = ["FAULT", "OBSERVED", "PLANTED", "Job", "configured", "plan", "set_up", "training"]

OBSERVED = ("torch", "tensorwise")
"""The run whose amaxes are recorded in the long form: (backend, recipe)."""

PLANTED = "planted-fault"
"""The name of the runs with a fault."""

FAULT = "gradients are cast to e4m3 without a scale, so most become zero"
"""What the fault is."""

RULES = (Rule(layers=("layers",), roles=("grad_output",), format="e4m3fn", policy="unscaled"),)
"""The fault, as the config has it."""

LOG = "demo.log"
"""The file in a demo's directory with what the training processes print."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run. recipe: its recipe, or ``PLANTED``."""

    backend: str
    recipe: str
    config: Config
    directory: Path

    @property
    def title(self) -> str:
        """Backend, recipe and seed."""
        return f"{self.backend} {self.recipe}, seed {self.config.run.seed}"

    def last(self, since: float) -> dict:
        """The metrics of its last step, if it was written after a time; else {}."""
        try:
            path = self.directory / "metrics.jsonl"
            if path.stat().st_mtime < since:
                return {}
            return json.loads(path.read_text().splitlines()[-1])
        except (OSError, ValueError, IndexError):  # not there yet, or half a line
            return {}


def configured(config: Config, recipe: str, *, observed: bool = False) -> Config:
    """The config of a recipe's runs. observed: it records amaxes at every step."""
    rules = config.numerics.rules
    numerics: dict = {"recipe": recipe}
    if recipe == "bf16":  # which has no FP8 GEMM to run under simulated hardware, and no cast
        numerics |= {"accumulate": None, "rules": None}
    if recipe == PLANTED:
        numerics = {"recipe": "tensorwise", "rules": (*(rules or ()), *RULES)}
    every = 1 if observed else config.statistics.every
    return config.replace(numerics=numerics, statistics={"every": every})


def plan(
    config: Config,
    out: Path,
    *,
    recipes: Sequence[str],
    seeds: Mapping[str, int],
    planted: str | None = None,
    observed: bool = False,
) -> list[Job]:
    """The runs of bf16 and recipes, which go to ``out``.

    seeds     {backend: how many}; each is added to the config's.
    planted   the backend that trains ``PLANTED`` too.
    observed  record the amaxes of the first run of ``OBSERVED``.
    """
    jobs = []
    for backend, count in seeds.items():
        fault = (PLANTED,) if backend == planted else ()
        for i in range(count):
            for recipe in ("bf16", *recipes, *fault):
                seen = observed and i == 0 and (backend, recipe) == OBSERVED
                seed = config.run.seed + i
                name = f"{backend}-{recipe}" + (f"-seed{seed}" if i else "")
                again = configured(config, recipe, observed=seen).replace(
                    run={"seed": seed}, data={"seed": config.data.seed + i}
                )
                jobs.append(Job(backend=backend, recipe=recipe, config=again, directory=out / name))
    return jobs


@contextmanager
def training(jobs: Sequence[Job], out: Path) -> Iterator[Callable[..., None]]:
    """Begin the runs, which replace those of the same directories, each backend's in one process.

    Yields a function that waits for them: wait(ended, advance) calls ended(job, first metrics, last
    metrics) after each, and advance(note, by=0) meanwhile. An error of a run ends all.
    """
    context, begin = multiprocessing.get_context("spawn"), time.time()
    backends = dict.fromkeys(job.backend for job in jobs)
    pools = {
        backend: ProcessPoolExecutor(1, context, initializer=_redirect, initargs=(out / LOG,))
        for backend in backends
    }
    futures: dict[Future, Job] = {pools[job.backend].submit(_train, job): job for job in jobs}

    def wait(ended: Callable[[Job, dict, dict], None], advance: Callable[..., None]) -> None:
        pending = set(futures)
        while pending:
            done, pending = concurrent.futures.wait(
                pending, 0.5, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                ended(futures[future], *future.result())
            running = [futures[f] for f in futures if f in pending and f.running()]
            notes = [(job, job.last(begin)) for job in running]
            advance(
                "; ".join(
                    f"{job.backend} {job.recipe} step {line['step'] + 1}, loss {line['loss']:.3f}"
                    for job, line in notes
                    if line
                ),
                by=len(done),
            )

    try:
        yield wait
    except BaseException:  # after Ctrl-C too; the next demo replaces half a run
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.kill()
        raise
    for pool in pools.values():
        pool.shutdown()


def set_up(out: Path) -> None:
    """Set what makes a demo fast, unless the user has: one thread a process, which suits models so
    small, and a cache in ``out`` of what JAX compiles, for the next seeds and the cross-check."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(out.absolute() / ".jax-cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def _redirect(path: Path) -> None:
    """Send all that a training process prints to a file, and end it with its parent."""
    sweep.follow_parent()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)


def _train(job: Job) -> tuple[dict, dict]:
    """The metrics of its first and last step."""
    lines = loop.train(job.config, job.backend, job.directory, overwrite=True)
    assert lines  # only a resumed run has nothing to do
    return lines[0], lines[-1]
