"""fp8ref train: train a model and write a run directory."""

import argparse
import contextlib
import os
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref train``."""
    train = shared.config_command(
        commands, "train", _train, "Train a model and write a run directory."
    )
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


def _train(arguments: argparse.Namespace, options: list[str]) -> int:
    from fp8ref.train.run import signals

    with signals.deferring_sigterm():  # before a framework takes its seconds to load
        return _trained(arguments, options)


def _trained(arguments: argparse.Namespace, options: list[str]) -> int:
    config = shared.config(arguments, options)
    from fp8ref.shared.errors import ConfigError

    if arguments.backend is None:
        raise ConfigError("fp8ref train needs --backend jax or --backend torch.")
    shared.trust_source(arguments, arguments.config, config, options)
    if arguments.dry_run:
        for flag in shared.used(arguments, "resume", "overwrite", "distributed"):
            raise ConfigError(
                f"--dry-run reads a config alone, in one process; got {flag} too. Leave it out."
            )
        from fp8ref.estimate import dry_run

        dry_run.show(config, arguments.backend, console.console())
        return 0
    from fp8ref.train import loop

    out = Path(config.run.out) if config.run.out else _default(arguments, config)
    processes = _processes(arguments, config) if arguments.distributed else None
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
        console.show(
            f"{out}: {config.run.steps} steps, loss {lines[-1]['loss']:.4f}, validation loss "
            f"{lines[-1]['val_loss']:.4f}"
        )
    return 0


def _default(arguments: argparse.Namespace, config) -> Path:
    """runs/<config>-<backend>-<recipes>[-<simulated hardware>]."""
    from fp8ref.train.config import hardware

    multiply = hardware.of(config, arguments.backend)
    parts = [
        arguments.config.stem,
        arguments.backend,
        "-to-".join(config.recipes),
        *([multiply.name] if multiply else []),
    ]
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
