"""fp8ref train: train a model and write a run directory."""

import argparse
import contextlib
import os
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref train``."""
    train = shared.of_config(commands, "train", _train, "Train a model and write a run directory.")
    train.add_argument(
        "--backend", choices=("jax", "torch"), help="the framework to train with (required)"
    )
    train.add_argument(
        "--resume", action="store_true", help="continue a stopped run; do nothing if it is finished"
    )
    train.add_argument("--overwrite", action="store_true", help="replace an existing run")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="print sizes, memory, GEMMs and predicted speed-ups; train nothing",
    )
    shared.add_trust(train)
    train.add_argument(
        "--distributed", action="store_true", help="this process is one of several of a run"
    )


def _train(known: argparse.Namespace, options: list[str]) -> int:
    from fp8ref.train.run import signals

    with signals.deferring_sigterm():  # before a framework takes its seconds to load
        return _trained(known, options)


def _trained(known: argparse.Namespace, options: list[str]) -> int:
    config = shared.config(known, options)
    from fp8ref.shared.errors import ConfigError

    if known.backend is None:
        raise ConfigError("fp8ref train needs --backend jax or --backend torch.")
    shared.trust_source(known, known.config, config, options)
    if known.dry_run:
        if given := [key for key in ("resume", "overwrite", "distributed") if getattr(known, key)]:
            raise ConfigError(
                f"--dry-run reads a config alone, in one process; got --{given[0]} too. Leave "
                "it out."
            )
        from fp8ref.estimate import dry_run

        dry_run.show(config, known.backend, console.console())
        return 0
    from fp8ref.train import loop

    out = Path(config.run.out) if config.run.out else _default(known, config)
    processes = _processes(known, config) if known.distributed else None
    with processes.naming_lost_processes() if processes else contextlib.nullcontext():
        lines = loop.train(
            config,
            known.backend,
            out,
            resume=known.resume,
            overwrite=known.overwrite,
            processes=processes,
        )
    if processes and not processes.first:
        return 0
    if lines is None:
        console.show(f"{out} is finished; nothing to do")
    else:
        console.show(
            f"{out}: {config.run.steps} steps, loss {lines[-1]['loss']:.4f}, validation loss "
            f"{lines[-1]['val_loss']:.4f}"
        )
    return 0


def _default(known: argparse.Namespace, config) -> Path:
    """The default directory: runs/<config>-<backend>-<recipe>[-<simulated hardware>], with all
    recipes of a schedule.
    """
    from fp8ref.train.config import hardware

    multiply = hardware.of(config, known.backend)
    parts = [
        known.config.stem,
        known.backend,
        "-to-".join(config.recipes),
        *([multiply.name] if multiply else []),
    ]
    return Path("runs") / "-".join(parts)


def _processes(known: argparse.Namespace, config):
    if known.backend == "jax":
        from fp8ref.train.jax.processes import join

        return join()
    # before torch is loaded; its warning of a lost process is a page of C++ frames
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from fp8ref.train.torch import processes

    known.leave = processes.leave
    return processes.join(config.parallel.timeout_s)
