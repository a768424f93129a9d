"""fp8ref sweep: train a config in several recipes and seeds, and report on them."""

import argparse
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref sweep``."""
    sweep = shared.config_command(
        commands,
        "sweep",
        _sweep,
        "Train a config in several recipes with matched seeds, and judge them by bf16.",
    )
    sweep.add_argument(
        "--recipes",
        default="bf16,tensorwise",
        metavar="NAMES",
        help="recipes, with commas (default bf16,tensorwise)",
    )
    sweep.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="seeds of each recipe, from those of CONFIG on (default 3)",
    )
    sweep.add_argument(
        "--backend",
        default="jax",
        metavar="NAMES",
        help="jax, torch, or both with a comma (default jax)",
    )
    sweep.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at a time, each in a process (default 1)",
    )
    sweep.add_argument(
        "--out",
        type=Path,
        default=Path("sweep"),
        metavar="DIR",
        help="directory of the runs and report.html (default sweep)",
    )
    shared.add_trust(sweep)
    shared.add_judging(sweep)


def _sweep(arguments: argparse.Namespace, options: list[str]) -> int:
    confidence, margin = shared.confidence(arguments), shared.margin(arguments)
    config = shared.config(arguments, options)
    from fp8ref.shared.errors import ConfigError
    from fp8ref.train.experiments import sweep
    from fp8ref.train.loop import BACKENDS

    backends = _names(arguments.backend)
    unknown = [name for name in backends if name not in BACKENDS]
    if not backends or unknown or len(set(backends)) < len(backends):
        raise ConfigError(
            f"--backend takes names of {', '.join(BACKENDS)}, each once; got {arguments.backend!r}."
        )
    if config.run.out is not None:
        raise ConfigError(
            f"the runs of a sweep are in directories of --out; got run.out {config.run.out!r}. "
            "Leave it out."
        )
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs is at least 1; got {arguments.jobs}.")
    if arguments.out.exists() and not arguments.out.is_dir():
        raise ConfigError(f"--out names a directory; {arguments.out} is a file. Name another.")
    shared.trust_source(arguments, arguments.config, config, options)
    planned = sweep.plan(
        config, backends, _names(arguments.recipes), seeds=arguments.seeds, out=arguments.out
    )
    sweep.train(planned, jobs=arguments.jobs)
    summary = sweep.report(
        planned, arguments.out / "report.html", confidence=confidence, margin=margin
    )
    console.show(*summary.split("\n"))
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
