"""fp8ref estimate: predict what FP8 gains on a GPU."""

import argparse

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError


def add(commands) -> None:
    """Add ``fp8ref estimate``."""
    command = shared.config_command(commands, "estimate", _estimate)
    command.option("--gpu", "NAME", "h100 or h200 (required)")
    shared.add_backend(command, "whose kernels to assume, jax or torch")
    command.option("--ceilings", "FILE", "JSON of measured GPU rates (default: published ones)")
    shared.add_json(command, "write all times, in seconds, to FILE")


def _estimate(arguments: argparse.Namespace) -> int:
    """Predict the speed-up of FP8 on a GPU, and what to keep in bf16.

    $ fp8ref estimate llama-8b --gpu h100
    $ fp8ref estimate llama-8b --gpu h200 --recipe rowwise --backend jax
    $ fp8ref estimate tiny --gpu h100 --json estimate.json
    """
    config = shared.config(arguments)
    check_json(arguments.json, arguments.config, arguments.ceilings)
    from fp8ref.estimate import gpu_rates, report
    from fp8ref.train.config import architecture

    if arguments.gpu is None:
        raise ConfigError("needs --gpu h100 or --gpu h200; got none.")
    architecture.require_llama(config, "an estimate")
    if config.numerics.simulates:
        raise ConfigError(
            "an estimate is for a GPU's own GEMMs; got numerics.accumulate "
            f"{config.numerics.accumulate!r}, which is simulated on a CPU. Leave it out."
        )
    backend = shared.backend(arguments, config)
    with console.waiting("estimate"):
        forecast = report.of(config, backend, gpu_rates.of(arguments.gpu, arguments.ceilings))
    step = f"next: fp8ref train {arguments.config} --dry-run"
    return conclude(forecast, arguments.json, step)
