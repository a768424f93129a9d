"""The runs of a demo, with a planted fault among them: a process for each backend, all at once."""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from fp8ref.selection.rules import Rule
from fp8ref.train import loop
from fp8ref.train.config.config import Config
from fp8ref.train.experiments import sweep
from fp8ref.train.experiments.sweep import Planned
from fp8ref.train.run import log

PLANTED = "planted-fault"
"""The name of the runs with a fault."""

FAULT = "gradients are cast to e4m3 without a scale, so most become zero"
"""What the fault is."""

RULE = Rule(layers=("layers",), roles=("grad_output",), format="e4m3fn", policy="unscaled")
"""The fault, as the config has it."""

LOG = "demo.log"
"""The file in a demo's directory with what the training processes print."""


def name_of(run: Planned) -> tuple[str, str]:
    """(backend, recipe or ``PLANTED``)."""
    numerics = run.config.numerics
    return run.backend, PLANTED if RULE in (numerics.rules or ()) else numerics.recipe


def faulty(run: Planned) -> Planned:
    """A run as one of 'tensorwise' with the fault."""
    rules = (*(run.config.numerics.rules or ()), RULE)
    numerics = {"recipe": "tensorwise", "rules": rules}
    directory = run.out.with_name(run.out.name.replace(run.config.numerics.recipe, PLANTED))
    return dataclasses.replace(run, config=run.config.replace(numerics=numerics), out=directory)


def plan(
    config: Config, out: Path, recipes: Sequence[str], seeds: Mapping[str, int], planted: str | None
) -> list[Planned]:
    """The runs of bf16 and recipes: {backend: how many seeds}. planted: the backend that trains the
    fault too. ConfigError as ``sweep.plan``."""
    runs, recipes = [], ["bf16", *recipes]
    for backend, count in seeds.items():
        for run in sweep.plan(config, [backend], recipes, seeds=count, out=out):
            runs.append(run)
            if backend == planted and run.config.numerics.recipe == recipes[-1]:
                runs.append(faulty(run))
    return runs


def set_up(out: Path) -> None:
    """Set what makes a demo fast, unless the user has: one thread a process, which suits models so
    small, and a cache in ``out`` of what JAX compiles, for the next seeds and the cross-check."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(out.absolute() / ".jax-cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@contextmanager
def training(runs: Sequence[Planned], out: Path) -> Iterator[Callable[..., None]]:
    """Begin the runs, which replace those in their directories, each backend's in one process.

    Yields a function that waits for them: wait(ended, advance) calls ended(run, its first metrics,
    its last metrics) after each, and advance(note, by=how many ended). An error of a run ends all.
    """
    context, begin = multiprocessing.get_context("spawn"), time.time()
    pools = {
        backend: ProcessPoolExecutor(1, context, _set_process_up, (out / LOG,))
        for backend in {run.backend: None for run in runs}
    }
    futures = {pools[run.backend].submit(_train, run): run for run in runs}

    def wait(ended: Callable[[Planned, dict, dict], None], advance: Callable[..., None]) -> None:
        pending = set(futures)
        while pending:
            done, pending = concurrent.futures.wait(pending, 0.5, FIRST_COMPLETED)
            for future in done:
                ended(futures[future], *future.result())
            running = [future for future in pending if future.running()]
            notes = [progress(futures[future], begin) for future in running]
            advance("; ".join(filter(None, notes)), by=len(done))

    try:
        yield wait
    except BaseException:  # after Ctrl-C too; the next demo replaces half a run
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:
        for pool in pools.values():
            pool.shutdown(cancel_futures=True)


def progress(run: Planned, since: float) -> str:
    """The last step of a run that was written after a time; '' if there is none."""
    path = run.out / log.METRICS
    try:
        line = json.loads(path.read_text().splitlines()[-1])
        new = path.stat().st_mtime >= since
    except (OSError, ValueError, IndexError):  # not there yet, or half a line
        return ""
    return f"{' '.join(name_of(run))} step {line['step'] + 1}, loss {line['loss']:.3f}" * new


def _set_process_up(path: Path) -> None:
    """Send all that a training process prints to a file, and end it with its parent."""
    sweep.follow_parent()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)


def _train(run: Planned) -> tuple[dict, dict]:
    """The metrics of its first and last step."""
    lines = loop.train(run.config, run.backend, run.out, overwrite=True)
    assert lines  # only a resumed run has nothing to do
    return lines[0], lines[-1]
