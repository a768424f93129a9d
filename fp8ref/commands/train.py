"""fp8ref train and sweep: train a model, or a config in several recipes and seeds."""

import argparse
import contextlib
import os
import statistics
import time
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.shared import console
from fp8ref.shared.errors import require


def add(commands) -> None:
    """Add ``fp8ref train`` and ``fp8ref sweep``."""
    train = shared.config_command(commands, "train", _train)
    shared.add_backend(train)
    train.option("--resume", None, "continue a stopped run")
    train.option("--overwrite", None, "replace an existing run")
    train.option("--dry-run", None, "print sizes, memory and speed-ups alone")
    shared.add_trust(train)
    train.option("--distributed", None, "this process is one of several of a run", rare=True)
    sweep = shared.config_command(commands, "sweep", _sweep)
    sweep.option("--recipes", "NAMES", "recipes, with commas", "bf16,tensorwise")
    sweep.option("--seeds", "N", "seeds of each recipe, from those of CONFIG on", 3)
    sweep.option(
        "--backend", "NAMES", "jax, torch, or both with a comma (default: as fp8ref train)"
    )
    sweep.option("--jobs", "N", "runs at a time, each in a process", 1)
    sweep.option("--out", "DIR", "directory of the runs and report.html", Path("sweep"))
    shared.add_trust(sweep)
    shared.add_judging(sweep)


def _train(arguments: argparse.Namespace) -> int:
    """Train a model and write a run directory.

    $ fp8ref train tiny --run.steps 20
    $ fp8ref train tiny --backend jax --recipe rowwise --run.out runs/rowwise
    $ fp8ref train llama-1b --dry-run
    """
    from fp8ref.train.run import signals

    with signals.deferring_sigterm():  # before a framework takes its seconds to load
        return _trained(arguments)


def _trained(arguments: argparse.Namespace) -> int:
    config = shared.config(arguments)
    default = arguments.backend is None
    arguments.backend = shared.backend(arguments, config)
    shared.trust_source(arguments, arguments.config, config)
    if arguments.dry_run:
        reason = "--dry-run reads a config alone, in one process"
        shared.refuse(arguments, reason, "resume", "overwrite", "distributed")
        from fp8ref.estimate import dry_run

        dry_run.show(config, arguments.backend, console.console())
        return 0
    from fp8ref.train import loop

    out = Path(config.run.out) if config.run.out else _default(arguments, config)
    processes = _processes(arguments, config) if arguments.distributed else None
    if processes and processes.first and default:
        shared.say_backend(arguments.backend)
    with processes.naming_lost_processes() if processes else contextlib.nullcontext():
        lines = loop.train(
            config,
            arguments.backend,
            out,
            resume=arguments.resume,
            overwrite=arguments.overwrite,
            processes=processes,
        )
    if processes and not processes.first:
        return 0
    if lines is None:
        console.show(f"{out} is finished; nothing to do")
    else:
        speed = statistics.median(line.get("tokens_per_second", 0.0) for line in lines)
        console.show(
            f"{out}: {config.run.steps} steps in {lines[-1]['seconds']:.1f} s, {speed:,.0f} "
            f"tokens/s, loss {lines[-1]['loss']:.4f}, validation loss {lines[-1]['val_loss']:.4f}"
        )
    console.show(f"next: fp8ref report {out}")
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    """Train several recipes with matched seeds, and judge them by bf16.

    $ fp8ref sweep tiny --run.steps 40
    $ fp8ref sweep tiny --recipes bf16,rowwise,mxfp8 --seeds 2 --out mx
    $ fp8ref sweep tiny --backend jax,torch --jobs 2
    """
    confidence, margin = shared.confidence(arguments), shared.margin(arguments)
    shared.refuse(arguments, "--recipes names the recipes of a sweep", "numerics.recipe")
    config = shared.config(arguments)
    from fp8ref.train.experiments import sweep

    backends = shared.names(shared.backend(arguments, config))
    unknown = [name for name in backends if name not in shared.BACKENDS]
    require(
        bool(backends) and not unknown and len(set(backends)) == len(backends),
        f"--backend takes names of {', '.join(shared.BACKENDS)}, each once; got "
        f"{arguments.backend!r}.",
    )
    shared.check_out(arguments.out, config)
    require(arguments.jobs >= 1, f"--jobs is at least 1; got {arguments.jobs}.")
    shared.trust_source(arguments, arguments.config, config)
    begin = time.monotonic()
    recipes, seeds, out = shared.names(arguments.recipes), arguments.seeds, arguments.out
    planned = sweep.plan(config, backends, recipes, seeds=seeds, out=out)
    sweep.train(planned, jobs=arguments.jobs)
    page = arguments.out / "report.html"
    console.show(
        *sweep.report(planned, page, confidence=confidence, margin=margin).split("\n"),
        f"{len(planned)} runs in {time.monotonic() - begin:.0f} s",
        f"next: open {page}; fp8ref ablate {planned[-1].out}",
    )
    return 0


def _default(arguments: argparse.Namespace, config) -> Path:
    """runs/<config>-<backend>-<recipes>[-<simulated hardware>]."""
    from fp8ref.train.config import hardware

    multiply = hardware.of(config, arguments.backend)
    parts = [arguments.config.stem, arguments.backend, "-to-".join(config.recipes)]
    parts += [multiply.name] if multiply else []
    return Path("runs") / "-".join(parts)


def _processes(arguments: argparse.Namespace, config):
    if arguments.backend == "jax":
        from fp8ref.train.jax.processes import join

        return join()
    # before torch is loaded; its warning of a lost process is a page of C++ frames
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from fp8ref.train.torch import processes

    arguments.leave = processes.leave
    return processes.join(config.parallel.timeout_s)
